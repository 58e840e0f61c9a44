"""The operator's verbs for triggers.

Each waits for the batches that use the triggers as they were and excludes new ones until it commits: after it has
returned, no launch that was decided by the old definition, or before the pause, is in progress. Requests are validated
before that, so that an invalid one does not delay any batch.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tidegate.errors import Conflict, FieldError, NotFound
from tidegate.flow.control.budgets import check_budgets, rehold, wake_lines
from tidegate.flow.run import finish
from tidegate.model import trigger_change
from tidegate.model.ids import DefinitionId, TriggerId
from tidegate.model.pauses import check_length, check_until
from tidegate.model.trigger import CompiledTrigger, Trigger, TriggerSpec, WorkflowDefinition
from tidegate.model.trigger_change import SPEC_FIELDS, NewTrigger
from tidegate.store import audit, budgets, held_deliveries, locks, trigger_gates, windows
from tidegate.store import triggers as store
from tidegate.store.db import Connection, Database
from tidegate.store.trigger_gates import TriggerState
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("control")


async def create_trigger(database: Database, workflow: str, given: Any, actor: str) -> Trigger:
    """Create a trigger from decoded JSON. InvalidInput names each field; Conflict when the name is taken."""

    async with database.connection() as connection:
        definition = await _definition(connection, workflow)
        new = trigger_change.created(given, workflow, definition.parameters)
        await check_budgets(connection, new.spec.budgets)

    async def change(connection: Connection) -> Trigger:
        await locks.exclude_triggers(connection)
        current = await _definition(connection, workflow)  # it may have been deleted or replaced since
        await check_budgets(connection, new.spec.budgets)
        trigger_id = await store.create(connection, current.id, new.spec, new.status, actor)
        if trigger_id is None:
            raise _name_taken(workflow, new.spec.name)
        after = await _required(connection, trigger_id)
        await audit.insert(
            connection, actor=actor, action="trigger.create", subject=str(trigger_id), after=_described(after)
        )
        return after

    created = await database.run(change)
    _log.info("trigger.created", trigger_id=str(created.id), workflow=workflow, trigger=created.name, actor=actor)
    return created


async def update_trigger(
    database: Database, trigger_id: TriggerId, given: Any, actor: str, *, workflow: str | None = None
) -> Trigger:
    """Change the fields in `given` (decoded JSON); null clears one. Waiting deliveries are decided by the new version.

    A `version` in it other than the current one is a Conflict. Disabling cancels waiting deliveries. Without a change
    the version stays.
    """

    async def change(connection: Connection) -> tuple[Trigger, int]:
        await locks.exclude_triggers(connection)
        before, definition, new = await _asked(connection, trigger_id, given, workflow)
        if new is None:
            return before, 0
        if not await store.update(connection, trigger_id, new.spec, new.status, actor):
            raise _name_taken(before.workflow, new.spec.name)
        after = await _required(connection, trigger_id)
        await _decide_again(connection, before, after, definition)
        cancelled = 0
        if after.status == "disabled":
            cancelled = await _cancel_waiting(connection, before, f"trigger disabled by {actor}", actor)
        await audit.insert(
            connection, actor=actor, action="trigger.update", subject=str(trigger_id), before=_described(before),
            after=_described(after),
        )  # fmt: skip
        return after, cancelled

    async with database.connection() as connection:
        before, _, new = await _asked(connection, trigger_id, given, workflow)
    if new is None:
        return before
    after, cancelled = await database.run(change)
    _log.info(
        "trigger.changed", trigger_id=str(trigger_id), workflow=after.workflow, trigger=after.name,
        version=after.version, status=after.status, cancelled=cancelled, actor=actor,
    )  # fmt: skip
    metrics.DELIVERY_RETRIES.labels("cancelled").inc(cancelled)
    return after


async def delete_trigger(
    database: Database, trigger_id: TriggerId, actor: str, *, workflow: str | None = None
) -> tuple[Trigger, int]:
    """Delete a trigger and cancel its waiting deliveries; the trigger as it was, and how many were cancelled."""

    async def change(connection: Connection) -> tuple[Trigger, int]:
        await locks.exclude_triggers(connection)
        before = await find_trigger(connection, trigger_id, workflow)
        await store.delete(connection, trigger_id, actor)
        cancelled = await _cancel_waiting(connection, before, f"trigger deleted by {actor}", actor)
        await audit.insert(
            connection, actor=actor, action="trigger.delete", subject=str(trigger_id), before=_described(before)
        )
        return before, cancelled

    async with database.connection() as connection:
        await find_trigger(connection, trigger_id, workflow)
    deleted, cancelled = await database.run(change)
    metrics.DELIVERY_RETRIES.labels("cancelled").inc(cancelled)
    _log.warning(
        "trigger.deleted", trigger_id=str(trigger_id), workflow=deleted.workflow, trigger=deleted.name,
        cancelled=cancelled, actor=actor,
    )  # fmt: skip
    return deleted, cancelled


async def pause_trigger(
    database: Database,
    trigger_id: TriggerId,
    *,
    until: datetime | None = None,
    duration_ms: int | None = None,
    reason: str | None = None,
    actor: str,
) -> TriggerState:
    """Pause a trigger until a time, for a duration, or (neither) until it is resumed."""
    check_length(until, duration_ms)

    async def change(connection: Connection) -> TriggerState:
        await locks.exclude_triggers(connection)
        await find_trigger(connection, trigger_id)
        if until is not None:
            check_until(until, await locks.now(connection))
        before = await _state(connection, trigger_id)
        await trigger_gates.pause(
            connection, trigger_id, until=until, duration_ms=duration_ms, reason=reason, actor=actor
        )
        return await _moved(connection, before, "trigger.pause", actor)

    async with database.connection() as connection:
        await find_trigger(connection, trigger_id)
    paused = await database.run(change)
    _log.warning(
        "trigger.paused", trigger_id=str(trigger_id), until=paused.paused_until, reason=reason, actor=actor
    )  # fmt: skip
    return paused


async def resume_trigger(database: Database, trigger_id: TriggerId, actor: str) -> TriggerState:
    """End a trigger's pause and close its breaker; its waiting deliveries get new slots at once."""

    async def change(connection: Connection) -> TriggerState:
        await locks.exclude_triggers(connection)
        await find_trigger(connection, trigger_id)
        before = await _state(connection, trigger_id)
        await trigger_gates.resume(connection, trigger_id)
        return await _moved(connection, before, "trigger.resume", actor)

    async with database.connection() as connection:
        await find_trigger(connection, trigger_id)
    resumed = await database.run(change)
    _log.info("trigger.resumed", trigger_id=str(trigger_id), actor=actor)
    return resumed


