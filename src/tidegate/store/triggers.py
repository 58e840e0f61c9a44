"""Workflow definitions and their triggers."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from tidegate.clock import uuid7
from tidegate.errors import Conflict
from tidegate.model.ids import DefinitionId, RunId, TriggerId
from tidegate.model.trigger import Trigger, TriggerSpec, TriggerStatus, WorkflowDefinition
from tidegate.model.trigger_change import declared
from tidegate.store.db import Connection, TransientConflict
from tidegate.store.sql import load
from tidegate.store.trigger_gates import TriggerState

_sql = load("triggers")


class TriggerVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger as it was in one version, with the author and time of the change."""

    version: int
    definition: dict[str, Any]
    changed_by: str
    changed_at: datetime


async def registry_version(connection: Connection) -> int:
    """The number that every change of a definition or trigger raises."""
    version: int = await connection.fetchval(_sql["registry_version"])
    return version


async def list_active(connection: Connection) -> list[tuple[Trigger, list[str]]]:
    """Every active trigger, with the argument names of its workflow."""
    found = []
    for row in await connection.fetch(_sql["list_active"]):
        fields = dict(row)
        names = fields.pop("parameter_names")
        found.append((msgspec.convert(fields, Trigger), names))
    return found


async def list_of_workflow(
    connection: Connection, slug: str, *, after: uuid.UUID | None = None, limit: int | None = None
) -> list[Trigger]:
    """The triggers of one workflow, oldest first."""
    rows = await connection.fetch(_sql["list_of_workflow"], slug, after, limit)
    return [msgspec.convert(dict(row), Trigger) for row in rows]


async def upsert_definition(
    connection: Connection, *, slug: str, kind: str, parameters: list[str], config: dict[str, Any], actor: str
) -> DefinitionId:
    """Create or update a workflow; its id. Conflict when there is one of another kind."""
    written: DefinitionId | None = await connection.fetchval(
        _sql["upsert_definition"], uuid7(), slug, kind, _json(parameters), _json(config), actor
    )
    if written is not None:
        return written
    # The same already, perhaps since a moment ago: a separate statement sees what another process has just committed.
    found = await get_definition(connection, slug)
    if found is None:
        raise TransientConflict(f"workflow {slug} is changing right now")
    if found.kind != kind:
        raise Conflict(f"there is a workflow {slug} of kind {found.kind}; one of kind {kind} needs another name")
    return found.id


async def delete_definition(
    connection: Connection, definition_id: DefinitionId, config: dict[str, Any], actor: str
) -> bool:
    """Mark a workflow as deleted and keep `config` of it; False when it was already."""
    return await connection.fetchval(_sql["delete_definition"], definition_id, _json(config), actor) is not None


async def list_unfinished_runs(connection: Connection, definition_id: DefinitionId, limit: int) -> list[RunId]:
    """Some runs of a workflow that have not ended."""
    return [row[0] for row in await connection.fetch(_sql["list_unfinished_runs"], definition_id, limit)]


async def list_of_kind(connection: Connection, kind: str) -> dict[DefinitionId, str]:
    """The slugs of the workflows of one kind, by id."""
    return {row[0]: row[1] for row in await connection.fetch(_sql["list_of_kind"], kind)}


async def upsert_trigger(
    connection: Connection, definition_id: DefinitionId, spec: TriggerSpec, actor: str
) -> TriggerId | None:
    """Make the workflow's trigger of that name as code says; its id, or None when nothing changed.

    When the code says the same as last time, what an operator has changed or deleted since then stays.
    """
    said = _json(declared(spec))
    written: TriggerId | None = await connection.fetchval(
        _sql["upsert_trigger"], uuid7(), definition_id, *_columns(spec), actor, said
    )
    if written is None:
        await connection.execute(_sql["adopt"], definition_id, spec.name, said)
    return written


async def get(connection: Connection, trigger_id: TriggerId) -> Trigger | None:
    """One trigger, unless it is deleted."""
    row = await connection.fetchrow(_sql["get"], trigger_id)
    return msgspec.convert(dict(row), Trigger) if row else None


async def list_page(connection: Connection, *, after: uuid.UUID | None = None, limit: int) -> list[Trigger]:
    """Triggers that are not deleted, by workflow and name."""
    return [msgspec.convert(dict(row), Trigger) for row in await connection.fetch(_sql["list_all"], after, limit)]


async def create(
    connection: Connection, definition_id: DefinitionId, spec: TriggerSpec, status: TriggerStatus, actor: str
) -> TriggerId | None:
    """Create a trigger; its id, or None when the workflow has one of that name."""
    made: TriggerId | None = await connection.fetchval(
        _sql["create"], uuid7(), definition_id, *_columns(spec), status, actor
    )
    return made


async def update(
    connection: Connection, trigger_id: TriggerId, spec: TriggerSpec, status: TriggerStatus, actor: str
) -> bool:
    """Make a trigger as given, in a new version; False when it is deleted or its name is taken."""
    return await connection.fetchval(_sql["update"], trigger_id, *_columns(spec), status, actor) is not None


async def delete(connection: Connection, trigger_id: TriggerId, actor: str) -> bool:
    """Mark a trigger as deleted, in a new version; False when it was already."""
    return await connection.fetchval(_sql["delete"], trigger_id, actor) is not None


async def list_versions(
    connection: Connection, trigger_id: TriggerId, *, before_version: int | None = None, limit: int = 100
) -> list[TriggerVersion]:
    """The versions of a trigger, newest first."""
    rows = await connection.fetch(_sql["list_versions"], trigger_id, before_version, limit)
    return [TriggerVersion(**dict(row)) for row in rows]


async def states(connection: Connection, trigger_ids: Iterable[TriggerId]) -> dict[TriggerId, TriggerState]:
    """The pause, breaker and waiting deliveries of each trigger."""
    rows = await connection.fetch(_sql["states"], list(trigger_ids))
    return {row["trigger_id"]: msgspec.convert(dict(row), TriggerState) for row in rows}


async def list_definitions(
    connection: Connection, *, after: str | None = None, limit: int | None = None
) -> list[WorkflowDefinition]:
    """Workflows, by slug."""
    rows = await connection.fetch(_sql["list_definitions"], after, limit)
    return [msgspec.convert(dict(row), WorkflowDefinition) for row in rows]


async def get_definition(connection: Connection, slug: str) -> WorkflowDefinition | None:
    """One workflow."""
    row = await connection.fetchrow(_sql["get_definition"], slug)
    return msgspec.convert(dict(row), WorkflowDefinition) if row else None


def _columns(spec: TriggerSpec) -> tuple[Any, ...]:
    """The columns that a user decides, in the order of the statements."""
    return (
        spec.name,
        spec.event_type,
        spec.event_source,
        _json(spec.predicates),
        spec.where,
        None if spec.parameter_template is None else _json(spec.parameter_template),
        spec.idempotency_key,
        spec.idempotency_window_ms,
        spec.concurrency_key,
        spec.throttle_count,
        spec.throttle_window_ms,
        spec.max_concurrency,
        None if spec.retry is None else _json(spec.retry),
        None if spec.breaker is None else _json(spec.breaker),
        spec.overlap,
        spec.key,
        None if spec.collect is None else _json(spec.collect),
        spec.priority,
        spec.skip_over_count,
        spec.skip_over_window_ms,
        spec.cancel_running,
        spec.budgets,
        None if spec.backlog is None else _json(spec.backlog),
        spec.holds,
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
