"""Try it: a command that publishes an event for the first trigger of an application."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import cast

import msgspec

from tidegate.cli.output import Json
from tidegate.flow.code.workflow import Workflow
from tidegate.model.declared import hint_of
from tidegate.model.event import RESERVED
from tidegate.model.trigger import TriggerSpec
from tidegate.model.typed import is_model

# A value of each type and format of JSON Schema, and of a parameter that declares nothing.
_VALUES: Mapping[str, object] = {
    "boolean": True, "string": "a", "array": [], "null": None,
}  # fmt: skip
_FORMATS = {
    "date-time": "2030-01-01T12:00:00Z", "date": "2030-01-01", "time": "12:00:00Z", "duration": "PT1H",
    "uuid": "01234567-89ab-cdef-0123-456789abcdef", "uuid4": "01234567-89ab-4def-8123-456789abcdef",
    "email": "a@example.com", "uri": "https://example.com", "decimal": "120",
}  # fmt: skip
_ANY = 7
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
                data = msgspec.json.format(msgspec.json.encode(_payload(workflow, trigger)), indent=0).decode()
                return f"publish {shlex.quote(event_type)} --source {shlex.quote(source)} --data {shlex.quote(data)}"
    return None


def _payload(workflow: Workflow, trigger: TriggerSpec) -> dict[str, object]:
    """The fields that the trigger reads by their names, with a value of the type that each parameter declares."""
    if trigger.parameter_template is not None:
        named = _FIELD.findall(msgspec.json.encode(trigger.parameter_template).decode())
        return {name: _value(hint_of(workflow.function, name)) for name in named}
    if workflow.payload_argument is not None:
        found = _value(hint_of(workflow.function, workflow.payload_argument))
        return found if isinstance(found, dict) else {}
    read = dict.fromkeys(_FIELD.findall(trigger.where or ""), 120)
    return read | {name: _value(hint_of(workflow.function, name)) for name in workflow.parameter_names if name != "*"}


def _value(hint: object) -> object:
    """A value of a type, as far as its JSON Schema tells; a number for one that is not declared."""
    try:
        given = cast(type, hint)
        schema = _schema_of(given) if is_model(given) else msgspec.json.schema(given, schema_hook=_schema_of)
        return _of_schema(schema, {}, 0)
    except Exception:  # noqa: BLE001 - a type without a schema; this is only an example
        return _ANY


def _schema_of(kind: type) -> Json:
    if not is_model(kind):
        raise NotImplementedError
    found: Json = getattr(kind, "model_json_schema")()  # noqa: B009 - of a pydantic model, which is not imported here
    return found


def _of_schema(schema: Json, named: Json, depth: int) -> object:
    named = {**named, **schema.get("$defs", {})}
    if "$ref" in schema and depth < 10:
        return _of_schema(named.get(schema["$ref"].rpartition("/")[2], {}), named, depth + 1)
    if "const" in schema or schema.get("enum"):
        return schema["const"] if "const" in schema else schema["enum"][0]
    if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return _of_schema(choices[0], named, depth + 1)
    kind = schema.get("type")
    if kind == "object":
        needed = {name: schema.get("properties", {}).get(name, {}) for name in schema.get("required", ())}
        return {name: _of_schema(one, named, depth + 1) for name, one in needed.items()} if depth < 10 else {}
    if kind == "array":
        least = int(schema.get("minItems", 0))
        places = [*schema.get("prefixItems", ()), *([schema.get("items") or {}] * least)]
        return [_of_schema(one, named, depth + 1) for one in places[:least]] if depth < 10 else []
    if kind in ("integer", "number"):
        return _number(schema, 7 if kind == "integer" else 120)
    if kind == "string":
        text = _FORMATS.get(schema.get("format", ""), "a")
        return text * int(schema.get("minLength", 1)) if text == "a" else text
    return _VALUES.get(str(kind), _ANY)


def _number(schema: Json, usual: float) -> object:
    """A number within the bounds that a schema gives."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None and usual <= low:
        return low + ("exclusiveMinimum" in schema)
    if high is not None and usual >= high:
        return high - ("exclusiveMaximum" in schema)
    return usual
