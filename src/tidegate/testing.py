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
import atexit
import inspect
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from tidegate.app import Tidegate
from tidegate.clock import utc_now, uuid7
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.errors import AppError
from tidegate.flow import control
from tidegate.flow.accept.ingest import Accepted
from tidegate.model import run as model
from tidegate.model.units import duration_ms
from tidegate.settings import Settings
from tidegate.store import migrate, runs, steps
from tidegate.store.db import Database
from tidegate.worker.supervisor import Worker

__all__ = ["DeadLetterResult", "Harness", "RunResult", "StepResult", "with_harness"]

P = ParamSpec("P")
T = TypeVar("T")

_TEMPLATE = "harness_template"
_CLOCK = """
create table public.harness_clock (now timestamptz not null);
insert into public.harness_clock values (clock_timestamp());
create or replace function tidegate.now() returns timestamptz language sql stable parallel safe
  as $$ select now from public.harness_clock $$;
"""
# The data is temporary, so nothing has to be flushed to disk.
_SCRATCH_OPTIONS = {"fsync": "off", "full_page_writes": "off", "max_connections": "300"}


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
        payload: dict[str, Any] | None = None,
        id: str | None = None,
        correlation_id: str | None = None,
        ttl_ms: int | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Accepted:
        """Publish an event, like `Tidegate.publish`. It is processed by `run_until_idle` or `advance`."""
        self._inside()
        return await self._app.publish(
            type, source=source, payload=payload, id=id, correlation_id=correlation_id, ttl_ms=ttl_ms, metadata=metadata
        )

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

    async def dead_letters(self) -> list[DeadLetterResult]:
        """The dead letters, oldest first."""
        _, database = self._inside()
        async with database.connection() as connection:
            rows = await connection.fetch("select kind, event_id, reason from tidegate.dead_letters order by id")
        return [DeadLetterResult(**dict(row)) for row in rows]

    async def __aenter__(self) -> Harness:
        if self._app in _inside_harness:
            raise AppError("this application is already in another harness; each harness needs its own Tidegate object")
        server = await asyncio.to_thread(_server)
        await _admin(server, f"create database {self._name} template {_TEMPLATE} owner {ROLE}")
        url = server.url(self._name)
        changes = {"queue": "postgres", **self._overrides, "database_url": url}
        self._outside = self._app.settings
        settings = msgspec.structs.replace(self._outside, **changes)
        _inside_harness.add(self._app)
        try:
            await self._app.close()
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
        try:
            if worker is not None:
                await worker.close()
            if database is not None:
                await database.close()
            await self._app.close()
            await _admin(_server(), f"drop database {self._name} with (force)")
        finally:
            self._app._settings = self._outside
            _inside_harness.discard(self._app)

    def _inside(self) -> tuple[Worker, Database]:
        if self._worker is None or self._database is None:
            raise AppError("use the harness inside `async with Harness(app) as harness:`")
        return self._worker, self._database

    async def _set_clock(self, now: datetime) -> None:
        assert self._database is not None
        async with self._database.connection() as connection:
            await connection.execute("update public.harness_clock set now = $1", now)
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


# One server for all harnesses of the process; each has its own database, cloned from a migrated template.
_inside_harness: set[Tidegate] = set()
_starting = threading.Lock()
_started: EmbeddedPostgres | None = None


def _server() -> EmbeddedPostgres:
    global _started
    with _starting:
        if _started is None:
            folder = Path(tempfile.mkdtemp(prefix="tidegate-harness-"))
            server = EmbeddedPostgres(folder, _SCRATCH_OPTIONS)
            atexit.register(_stop, server, os.getpid())
            _in_lasting_thread(lambda: _prepare(server))
            _started = server
        return _started


def _prepare(server: EmbeddedPostgres) -> None:
    server.start()
    asyncio.run(_make_template(server))


async def _make_template(server: EmbeddedPostgres) -> None:
    await _admin(server, f"create database {_TEMPLATE} owner {ROLE}")
    database = Database(server.url(_TEMPLATE), "harness", size=1)
    try:
        await migrate.migrate(database)
        async with database.connection() as connection:
            await connection.execute(_CLOCK)
    finally:
        await database.close()


async def _admin(server: EmbeddedPostgres, statement: str) -> None:
    database = Database(server.admin_url(), "harness", size=1)
    try:
        async with database.connection() as connection:
            await connection.execute(statement)
    finally:
        await database.close()


def _in_lasting_thread(work: Callable[[], None]) -> None:
    """Call it in a thread that lives as long as the process: the server ends with the thread that started it."""
    done = threading.Event()
    failures: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - re-raised in the calling thread
            failures.append(exc)
        done.set()
        if not failures:
            threading.Event().wait()

    threading.Thread(target=body, name="tidegate-harness", daemon=True).start()
    done.wait()
    if failures:
        raise failures[0]


def _stop(server: EmbeddedPostgres, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        server.stop(immediate=True)
        shutil.rmtree(server.data, ignore_errors=True)
