"""Slot line: runs of a trigger with `holds: executing` give their slots back when they are suspended, and take them
again, all or none, when they resume; or they wait in line, with deliveries and steps, by how long each has waited.

A worker claims a due run first and asks for its slots then, under the locks of its trigger and budgets and before its
function is called; without slots it hands the run back. So claims cost nothing for others, and a worker that dies in
between has executed nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial

import msgspec

from tidegate import failpoints
from tidegate.flow.run import budget_slots
from tidegate.model.budget import CompiledBudget
from tidegate.model.event import Event
from tidegate.model.ids import RunId, TriggerId
from tidegate.model.run import ClaimedRun
from tidegate.model.slot_line import SlotLine
from tidegate.store import budgets, locks, slot_lines, trigger_gates
from tidegate.store.budgets import Holder, LockedBudget
from tidegate.store.db import Connection, Database
from tidegate.store.locks import Unlocked
from tidegate.store.runs import KeptSuspension
from tidegate.store.slot_lines import Lines, Nudged, QueuedRun, ResumingRun, TriggerKey
from tidegate.store.trigger_gates import LockedTrigger
from tidegate.telemetry.logs import logger

# When it is the turn of a delivery that is due, a run asks again after this time: the delivery may not take the slot.
TURN = timedelta(milliseconds=100)
# Whoever frees a slot makes the next in line due; as a safety net a run asks again after as long as it has waited.
ASK_AFTER, ASK_WITHIN = timedelta(seconds=5), timedelta(minutes=5)

_log = logger("run")


async def enter(database: Database, claimed: Sequence[tuple[ClaimedRun, Event | None]]) -> dict[RunId, ClaimedRun]:
    """Have claimed runs take the slots that they need; those that may begin. The others are handed back, and wait."""
    try:
        failpoints.hit("slot_line.before_enter")
        return await database.run(partial(_enter, claimed=claimed))
    except Exception as exc:  # noqa: BLE001 - their leases end by themselves; the other claimed runs must begin
        _log.warning("run.slots_failed", count=len(claimed), error=exc)
        return {}


async def _enter(connection: Connection, claimed: Sequence[tuple[ClaimedRun, Event | None]]) -> dict[RunId, ClaimedRun]:
    await locks.share_all(connection)
    locked = await trigger_gates.lock(connection, always={r.trigger_id for r, _ in claimed if r.trigger_id})
    held = await budget_slots.lock(connection, locked)
    runs = {run.id: run for run, _ in claimed}
    found = [one for one in await slot_lines.asking(connection, runs) if _is_same(one, runs[one.id])]
    asking = [one for one in found if one.needs_slot and not _is_ending(one, runs[one.id])]
    needs = _needs(claimed, locked, held)
    of_triggers = [(one.trigger_id, one.key) for one in asking]
    lines = await slot_lines.lines(
        connection, of_triggers, (line for one in asking for line in needs[one.id]), {one.id for one in asking}
    )
    now = await locks.now(connection)
    taking: list[ResumingRun] = []
    waiting: list[QueuedRun] = []
    for one in asking:
        refused = _ask(one, needs[one.id], lines, now)
        taking.append(one) if refused is None else waiting.append(refused)
    taken = await slot_lines.take(connection, [(one, locked[one.trigger_id].gives_back) for one in taking])
    await budgets.hold(connection, [Holder(run_id, *line) for run_id in sorted(taken) for line in needs[run_id]])
    await slot_lines.wait(connection, waiting)
    failpoints.hit("slot_line.before_commit")
    begins = {one.id: runs[one.id] for one in found if _is_ending(one, runs[one.id])}
    begins |= {one.id: _with_slot(runs[one.id], one.key) for one in found if not one.needs_slot}
    return begins | {one.id: _with_slot(runs[one.id], one.key) for one in taking if one.id in taken}


def _is_same(one: ResumingRun, run: ClaimedRun) -> bool:
    return one.claim_generation == run.claim_generation


def _is_ending(one: ResumingRun, run: ClaimedRun) -> bool:
    """Whether its function is not called: its time was over, or it was to be cancelled, when it was claimed."""
    return run.cancel_requested or (one.deadline_at is not None and one.deadline_at <= run.now)


def _with_slot(run: ClaimedRun, key: str) -> ClaimedRun:
    # Whether it gives it back is decided when it is suspended, by its row.
    return msgspec.structs.replace(run, concurrency_key=key, slot_key=key)


def _needs(
    claimed: Sequence[tuple[ClaimedRun, Event | None]],
    locked: Mapping[TriggerId, LockedTrigger],
    held: Mapping[str, LockedBudget],
) -> dict[RunId, list[tuple[str, str]]]:
    """The keys of budgets of which each run holds a slot, in the order of the budgets' names."""
    compiled = {name: CompiledBudget(one.spec) for name, one in held.items()}
    found = {}
    for run, event in claimed:
        names = sorted(locked[run.trigger_id].budgets) if run.trigger_id is not None else ()
        used = [compiled[name] for name in names if name in compiled]
        found[run.id] = [(need.budget, need.key) for need in budget_slots.needs_of(used, event)]
    return found


