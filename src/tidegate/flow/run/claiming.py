"""Claiming: a worker claims due runs, some of them in advance, and takes up each claim once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from tidegate.clock import monotonic
from tidegate.flow.call.execution import Execution
from tidegate.flow.call.states import RELEASED
from tidegate.flow.run import slot_line
from tidegate.flow.run.fair_claims import FairClaims
from tidegate.model.event import Event
from tidegate.model.ids import DefinitionId, RunId
from tidegate.model.run import ClaimedRun, LaunchBlock, Step
from tidegate.model.shares import Line, Turns
from tidegate.model.worker_share import ReservedSlots
from tidegate.store import events, runs, steps, windows
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

    def __init__(
        self,
        database: Database,
        worker: str,
        lease_ms: int,
        held: Callable[[], Sequence[ClaimedRun]] = lambda: (),
        slots: ReservedSlots | None = None,
    ) -> None:
        self._database = database
        self._worker = worker
        self._lease_ms = lease_ms
        self._fair = FairClaims(worker, lease_ms, held, slots)

    async def claim(
        self, definitions: Sequence[DefinitionId], limit: int, *, is_behind: bool = True
    ) -> tuple[list[ReadyRun], bool]:
        """Runs that are due, except suspects, and whether more may be. `is_behind`: more may be due than the limit."""
        async with self._database.transaction() as connection:
            claimed = await self._fair.claim(connection, definitions, limit, is_behind=is_behind)
            found = await ready(connection, claimed.runs)
        return await self._with_slots(found), claimed.has_more

    @property
    def weights(self) -> Mapping[str, int]:
        """The weights of workflows, as far as they are known."""
        return self._fair.weights

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
            claimed = await ready(connection, [found.run]) if found else []
        mine = await self._with_slots(claimed)
        return (mine[0], found.crashes) if found and mine else None

    async def _with_slots(self, found: list[ReadyRun]) -> list[ReadyRun]:
        """The runs that may begin: those that give their slots back while they wait take them first."""
        needing = [(one.run, one.event) for one in found if one.run.needs_slot]
        if not needing:
            return found
        begin = await slot_line.enter(self._database, needing)
        return [
            one._replace(run=begin.get(one.run.id, one.run))
            for one in found
            if not one.run.needs_slot or one.run.id in begin
        ]


async def ready(connection: Connection, claimed: Sequence[ClaimedRun]) -> list[ReadyRun]:
    """Claimed runs with what their executions need."""
    ids = {run.event_id for run in claimed if run.event_id is not None}
    found = await events.get_many(connection, ids) if ids else {}
    if any(run.window_id is not None for run in claimed):
        claimed = await _with_windows(connection, claimed)
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


async def _with_windows(connection: Connection, claimed: Sequence[ClaimedRun]) -> list[ClaimedRun]:
    """The runs, those that take a window with its events, in the order of arrival."""
    ids = await windows.event_ids(connection, [run.window_id for run in claimed if run.window_id is not None])
    found = await events.get_many(connection, {event_id for mine in ids.values() for event_id in mine})
    return [
        run
        if run.window_id is None
        else msgspec.structs.replace(
            run, window=tuple(found[one] for one in ids.get(run.window_id, ()) if one in found)
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
    """The executions of one worker that are ready: claimed and not begun, oldest first within a workflow; workflows
    take turns.

    Beyond its slots a worker claims what they will get through in a moment, so that short runs are claimed in batches.
    What has not begun after RELEASE_SECONDS is released, so that nothing waits here behind long runs while another
    worker is idle. `on_release` is called then.
    """

    def __init__(
        self,
        database: Database,
        concurrency: int,
        on_release: Callable[[], None],
        slots: ReservedSlots | None = None,
        weights: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._weights = weights
        self._slots = slots  # given if some are reserved; then nothing is claimed ahead
        self._database = database
        self._concurrency = concurrency
        self._on_release = on_release
        self._lines: dict[str, deque[Execution]] = {}  # by workflow; none is empty
        self._turns = Turns()
        self._typical_seconds: float | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Execution]:
        return chain.from_iterable(self._lines.values())

    @property
    def limit(self) -> int:
        """How many runs to claim beyond the free slots, judged by how long the last runs took."""
        if self._typical_seconds is None or self._typical_seconds > SHORT_SECONDS or self._slots is not None:
            return 0
        return min(MAX_PREFETCH, int(self._concurrency * PREFETCH_SECONDS / max(self._typical_seconds, 1e-6)))

    def learn(self, seconds: float) -> None:
        """A run took this long. Longer runs than usual count less, since they may have waited for the processor."""
        known = seconds if self._typical_seconds is None else self._typical_seconds
        self._typical_seconds = known + (seconds - known) * (0.2 if seconds < known else 0.02)

    def add(self, execution: Execution) -> None:
        self._lines.setdefault(execution.run.workflow, deque()).append(execution)

    def next(self, max_age_seconds: float, used: Mapping[str, int]) -> Execution | None:
        """The oldest of the workflow whose turn it is, to be begun; None when there is none, or its lease may end
        before it has begun. `used` are the slots that each workflow uses."""
        slots = self._slots
        lines = self._lines if slots is None else {w: one for w, one in self._lines.items() if slots.may_begin(w, used)}
        if not lines:
            return None
        if len(lines) == 1:
            [(workflow, line)] = lines.items()
        else:
            known = self._weights()
            waiting = [Line(w, len(one), used.get(w, 0), known.get(w, 1)) for w, one in lines.items()]
            [workflow] = self._turns.give(1, waiting)
            line = lines[workflow]
        if monotonic() - line[0].claimed_at > max_age_seconds:
            return None
        execution = line.popleft()
        if not line:
            del self._lines[workflow]
        return execution

    @property
    def _oldest_at(self) -> float:
        return min(line[0].claimed_at for line in self._lines.values())

    def release_later(self) -> None:
        """Release what is still here after RELEASE_SECONDS."""
        if self._lines and self._releasing is None:
            self._releasing = asyncio.create_task(self._release_old())

    async def release_all(self) -> None:
        """Let other workers have them all. If that fails, their leases end by themselves."""
        unbegun = list(self)
        self._lines.clear()
        if unbegun:
            await self._release(unbegun)

    def release_of(self, block: LaunchBlock) -> None:
        """Release what belongs to a trigger or key that was blocked; it begins when that is no longer so."""
        held = [one for one in self if _is_of(one.run, block)]
        for execution in held:
            line = self._lines[execution.run.workflow]
            line.remove(execution)
            if not line:
                del self._lines[execution.run.workflow]
        if held:
            self._background.add(task := asyncio.create_task(self._release(held)))
            task.add_done_callback(self._background.discard)

    async def wait_for_releases(self) -> None:
        """Wait for releases in progress."""
        await asyncio.gather(*self._background, *([self._releasing] if self._releasing else ()))

    async def _release_old(self) -> None:
        try:
            while self._lines:
                left = self._oldest_at + RELEASE_SECONDS - monotonic()
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
    if block.budget is not None:  # it is closed for launches; what was launched before goes on
        return False
    return run.trigger_id == block.trigger_id and block.concurrency_key in (None, run.concurrency_key)
