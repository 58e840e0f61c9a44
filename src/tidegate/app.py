"""Tidegate: the application object on which users declare workflows, and the composition root."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from tidegate import settings as settings_module
from tidegate.clock import utc_now, uuid7
from tidegate.errors import AppError, FieldError, InvalidInput, TidegateError
from tidegate.flow import control
from tidegate.flow.accept.ingest import LOCK_TIMEOUT_MS, STATEMENT_SECONDS, Ingest
from tidegate.flow.accept.starts import Starts
from tidegate.flow.code.workflow import Workflow
from tidegate.flow.keep import schedule as scheduling
from tidegate.flow.look.ends import RunEnds, RunHandle
from tidegate.flow.presence import Presence
from tidegate.model import typed
from tidegate.model.backlog import Keep, WhenFull
from tidegate.model.budget import BudgetSpec, declared_names
from tidegate.model.by_key import WhileRunning, declared_by_key
from tidegate.model.declaration import require_given, require_text
from tidegate.model.event import Accepted, NewEvent, as_delay_ms, check_event
from tidegate.model.ids import DefinitionId
from tidegate.model.not_json import not_encodable, set_or_bytes
from tidegate.model.predicate import Predicate
from tidegate.model.retry import RetryPolicy
from tidegate.model.schedule import SOURCE, TRIGGER, Overlap, ScheduleSpec, declared, event_type
from tidegate.model.source import BreakerPolicy
from tidegate.model.start import StartedRun, start_spec
from tidegate.model.trigger import TriggerHolds, TriggerSpec, check_spec
from tidegate.model.typed import Payload
from tidegate.model.units import named_duration_ms, rate
from tidegate.model.wait import On, cancelled_by
from tidegate.model.window import CollectPolicy
from tidegate.model.wording import as_written
from tidegate.model.worker_share import WorkerShare
from tidegate.queue.choose import open_queue
from tidegate.settings import Settings
from tidegate.store import locks, migrate, triggers
from tidegate.store.db import Connection, Database
from tidegate.telemetry import traces
from tidegate.worker.supervisor import Worker

Function = TypeVar("Function", bound=Callable[..., Any])

REGISTERED_BY = "code"
# The names in a declaration of the trigger fields that have another name there.
_NAMES = {"event_type": "on", "event_source": "source", "parameter_template": "params", "throttle_count": "throttle"}


class Tidegate:
    """An application: declares workflows, publishes events and creates workers.

    Keyword arguments are settings by field name (`Tidegate(database_url="postgresql://…")`, see docs/settings.md); they
    override `tidegate.toml` and the environment.
    """

    def __init__(self, **overrides: object) -> None:
        self._overrides = overrides
        self._settings: Settings | None = None
        self._publisher: _Publisher | None = None
        self._clock: Callable[[], datetime] = utc_now  # for the bounds of input; a harness replaces it
        self.workflows: dict[str, Workflow] = {}
        self.schedules: dict[str, ScheduleSpec] = {}
        self.budgets: dict[str, BudgetSpec] = {}
        self._declared: list[scheduling.DeclaredSchedule] = []  # by the last `register`, logged after its commit

    @property
    def settings(self) -> Settings:
        """The settings; read from `tidegate.toml` and the environment on first use."""
        if self._settings is None:
            self._settings = settings_module.load(self._overrides)
        return self._settings

    def configure(self, settings: Settings) -> None:
        """Use the settings of a command; keyword arguments given to this object still override them."""
        given = {k: v for k, v in self._overrides.items() if v is not None}
        self._settings = msgspec.structs.replace(settings, **given)

    def workflow(
        self,
        on: str | None = None,
        *,
        every: str | int | float | None = None, cron: str | None = None, timezone: str | None = None,
        overlap: Overlap | None = None,
        source: str = "*", where: str | None = None, predicates: list[dict[str, Any]] | None = None,
        params: dict[str, Any] | None = None,
        throttle: str | None = None, max_concurrency: int | None = None, concurrency_key: str | None = None,
        idempotency_key: str | None = None, idempotency_window: str | int | float | None = None,
        debounce: str | int | float | None = None, max_wait: str | int | float | None = None, leading: bool = False,
        batch: CollectPolicy | None = None, skip_over: str | None = None, while_running: WhileRunning | None = None,
        max_waiting: int | None = None, when_full: WhenFull | None = None, keep: Keep | None = None,
        key: str | None = None,
        retry: RetryPolicy | None = None, breaker: BreakerPolicy | None = None, priority: int = 1,
        budgets: Sequence[BudgetSpec | str] = (), holds: TriggerHolds = "unfinished",
        timeout: str | int | float | None = None,
        cancel_on: str | On | list[str | On] | tuple[str | On, ...] = (),
        version: str | None = None, name: str | None = None,
    ) -> Callable[[Function], Function]:  # fmt: skip
        """Declare a workflow: the function runs for each matching event of type `on`, or on a schedule.
        Events: `on` (type) and `source` are exact or contain `*`; `where` (CEL) and `predicates` filter further; or a
        schedule: `every` ("10m") or `cron` ("0 3 * * *") in `timezone` (UTC), `overlap` "allow", "queue" or "skip".
        `params`: Liquid templates by argument name; by default, the payload's fields by argument name.
        Limits: `throttle` ("20/min"), `max_concurrency` (per `concurrency_key`) and `budgets`, whose slots a run holds
        while "unfinished" or "executing" (`holds`), `breaker`, `priority`; one run per `idempotency_key` within
        `idempotency_window` (one day; 0: forever). `retry`: of held deliveries.
        By `key`: one run for many events (`debounce`, `max_wait`, `leading`; `batch`); what is over `skip_over` is
        skipped; `while_running` an earlier run: "skip" the new one, "cancel" it, or "queue"; `max_waiting` may wait,
        then `when_full`, or `keep` the "latest" only, none for more than `max_wait`. `timeout`: of a run, with waits.
        `version`: of the code; by default, its hash. `cancel_on`: events that cancel a run; a type alone means those
        with its correlation id. `name`: the slug; by default, the function's name. Raises AppError."""
        fields = {
            "where": where, "parameter_template": params, "idempotency_key": idempotency_key, "key": key,
            "concurrency_key": concurrency_key, "max_concurrency": max_concurrency, "breaker": breaker, "retry": retry,
        }  # fmt: skip

        def build(slug: str, function: Function) -> tuple[Workflow, ScheduleSpec | None]:
            schedule = declared(every, cron, timezone, overlap)
            window, waiting = (debounce, max_wait, leading, batch), (max_waiting, when_full, keep)
            keys = declared_by_key(fields, on, schedule, window, skip_over, while_running, waiting)
            shared = {"budgets": declared_names(budgets, self.budgets), "priority": priority, "holds": holds}
            given = {**_launched_by(slug, on, source, schedule), **fields, **keys, **shared}
            spec = _spec(given, predicates, throttle, idempotency_window)
            timeout_ms = None if timeout is None else named_duration_ms("timeout", timeout)
            made = partial(Workflow, timeout_ms=timeout_ms, takes_payload=on is not None, version=version)
            return made(slug, function, [spec], cancel_on=cancelled_by(cancel_on)), schedule

        return partial(self._declared_by, name, build)

    def _declared_by(
        self, name: str | None, build: Callable[..., tuple[Workflow, ScheduleSpec | None]], function: Function
    ) -> Function:
        slug = name or function.__name__
        try:
            self._declare(*build(slug, function))
        except (TidegateError, ValueError, msgspec.ValidationError) as exc:
            raise _declaration_error(slug, exc) from exc
        return function

    def _declare(self, workflow: Workflow, schedule: ScheduleSpec | None) -> None:
        if workflow.slug in self.workflows:
            raise AppError(f"workflow {workflow.slug} is declared twice")
        for spec in workflow.triggers:
            check_spec(spec, workflow.slug, workflow.parameter_names)
            require_given(workflow.required_names, spec.parameter_template, is_scheduled=schedule is not None)
        self.workflows[workflow.slug] = workflow
        if schedule is not None:
            self.schedules[workflow.slug] = schedule

    async def register(self, connection: Connection) -> list[DefinitionId]:
        """Create or update the definitions, triggers and schedules of this application; returns the definition ids."""
        await locks.exclude_triggers(connection)
        ids, self._declared = [], []
        await control.declare_budgets(connection, self.budgets.values(), REGISTERED_BY)
        for workflow in sorted(self.workflows.values(), key=lambda w: w.slug):
            workflow.check_types()
            workflow.check_steps()
            definition_id = await triggers.upsert_definition(
                connection,
                slug=workflow.slug,
                kind="python",
                parameters=workflow.parameter_names,
                config=workflow.stored_config,
                actor=REGISTERED_BY,
            )
            for spec in workflow.triggers:
                await control.declare_trigger(connection, workflow.slug, definition_id, spec, REGISTERED_BY)
            schedule = self.schedules.get(workflow.slug)
            if declared := await scheduling.declare(connection, workflow.slug, definition_id, schedule):
                self._declared.append(declared)
            ids.append(definition_id)
        return ids

    async def worker(self) -> Worker:
        """Register the workflows and return a worker for them; start it with `await worker.run()`."""
        traces.switch_on()
        database = Database(self.settings.require_database_url(), "register", size=1)
        try:
            await migrate.require_current(database)
            await control.seed_limits(database, self.settings.source_rate_limits)
            await control.seed_breakers(database, self.settings.source_breakers)
            definitions = await database.run(self.register)
            async with database.connection() as connection:
                others = (await triggers.list_of_kind(connection, "http")).values()
            share = WorkerShare.of(self.settings.worker_only, self.settings.worker_reserve)
            share.check({*self.workflows, *others}, self.settings.worker_concurrency)
            scheduling.log_declared(self._declared)
        finally:
            await database.close()
        return Worker(self.settings, self.workflows, definitions)

    async def publish(
        self,
        type: str,
        *,
        source: str,
        payload: Payload | None = None,
        id: str | None = None,
        occurred_at: datetime | None = None,
        correlation_id: str | None = None,
        ttl_ms: int | None = None,
        metadata: dict[str, Any] | None = None,
        deliver_at: datetime | None = None,
        delay: str | int | float | None = None,
        priority: int | None = None,
    ) -> Accepted:
        """Publish an event directly to the database, without the API; returns after the commit.

        `payload` is a dict, a dataclass, a msgspec Struct or a pydantic model.
        `id` is the producer's id, unique per source: publishing the same event again returns the status `duplicate`.
        With `deliver_at`, or `delay` ("10m") from now, it is stored at once and decided at that time.
        `priority` (1 to 10) is its share among the events of its source that wait to be decided.
        Raises InvalidInput, Conflict (the id was already used with a different body), Unavailable, or SchemaError (the
        schema is not for this version of Tidegate).
        """
        given = {
            "id": id,
            "type": type,
            "source": source,
            "occurred_at": occurred_at.isoformat() if occurred_at else None,
            "payload": payload,
            "correlation_id": correlation_id,
            "ttl_ms": ttl_ms,
            "metadata": metadata,
            "deliver_at": deliver_at.isoformat() if deliver_at else None,
            "delay_ms": None if delay is None else as_delay_ms(delay),
            "priority": priority,
        }
        event = checked(given, self.settings, self._clock())
        return await self._opened().publish(event)

    def _opened(self) -> _Publisher:
        loop = asyncio.get_running_loop()
        if self._publisher is None or self._publisher.loop is not loop:
            self._publisher = _Publisher(self.settings, loop)
        return self._publisher

    async def start(
        self,
        workflow: str | Callable[..., object],
        parameters: Mapping[str, object] | None = None,
        *,
        id: str | None = None,
        correlation_id: str | None = None,
        **given: object,
    ) -> RunHandle:
        """Start a run of a workflow, by its slug or function; returns after the commit. Its limits hold as for events.

        The parameters are a mapping, keyword arguments (`app.start(ship, order_id=7)`), or both. The same `id` again is
        the same run. Raises NotFound, InvalidInput (names each parameter), Conflict (the id was used with other
        parameters, or the trigger is disabled), Unavailable.
        """
        slug = self.slug_of(workflow)
        publisher = self._opened()
        started = await publisher.start(slug, {**(parameters or {}), **given}, id=id, correlation_id=correlation_id)
        return RunHandle(started, publisher.ends)

    def slug_of(self, workflow: str | Callable[..., object]) -> str:
        """The slug of a workflow of this application, given its function; a slug stays as it is."""
        if isinstance(workflow, str):
            return workflow
        found = [one.slug for one in self.workflows.values() if one.function is workflow]
        if not found:
            raise AppError(f"{getattr(workflow, '__name__', workflow)} is not a workflow of this application")
        return found[0]

    async def close(self) -> None:
        """Close the connections that `publish` and `start` opened."""
        if self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            await publisher.close()

    async def __aenter__(self) -> Tidegate:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _declaration_error(slug: str, exc: Exception) -> AppError:
    """The error of a declaration, with the names that the user wrote."""
    if isinstance(exc, AppError):
        return exc
    if isinstance(exc, InvalidInput):
        exc = InvalidInput(exc.args[0], [as_written(error, _NAMES) for error in exc.errors])
    return AppError(f"workflow {slug}: {exc}")