def _ask(one: ResumingRun, needs: Sequence[tuple[str, str]], lines: Lines, now: datetime) -> QueuedRun | None:
    """Take the slots of the trigger and of each budget; or the line in which the run waits."""
    own = one.trigger_id, one.key
    closed = lines.closed.get(own)
    mine = lines.triggers[own]
    if closed is not None and closed > now:
        mine.wait(one.since)
        return QueuedRun(one.id, one.claim_generation, one.trigger_id, None, one.key, one.since, closed)
    wanted: list[tuple[SlotLine, TriggerId | None, str | None, str]] = [(mine, one.trigger_id, None, one.key)]
    wanted += [(lines.budgets[line], None, *line) for line in needs if line in lines.budgets]
    for line, trigger_id, budget, key in wanted:
        answer = line.ask(one.since)
        if answer != "free":
            line.wait(one.since)
            look_at = now + (TURN if answer == "turn" else min(max(now - one.since, ASK_AFTER), ASK_WITHIN))
            return QueuedRun(one.id, one.claim_generation, trigger_id, budget, key, one.since, look_at)
    for line, *_ in wanted:
        line.take()
    return None


async def give_back(
    connection: Connection, suspended: Mapping[RunId, KeptSuspension], known: Collection[TriggerId]
) -> Nudged:
    """Runs were suspended: those that hold their slots while they execute have given them back. Who waits for one is
    due; how many. `known` are the triggers that this transaction has locked, with their budgets."""
    lent = {run_id: one for run_id, one in suspended.items() if one.slot_key is not None and one.trigger_id is not None}
    if not lent:
        return Nudged()
    if late := {one.trigger_id for one in lent.values() if one.trigger_id is not None} - {*known}:
        raise Unlocked(late)  # it was changed while the run was executing
    pairs = {(one.trigger_id, one.slot_key) for one in lent.values() if one.trigger_id and one.slot_key is not None}
    freed = await budgets.release(connection, lent, without_steps=True)
    nudged = await _nudge(connection, freed)
    deliveries = await trigger_gates.wake(connection, pairs)
    return Nudged(nudged.deliveries + deliveries, nudged.runs + await slot_lines.call(connection, pairs))


async def after_end(
    connection: Connection,
    locked: Mapping[TriggerId, LockedTrigger],
    freed: Collection[TriggerKey],
    ended: Collection[RunId],
) -> Nudged:
    """Runs have ended, and what they held of these triggers and keys is free: runs that wait longest for it are due;
    how many. Those that ended wait for nothing."""
    lent = [pair for pair in freed if locked[pair[0]].lends_slots]
    if not lent:
        return Nudged()
    nudged = await _nudge(connection, await slot_lines.leave(connection, ended))
    return nudged._replace(runs=nudged.runs + await slot_lines.call(connection, lent))


async def _nudge(connection: Connection, lines: Sequence[tuple[str, str]]) -> Nudged:
    now = await locks.now(connection) if lines else None
    return Nudged() if now is None else await budgets.nudge(connection, dict.fromkeys(lines, now))