async def declare_trigger(
    connection: Connection, workflow: str, definition_id: DefinitionId, spec: TriggerSpec, actor: str
) -> None:
    """Store a trigger as declared in code, in the caller's transaction, which excludes batches. Waiting deliveries are
    decided by the new version."""
    await check_budgets(connection, spec.budgets)
    known = [t for t in await store.list_of_workflow(connection, workflow) if t.name == spec.name]
    trigger_id = await store.upsert_trigger(connection, definition_id, spec, actor)
    if trigger_id is not None and known:
        after = await _required(connection, trigger_id)
        await _decide_again(connection, known[0], after, await _definition(connection, workflow))
        await audit.insert(
            connection, actor=actor, action="trigger.update", subject=str(trigger_id), before=_described(known[0]),
            after=_described(after),
        )  # fmt: skip


async def find_trigger(connection: Connection, trigger_id: TriggerId, workflow: str | None = None) -> Trigger:
    """The trigger, of that workflow if one is given. NotFound when it does not exist or is deleted."""
    found = await store.get(connection, trigger_id)
    if found is None or (workflow is not None and found.workflow != workflow):
        raise NotFound(f"no trigger {trigger_id}" if workflow is None else f"{workflow} has no trigger {trigger_id}")
    return found


async def _asked(
    connection: Connection, trigger_id: TriggerId, given: Any, workflow: str | None
) -> tuple[Trigger, WorkflowDefinition, NewTrigger | None]:
    """The trigger as it is, its definition, and the requested trigger (None: unchanged). Raises what is wrong with
    it."""
    known = trigger_change.known_version(given)
    before = await find_trigger(connection, trigger_id, workflow)
    definition = await _definition(connection, before.workflow)
    if known is not None and known != before.version:
        problem = FieldError("version", f"the current version is {before.version}")
        raise Conflict(f"trigger {trigger_id} has changed: the request is based on version {known}", [problem])
    new = trigger_change.changed(before, before.status, given, before.workflow, definition.parameters)
    await check_budgets(connection, new.spec.budgets)
    is_same = new.status == before.status and all(getattr(new.spec, f) == getattr(before, f) for f in SPEC_FIELDS)
    return before, definition, None if is_same else new