def _launched_by(slug: str, on: str | None, source: str, schedule: ScheduleSpec | None) -> dict[str, str]:
    """The name, event type and source of the trigger: those of `on`, the schedule's own, or one for starts."""
    if schedule is None:
        return start_spec(slug) if on is None else {"name": "code", "event_type": on, "event_source": source}
    if on is not None:
        raise AppError(f"workflow {slug}: on: cannot be combined with every or cron, which publish their own events")
    if source != "*":
        raise AppError(f"workflow {slug}: source: requires on; the events of a schedule have the source {SOURCE}")
    return {"name": TRIGGER, "event_type": event_type(slug), "event_source": SOURCE}


def _spec(
    fields: dict[str, Any],
    predicates: list[dict[str, Any]] | None,
    throttle: str | None,
    idempotency_window: str | int | float | None,
) -> TriggerSpec:
    """The trigger that a declaration describes, with rates and durations parsed."""
    require_text({"on": fields["event_type"], "source": fields["event_source"], "throttle": throttle, **fields})
    spec = TriggerSpec(predicates=msgspec.convert(predicates or [], list[Predicate]), **fields)
    if throttle is not None:
        try:
            count, window_ms = rate(throttle)
        except ValueError as exc:
            raise ValueError(f"throttle: {exc}") from exc
        spec = msgspec.structs.replace(spec, throttle_count=count, throttle_window_ms=window_ms)
    if idempotency_window is not None:
        spec = msgspec.structs.replace(
            spec, idempotency_window_ms=named_duration_ms("idempotency_window", idempotency_window)
        )
    return spec


