"""The operator's verbs for budgets.

A change of what a budget is excludes the batches that use triggers until it commits, like a change of a trigger: after
it has returned, no launch that was decided by the old definition is in progress. Pausing and resuming take the budget's
own lock, with the same effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime

from tidegate.errors import Conflict, FieldError, InvalidInput, NotFound
from tidegate.flow.run import budget_slots, finish
from tidegate.model.budget import SPEC_FIELDS, BudgetSpec, CompiledBudget, budget_errors
from tidegate.model.pauses import check_length, check_until
from tidegate.model.trigger import CompiledTrigger, Trigger, WorkflowDefinition
from tidegate.store import audit, locks, slot_lines, triggers
from tidegate.store import budgets as store
from tidegate.store.budgets import BudgetRecord
from tidegate.store.db import Connection, Database
from tidegate.telemetry.logs import logger

_log = logger("control")

# Who declares budgets that steps define.
DECLARED_BY = "code"


async def check_budgets(connection: Connection, names: Sequence[str]) -> None:
    """InvalidInput names each budget of a trigger that does not exist."""
    missing = await store.unknown(connection, names)
    if missing:
        errors = [
            FieldError(f"budgets[{list(names).index(name)}]", f"there is no budget {name!r}; tidegate budgets list")
            for name in missing
        ]
        raise InvalidInput("the trigger is not valid", errors)


async def rehold(
    connection: Connection, trigger: Trigger, definition: WorkflowDefinition, names: Collection[str]
) -> None:
    """The budgets of a trigger, or one of them, have changed: its unfinished runs hold slots by the new rule."""
    await store.lock(connection, names)
    used = [CompiledBudget(spec) for spec in await store.list_specs(connection) if spec.name in trigger.budgets]
    await budget_slots.rehold(connection, CompiledTrigger(trigger, definition.parameters, used))


async def declare_budgets(connection: Connection, specs: Iterable[BudgetSpec], actor: str) -> None:
    """Store budgets as declared in code, in the caller's transaction, which excludes batches. What an operator has
    changed stays until the code says something new."""
    for spec in sorted(specs, key=lambda one: one.name):
        before = await store.get(connection, spec.name)
        if await store.upsert(connection, spec, actor):
            await _changed(connection, before, spec, actor)


async def declare_from_run(database: Database, specs: Iterable[BudgetSpec]) -> None:
    """Store budgets that steps define, as declared in code."""

    async def declare(connection: Connection) -> None:
        await locks.exclude_triggers(connection)
        await declare_budgets(connection, specs, DECLARED_BY)

    await database.run(declare)


async def put_budget(database: Database, spec: BudgetSpec, actor: str) -> BudgetRecord:
    """Create a budget, or make it as given. What waits for it is decided by the new definition. InvalidInput names each
    field."""
    errors = budget_errors(spec)
    if errors:
        raise InvalidInput("the budget is not valid", errors)

    async def change(connection: Connection) -> tuple[BudgetRecord, bool]:
        await locks.exclude_triggers(connection)
        before = await store.get(connection, spec.name)
        if before is not None and before.spec == spec:
            return before, False
        await store.put(connection, spec, actor)
        await _changed(connection, before, spec, actor)
        return await required(connection, spec.name), True

    after, is_changed = await database.run(change)
    if is_changed:
        _log.info("budget.changed", budget=spec.name, version=after.version, actor=actor)
    return after


async def delete_budget(database: Database, name: str, actor: str) -> BudgetRecord:
    """Delete a budget that no trigger uses, and for which no step waits. Conflict says which do."""

    async def change(connection: Connection) -> BudgetRecord:
        await locks.exclude_triggers(connection)
        before = await required(connection, name)
        if before.used_by:
            text = f"{', '.join(before.used_by[:5])} use it; remove it from their budgets first"
            raise Conflict(f"budget {name} is in use", [FieldError("name", text)])
        await store.lock(connection, [name])
        if count := (await required(connection, name)).waiting_steps:
            text = f"{count} step{'s wait' if count > 1 else ' waits'} for it: tidegate budgets explain {name}"
            raise Conflict(f"budget {name} is in use", [FieldError("name", text)])
        await store.decide_again(connection, name)
        await slot_lines.look_again_at(connection, name)
        await store.delete(connection, name)
        await audit.insert(connection, actor=actor, action="budget.delete", subject=name, before=_described(before))
        return before

    gone = await database.run(change)
    _log.warning("budget.deleted", budget=name, actor=actor)
    return gone


async def pause_budget(
    database: Database,
    name: str,
    *,
    until: datetime | None = None,
    duration_ms: int | None = None,
    reason: str | None = None,
    actor: str,
) -> BudgetRecord:
    """Pause a budget until a time, for a duration, or (neither) until it is resumed: nothing of it is spent."""
    check_length(until, duration_ms)

    async def change(connection: Connection) -> BudgetRecord:
        await store.lock(connection, [name])
        before = await required(connection, name)
        if until is not None:
            check_until(until, await locks.now(connection))
        await store.pause(connection, name, until=until, duration_ms=duration_ms, reason=reason, actor=actor)
        return await _moved(connection, before, "budget.pause", actor)

    paused = await database.run(change)
    _log.warning("budget.paused", budget=name, until=paused.paused_until, reason=reason, actor=actor)
    return paused


async def resume_budget(database: Database, name: str, actor: str) -> BudgetRecord:
    """End the pause of a budget; the first in each line are due at once."""

    async def change(connection: Connection) -> BudgetRecord:
        await store.lock(connection, [name])
        before = await required(connection, name)
        await store.resume(connection, name, actor)
        return await _moved(connection, before, "budget.resume", actor)

    resumed = await database.run(change)
    _log.info("budget.resumed", budget=name, actor=actor)
    return resumed


async def required(connection: Connection, name: str) -> BudgetRecord:
    """The budget. NotFound when there is none."""
    found = await store.get(connection, name)
    if found is None:
        raise NotFound(f"no budget {name!r}; `tidegate budgets list` shows the budgets")
    return found


async def _changed(connection: Connection, before: BudgetRecord | None, spec: BudgetSpec, actor: str) -> None:
    """After a change of what a budget is: unfinished runs hold it, and deliveries wait for it, by the new rule."""
    if before is not None and before.spec == spec:
        return
    after = await required(connection, spec.name)
    if before is not None:
        is_less = before.concurrency is not None and (spec.concurrency or before.concurrency) < before.concurrency
        if is_less:
            await _ask_anew(connection, spec.name)
        await store.lock(connection, [spec.name])
        if is_less or (before.key, before.concurrency is None) != (spec.key, spec.concurrency is None):
            await _rehold_all(connection, spec.name)
            await slot_lines.look_again_at(connection, spec.name)
        if (before.key, before.cost) != (spec.key, spec.cost):
            await store.decide_again(connection, spec.name)
        elif before.unread:
            await store.decide_again(connection, spec.name, unread=True)
        await wake_lines(connection, [spec.name])
    action = "budget.create" if before is None else "budget.update"
    await audit.insert(
        connection, actor=actor, action=action, subject=spec.name,
        before=None if before is None else _described(before), after=_described(after),
    )  # fmt: skip


async def _ask_anew(connection: Connection, name: str) -> None:
    """A budget has fewer slots: runs that hold them while they execute, and do not, must ask for them."""
    for trigger_id in await store.triggers_of(connection, name):
        trigger = await triggers.get(connection, trigger_id)
        definition = await triggers.get_definition(connection, trigger.workflow) if trigger is not None else None
        if trigger is not None and definition is not None and trigger.gives_back:
            await finish.rekey(connection, CompiledTrigger(trigger, definition.parameters))


async def _rehold_all(connection: Connection, name: str) -> None:
    for trigger_id in await store.triggers_of(connection, name):
        trigger = await triggers.get(connection, trigger_id)
        definition = await triggers.get_definition(connection, trigger.workflow) if trigger is not None else None
        if trigger is not None and definition is not None:
            await rehold(connection, trigger, definition, [name, *trigger.budgets])


async def _moved(connection: Connection, before: BudgetRecord, action: str, actor: str) -> BudgetRecord:
    await wake_lines(connection, [before.name])
    after = await required(connection, before.name)
    await audit.insert(
        connection, actor=actor, action=action, subject=before.name, before=_pauses(before), after=_pauses(after)
    )
    return after


async def wake_lines(connection: Connection, names: Iterable[str]) -> None:
    """The first in each line is decided by the budgets as they are now; it stands for those behind it."""
    for name in await store.lock(connection, names):
        lines = await store.lines_of(connection, name)
        await store.nudge(connection, dict.fromkeys(lines, await locks.now(connection)))


def _described(record: BudgetRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in (*SPEC_FIELDS, "version")}


def _pauses(record: BudgetRecord) -> dict[str, object]:
    return {"paused_until": record.paused_until, "reason": record.pause_reason, "paused_by": record.paused_by,
            "is_paused": record.paused_at is not None}  # fmt: skip