async def _decide_again(
    connection: Connection, before: Trigger, after: Trigger, definition: WorkflowDefinition
) -> None:
    """Waiting deliveries are decided again by the new version, in arrival order."""
    slots = [(one.max_concurrency, one.concurrency_key, one.budgets, one.holds) for one in (before, after)]
    if slots[0] != slots[1]:
        await finish.rekey(connection, CompiledTrigger(after, definition.parameters))
    if before.budgets != after.budgets or (after.budgets and before.holds != after.holds):
        await rehold(connection, after, definition, {*before.budgets, *after.budgets})
        kept = {*after.budgets} if before.holds == after.holds else set()
        await wake_lines(connection, {*before.budgets} - kept)  # what its runs held of them is free
    decides = [field for field in SPEC_FIELDS if field != "name"]
    if after.status != before.status or any(getattr(before, f) != getattr(after, f) for f in decides):
        await trigger_gates.replan(connection, after.id)


async def _cancel_waiting(connection: Connection, trigger: Trigger, reason: str, actor: str) -> int:
    """Cancel what waits. Those behind them in the lines of budgets may be first now."""
    await budgets.lock(connection, trigger.budgets)  # before the deliveries that wait for them: see store/locks.py
    led = await windows.of_trigger(connection, trigger.id)
    cancelled = await held_deliveries.cancel_of_trigger(connection, trigger.id, reason, actor)
    await windows.follow(connection, led, await locks.now(connection))
    await wake_lines(connection, trigger.budgets if cancelled else ())
    return cancelled


async def _moved(connection: Connection, before: TriggerState, action: str, actor: str) -> TriggerState:
    """After a pause or resume: everyone who waits gets a new slot, and the change is on record."""
    await trigger_gates.replan(connection, before.trigger_id)
    after = await _state(connection, before.trigger_id)
    await audit.insert(
        connection, actor=actor, action=action, subject=str(before.trigger_id), before=_pauses(before),
        after=_pauses(after),
    )  # fmt: skip
    return after


async def _state(connection: Connection, trigger_id: TriggerId) -> TriggerState:
    found = await trigger_gates.get(connection, trigger_id)
    assert found is not None, f"{trigger_id} was just found"
    return found


async def _required(connection: Connection, trigger_id: TriggerId) -> Trigger:
    found = await store.get(connection, trigger_id)
    assert found is not None, f"{trigger_id} was just written"
    return found


async def _definition(connection: Connection, workflow: str) -> WorkflowDefinition:
    found = await store.get_definition(connection, workflow)
    if found is None:
        raise NotFound(f"no workflow {workflow!r}; `tidegate workflows list` shows the workflows")
    return found


def _name_taken(workflow: str, name: str) -> Conflict:
    problem = FieldError("name", f"{name!r} is taken; names are unique within a workflow")
    return Conflict(f"{workflow} already has a trigger {name!r}", [problem])


def _described(trigger: Trigger) -> dict[str, Any]:
    fields = (*SPEC_FIELDS, "status", "version")
    return {"workflow": trigger.workflow} | {name: getattr(trigger, name) for name in fields}


def _pauses(state: TriggerState) -> dict[str, object]:
    return {"paused_until": state.paused_until, "reason": state.pause_reason, "paused_by": state.paused_by,
            "is_paused": state.paused_at is not None, "breaker_state": state.breaker_state}  # fmt: skip
