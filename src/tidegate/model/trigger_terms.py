"""What the parts of a trigger share: the fields that events have, and the errors of paths and templates.

Nothing here needs the libraries for JSONPath and Liquid. They take a fifth of the start of a process to load, so they
are loaded with the first trigger that has a predicate or a template.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidegate.model.event import Event
from tidegate.model.work_limit import WorkLeft

# Maximum number of values that a path may find for a predicate.
MAX_NODES = 1000

# The fields of an event; the content of `payload` and `metadata` is the producer's.
_INTERNAL = ("traceparent", "replayed_at", "deliver_at", "origin", "priority")
FIELDS = tuple(name for name in Event.__struct_fields__ if name not in _INTERNAL)

Find = Callable[[dict[str, Any], WorkLeft], list[Any]]
Render = Callable[..., Any]  # of an envelope and the work left


class WrongPath(Exception):
    """The path is not valid; the text says why."""


class Unanswerable(Exception):
    """A filter makes a comparison that is not supported; the text says which."""


class TemplateError(Exception):
    """A template failed on an event; the text says where and why."""


def unknown_field(name: object) -> str:
    """The error for a first-level field that events do not have."""
    return f"uses `{name}`, which is not a field of an event; the fields are {', '.join(FIELDS)}"
