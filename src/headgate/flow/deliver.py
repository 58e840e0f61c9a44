"""Deliver: one decision for each event and trigger that match: launch a run, or say why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headgate.clock import uuid7
from headgate.model.event import Event
from headgate.model.template import TemplateError
from headgate.model.trigger import CompiledTrigger
from headgate.store.deliveries import Decided

MAX_PARAMETER_BYTES = 256 * 1024


def decide(matches: Sequence[tuple[Event, dict[str, Any], CompiledTrigger]]) -> list[Decided]:
    """The deliveries of a batch. A trigger that fails on an event is that delivery's failure, nobody else's."""
    return [_decide(event, envelope, compiled) for event, envelope, compiled in matches]


def _decide(event: Event, envelope: dict[str, Any], compiled: CompiledTrigger) -> Decided:
    trigger = compiled.trigger
    error = None
    try:
        parameters = msgspec.json.encode(compiled.parameters(event, envelope)).decode()
        if len(parameters) > MAX_PARAMETER_BYTES:
            error = f"the parameters are {len(parameters)} bytes; at most {MAX_PARAMETER_BYTES} are allowed"
    except (TemplateError, TypeError, ValueError, RecursionError) as exc:
        error = str(exc)
    return Decided(
        id=uuid7(),
        trigger_id=trigger.id,
        event_id=event.id,
        trigger_version=trigger.version,
        status="failed" if error else "launched",
        last_error=error,
        run_id=None if error else uuid7(),
        workflow_definition_id=trigger.workflow_definition_id,
        correlation_id=event.correlation_id,
        parameters="{}" if error else parameters,
    )
