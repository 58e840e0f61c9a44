"""For tests of workflows: a temporary database and a clock that the test moves, so that an hour of backoff takes
milliseconds.

    async with Harness(app) as harness:
        await harness.publish("order.created", source="shop", payload={"id": 7})
        await harness.advance("1h")
        assert (await harness.only_run("fulfil")).status == "succeeded"

The code is the worker's own, on a real Postgres; only the function `tidegate.now()` of the temporary database is
replaced. The clock does not move while anything runs. Needs `tidegate[embedded]`.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from tidegate import scratch
from tidegate.api.server import bind, serving
from tidegate.app import Tidegate
from tidegate.client import AsyncClient
from tidegate.clock import utc_now, uuid7
from tidegate.errors import AppError, Conflict
from tidegate.flow import control
from tidegate.flow.decide import approvals
from tidegate.flow.look.ends import RunHandle
from tidegate.flow.look.explain import Explanation, explain_any, find_event
from tidegate.model import run as model
from tidegate.model.approval import ApprovalDecision, ApprovalVerdict
from tidegate.model.event import Accepted
from tidegate.model.ids import step_id
from tidegate.model.typed import Payload
from tidegate.model.units import duration_ms
from tidegate.settings import Settings
from tidegate.store import runs, steps
from tidegate.store.db import Connection, Database
from tidegate.worker.supervisor import Worker

__all__ = ["DeadLetterResult", "Harness", "RunResult", "StepResult", "with_harness"]

P = ParamSpec("P")
T = TypeVar("T")


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run, or a timer (`sleep-1`); `attempts` is the number of completed calls of its function."""

    name: str
    kind: str
    status: model.StepStatus
    attempts: int
    result: Any
    error: str | None
    next_attempt_at: datetime | None


class RunResult(model.Run, frozen=True, kw_only=True):
    """A run with its steps by name, in the order in which they were first recorded."""

    steps: dict[str, StepResult]


