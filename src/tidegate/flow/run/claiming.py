"""Claiming: a worker claims due runs, some of them in advance, and takes up each claim once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tidegate.clock import monotonic
from tidegate.flow.call.execution import Execution
from tidegate.flow.call.states import RELEASED
from tidegate.model.event import Event
from tidegate.model.ids import DefinitionId, RunId
from tidegate.model.run import ClaimedRun, Step
from tidegate.model.step import LaunchBlock
from tidegate.store import events, runs, steps
from tidegate.store.db import Connection, Database
from tidegate.telemetry.logs import logger

# Runs shorter than SHORT_SECONDS are prefetched: what the slots get through in PREFETCH_SECONDS, at most MAX_PREFETCH.
SHORT_SECONDS, PREFETCH_SECONDS, MAX_PREFETCH = 0.01, 0.2, 2000
RELEASE_SECONDS = 0.3
# At least this many of the last claims are remembered, beside those that are held.
RECENT = 10_000

_log = logger("run")


class ReadyRun(NamedTuple):
    """A claimed run, its event, and its steps so far."""

    run: ClaimedRun
    event: Event | None
    steps: list[Step]


class DueRuns:
    """Claims due runs for one worker."""

    def __init__(self, database: Database, worker: str, lease_ms: int) -> None:
        self._database = database
        self._worker = worker
        self._lease_ms = lease_ms

    async def claim(self, definitions: Sequence[DefinitionId], limit: int) -> list[ReadyRun]:
        """Runs that are due, except suspects."""
        async with self._database.transaction() as connection:
            claimed = await runs.claim_due(
                connection, definitions=definitions, limit=limit, worker=self._worker, lease_ms=self._lease_ms
            )
            return await ready(connection, claimed)

    async def has_suspects(self, connection: Connection, definitions: Sequence[DefinitionId]) -> bool:
        """Whether suspects are due that this worker may claim."""
        return await runs.has_suspects(connection, definitions, worker=self._worker, lease_ms=self._lease_ms)

    async def next_seconds(self, definitions: Sequence[DefinitionId]) -> float | None:
        """Seconds until the next run is due that this worker may claim, or None."""
        async with self._database.connection() as connection:
            return await runs.next_due_seconds(connection, definitions, worker=self._worker, lease_ms=self._lease_ms)

    async def claim_suspect(
        self, definitions: Sequence[DefinitionId], *, is_counted: bool
    ) -> tuple[ReadyRun, int] | None:
        """One suspect, to be executed alone, and how often in a row its workers have died."""
        async with self._database.transaction() as connection:
            found = await runs.claim_suspect(
                connection, definitions=definitions, worker=self._worker, lease_ms=self._lease_ms, is_counted=is_counted
            )
            return ((await ready(connection, [found.run]))[0], found.crashes) if found else None


async def ready(connection: Connection, claimed: Sequence[ClaimedRun]) -> list[ReadyRun]:
    """Claimed runs with what their executions need."""
    ids = {run.event_id for run in claimed if run.event_id is not None}
    found = await events.get_many(connection, ids) if ids else {}
    again = [run.id for run in claimed if run.attempts > 1]  # a first attempt has no steps yet
    known = await steps.list_of_runs(connection, again)
    return [
        ReadyRun(
            run,
            found.get(run.event_id) if run.event_id else None,
            [step for step in known if step.workflow_run_id == run.id],
        )
        for run in claimed
    ]


class Claims:
    """The claims that this worker has taken up; none is taken up twice, whatever hands it over.

    A run's generation rises with every claim: a claim whose generation is not above the last one taken up here was
    taken up before, or is older. `held` returns the claims that are not over.
    """

    def __init__(self, held: Callable[[], Iterable[ClaimedRun]]) -> None:
        self._held = held
        self._now: dict[RunId, int] = {}
        self._before: dict[RunId, int] = {}

    def take(self, run: ClaimedRun) -> bool:
        """Take a claim up; False when it was taken up before."""
        last = self._now.get(run.id) or self._before.get(run.id, 0)
        if run.claim_generation <= last:
            return False
        if len(self._now) >= RECENT:
            self._before, self._now = self._now, {one.id: one.claim_generation for one in self._held()}
        self._now[run.id] = run.claim_generation
        return True


class Prefetch:
    """The executions of one worker that are ready: claimed and not begun, oldest first.

    Beyond its slots a worker claims what they will get through in a moment, so that short runs are claimed in batches.
    What has not begun after RELEASE_SECONDS is released, so that nothing waits here behind long runs while another
    worker is idle. `on_release` is called then.
    """

    def __init__(self, database: Database, concurrency: int, on_release: Callable[[], None]) -> None:
        self._database = database
        self._concurrency = concurrency
        self._on_release = on_release
        self._ready: deque[Execution] = deque()
        self._typical_seconds: float | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[Execution]:
        return iter(self._ready)

    @property
    def limit(self) -> int:
        """How many runs to claim beyond the free slots, judged by how long the last runs took."""
        if self._typical_seconds is None or self._typical_seconds > SHORT_SECONDS:
            return 0
        return min(MAX_PREFETCH, int(self._concurrency * PREFETCH_SECONDS / max(self._typical_seconds, 1e-6)))

    def learn(self, seconds: float) -> None:
        """A run took this long. Longer runs than usual count less, since they may have waited for the processor."""
        known = seconds if self._typical_seconds is None else self._typical_seconds
        self._typical_seconds = known + (seconds - known) * (0.2 if seconds < known else 0.02)

    def add(self, execution: Execution) -> None:
        self._ready.append(execution)

    def next(self, max_age_seconds: float) -> Execution | None:
        """The oldest, to be begun; None when there is none, or its lease may end before it has begun."""
        if not self._ready or monotonic() - self._ready[0].claimed_at > max_age_seconds:
            return None
        return self._ready.popleft()

    def release_later(self) -> None:
        """Release what is still here after RELEASE_SECONDS."""
        if self._ready and self._releasing is None:
            self._releasing = asyncio.create_task(self._release_old())

    async def release_all(self) -> None:
        """Let other workers have them all. If that fails, their leases end by themselves."""
        unbegun = list(self._ready)
        self._ready.clear()
        if unbegun:
            await self._release(unbegun)

    def release_of(self, block: LaunchBlock) -> None:
        """Release what belongs to a trigger or key that was blocked; it begins when that is no longer so."""
        held = [one for one in self._ready if _is_of(one.run, block)]
        for execution in held:
            self._ready.remove(execution)
        if held:
            self._background.add(task := asyncio.create_task(self._release(held)))
            task.add_done_callback(self._background.discard)

    async def wait_for_releases(self) -> None:
        """Wait for releases in progress."""
        await asyncio.gather(*self._background, *([self._releasing] if self._releasing else ()))

    async def _release_old(self) -> None:
        try:
            while self._ready:
                left = self._ready[0].claimed_at + RELEASE_SECONDS - monotonic()
                if left > 0:
                    await asyncio.sleep(left)
                else:
                    self._typical_seconds = None  # runs take longer than was assumed
                    await self.release_all()
        finally:
            self._releasing = None

    async def _release(self, unbegun: Sequence[Execution]) -> None:
        for execution in unbegun:
            execution.move(RELEASED)
        try:
            async with self._database.transaction() as connection:
                await runs.release_unstarted(connection, [execution.run for execution in unbegun])
            _log.info("run.released", count=len(unbegun))
        except Exception as exc:  # noqa: BLE001 - the leases end by themselves, and a worker that stops must continue
            _log.warning("run.release_failed", count=len(unbegun), error=exc)
        finally:
            self._on_release()


def _is_of(run: ClaimedRun, block: LaunchBlock) -> bool:
    """Whether a run belongs to what was blocked."""
    return run.trigger_id == block.trigger_id and block.concurrency_key in (None, run.concurrency_key)
