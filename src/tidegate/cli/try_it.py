"""Try it: a command that publishes an event for the first trigger of an application."""

from __future__ import annotations

import re
import shlex
import typing
from collections.abc import Iterable

import msgspec

from tidegate.flow.code.workflow import Workflow
from tidegate.model.declared import hint_of
from tidegate.model.event import RESERVED
from tidegate.model.trigger import TriggerSpec

# A value for a parameter of each type; the first that fits.
_VALUES: tuple[tuple[type, object], ...] = ((bool, True), (int, 7), (float, 120), (str, "a"), (list, []), (dict, {}))
_FIELD = re.compile(r"event\.payload\.(\w+)")
ANY_SOURCE = "my.program"


def example(workflows: Iterable[Workflow]) -> str | None:
    """The arguments of `tidegate` that publish an event for the first trigger; None: no trigger takes events of
    others."""
    for workflow in workflows:
        for trigger in workflow.triggers:
            if not (trigger.event_type.startswith(RESERVED) or trigger.event_source.startswith(RESERVED)):
                event_type = trigger.event_type.replace("*", "example")
                source = ANY_SOURCE if trigger.event_source == "*" else trigger.event_source.replace("*", "api")
                data = msgspec.json.encode(_payload(workflow, trigger)).decode().replace(",", ", ").replace(":", ": ")
                return f"publish {shlex.quote(event_type)} --source {shlex.quote(source)} --data {shlex.quote(data)}"
    return None


def _payload(workflow: Workflow, trigger: TriggerSpec) -> dict[str, object]:
    """The fields that the trigger reads by their names, with a value of the type that each parameter declares."""
    if trigger.parameter_template is not None:
        named = _FIELD.findall(msgspec.json.encode(trigger.parameter_template).decode())
        return {name: _value(hint_of(workflow.function, name)) for name in named}
    if workflow.payload_argument is not None:
        hint = hint_of(workflow.function, workflow.payload_argument)
        return {name: _value(of) for name, of in typing.get_type_hints(hint).items() if not name.startswith("_")}
    read = dict.fromkeys(_FIELD.findall(trigger.where or ""), 120)
    return read | {name: _value(hint_of(workflow.function, name)) for name in workflow.parameter_names if name != "*"}


def _value(hint: object) -> object:
    """A value of a type; a number for one that is not declared."""
    kind = typing.get_origin(hint) or hint
    return next((value for of, value in _VALUES if isinstance(kind, type) and issubclass(kind, of)), 7)
