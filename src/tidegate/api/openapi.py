"""The OpenAPI document, built from the route table and the types of the answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from tidegate import __version__
from tidegate.api.problems import TITLES, ProblemBody
from tidegate.api.routes import MAX_PAGE, Query, Route
from tidegate.model.event import MAX_DELAY_MS
from tidegate.model.shares import MAX_PRIORITY

_REF = "#/components/schemas/{name}"
# Statuses that any request other than GET may be answered with, whether or not it has a body.
_BODY_REFUSALS = (400, 408, 413, 415, 422)

NEW_EVENT = {"$ref": _REF.format(name="NewEvent")}
EVENT_SCHEMA: dict[str, Any] = {
    "title": "NewEvent",
    "description": "An event to publish. CloudEvents 1.0 are accepted too, in binary, structured and batch mode.",
    "type": "object",
    "required": ["type", "source"],
    "additionalProperties": False,
    "properties": {
        "id": {
            "type": "string",
            "maxLength": 200,
            "description": "The producer's id, unique per source. Makes publishing idempotent.",
        },
        "type": {"type": "string", "maxLength": 200},
        "source": {"type": "string", "maxLength": 200},
        "occurred_at": {"type": "string", "format": "date-time"},
        "payload": {"type": "object", "description": "At most 256 KiB."},
        "correlation_id": {"type": "string", "maxLength": 200},
        "ttl_ms": {"type": "integer", "minimum": 1},
        "metadata": {"type": "object", "description": "At most 16 KiB."},
        "deliver_at": {
            "type": "string",
            "format": "date-time",
            "description": "Decide it at this time, at most 366 days ahead; until then it waits and can be cancelled.",
        },
        "delay_ms": {
            "type": "integer",
            "minimum": 0,
            "maximum": MAX_DELAY_MS,
            "description": "Instead of deliver_at: decide it this long after it was stored.",
        },
        "priority": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_PRIORITY,
            "description": "Its share among the events of its source that wait to be decided; 1 unless given.",
        },
    },
}
# Below `$defs`, where openapi-python-client does not find them: it warns about these two bodies and skips them. For a
# route with several kinds of body it generates a module that cannot be imported.
_CLOUD_REF = _REF.format(name="CloudEvents") + "/$defs/{name}"
CLOUD_EVENT = {"$ref": _CLOUD_REF.format(name="CloudEvent")}
CLOUD_EVENT_BATCH = {"$ref": _CLOUD_REF.format(name="CloudEventBatch")}
CLOUD_EVENTS_SCHEMA: dict[str, Any] = {
    "title": "CloudEvents",
    "description": "CloudEvents 1.0 in the JSON format. In binary mode the attributes are headers (`ce-id` …).",
    "$defs": {
        "CloudEvent": {
            "title": "CloudEvent",
            "description": "`data` or `data_base64`, not both. Other names are extension attributes, kept as metadata.",
            "type": "object",
            "required": ["specversion", "id", "source", "type"],
            "properties": {
                "specversion": {"type": "string", "enum": ["1.0"]},
                "id": {"type": "string", "minLength": 1, "maxLength": 200},
                "source": {"type": "string", "minLength": 1, "maxLength": 200},
                "type": {"type": "string", "minLength": 1, "maxLength": 200},
                "time": {"type": ["string", "null"], "format": "date-time"},
                "subject": {"type": ["string", "null"]},
                "datacontenttype": {"type": ["string", "null"]},
                "dataschema": {"type": ["string", "null"], "format": "uri"},
                "data": {
                    "description": "At most 256 KiB. A value that is no object becomes the payload's field `data`."
                },
                "data_base64": {"type": ["string", "null"], "contentEncoding": "base64"},
                "correlationid": {"type": ["string", "null"], "maxLength": 200},
                "traceparent": {"type": ["string", "null"]},
            },
            "additionalProperties": {"type": ["boolean", "integer", "string", "null"]},
        },
        "CloudEventBatch": {"title": "CloudEventBatch", "type": "array", "items": CLOUD_EVENT},
    },
}


def document(routes: Sequence[Route]) -> Any:
    """The whole document."""
    types = [ProblemBody, *(answer for route in routes for answer in route.returns)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    for name, field in _times(types):
        _mark_time(components.get(name, {}).get("properties", {}).get(field, {}))
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, by_type)
    return _complete({
        "openapi": "3.1.0",
        "info": {
            "title": "Tidegate",
            "version": __version__,
            "description": "A durable event gate and scheduler.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components | {"NewEvent": EVENT_SCHEMA, "CloudEvents": CLOUD_EVENTS_SCHEMA},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API token with the operation's scope. The scope `admin` includes all others.",
                }
            },
        },
    })  # fmt: skip


def _times(types: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """The fields that hold times, with the name of their type: msgspec's schemas declare them as plain strings."""
    waiting, seen = list(inspect.multi_type_info(types)), set[type]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, inspect.StructType) and one.cls not in seen:
            seen.add(one.cls)
            for field in one.fields:
                waiting.append(field.type)
                kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
                if any(isinstance(kind, inspect.DateTimeType) for kind in kinds):
                    yield one.cls.__name__, field.encode_name
        elif isinstance(one, inspect.UnionType):
            waiting += one.types
        elif isinstance(one, inspect.CollectionType):
            waiting.append(one.item_type)
        elif isinstance(one, inspect.DictType):
            waiting.append(one.value_type)


