"""Run: claim due runs, call the workflow, write how it ended. A worker that lost its claim changes nothing."""

from __future__ import annotations

import asyncio
import re
import traceback
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from headgate import failpoints
from headgate.errors import NonRetryable, Unavailable
from headgate.flow import slots
from headgate.flow.slots import Fill, Freed
from headgate.flow.tell import tell_moves
from headgate.flow.workflow import Context, Workflow
from headgate.model.event import Event
from headgate.model.run import ClaimedRun, FinishedRun
from headgate.model.source import TRIGGER_BREAKER, BreakerPolicy
from headgate.store import events, runs
from headgate.store.db import Connection, Database
from headgate.store.deliveries import Claim
from headgate.store.group_commit import GroupCommit
from headgate.telemetry.logs import logger

MAX_OUTPUT_BYTES = 1024 * 1024
MAX_ERROR_CHARACTERS = 8000
_WRITE_RETRY_SECONDS = 0.5

# The escape for U+0000, not the text backslash-u-0000: an odd number of backslashes before the u.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")

_log = logger("run")


class Runner:
    """Runs the workflows of one worker process, at most `concurrency` at a time.

    The transaction that ends a run launches what waits for its slot (`fill`) and claims it: the next begins at once.
    `after_free` hears of it after the commit.
    """

    def __init__(
        self,
        database: Database,
        workflows: Mapping[str, Workflow],
        *,
        worker: str,
        concurrency: int,
        lease_ms: int,
        breaker: BreakerPolicy = TRIGGER_BREAKER,
        fill: Fill | None = None,
        after_free: Callable[[Freed], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._workflows = workflows
        self._worker = worker
        self._concurrency = concurrency
        self._lease_ms = lease_ms
        self._breaker = breaker
        self._fill = fill
        self._after_free = after_free
        self._definitions: list[uuid.UUID] = []
        self._held: dict[uuid.UUID, tuple[ClaimedRun, asyncio.Task[None]]] = {}
        self._free = asyncio.Event()
        self._closing = False
        self._threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="workflow")
        self._finishes: GroupCommit[FinishedRun, bool] = GroupCommit(
            self._write_finished, weight=lambda _: 1, max_weight=1000, max_waiting=1_000_000
        )

    def serve(self, definitions: list[uuid.UUID]) -> None:
        """The definitions whose code is in this process; runs of others are left alone."""
        self._definitions = definitions

    @property
    def is_full(self) -> bool:
        """Whether every slot is taken."""
        return len(self._held) >= self._concurrency

    async def wait_for_slot(self) -> None:
        """Wait until a run ends, or nothing more is to be claimed."""
        self._free.clear()
        if self.is_full and not self._closing:
            await self._free.wait()

    def stop_claiming(self) -> None:
        """Claim nothing more; what runs goes on."""
        self._closing = True
        self._free.set()

    async def run_once(self) -> int:
        """Claim as many due runs as there are free slots and start them; how many."""
        free = self._concurrency - len(self._held)
        if free <= 0 or self._closing or not self._definitions:
            return 0
        async with self._database.transaction() as connection:
            claimed = await runs.claim_due(
                connection, definitions=self._definitions, limit=free, worker=self._worker, lease_ms=self._lease_ms
            )
            ids = {run.event_id for run in claimed if run.event_id is not None}
            found = await events.get_many(connection, ids) if ids else {}
        failpoints.hit("run.after_claim")
        for run in claimed:
            self._start(run, found.get(run.event_id) if run.event_id else None)
        return len(claimed)

    def _start(self, run: ClaimedRun, event: Event | None) -> None:
        self._held[run.id] = (run, asyncio.create_task(self._execute(run, event)))

    async def renew(self) -> int:
        """Extend the leases of what is running; a run that belongs to someone else now is stopped here."""
        held = [run for run, _ in self._held.values()]
        if not held:
            return 0
        async with self._database.transaction() as connection:
            kept = await runs.renew(connection, held, self._lease_ms)
        for run in held:
            if run.id not in kept and run.id in self._held:
                _log.warning("run.lease_lost", run_id=str(run.id), workflow=run.workflow)
                self._held[run.id][1].cancel()
        return len(kept)

    async def stop(self, patience_seconds: float) -> None:
        """Wait for running workflows, then hand back what is still running."""
        tasks = [task for _, task in self._held.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=patience_seconds)
        left = list(self._held.values())
        for _, task in left:
            task.cancel()
        await asyncio.gather(*(task for _, task in left), return_exceptions=True)
        if left:
            async with self._database.transaction() as connection:
                back = await runs.hand_back(connection, [run for run, _ in left])
            _log.info("run.handed_back", count=len(back))
        await self._finishes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _execute(self, run: ClaimedRun, event: Event | None) -> None:
        try:
            finished = await self._call(run, event)
            failpoints.hit("run.before_finish")
            written = await self._finishes.submit(finished)
            failpoints.hit("run.after_finish")
            if not written:
                _log.warning("run.result_discarded", run_id=str(run.id), reason="the lease was lost")
        finally:
            self._held.pop(run.id, None)
            self._free.set()

    async def _call(self, run: ClaimedRun, event: Event | None) -> FinishedRun:
        workflow = self._workflows[run.workflow]
        context = Context(run.id, run.workflow, event, run.correlation_id)
        try:
            arguments = workflow.bind(run.parameters)
            if workflow.is_async:
                result = await workflow.function(context, **arguments)
            else:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, lambda: workflow.function(context, **arguments))
            return self._ended(run, "succeeded", output=_output(result))
        except NonRetryable as exc:
            return self._ended(run, "failed", error=str(exc))
        except Exception as exc:
            return self._ended(run, "failed", error=_traceback(exc))

    def _ended(self, run: ClaimedRun, status: Any, output: str | None = None, error: str | None = None) -> FinishedRun:
        log = _log.info if status == "succeeded" else _log.warning
        log(
            f"run.{status}",
            run_id=str(run.id),
            workflow=run.workflow,
            event_id=str(run.event_id),
            correlation_id=run.correlation_id,
            attempt=run.attempts,
            **({"reason": error.splitlines()[-1]} if error else {}),
        )
        return FinishedRun(
            id=run.id,
            claim_generation=run.claim_generation,
            status=status,
            output=output,
            error=error,
            trigger_id=run.trigger_id,
            concurrency_key=run.concurrency_key,
            is_probe=run.is_probe,
        )

    async def _write_finished(self, finished: list[FinishedRun]) -> list[bool]:
        fill = None if self._closing else self._fill
        also: frozenset[uuid.UUID] = frozenset()
        while True:
            try:
                freed = await self._database.run(partial(self._finish, finished=finished, fill=fill, also=also))
            except Unavailable as exc:
                # The work is done; keep its result until the database is back. If the lease ends first, another
                # worker runs it again, and this write will change nothing.
                _log.warning("run.finish_waits", count=len(finished), error=exc)
                await asyncio.sleep(_WRITE_RETRY_SECONDS)
                continue
            except slots.Unlocked as exc:
                also |= exc.trigger_ids
                continue
            except Exception as exc:
                if fill is None:
                    raise
                # What waits for the slots cannot be decided; that must not keep these runs from ending.
                _log.warning("run.fill_failed", count=len(finished), error=exc)
                fill = None
                continue
            for run, event in freed.filled.claimed if freed.filled else ():
                self._start(run, event)
            tell_moves(freed.moves)
            if freed.woken or freed.filled or freed.moves:
                self._after_free(freed)
            return [f.id in freed.written for f in finished]

    async def _finish(
        self, connection: Connection, finished: list[FinishedRun], fill: Fill | None, also: frozenset[uuid.UUID]
    ) -> Freed:
        claim = Claim(self._worker, self._lease_ms, self._definitions, len(finished))
        return await slots.finish(connection, finished, breaker=self._breaker, fill=fill, claim=claim, also=also)


def _output(result: Any) -> str | None:
    if result is None:
        return None
    try:
        output = msgspec.json.encode(result)
    except (TypeError, ValueError, RecursionError) as exc:
        raise NonRetryable(f"what the workflow returned cannot be stored as JSON: {exc}") from exc
    if len(output) > MAX_OUTPUT_BYTES:
        raise NonRetryable(f"what the workflow returned is {len(output)} bytes; at most {MAX_OUTPUT_BYTES} are kept")
    if _NUL.search(output):
        raise NonRetryable("what the workflow returned holds the character U+0000, which cannot be stored")
    return output.decode()


def _traceback(exc: Exception) -> str:
    text = "".join(traceback.format_exception(exc)).replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"…{text[-MAX_ERROR_CHARACTERS:]}"
