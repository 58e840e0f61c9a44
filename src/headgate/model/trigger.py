"""A trigger: which events launch which workflow, compiled once and indexed by event type."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

import msgspec
import re2

from headgate.errors import FieldError, InvalidInput
from headgate.model.event import Event
from headgate.model.expression import compile_expression
from headgate.model.predicate import Predicate, compile_predicate
from headgate.model.retry import RetryPolicy
from headgate.model.template import TemplateError, compile_template

TriggerStatus = Literal["active", "disabled"]
MAX_PREDICATES = 50


class TriggerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a user says about a trigger; the rest of its row is ours."""

    name: str
    event_type: str
    event_source: str = "*"
    predicates: list[Predicate] = []
    where: str | None = None
    parameter_template: dict[str, Any] | None = None
    idempotency_key: str | None = None
    idempotency_window_ms: int = 86_400_000
    concurrency_key: str | None = None
    throttle_count: int | None = None
    throttle_window_ms: int | None = None
    max_concurrency: int | None = None
    retry: RetryPolicy | None = None


class Trigger(TriggerSpec, frozen=True, kw_only=True):
    """A row of `workflow_event_triggers`, with the workflow it launches."""

    id: uuid.UUID
    workflow_definition_id: uuid.UUID
    workflow: str
    status: TriggerStatus = "active"
    version: int = 1
    created_by: str = ""
    updated_by: str = ""
    created_at: datetime | None = None
    updated_at: datetime | None = None


class WorkflowDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `workflow_definitions`; `parameters` are the argument names, `["*"]` for any."""

    id: uuid.UUID
    slug: str
    kind: str
    parameters: list[str]
    config: dict[str, Any]
    version: int
    created_by: str
    updated_by: str
    created_at: datetime
    updated_at: datetime


class CompiledTrigger:
    """A trigger ready to judge events. Raises InvalidInput, naming each field, when it cannot be compiled."""

    __slots__ = ("_checks", "_names", "_parameters", "_source", "trigger")

    def __init__(self, trigger: Trigger, parameter_names: list[str]) -> None:
        errors: list[FieldError] = []
        self.trigger = trigger
        self._source = compile_pattern(trigger.event_source, "event_source", errors)
        compile_pattern(trigger.event_type, "event_type", errors)
        if len(trigger.predicates) > MAX_PREDICATES:
            errors.append(FieldError("predicates", f"are more than {MAX_PREDICATES}"))
        compiled = [compile_predicate(p, f"predicates[{i}]", errors) for i, p in enumerate(trigger.predicates)]
        where = compile_expression(trigger.where, "where", errors) if trigger.where is not None else None
        self._checks = [check for check in (*compiled, where) if check is not None]
        template = trigger.parameter_template
        self._parameters = compile_template(template, "parameter_template", errors) if template is not None else None
        self._names = parameter_names
        if errors:
            raise InvalidInput(f"trigger {trigger.name} is not valid", errors)

    def takes_source(self, source: str) -> bool:
        return self._source is None or self._source.fullmatch(source) is not None

    def reason(self, envelope: dict[str, Any]) -> str | None:
        """None when the event fires this trigger, else the check that stops it."""
        for check in self._checks:
            reason = check.reason(envelope)
            if reason is not None:
                return reason
        return None

    def parameters(self, event: Event, envelope: dict[str, Any]) -> dict[str, Any]:
        """The run's arguments: the rendered template, else the payload's fields by argument name."""
        if self._parameters is not None:
            rendered = self._parameters(envelope)
            if not isinstance(rendered, dict):
                raise TemplateError("parameter_template: must give an object")
            return rendered
        if self._names == ["*"]:
            return event.payload
        return {name: event.payload[name] for name in self._names if name in event.payload}


def check_spec(spec: TriggerSpec, workflow: str, parameter_names: list[str]) -> None:
    """Compile what a user wrote, to refuse it now rather than on the first event."""
    nobody = uuid.UUID(int=0)
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    CompiledTrigger(Trigger(id=nobody, workflow_definition_id=nobody, workflow=workflow, **fields), parameter_names)


class TriggerIndex:
    """All active triggers; those of other event types cost an event nothing."""

    def __init__(self, triggers: list[CompiledTrigger]) -> None:
        self._exact: dict[str, list[CompiledTrigger]] = {}
        self._patterns: list[tuple[Any, CompiledTrigger]] = []
        for compiled in triggers:
            event_type = compiled.trigger.event_type
            if "*" in event_type:
                self._patterns.append((compile_pattern(event_type, "event_type", []), compiled))
            else:
                self._exact.setdefault(event_type, []).append(compiled)

    def candidates(self, event_type: str, source: str) -> Iterator[CompiledTrigger]:
        """The triggers whose type and source take the event, in a stable order."""
        for compiled in self._exact.get(event_type, ()):
            if compiled.takes_source(source):
                yield compiled
        for pattern, compiled in self._patterns:
            if (pattern is None or pattern.fullmatch(event_type)) and compiled.takes_source(source):
                yield compiled


def compile_pattern(pattern: str, field: str, errors: list[FieldError]) -> Any:
    """A name in which `*` stands for any run of characters, as a regex; None for `*` alone, which takes everything."""
    if pattern == "*":
        return None
    if not 0 < len(pattern) <= 200 or pattern.isspace():
        errors.append(FieldError(field, "must be 1 to 200 characters, exact or with *"))
        return None
    return re2.compile(".*".join(re2.escape(part) for part in pattern.split("*")))
