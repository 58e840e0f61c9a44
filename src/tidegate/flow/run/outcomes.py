"""Outcomes: writes what runs did: outcomes of steps, suspensions, ends. Many runs share one transaction (group
commit)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.call.journal import RecordedOutcome, Written
from tidegate.flow.decide.reporting import log_source_moves, log_trigger_moves
from tidegate.flow.run import budget_slots, children, finish, published, slot_line
from tidegate.flow.run.children import ChildrenMoved
from tidegate.flow.run.finish import Fill, Freed
from tidegate.flow.run.published import Replaced, SourceFull, with_replaced
from tidegate.model.ids import RunId, StepId, TriggerId
from tidegate.model.run import FinishedRun, LaunchBlock
from tidegate.model.source import SOURCE_BREAKER, BreakerPolicy, SourceBreakerPolicy
from tidegate.model.step import RunOutcome, StepWrite, SuspendedRun
from tidegate.store import budget_steps, budgets, runs, steps, trigger_gates, waits
from tidegate.store.db import Connection, Database
from tidegate.store.deliveries import NOBODY, Claim
from tidegate.store.group_commit import GroupCommit
from tidegate.store.locks import Unlocked
from tidegate.store.runs import KeptSuspension
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

MAX_WRITES = 1000
_RETRY_SECONDS = 0.5

_KEPT = Written(True)

_log = logger("run")


class WaitingStep(NamedTuple):
    """A step that waits until a time: what a wake-up needs to know."""

    id: StepId
    retry_attempts: int
    next_attempt_at: datetime | None


def _weight(item: RunOutcome) -> int:
    """A large result counts as many writes, so that a transaction stays short."""
    weight = 1
    for write in item.steps:
        weight += 1 if write.result is None else 1 + len(write.result) // 10_000
        weight += 0 if write.children is None else len(write.children.parameters)
        weight += 0 if write.event is None else 1 + len(write.event.payload) // 10_000
    return weight


class OutcomeWriter:
    """Writes what runs did. The transaction that ends a run launches what waits for its slot (`fill`), and claims as
    much of it as `claim` allows. After the commit `after_free` is called with it, `after_wait` with steps that wait,
    `after_block` with triggers and keys that a step has blocked for all runs. `waits_here` says which parents are
    executing here, by which claim."""

    def __init__(
        self,
        database: Database,
        *,
        breaker: BreakerPolicy,
        source_breaker: SourceBreakerPolicy = SOURCE_BREAKER,
        fill: Fill | None,
        claim: Callable[[int], Claim | None],
        after_free: Callable[[Freed], None],
        after_wait: Callable[[Sequence[WaitingStep]], None],
        after_block: Callable[[LaunchBlock], None],
        waits_here: Callable[[RunId, int], bool],
    ) -> None:
        self._database = database
        self._breaker = breaker
        self._source_breaker = source_breaker
        self._fill = fill
        self._claim = claim
        self._after_free = after_free
        self._after_wait = after_wait
        self._after_block = after_block
        self._waits_here = waits_here
        self._waits_for_database = True
        self._expects_simple = True
        self._group: GroupCommit[RunOutcome, RecordedOutcome] = GroupCommit(
            self._write_all, weight=_weight, max_weight=MAX_WRITES, max_waiting=1_000_000
        )

    def put(self, item: RunOutcome, then: Callable[[RecordedOutcome | BaseException], None]) -> None:
        """Hand over an outcome; `then` is called when it is committed, with whether it took effect."""
        self._group.put(item, then)

    def stop_waiting(self) -> None:
        """From now on fail when the database is down, in place of waiting for it: the worker stops."""
        self._waits_for_database = False

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return self._group.is_busy

    async def close(self) -> None:
        """Wait until everything is written."""
        await self._group.close()

    async def _write_all(self, items: list[RunOutcome]) -> Sequence[RecordedOutcome | Exception]:
        """Write a group; if that fails, one by one, so that an outcome that cannot be written affects no other. A step
        is written once in a transaction; what follows of it, in the next one."""
        if place := _repeats_at(items):
            return [*await self._write_part(items[:place]), *await self._write_part(items[place:])]
        try:
            return await self._write_group(items)
        except Exception as exc:
            if isinstance(exc, SourceFull) and len(items) == 1:
                raise exc.refusal from exc
            if len(items) == 1 or isinstance(exc, Unavailable):
                raise
            _log.warning("run.group_failed", count=len(items), error=exc, reason="writing one by one")
        return [answer for item in items for answer in await self._write_part([item])]

    async def _write_part(self, items: list[RunOutcome]) -> Sequence[RecordedOutcome | Exception]:
        try:
            return await self._write_all(items)
        except Exception as exc:  # noqa: BLE001 - reported to the runs that it belongs to
            return [exc] * len(items)

    async def _write_group(self, items: list[RunOutcome]) -> list[RecordedOutcome]:
        claim = self._claim(sum(isinstance(item.end, FinishedRun) for item in items))
        fill = None if claim is None else self._fill
        also: frozenset[TriggerId] = frozenset()
        are_simple, replaced = self._expects_simple, dict[StepId, StepWrite]()
        while True:
            work = partial(self._write_together, items=items, are_simple=are_simple, fill=fill, claim=claim, also=also)
            try:
                recorded, freed = await self._database.run(work)
            except _NotSimple:
                are_simple = False
                continue
            except Unavailable as exc:
                if not self._waits_for_database:
                    raise
                # The work is done: keep its result until the database is back. If the lease ends first, another
                # worker runs it again, and this write takes no effect.
                _log.warning("run.finish_waits", count=len(items), error=exc)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            except Unlocked as exc:
                also |= exc.trigger_ids
                continue
            except SourceFull:
                raise
            except Replaced as exc:
                replaced |= exc.writes
                items = with_replaced(items, exc.writes)
                continue
            except Exception as exc:
                if fill is None:
                    raise
                # What waits for the slots cannot be decided; these runs must end all the same.
                _log.warning("run.fill_failed", count=len(items), error=exc)
                fill = None
                continue
            failpoints.hit("outcome.after_commit")
            if freed is not None:
                self._expects_simple = not freed.are_ends_asked_for
                self._committed(items, recorded, freed)
            return (
                [_told(one, item, replaced) for one, item in zip(recorded, items, strict=True)]
                if replaced
                else recorded
            )

    async def _write_together(
        self, connection: Connection, items: list[RunOutcome], are_simple: bool, **how: Any
    ) -> tuple[list[RecordedOutcome], Freed | None]:
        """One transaction: first what may concern triggers, whose rows are locked before those of runs (general path);
        then, in one statement, the runs that simply succeeded (fast path). Freed is None when all took the fast
        path."""
        simple = [item for item in items if _is_simple(item)] if are_simple else []
        if len(simple) == len(items):
            await runs.note(connection, [item.notes for item in simple if item.notes is not None])
            await _succeed(connection, simple)
            failpoints.hit("outcome.before_commit")
            return [_kept(item) for item in items], None
        simple_ids = {id(item) for item in simple}
        recorded, freed = await self._write(connection, [item for item in items if id(item) not in simple_ids], **how)
        if simple:
            await runs.note(connection, [item.notes for item in simple if item.notes is not None])
            await _succeed(connection, simple)
        failpoints.hit("outcome.before_commit")
        others = iter(recorded)
        return [_kept(item) if id(item) in simple_ids else next(others) for item in items], freed

    async def _write(
        self,
        connection: Connection,
        items: list[RunOutcome],
        fill: Fill | None,
        claim: Claim | None,
        also: frozenset[TriggerId],
    ) -> tuple[list[RecordedOutcome], Freed]:
        """The general path: outcomes of steps, suspended runs, runs that ended."""
        finished = [item.end for item in items if isinstance(item.end, FinishedRun)]
        suspended = [item.end for item in items if isinstance(item.end, SuspendedRun)]
        step_writes = [write for item in items for write in item.steps]
        blocking = [write for write in step_writes if write.blocks is not None]
        blocks = _blocks(step_writes, [*suspended, *finished])
        also |= {one.trigger_id for one in blocks} | {s.gives_back for s in suspended if s.gives_back is not None}
        kept: dict[tuple[RunId, str], steps.RecordedStep] = {}

        async def block() -> None:
            await runs.note(connection, [item.notes for item in items if item.notes is not None])
            kept.update(await _block(connection, blocking))

        freed = await finish.end_held(
            connection,
            finished,
            breaker=self._breaker,
            source_breaker=self._source_breaker,
            fill=None if blocks else fill,  # what waits is decided by the gate as it is with the block
            claim=claim or NOBODY,
            before=block,
            also=also,
            also_budgets=budget_slots.names_of(blocks, step_writes, finished),
            waits_here=self._waits_here,
        )
        kept |= await steps.write(connection, [write for write in step_writes if write.blocks is None], freed.written)
        mine = [w for w in step_writes if (w.workflow_run_id, w.name) in kept]
        sent = await _send(connection, mine)
        freed = freed.also(await budget_slots.end_steps(connection, [write for write in mine if write.budgets]))
        await waits.record(connection, [write for write in mine if write.kind == "wait"])
        kept_suspensions = await _suspend(connection, suspended) if suspended else {}
        freed = freed.also(await slot_line.give_back(connection, kept_suspensions, also)) if suspended else freed
        ended = [run for run in finished if run.id in freed.written]
        freed = await _end_waiting(connection, ended, freed)
        await _fail(connection, [run for run in ended if run.status == "failed"])
        # Ended before, by a commit whose answer was lost.
        before = await runs.ended_by(connection, [run for run in finished if run.id not in freed.written])
        resumed = await finish.resumed_before(connection, [r for r in finished if r.id in before], claim or NOBODY)
        asked = await runs.cancel_requested(connection, [s.id for s in suspended if s.id not in kept_suspensions])

        def recorded(item: RunOutcome) -> RecordedOutcome:
            rows = [kept.get((write.workflow_run_id, write.name)) for write in item.steps]
            end = item.end.id if item.end else None
            return RecordedOutcome(
                [Written(True, *row) if row else Written(False) for row in rows],
                Written(end in kept_suspensions or end in freed.written or end in before, end in asked),
            )

        due = freed.woken_runs + sum(one.is_woken for one in kept_suspensions.values()) + len(sent.due)
        return [recorded(item) for item in items], freed._replace(
            resumed=[*freed.resumed, *resumed], woken_runs=due, published=[*freed.published, *sent.published]
        )

    def _committed(self, items: list[RunOutcome], recorded: list[RecordedOutcome], freed: Freed) -> None:
        log_trigger_moves(freed.moves)
        log_source_moves(freed.source_moves)
        metrics.STEP_RETRIES.labels("cancelled").inc(freed.cancelled_retries)
        if freed.has_consequences:
            self._after_free(freed)
        waiting: list[WaitingStep] = []
        for item, answer in zip(items, recorded, strict=True):
            for write, written in zip(item.steps, answer.steps, strict=True):
                if not written.is_kept:
                    continue
                if write.blocks is not None:
                    self._after_block(write.blocks)
                if write.retry_state == "scheduled":
                    waiting.append(WaitingStep(write.id, write.retry_attempts, written.next_attempt_at))
                if write.kind == "step" and (write.retry_state != "none" or write.retry_attempts):
                    _count_retry(write)
        if waiting:
            self._after_wait(waiting)


async def _suspend(connection: Connection, suspended: Sequence[SuspendedRun]) -> dict[RunId, KeptSuspension]:
    """Suspend runs; those that were still held."""
    kept = await runs.suspend(connection, suspended)
    mine = [one for one in suspended if one.id in kept]
    await _close(connection, _blocks((), mine))
    await runs.hold_for_version(connection, [one for one in mine if one.misfit])
    return kept


async def _end_waiting(connection: Connection, ended: Sequence[FinishedRun], freed: Freed) -> Freed:
    """End the waiting steps of runs that have ended; with how many, and who is due in the lines of budgets."""
    lines = await budget_steps.lines_of_runs(connection, [run.id for run in ended if run.budgets])
    cancelled = await steps.end_waiting(connection, [run.id for run in ended if run.has_waiting_steps])
    return freed._replace(cancelled_retries=cancelled).also(await budget_slots.wake(connection, lines))


async def _fail(connection: Connection, failed: Sequence[FinishedRun]) -> None:
    """Runs have failed: their dead letters, and what they ask everyone to wait for."""
    if failed:
        failpoints.hit("outcome.before_dead_letter")
        await runs.dead_letter(connection, failed)
        await _close(connection, _blocks((), failed))


def _blocks(writes: Sequence[StepWrite], ends: Sequence[SuspendedRun | FinishedRun]) -> list[LaunchBlock]:
    """What steps and runs, suspended or ended, ask everyone to wait for."""
    asked = [*(write.blocks for write in writes), *(run.blocks for run in ends)]
    return [one for one in asked if one is not None]


async def _block(connection: Connection, blocking: Sequence[StepWrite]) -> dict[tuple[RunId, str], steps.RecordedStep]:
    """Write steps that block their trigger or key for all runs, and block it; those that were kept."""
    kept = await steps.write(connection, blocking)
    await _close(connection, [w.blocks for w in blocking if w.blocks and (w.workflow_run_id, w.name) in kept])
    return kept


async def _close(connection: Connection, blocks: Sequence[LaunchBlock]) -> None:
    """Close triggers, keys and budgets for a while. This transaction holds them."""
    for one in blocks:
        if one.budget is None:
            await trigger_gates.close(
                connection, one.trigger_id, key=one.concurrency_key, delay_ms=one.delay_ms, reason=one.reason
            )
        elif not await budget_slots.close(connection, await budgets.lock(connection, [one.budget]), one):
            _log.warning("run.unknown_budget", budget=one.budget, trigger_id=one.trigger_id, reason=one.reason)


async def _send(connection: Connection, writes: Sequence[StepWrite]) -> ChildrenMoved:
    """Store the events that steps publish, and start their children."""
    stored = await published.store(connection, [write for write in writes if write.event is not None])
    parents = [write for write in writes if write.children is not None]
    moved = await children.start(connection, parents) if parents else ChildrenMoved()
    return moved._replace(published=[*stored, *moved.published])


class _NotSimple(Exception):
    """The fast path does not apply: some runs are no longer held, or their end concerns their trigger."""


def _repeats_at(items: Sequence[RunOutcome]) -> int:
    """The place of the first outcome with a step that an earlier one has, too; 0: there is none."""
    if all(write.is_new for item in items for write in item.steps):
        return 0
    seen: set[StepId] = set()
    for place, item in enumerate(items):
        mine = {write.id for write in item.steps}
        if not seen.isdisjoint(mine):
            return place
        seen |= mine
    return 0


def _is_simple(item: RunOutcome) -> bool:
    """Whether the fast path applies: the run succeeded, its steps are new and succeeded, and its trigger need not
    know."""
    end = item.end
    if not isinstance(end, FinishedRun) or end.status != "succeeded" or end.matters_to_trigger or end.has_waiting_steps:
        return False
    if end.child_of is not None or end.budgets:
        return False
    for write in item.steps:
        if not write.is_new or write.status != "succeeded" or write.kind != "step" or write.budgets:
            return False
    return True


async def _succeed(connection: Connection, items: Sequence[RunOutcome]) -> None:
    ends = [item.end for item in items if isinstance(item.end, FinishedRun)]
    if not await runs.succeed(connection, ends, [write for item in items for write in item.steps]):
        raise _NotSimple


def _told(recorded: RecordedOutcome, item: RunOutcome, replaced: Mapping[StepId, StepWrite]) -> RecordedOutcome:
    """The answers to steps, with what was written in place of what was asked for."""
    return recorded._replace(
        steps=[one._replace(instead=replaced.get(w.id)) for one, w in zip(recorded.steps, item.steps, strict=True)]
    )


def _kept(item: RunOutcome) -> RecordedOutcome:
    return RecordedOutcome([_KEPT] * len(item.steps), _KEPT)


def _count_retry(write: StepWrite) -> None:
    """Count the attempt of a step that failed, now or before. Every attempt after the first was due once."""
    has_failed_now = write.retry_state in ("scheduled", "exhausted")
    is_again = write.retry_attempts > has_failed_now
    outcome = "completed" if write.retry_state == "none" else write.retry_state
    if is_again:
        metrics.STEP_RETRIES.labels("due").inc()
    metrics.STEP_RETRIES.labels("rescheduled" if is_again and outcome == "scheduled" else outcome).inc()
