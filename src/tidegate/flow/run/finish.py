"""Finish: ends runs and updates their triggers, in one transaction. A free concurrency slot goes to the oldest delivery
that waits for one; a failed run counts for the breaker of its trigger; the end of a probe closes or reopens it.

Slots are not stored: they are the trigger's unfinished runs, counted under its row lock, apart from those that have
given their slots back (`slot_line`).
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from tidegate.flow.decide import source_failures
from tidegate.flow.decide.source_failures import SourceMove
from tidegate.flow.run import budget_slots, children, slot_line
from tidegate.flow.run.claiming import ReadyRun, ready
from tidegate.model.event import Event
from tidegate.model.ids import RunId, TriggerId
from tidegate.model.run import ClaimedRun, FinishedRun, Step
from tidegate.model.source import SOURCE_BREAKER, BreakerPolicy, SourceBreakerPolicy
from tidegate.model.trigger import CompiledTrigger, RenderedKeys
from tidegate.model.trigger_gate import TriggerMove
from tidegate.model.trigger_terms import TemplateError
from tidegate.store import budget_steps, events, locks, run_ends, runs, slot_lines, steps, trigger_gates
from tidegate.store import children as run_children
from tidegate.store.db import Connection
from tidegate.store.deliveries import NOBODY, Claim
from tidegate.store.locks import Unlocked
from tidegate.store.runs import EndedRun, WokenRun
from tidegate.store.slot_lines import Nudged
from tidegate.store.trigger_gates import LockedTrigger, NextInLine

REKEY_BATCH = 1000


Gates = dict[TriggerId, LockedTrigger]


class Filled(Protocol):
    """What came of launching into freed slots: the runs launched, and those of them that are claimed."""

    @property
    def launched(self) -> int: ...
    @property
    def claimed(self) -> Sequence[tuple[ClaimedRun, Event]]: ...


class Fill(Protocol):
    """Decides the deliveries that are first in line for freed slots, in the transaction that freed them."""

    async def __call__(self, connection: Connection, gates: Gates, line: NextInLine, claim: Claim) -> Filled: ...


class ParentHere(NamedTuple):
    """A parent that this worker is executing, by which claim, and how often it was woken: its steps, now that its
    children have ended."""

    run_id: RunId
    claim_generation: int
    wakes: int
    steps: Sequence[Step]


class Freed(NamedTuple):
    """The runs that ended, how many deliveries were made due, what was launched instead, the breakers that moved, how
    many retries of steps were cancelled with their runs, the parents that resume here at once, those that are executing
    here, how many other runs are due at once, and the sources of the events that were published.
    `are_ends_asked_for`: the end of a run that succeeded is published."""

    written: frozenset[RunId] = frozenset()
    woken: int = 0
    filled: Filled | None = None
    moves: Sequence[TriggerMove] = ()
    source_moves: Sequence[SourceMove] = ()
    cancelled_retries: int = 0
    resumed: Sequence[ReadyRun] = ()
    parents_here: Sequence[ParentHere] = ()
    woken_runs: int = 0
    published: Sequence[str] = ()
    are_ends_asked_for: bool = False

    def also(self, nudged: Nudged) -> Freed:
        """With deliveries and runs that are due, too."""
        if nudged == Nudged():
            return self
        return self._replace(woken=self.woken + nudged.deliveries, woken_runs=self.woken_runs + nudged.runs)

    @property
    def has_consequences(self) -> bool:
        """Whether something is to be done after the commit."""
        has_runs = self.woken_runs or self.resumed or self.parents_here
        return bool(self.woken or has_runs or self.filled or self.moves or self.published)


async def end_held(
    connection: Connection,
    finished: Sequence[FinishedRun],
    *,
    breaker: BreakerPolicy,
    source_breaker: SourceBreakerPolicy = SOURCE_BREAKER,
    fill: Fill | None = None,
    claim: Claim = NOBODY,
    before: Callable[[], Awaitable[None]] | None = None,
    also: Collection[TriggerId] = (),
    waits_here: Callable[[RunId, int], bool] = lambda *_: False,
    also_budgets: Collection[str] = (),
) -> Freed:
    """End runs that are still held, and update their triggers. What waits for a slot is launched (and claimed) by
    `fill` in the same transaction; without `fill`, it is made due. `waits_here`: this worker is executing that run
    by that claim, and it waits for its children.

    Locks are taken in the order of `store/locks.py`. Unlocked names triggers that turn out to matter and were not in
    `also`.
    """
    wanted = {run.trigger_id for run in finished if run.trigger_id is not None and run.matters_to_trigger} | {*also}
    if wanted:  # also so that the triggers cannot be changed while we wait for their rows
        await locks.share_all(connection)
    failed = [run for run in finished if run.status == "failed"]
    blamed = await source_failures.lock(connection, [run.id for run in failed], source_breaker) if failed else None
    locked = await trigger_gates.lock(connection, always=wanted)
    held = await budget_slots.lock(connection, locked, also_budgets)
    if before is not None:
        await before()  # writes that belong to this transaction; `also` are the triggers that they concern
    if not finished:
        return Freed()
    parents = {run.child_of.run_id for run in finished if run.child_of is not None}
    await children.lock_parents(connection, parents, (run.id for run in finished))
    ended, left = await children.end_finished(connection, finished)
    freed = {(r.trigger_id, r.concurrency_key) for r in ended if r.trigger_id and r.concurrency_key is not None}
    late = {trigger_id for trigger_id, _ in freed} - locked.keys()
    if late:  # a limit that was set while the run was executing
        raise Unlocked(late)
    written = frozenset(run.id for run in ended)
    non_retryable = {run.id for run in failed if run.is_non_retryable}
    moves = await _update_breakers(connection, locked, ended, breaker, non_retryable)
    source_moves = await source_failures.count_failed(connection, blamed, ended, non_retryable) if blamed else ()
    moved = await children.go_on(connection, finished, written, left)
    resumed = await _resume(connection, moved.due, claim)
    nudged = await budget_slots.release(connection, held, written)
    done = Freed(
        written, nudged.deliveries, moves=moves, source_moves=source_moves, resumed=resumed,
        parents_here=await _parents_here(connection, moved.woken, waits_here),
        woken_runs=len(moved.due) - len(resumed) + nudged.runs,
        published=[*await _publish_ends(connection, ended), *moved.published],
        are_ends_asked_for=any(run.is_asked_for and run.status == "succeeded" for run in ended),
    )  # fmt: skip
    if not freed:
        return done
    if fill is None or moves:
        done = done._replace(woken=done.woken + await trigger_gates.wake(connection, freed))
    elif (line := await trigger_gates.next_in_line(connection, freed)) is not None:
        rest = claim._replace(most=claim.most - len(resumed))
        done = done._replace(filled=await fill(connection, locked, line, rest if rest.most else NOBODY))
    return done.also(await slot_line.after_end(connection, locked, freed, written))


async def end_waiting(
    connection: Connection,
    run_id: RunId,
    trigger_id: TriggerId | None,
    end: Callable[[], Awaitable[EndedRun | None]],
    breaker: BreakerPolicy,
) -> Freed | None:
    """End a run that no worker holds (`end` does it), and update its trigger; None when there was nothing to end."""

    async def end_one() -> list[EndedRun]:
        ended = await end()
        return [ended] if ended is not None else []

    trigger_ids = [trigger_id] if trigger_id is not None else []
    freed = await end_all_waiting(connection, [run_id], trigger_ids, end_one, breaker)
    return freed if freed.written else None


async def fail_waiting(
    connection: Connection,
    run_id: RunId,
    trigger_id: TriggerId | None,
    end: Callable[[], Awaitable[EndedRun | None]],
    breaker: BreakerPolicy,
    source_breaker: SourceBreakerPolicy,
) -> Freed | None:
    """The same for a run that has failed; it may count for the breaker of its source, too."""
    ended: list[EndedRun] = []

    async def fail() -> EndedRun | None:
        one = await end()
        ended.extend([one] if one is not None else [])
        return one

    if trigger_id is not None:  # before any source: see store/locks.py
        await locks.share_all(connection)
    blamed = await source_failures.lock(connection, [run_id], source_breaker)
    freed = await end_waiting(connection, run_id, trigger_id, fail, breaker)
    if freed is None or blamed is None:
        return freed
    return freed._replace(source_moves=await source_failures.count_failed(connection, blamed, ended, ()))


async def end_all_waiting(
    connection: Connection,
    run_ids: Collection[RunId],
    trigger_ids: Collection[TriggerId],
    end: Callable[[], Awaitable[Sequence[EndedRun]]],
    breaker: BreakerPolicy,
) -> Freed:
    """End those of the runs, of these triggers, that no worker holds (`end` does it), and update the triggers."""
    locked: Gates = {}
    if trigger_ids:
        await locks.share_all(connection)
        locked = await trigger_gates.lock(connection, always=trigger_ids)
    held = await budget_slots.lock(connection, locked, await budget_steps.names_of_runs(connection, run_ids))
    known = await run_children.of_runs(connection, run_ids)
    await children.lock_parents(connection, (one.run_id for one in known.values()), run_ids)
    ended = await end()
    if not ended:
        return Freed()
    lines = await budget_steps.lines_of_runs(connection, [run.id for run in ended]) if held else []
    cancelled = await steps.end_waiting(connection, [run.id for run in ended])
    moves = await _update_breakers(connection, locked, ended, breaker)
    slots_of = [(r.trigger_id, r.concurrency_key) for r in ended if r.trigger_id and r.concurrency_key is not None]
    woken = await trigger_gates.wake(connection, slots_of)
    written = frozenset(run.id for run in ended)
    nudged = await budget_slots.release(connection, held, written, lines)
    moved = await children.end_waiting(connection, {run.id: run.status for run in ended}, known)
    published = [*await _publish_ends(connection, ended), *moved.published]
    freed = Freed(
        written, woken, moves=moves, cancelled_retries=cancelled, published=published, woken_runs=len(moved.due)
    )
    return freed.also(nudged).also(await slot_line.after_end(connection, locked, slots_of, written))


async def _resume(connection: Connection, woken: Collection[RunId], claim: Claim) -> Sequence[ReadyRun]:
    """Claim parents whose children have ended, as far as this worker may, in the slots that are freed: a parent that
    waits for the worker's next look at due runs would resume two commits later."""
    if not woken or claim.worker is None:
        return ()
    claimed = await runs.claim_woken(
        connection, sorted(woken), definitions=claim.definitions, limit=claim.most, worker=claim.worker,
        lease_ms=claim.lease_ms,
    )  # fmt: skip
    return await ready(connection, claimed) if claimed else ()