class DeadLetterResult(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter, with the last line of the reason. `kind`: event, delivery, step or run."""

    kind: str
    event_id: uuid.UUID | None
    reason: str


class _InjectedFailure:
    """Attempts at a step that fail; `left` of them."""

    def __init__(self, name: str, workflow: str | None, error: BaseException, times: int) -> None:
        self.name = name
        self.workflow = workflow
        self.error = error
        self.left = times


class Harness:
    """Runs an application on a database and a clock of its own; inside, its `publish` uses that database too.

    `settings` override the application's settings. `patience` is how long (in real time) workflows may run before a
    TimeoutError that names them.
    """

    def __init__(self, app: Tidegate, *, patience: str | int | float = "30s", **settings: object) -> None:
        self._app = app
        self._patience_seconds = duration_ms(patience) / 1000
        self._overrides = settings
        self._name = f"harness_{uuid7().hex}"
        self._now = utc_now().replace(microsecond=0)
        self._next_at: datetime | None = None
        self._outside: Settings | None = None
        self._failures: list[_InjectedFailure] = []
        self._client: AsyncClient | None = None
        self._url: str | None = None
        self._api = AsyncExitStack()
        self._serving: asyncio.Task[None] | None = None
        self._worker: Worker | None = None
        self._database: Database | None = None

    @property
    def now(self) -> datetime:
        """The current time of the harness's clock."""
        return self._now

    async def publish(
        self,
        type: str,
        *,
        source: str,
        payload: Payload | None = None,
        id: str | None = None,
        correlation_id: str | None = None,
        ttl_ms: int | None = None,
        metadata: dict[str, Any] | None = None,
        deliver_at: datetime | None = None,
        delay: str | int | float | None = None,
        priority: int | None = None,
    ) -> Accepted:
        """Publish an event, like `Tidegate.publish`. It is processed by `run_until_idle` or `advance`; `deliver_at` and
        `delay` mean the harness's clock."""
        self._inside()
        return await self._app.publish(
            type, source=source, payload=payload, id=id, correlation_id=correlation_id, ttl_ms=ttl_ms,
            metadata=metadata, deliver_at=deliver_at, delay=delay, priority=priority,
        )  # fmt: skip

    async def cancel_event(self, event_id: str) -> None:
        """Take back an event that waits, by our id or the producer's. Conflict if it has been decided."""
        _, database = self._inside()
        async with database.connection() as connection:
            found = await find_event(connection, event_id)
        await control.cancel_event(database, found.id, "harness")

    async def run_now(self, workflow: str) -> None:
        """Publish an event of the workflow's schedule now, as `tidegate schedules run-now` does."""
        _, database = self._inside()
        await control.run_schedule_now(database, workflow, "harness")

    async def start(
        self,
        workflow: str | Callable[..., object],
        parameters: Mapping[str, object] | None = None,
        *,
        id: str | None = None,
    ) -> RunHandle:
        """Start a run, like `Tidegate.start`. It runs in `run_until_idle` or `advance`; then ask for its `result()`."""
        self._inside()
        return await self._app.start(workflow, parameters, id=id)

    async def run_until_idle(self) -> None:
        """Process everything that is due by the harness's clock, and what follows from it."""
        worker, _ = self._inside()
        try:
            async with asyncio.timeout(self._patience_seconds):
                while (turn := await worker.turn(self._now)).done:
                    pass
                self._next_at = turn.next_at
        except TimeoutError as exc:
            busy = [f"{run.workflow} {run.id}" for run in await self.runs() if run.status == "running"]
            raise TimeoutError(
                f"not idle after {self._patience_seconds:g} s; running: {', '.join(busy) or 'nothing'}"
            ) from exc

    async def advance(self, duration: str | int | float) -> datetime:
        """Move the clock (`"1h"`, `"30s"`) from one due time to the next, processing each before moving on. Returns the
        new time."""
        until = self._now + timedelta(milliseconds=duration_ms(duration))
        await self.run_until_idle()
        while self._next_at is not None and self._next_at <= until:
            await self._set_clock(self._next_at)
            await self.run_until_idle()
        await self._set_clock(until)
        await self.run_until_idle()
        return until

    async def runs(self, workflow: str | None = None) -> list[RunResult]:
        """The runs so far, of one workflow or of all, oldest first."""
        _, database = self._inside()
        async with database.connection() as connection:
            found = await runs.list_page(connection, workflow=workflow, limit=10_000)
            mine = await steps.list_of_runs(connection, [run.id for run in found])
        known: dict[uuid.UUID, dict[str, StepResult]] = {run.id: {} for run in found}
        for step in sorted(mine, key=lambda s: (s.created_at or self._now, s.id)):
            known[step.workflow_run_id][step.name] = _step(step)
        return [RunResult(**msgspec.structs.asdict(run), steps=known[run.id]) for run in reversed(found)]

    async def only_run(self, workflow: str | None = None) -> RunResult:
        """The only run; AssertionError if there is none, or more than one."""
        found = await self.runs(workflow)
        if len(found) != 1:
            listed = "".join(f"\n  {run.workflow} {run.id} {run.status}" for run in found)
            raise AssertionError(f"{len(found)} runs of {workflow or 'all workflows'}, not 1{listed}")
        return found[0]

    async def cancel(self, run: model.Run) -> None:
        """Cancel a waiting run, as an operator would. Conflict if it has already ended."""
        worker, database = self._inside()
        await control.cancel_run(database, run.id, "harness", worker.settings.trigger_error)

    async def approve(
        self, run: model.Run, name: str, *, by: str = "harness", comment: str | None = None
    ) -> ApprovalDecision:
        """Approve what a run waits for, by the name that it gave `ctx.approval`. Conflict if it cannot be decided."""
        return await self._decide(run, name, ApprovalVerdict(approved=True, by=by, comment=comment))

    async def reject(
        self, run: model.Run, name: str, *, by: str = "harness", comment: str | None = None
    ) -> ApprovalDecision:
        """Reject what a run waits for; see `approve`."""
        return await self._decide(run, name, ApprovalVerdict(approved=False, by=by, comment=comment))

    async def _decide(self, run: model.Run, name: str, verdict: ApprovalVerdict) -> ApprovalDecision:
        _, database = self._inside()
        done = await approvals.decide(database, step_id(run.id, name), verdict)
        if not done.is_new or done.approval.decision is None:
            raise Conflict(f"approval {name!r} cannot be decided: it is {done.approval.state}")
        return done.approval.decision

    async def explain(self, what: Accepted | model.Run | uuid.UUID | str) -> Explanation:
        """Why an event or a run is where it is: `summary` in a sentence, `decisions` in order. Takes what `publish` or
        `runs` returned, or the id of an event, run or delivery, or a producer's id."""
        _, database = self._inside()
        async with database.connection() as connection:
            return await explain_any(connection, str(what.id if isinstance(what, Accepted | model.Run) else what))

    def fail_step(
        self, name: str, *, times: int = 1, error: BaseException | str | None = None, workflow: str | None = None
    ) -> None:
        """Have the next attempts at a step fail, of any run or of those of one workflow: `error` is raised instead of
        calling its function."""
        self._inside()
        if times < 1:
            raise ValueError(f"times must be at least 1, not {times}")
        if workflow is not None and workflow not in self._app.workflows:
            raise ValueError(f"workflow: there is no {workflow!r}; there are {', '.join(sorted(self._app.workflows))}")
        if not isinstance(error, BaseException):
            error = RuntimeError(error or f"step {name!r} fails in this test")
        self._failures.append(_InjectedFailure(name, workflow, error, times))
        for slug, declared in self._app.workflows.items():
            declared.before_step = partial(self._before_step, slug)

    def _before_step(self, workflow: str, name: str) -> None:
        for failure in self._failures:
            if failure.left and failure.name == name and failure.workflow in (None, workflow):
                failure.left -= 1
                raise failure.error

    @property
    def database_url(self) -> str:
        """The address of the harness's database."""
        return self._inside()[1].url

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection (asyncpg) to the harness's database: to create tables of your own, and to look at them."""
        _, database = self._inside()
        async with database.connection() as connection:
            yield connection

    @property
    def url(self) -> str:
        """The address of the HTTP API, which is started when it is first asked for; no token is needed. Requests are
        answered while the test awaits something: use `client`, or a blocking client in a thread."""
        if self._url is None:
            worker, _ = self._inside()
            changes = {"auth": "off", "host": "127.0.0.1", "port": 0, "allow_unsafe_durability": True}
            settings = msgspec.structs.replace(worker.settings, **changes)
            listening = bind(settings)
            listening.listen()
            self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            self._serving = asyncio.create_task(self._serve(settings, listening))
        return self._url

    async def _serve(self, settings: Settings, listening: socket.socket) -> None:
        await self._api.enter_async_context(serving(settings, listening))

    @property
    def client(self) -> AsyncClient:
        """A client of the HTTP API of this harness: `await harness.client.request("GET", "/v1/runs")`."""
        if self._client is None:
            self._client = AsyncClient(self.url)
        return self._client

    async def dead_letters(self) -> list[DeadLetterResult]:
        """The dead letters, oldest first."""
        _, database = self._inside()
        async with database.connection() as connection:
            rows = await connection.fetch("select kind, event_id, reason from tidegate.dead_letters order by id")
        return [DeadLetterResult(**dict(row)) for row in rows]

    async def __aenter__(self) -> Harness:
        if self._app in _inside_harness:
            raise AppError("this application is already in another harness; each harness needs its own Tidegate object")
        url = await scratch.create(self._name)
        changes = {"queue": "postgres", **self._overrides, "database_url": url, "database_direct_url": None}
        self._outside = self._app.settings
        settings = msgspec.structs.replace(self._outside, **changes)
        _inside_harness.add(self._app)
        try:
            await self._app.close()
            self._app._clock = lambda: self._now
            self._app._settings = settings  # with `configure`, the application's own database_url would take precedence
            self._database = Database(url, "harness", size=2)
            await self._set_clock(self._now)
            self._worker = await self._app.worker()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave()

    async def _leave(self) -> None:
        worker, self._worker = self._worker, None
        database, self._database = self._database, None
        for declared in self._app.workflows.values():
            declared.before_step = None
        try:
            await self._close_api()
            if worker is not None:
                await worker.close()
            if database is not None:
                await database.close()
            await self._app.close()
            await scratch.drop(self._name)
        finally:
            self._app._settings, self._app._clock = self._outside, utc_now
            _inside_harness.discard(self._app)

    async def _close_api(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._serving is not None:
            await self._serving
        await self._api.aclose()

    def _inside(self) -> tuple[Worker, Database]:
        if self._worker is None or self._database is None:
            raise AppError("use the harness inside `async with Harness(app) as harness:`")
        return self._worker, self._database

    async def _set_clock(self, now: datetime) -> None:
        assert self._database is not None
        await scratch.set_clock(self._database, now)
        self._now = now


def with_harness(
    app: Tidegate, *, patience: str | int | float = "30s", **settings: object
) -> Callable[[Callable[Concatenate[Harness, P], Coroutine[Any, Any, T]]], Callable[P, T]]:
    """Turn an `async def test(harness, …)` into a synchronous test that runs in its own harness and event loop."""

    def decorate(test: Callable[Concatenate[Harness, P], Coroutine[Any, Any, T]]) -> Callable[P, T]:
        async def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            async with Harness(app, patience=patience, **settings) as harness:
                return await test(harness, *args, **kwargs)

        @wraps(test)
        def plain(*args: P.args, **kwargs: P.kwargs) -> T:
            return asyncio.run(inside(*args, **kwargs))

        # What a test runner sees: a synchronous function, without the argument `harness`.
        signature = inspect.signature(test)
        del plain.__wrapped__
        plain.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:]
        )
        return plain

    return decorate


def _step(step: model.Step) -> StepResult:
    attempts = step.retry_attempts + (step.status == "succeeded" and step.kind == "step")
    return StepResult(
        name=step.name, kind=step.kind, status=step.status, attempts=attempts, result=step.result, error=step.error,
        next_attempt_at=step.next_attempt_at,
    )  # fmt: skip


_inside_harness: set[Tidegate] = set()
