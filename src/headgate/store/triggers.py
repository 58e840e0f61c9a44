"""Workflow definitions and their triggers."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from headgate.clock import uuid7
from headgate.model.trigger import Trigger, TriggerSpec, WorkflowDefinition
from headgate.store.db import Connection, TransientConflict
from headgate.store.sql import load

_sql = load("triggers")


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


async def list_of_workflow(connection: Connection, slug: str) -> list[Trigger]:
    """The triggers of one workflow."""
    return [msgspec.convert(dict(row), Trigger) for row in await connection.fetch(_sql["list_of_workflow"], slug)]


async def upsert_definition(
    connection: Connection, *, slug: str, kind: str, parameters: list[str], config: dict[str, Any], actor: str
) -> uuid.UUID:
    """Create or update a workflow; its id."""
    written: uuid.UUID | None = await connection.fetchval(
        _sql["upsert_definition"], uuid7(), slug, kind, _json(parameters), _json(config), actor
    )
    if written is not None:
        return written
    # The same already, perhaps since a moment ago: a statement of its own sees what another process has just made.
    found = await get_definition(connection, slug)
    if found is None:
        raise TransientConflict(f"workflow {slug} is changing right now")
    return found.id


async def upsert_trigger(connection: Connection, definition_id: uuid.UUID, spec: TriggerSpec, actor: str) -> None:
    """Create the workflow's trigger of that name, or make it as given."""
    await connection.execute(
        _sql["upsert_trigger"],
        uuid7(),
        definition_id,
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
        actor,
    )


async def list_definitions(connection: Connection) -> list[WorkflowDefinition]:
    """Every workflow."""
    return [msgspec.convert(dict(row), WorkflowDefinition) for row in await connection.fetch(_sql["list_definitions"])]


async def get_definition(connection: Connection, slug: str) -> WorkflowDefinition | None:
    """One workflow."""
    row = await connection.fetchrow(_sql["get_definition"], slug)
    return msgspec.convert(dict(row), WorkflowDefinition) if row else None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