async def _parents_here(
    connection: Connection, woken: Sequence[WokenRun], waits_here: Callable[[RunId, int], bool]
) -> list[ParentHere]:
    """The steps of parents that this worker is still executing: they go on after the commit, without being
    suspended."""
    here = [run for run in woken if run.is_held and waits_here(run.id, run.claim_generation)]
    known = await steps.list_of_runs(connection, [run.id for run in here])
    return [
        ParentHere(run.id, run.claim_generation, run.wakes, [s for s in known if s.workflow_run_id == run.id])
        for run in here
    ]


async def resumed_before(connection: Connection, ended: Sequence[FinishedRun], claim: Claim) -> Sequence[ReadyRun]:
    """The parents that this worker claimed when these runs ended, by a commit whose answer was lost. A claim that it
    has taken up since is not taken up again (`Claims`)."""
    parents = sorted({run.child_of.run_id for run in ended if run.child_of is not None})
    if not parents or claim.worker is None:
        return ()
    claimed = await runs.keep_claimed(connection, parents, worker=claim.worker, lease_ms=claim.lease_ms)
    return await ready(connection, claimed) if claimed else ()


async def _publish_ends(connection: Connection, ended: Sequence[EndedRun]) -> list[str]:
    """Publish the ends that a trigger asks for; the sources of the events."""
    return await run_ends.publish(connection, [run.id for run in ended if run.is_asked_for])


