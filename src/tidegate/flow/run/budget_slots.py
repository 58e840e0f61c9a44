"""Budget slots: what runs hold of budgets, given back by the transaction that ends them. Whoever is first in line for
the key is then due at once.

A slot is held by a row that names its run, and counts while the run is unfinished: nothing leaks when a process dies.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime

from tidegate.model.budget import CannotSpend, CompiledBudget, Need
from tidegate.model.event import Event
from tidegate.model.ids import EventId, RunId, TriggerId
from tidegate.model.run import FinishedRun, LaunchBlock
from tidegate.model.step import StepWrite
from tidegate.model.trigger import CompiledTrigger
from tidegate.model.work_limit import WorkLeft
from tidegate.store import budget_steps, budgets, events, locks, runs
from tidegate.store.budgets import Holder, Line, LockedBudget
from tidegate.store.db import Connection
from tidegate.store.slot_lines import Nudged
from tidegate.store.trigger_gates import LockedTrigger

REHOLD_BATCH = 1000


async def lock(
    connection: Connection, locked: Mapping[TriggerId, LockedTrigger], also: Collection[str] = ()
) -> dict[str, LockedBudget]:
    """The budgets of triggers that this transaction holds, and those named, locked before any run."""
    return await budgets.lock(connection, {name for one in locked.values() for name in one.budgets} | {*also})


async def release(
    connection: Connection, held: Mapping[str, LockedBudget], run_ids: Collection[RunId], left: Collection[Line] = ()
) -> Nudged:
    """Give back what the runs and their steps held of these budgets; who is due because of that, or because they left
    these lines."""
    if not held:
        return Nudged()
    lines = {*await budgets.release(connection, run_ids), *await budgets.end_probes(connection, run_ids), *left}
    return await wake(connection, [line for line in lines if line[0] in held])


def names_of(blocks: Sequence[LaunchBlock], writes: Sequence[StepWrite], finished: Sequence[FinishedRun]) -> set[str]:
    """The budgets that have to be locked first: those that are closed, and those of which steps held slots, or for
    which they waited."""
    found = {one.budget for one in blocks if one.budget is not None}
    for written in writes:
        found.update(written.budgets)
    for run in finished:
        found.update(run.budgets)
    return found


async def end_steps(connection: Connection, writes: Sequence[StepWrite]) -> Nudged:
    """Attempts at steps have ended, or they wait no longer: give back what they held of budgets, which this transaction
    has locked; who is due because of that."""
    if not writes:
        return Nudged()
    steps = [(one.workflow_run_id, one.id) for one in writes]
    lines = {*await budgets.release_steps(connection, steps)}
    lines |= {*await budget_steps.leave(connection, [step_id for _, step_id in steps])}
    names = {name for one in writes for name in one.budgets}
    lines |= {*await budgets.end_probes(connection, [run_id for run_id, _ in steps], names)}
    return await wake(connection, [line for line in lines if line[0] in names])


async def wake(connection: Connection, lines: Collection[Line]) -> Nudged:
    """Who is first in the lines is due now; how many were due later. The caller holds the budgets."""
    return await budgets.nudge(connection, await _now_of(connection, lines))


async def sweep(connection: Connection, limit: int) -> list[Line]:
    """Remove what is noted of runs that have ended elsewhere, and of steps whose workers died. Who is first in line for
    it is due now, in the same transaction."""
    holders, places = await budgets.ended_holders(connection, limit), await budget_steps.ended(connection, limit)
    await budgets.lock(connection, {one.budget for one in holders} | {budget for _, budget in places})
    freed = {*await budgets.sweep(connection, holders)}
    freed |= {*await budget_steps.leave(connection, [step_id for step_id, _ in places])}
    await wake(connection, freed)
    return sorted(freed)


async def _now_of(connection: Connection, lines: Collection[Line]) -> dict[Line, datetime]:
    return dict.fromkeys(lines, await locks.now(connection)) if lines else {}


async def close(connection: Connection, held: Mapping[str, LockedBudget], block: LaunchBlock) -> bool:
    """A run asked everyone who uses a budget to wait: its key is closed for a while, the one that the run's event
    gives. False when there is no such budget."""
    budget = held.get(block.budget or "")
    if budget is None:
        return False
    event_id = block.event_id
    found = await events.get_many(connection, [event_id]) if event_id is not None else {}
    key = _key_of(CompiledBudget(budget.spec), found.get(event_id) if event_id is not None else None)
    if block.budget_key is not None and budget.spec.key is not None:
        key = block.budget_key
    await budgets.close(connection, (budget.spec.name, key), block.delay_ms, block.reason)
    return True


def _key_of(budget: CompiledBudget, event: Event | None) -> str:
    if event is not None:
        with contextlib.suppress(CannotSpend):
            return budget.need(event.envelope(), WorkLeft()).key
    return ""


def needs_of(used: Sequence[CompiledBudget], event: Event | None) -> list[Need]:
    """What a run holds of budgets with a concurrency; of no key, if its event does not give one."""
    found = []
    for budget in used:
        if budget.spec.concurrency is None:
            continue
        found.append(Need(budget.spec.name, _key_of(budget, event), 1))
    return found


async def find(
    connection: Connection, held: Mapping[str, LockedBudget], event_id: EventId | None
) -> tuple[list[Line], str | None]:
    """The keys of which a run for the event holds a slot, of locked budgets; and what is in use, if one has none
    free."""
    found = await events.get_many(connection, [event_id]) if event_id is not None else {}
    event = found.get(event_id) if event_id is not None else None
    used = [CompiledBudget(one.spec) for one in held.values()]
    lines = [(need.budget, need.key) for need in needs_of(used, event)]
    for line, row in (await budgets.keys(connection, held, lines, [])).items():
        most = held[line[0]].spec.concurrency
        if most is not None and row.in_use >= most:
            of_key = f" for key {line[1]}" if line[1] else ""
            return lines, f"all {most} slots of budget {line[0]}{of_key} are in use"
    return lines, None


async def rehold(connection: Connection, compiled: CompiledTrigger) -> None:
    """A trigger's budgets, or one of them, have changed: its unfinished runs hold slots by the new rule from now on.

    The caller excludes all launches and has locked the budgets.
    """
    after = uuid.UUID(int=0)
    while page := await runs.list_unfinished(connection, compiled.trigger.id, after=after, limit=REHOLD_BATCH):
        found = await events.get_many(connection, [run.event_id for run in page if run.event_id is not None])
        await budgets.release(connection, [run.id for run in page], without_steps=True)
        held = [
            Holder(run.id, need.budget, need.key)
            for run in page
            if not run.has_no_slot
            for need in needs_of(compiled.budgets, found.get(run.event_id) if run.event_id else None)
        ]
        await budgets.hold(connection, held)
        after = page[-1].id