class _Publisher:
    """What `Tidegate.publish` needs, for one event loop."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        url = settings.require_database_url()
        self._database = Database(
            url, "publish", size=2, lock_timeout_ms=LOCK_TIMEOUT_MS, statement_seconds=STATEMENT_SECONDS
        )
        self._queue = open_queue(settings, self._database)
        self._ingest = Ingest(
            self._database,
            max_waiting=settings.ingest_max_waiting,
            after_commit=lambda: self._queue.hint("inbox"),
            after_later=lambda: self._queue.hint("retries"),
        )
        self._presence = Presence("publisher")
        self._starts = Starts(self._database, self._ingest, settings.limits)
        self.ends = RunEnds(self._database)

    async def publish(self, event: NewEvent) -> Accepted:
        """Store an event. SchemaError if this program cannot use the schema any more."""
        await self._presence.renew(self._database)
        return (await self._ingest.accept([event]))[0]

    async def start(self, workflow: str, parameters: Mapping[str, object], **given: str | None) -> StartedRun:
        await self._presence.renew(self._database)
        return await self._starts.start(workflow, parameters, **given)

    async def close(self) -> None:
        await self.ends.close()
        await self._ingest.close()
        await self._queue.close()
        await self._presence.leave(self._database)
        await self._database.close()


def checked(given: dict[str, Any], settings: Settings, now: datetime | None = None) -> NewEvent:
    """A validated event from its field values. InvalidInput names each invalid field."""
    try:
        if typed.has_fields(type(given.get("payload"))):
            given = given | {"payload": typed.payload_of(given["payload"])}
        plain = msgspec.to_builtins(given, str_keys=True, enc_hook=typed.plain)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInput("the event cannot be published", [not_encodable(given, exc)]) from exc
    if (refused := set_or_bytes(given)) is not None:
        raise InvalidInput("the event cannot be published", [refused])
    errors: list[FieldError] = []
    event = check_event(plain, new_id=uuid7(), now=now or utc_now(), limits=settings.limits, errors=errors)
    if event is None:
        raise InvalidInput("the event cannot be published", errors)
    return event