async def _update_breakers(
    connection: Connection,
    locked: Gates,
    ended: Sequence[EndedRun],
    breaker: BreakerPolicy,
    non_retryable: Collection[RunId] = (),
) -> list[TriggerMove]:
    if not any(run.is_probe or run.status == "failed" for run in ended):
        return []
    now = await locks.now(connection)
    moves = []
    for trigger_id, one in locked.items():
        mine = [run for run in ended if run.trigger_id == trigger_id]
        policy, gate = one.breaker or breaker, one.gate
        bad = [r for r in mine if r.status == "failed" and (policy.non_retryable or r.id not in non_retryable)]
        found: list[tuple[str | None, EndedRun]] = []
        # While it is open, only the probe counts: what was launched before may still be failing.
        failures = [run for run in bad if not run.is_probe] if gate.breaker_state == "closed" else []
        for run in mine:
            if run.is_probe:
                is_good = True if run.status == "succeeded" else False if run in bad else None
                found.append((gate.end_probe(now, run.id, policy, is_good=is_good), run))
        if failures:
            await trigger_gates.gather_outcomes(connection, gate, now, policy)
            found.append((gate.count_failures(now, len(failures), policy), failures[-1]))
        moves += [
            TriggerMove(gate.trigger_id, move, gate.breaker_reason, run.event_id, run.correlation_id, run.id)
            for move, run in found
            if move
        ]
    await trigger_gates.save(connection, (one.gate for one in locked.values()))
    for trigger_id in sorted({move.trigger_id for move in moves}):  # waiting deliveries get new times
        await trigger_gates.replan(connection, trigger_id)
    return moves


async def rekey(connection: Connection, compiled: CompiledTrigger) -> None:
    """A trigger's concurrency has changed: its unfinished runs hold slots by the new rule from now on.

    The caller excludes all launches. A run whose event does not give the new key holds a slot of no key.
    """
    trigger = compiled.trigger
    await trigger_gates.lock(connection, always=[trigger.id])
    after = uuid.UUID(int=0)
    while page := await runs.list_unfinished(connection, trigger.id, after=after, limit=REKEY_BATCH):
        found = await events.get_many(connection, [run.event_id for run in page if run.event_id is not None])
        keys: list[str | None] = []
        for run in page:
            event = found.get(run.event_id) if run.event_id else None
            try:
                keys.append(_rendered(compiled, event).concurrency_key if event else "")
            except TemplateError:
                keys.append("")
        if not trigger.holds_slots:
            keys = [None] * len(page)
        await runs.set_concurrency_keys(connection, [run.id for run in page], keys, gives_back=trigger.gives_back)
        after = page[-1].id
    await slot_lines.look_again(connection, trigger.id)


def _rendered(compiled: CompiledTrigger, event: Event) -> RenderedKeys:
    envelope = event.envelope()
    return compiled.keys(envelope) if event.starts is None else compiled.start_keys(envelope)
