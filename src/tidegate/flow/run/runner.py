"""Runner: claims runs for one worker, has them executed (`worker_slots`), and writes what came of them (`outcomes`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.accept.approvals import ApprovalLinks
from tidegate.flow.accept.backlog import SourceCaps
from tidegate.flow.call.execution import Execution
from tidegate.flow.code.workflow import Workflow
from tidegate.flow.run import budget_slots
from tidegate.flow.run.claiming import DueRuns, Prefetch
from tidegate.flow.run.finish import Fill, Freed
from tidegate.flow.run.leases import LeaseKeeper
from tidegate.flow.run.look_back import LookBack
from tidegate.flow.run.outcomes import OutcomeWriter, WaitingStep
from tidegate.flow.run.quarantine import Quarantine
from tidegate.flow.run.step_budgets import Declare, StepBudgets, declare_nothing
from tidegate.flow.run.worker_slots import WorkerSlots
from tidegate.model.event import Event, EventLimits
from tidegate.model.ids import DefinitionId, RunId
from tidegate.model.retry import STEP_RETRY, RetryPolicy
from tidegate.model.run import ClaimedRun
from tidegate.model.source import SOURCE_BREAKER, TRIGGER_BREAKER, BreakerPolicy, SourceBreakerPolicy
from tidegate.model.worker_share import ALL, ReservedSlots, WorkerShare
from tidegate.store import runs
from tidegate.store.db import Database
from tidegate.store.deliveries import NOBODY, Claim
from tidegate.store.slot_lines import Nudged
from tidegate.store.transactions import Transactions
from tidegate.telemetry.logs import logger

# With a prefetch of at least this many runs, dispatch waits up to PAUSE_SECONDS for room: runs that are created then
# are claimed in the same statement. What others publish meanwhile is decided beside it, and up to FEW runs of that are
# claimed beyond the prefetch.
BUSY_PREFETCH, PAUSE_SECONDS, FEW = 50, 0.25, 4

_log = logger("run")


class Runner:
    """Runs the workflows of one worker process, at most `concurrency` at a time.

    A run is claimed here when it is due (`run_once`), or as it is created: the transaction that creates it asks for a
    `claim` and passes the runs to `start`. `after_free` is called with what a freed slot let launch, `after_wait` with
    steps that wait.
    """

    def __init__(
        self,
        database: Database,
        workflows: Mapping[str, Workflow],
        *,
        worker: str,
        concurrency: int,
        lease_ms: int,
        transaction_connections: int = 4,
        policy: RetryPolicy = STEP_RETRY,
        breaker: BreakerPolicy = TRIGGER_BREAKER,
        source_breaker: SourceBreakerPolicy = SOURCE_BREAKER,
        fill: Fill | None = None,
        after_free: Callable[[Freed], None] = lambda _: None,
        after_wait: Callable[[Sequence[WaitingStep]], None] = lambda _: None,
        beside_leases: Callable[[Database], Coroutine[None, None, None]] | None = None,
        limits: EventLimits | None = None,
        link_base: str = "",
        share: WorkerShare = ALL,
        after_slot: Callable[[], None] = lambda: None,
        declare: Declare = declare_nothing,
    ) -> None:
        self._reserved = ReservedSlots(concurrency, share.reserved) if share.reserved else None
        self._after_slot = after_slot
        self._database, self._caps = database, SourceCaps(database)
        self._worker, self._concurrency, self._lease_ms = worker, concurrency, lease_ms
        self._after_free = after_free
        self._definitions: list[DefinitionId] = []
        self._versions: Sequence[str | None] = ()
        self._free = asyncio.Event()
        self._has_backlog = False
        self._was_full = False  # since the last claim: more may be due than there is room for
        self._has_stopped_claiming = False
        self._prefetch = Prefetch(
            database, concurrency, on_release=self._free.set, slots=self._reserved, weights=self._weights
        )
        self._due = DueRuns(database, worker, lease_ms, held=self._held, slots=self._reserved)
        self._quarantine = Quarantine(database, self._due, after_open=self._reopened)
        self._outcomes = OutcomeWriter(
            database, breaker=breaker, source_breaker=source_breaker, fill=fill, claim=self._claim_freed,
            after_free=self._freed, after_wait=after_wait, after_block=self._prefetch.release_of,
            waits_here=self._waits_here,
        )  # fmt: skip
        self._look_back, self._step_budgets = LookBack(database), StepBudgets(database, declare, self._lines_moved)
        self._transactions = Transactions(database.url, transaction_connections)
        self._slots = WorkerSlots(
            workflows, self._prefetch, concurrency=concurrency, lease_ms=lease_ms, policy=policy,
            put=self._outcomes.put, ask=self._look_back.ask, ask_spend=self._step_budgets.ask,
            transactions=self._transactions, may_begin=self._may_begin, on_free=self._slot_is_free,
            limits=limits or EventLimits(), links=ApprovalLinks(database, link_base), caps=self._caps,
        )  # fmt: skip
        self._leases = LeaseKeeper(
            database.url, worker, lambda: (self._definitions, self._versions), lease_ms,
            lambda: [(execution.run, execution.claimed_at) for execution in self._slots.held()],
            lost=self._slots.lease_lost, overdue=partial(self._slots.lease_lost, is_taken=False),
            cancelled=self._slots.cancelled, beside=beside_leases, slots=concurrency, share=share,
            workflows=workflows,
        )  # fmt: skip

    def _may_begin(self) -> bool:
        return self._quarantine.state != "alone"

    def _lines_moved(self, nudged: Nudged) -> None:
        """Others are due in the lines of budgets."""
        self._after_free(Freed().also(nudged))

    def serve(self, definitions: list[DefinitionId], versions: Sequence[str | None] = ()) -> None:
        """Set the definitions whose code is in this process, and its versions (None: it has none); only their runs are
        claimed."""
        self._definitions, self._versions = definitions, versions

    async def announce(self) -> None:
        """Send the first heartbeat: runs that are claimed from now on note the versions of this worker."""
        await self._leases.heartbeat(self._database)

    def keep_leases(self) -> None:
        """Start renewing leases."""
        self._leases.start()

    @property
    def room(self) -> int:
        """How many runs may be claimed now."""
        claimed = len(self._prefetch) + len(self._slots)
        is_open = self._quarantine.state == "open" and not self._has_stopped_claiming
        return max(0, self._concurrency + self._prefetch.limit - claimed) if is_open else 0

    @property
    def claims_nothing(self) -> bool:
        """Whether this worker claims none of the runs that are created now."""
        return self.room == 0 or not self._definitions

    def claim(self, ending: int = 0) -> Claim:
        """How many of the runs that are being created this worker claims; `ending` are runs that free their slots."""
        room = ending if ending and self._quarantine.state == "open" else min(self.room, self._shared_room)
        return Claim(self._worker, self._lease_ms, self._definitions, room) if room else NOBODY

    def claim_few(self) -> Claim:
        """As `claim`, at least a few beyond the prefetch: runs of others than those that fill it begin in turns with
        them, and would otherwise be claimed by a statement of their own."""
        if self._quarantine.state != "open" or self._has_stopped_claiming or self._reserved is not None:
            return self.claim()
        return Claim(self._worker, self._lease_ms, self._definitions, max(self.room, FEW))

    def expect(self) -> None:
        """Runs were created that this worker did not claim at once."""
        self._has_backlog = True

    def start(self, claimed: Sequence[tuple[ClaimedRun, Event | None]]) -> None:
        """Execute runs that were claimed for this worker."""
        failpoints.hit("run.after_claim")
        self._slots.add((run, event, []) for run, event in claimed)

    @property
    def _shared_room(self) -> int:
        """How many runs of any workflow may be claimed now: not those for which slots are reserved."""
        return self.room if self._reserved is None else self._reserved.shared_free(self._busy())

    def _weights(self) -> Mapping[str, int]:
        return self._due.weights

    def _busy(self) -> Counter[str]:
        return Counter(run.workflow for run in self._held())

    def _slot_is_free(self) -> None:
        self._free.set()
        if self._reserved is not None:  # due runs may have waited for it while there was room for others
            self._after_slot()

    def _held(self) -> list[ClaimedRun]:
        return self._slots.claimed()

    async def wait_for_room(self) -> None:
        """Wait until more may be claimed, or nothing more is to be claimed."""
        self._free.clear()
        if self.room == 0 and not self._has_stopped_claiming:
            self._was_full = True
            await self._free.wait()

    async def pause_for_room(self) -> None:
        """While short runs are executed, wait a moment for room: runs that are created then are claimed at once."""
        if self._prefetch.limit < BUSY_PREFETCH:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_SECONDS):
                while (self._has_backlog or self.room < self._prefetch.limit // 2) and not self._has_stopped_claiming:
                    self._free.clear()
                    await self._free.wait()

    async def idle(self) -> None:
        """Wait until nothing executes or is being written here."""
        while self._slots:
            self._free.clear()
            await self._free.wait()

    def stop_claiming(self) -> None:
        """Claim nothing more; executions continue."""
        self._has_stopped_claiming = True
        self._versions = ()  # other workers may have its runs
        self._free.set()

    async def run_once(self) -> int:
        """Claim as many due runs as there is room for, or one suspect if it is time for that, and start them; returns
        how many."""
        if self._has_stopped_claiming or not self._definitions:
            return 0
        await self._quarantine.check(self._definitions)
        if self._quarantine.state != "open" and (started := await self._try_suspect()):
            return started
        room = self.room
        if room == 0:
            return 0
        is_behind, self._was_full = self._was_full or self._has_backlog, False
        claimed, self._has_backlog = await self._due.claim(self._definitions, room, is_behind=is_behind)
        if claimed:
            failpoints.hit("run.after_claim")
        self._free.set()
        self._slots.add(claimed)
        return len(claimed) or (await self._try_suspect() if self._quarantine.has_suspects else 0)

    def check_for_suspects(self) -> None:
        """Runs of a dead worker are due again."""
        self._quarantine.check_now()

    async def _try_suspect(self) -> int:
        """Execute one suspect, and nothing beside it, once nothing else executes here; returns how many were begun."""
        if self._slots.used >= self._concurrency:
            return 0
        is_busy = self._slots.used > 0 or len(self._prefetch) > 0
        # Otherwise what kills the worker may be a function that does not stop.
        is_alone = not self._slots.has_remains
        found = await self._quarantine.next(self._definitions, is_busy, is_counted=is_alone)
        if found is None:
            return 0
        ready, crashes = found
        execution = self._slots.take_up(*ready)
        assert execution is not None, "a claim made just now was taken up before"
        self._quarantine.begin(execution, crashes, is_busy=is_busy)
        self._slots.begin(execution)
        return 1

    def _reopened(self) -> None:
        self._slots.begin_ready()
        self._free.set()

    async def next_due_seconds(self) -> float | None:
        """Seconds until the next waiting run of this worker is due, or None; also None while the slots that are for all
        are in use: the next that is free wakes the worker."""
        if not self._definitions or (self._reserved is not None and self._shared_room == 0):
            return None
        return await self._due.next_seconds(self._definitions)

    async def stop(self, patience_seconds: float) -> None:
        """Wait for running workflows, then release what is still running."""
        self._quarantine.stop()
        await self._prefetch.release_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_seconds):
                await self.idle()
        self._outcomes.stop_waiting()
        self._look_back.stop()
        self._step_budgets.stop()
        left: list[Execution] = []
        while self._slots or self._outcomes.is_busy:  # a commit in progress may still begin what fills a slot
            left += self._slots.held()
            for execution in self._slots.held():
                self._slots.stop(execution)
            await self.idle()
            await self._outcomes.close()
        await self._prefetch.release_all()
        await self._prefetch.wait_for_releases()
        if left:
            await self._release(left)
        await self._leases.stop()
        await self._transactions.close()
        await self._caps.close()
        self._slots.close()

    async def _release(self, left: Sequence[Execution]) -> None:
        """Let other workers have what was still running. If that fails, the leases end by themselves."""
        try:
            async with self._database.transaction() as connection:
                back = await runs.release(connection, [one.run for one in left if one.has_stopped])
                # A function that has not stopped ends with the process: no worker is to begin its run before that.
                later = [one.run for one in left if not one.has_stopped]
                back |= await runs.release(connection, later, delay_ms=self._lease_ms)
            await self._database.run(partial(budget_slots.sweep, limit=len(left)))  # what their steps held
            _log.info("run.handed_back", count=len(back))
        except Unavailable as exc:
            _log.warning("run.release_failed", count=len(left), error=exc)

    def _claim_freed(self, ending: int) -> Claim | None:
        """How much this worker claims of what is launched into the slots of runs that end; None: launch nothing."""
        return None if self._has_stopped_claiming else self.claim(ending)

    def _waits_here(self, run_id: RunId, claim_generation: int) -> bool:
        return self._slots.waits_here(run_id, claim_generation)

    def _freed(self, freed: Freed) -> None:
        if freed.filled:
            self.start(freed.filled.claimed)
        self._slots.add(freed.resumed)
        for here in freed.parents_here:
            self._slots.woken(*here)
        self._after_free(freed)