def _mark_time(schema: dict[str, Any]) -> None:
    for one in schema.get("anyOf", [schema]):
        if one.get("type") == "string":
            one["format"] = "date-time"


def _complete(schema: Any) -> Any:
    """The document with `items` in every array: client generators require it."""
    if isinstance(schema, list):
        return [_complete(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    added: dict[str, Any] = {"items": {}} if schema.get("type") == "array" and "items" not in schema else {}
    return {name: _complete(one) for name, one in schema.items()} | added


def _operation(route: Route, path: str, by_type: dict[Any, Any]) -> dict[str, Any]:
    shapes = [by_type[answer] for answer in route.returns]
    schema = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    answers: dict[str, Any] = {
        str(status): {
            "description": "Success" if status < 400 else TITLES[status],
            "content": {route.media: {"schema": schema}},
        }
        for status in (route.status, *route.also)
    }
    for status in sorted(_refusals(route, path) - {route.status}):
        answer = answers.setdefault(str(status), {"description": TITLES[status], "content": {}})
        answer["content"]["application/problem+json"] = {"schema": by_type[ProblemBody]}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__.lstrip("_"),
        "summary": route.summary,
        "parameters": in_path + [_parameter(query) for query in route.query],
        "security": [] if route.scope == "public" else [{"token": [route.scope]}],
        "responses": answers,
    }
    if route.body:
        is_needed = all(media["schema"].get("required", True) for media in route.body.values())
        operation["requestBody"] = {"required": is_needed, "content": route.body}
    return operation


def _refusals(route: Route, path: str) -> set[int]:
    """The error statuses that a route declares, and those that follow from its method, path and scope."""
    found = {*route.errors, 503}
    found |= set() if route.scope == "public" else {401, 403, 429}
    found |= {404} if "{" in path else set()
    found |= set() if route.method == "GET" else set(_BODY_REFUSALS)
    return found


def _parameter(query: Query) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": query.type if query.type in ("integer", "boolean") else "string"}
    if query.type in ("date-time", "uuid"):
        schema["format"] = query.type
    if query.type == "integer":
        schema |= {"minimum": 1, "maximum": MAX_PAGE}
    if query.choices:
        schema["enum"] = list(query.choices)
    if query.repeats:
        schema = {"type": "array", "items": schema}
    return {"name": query.name, "in": "query", "description": query.description, "schema": schema}
