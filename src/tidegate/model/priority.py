"""Priorities: bounded weights, of an event among those of its source, and of a trigger's workflow among others."""

from __future__ import annotations

from tidegate.errors import FieldError
from tidegate.model.shares import MAX_PRIORITY


def checked_priority(value: object, field: str, errors: list[FieldError]) -> int | None:
    """The priority, or None for the default; `errors` names the field if it is not valid."""
    if value is None or (type(value) is int and 1 <= value <= MAX_PRIORITY):
        return value
    given = f", not {value}" if type(value) is int and abs(value) < 2**63 else ""
    errors.append(FieldError(field, f"must be a whole number from 1 to {MAX_PRIORITY}{given}"))
    return None


def share_of_event(priority: int) -> str:
    """What the priority of an event changes."""
    return f"priority {priority}: of its source's share of each batch, such events get {priority} for 1 of priority 1"


def share_of_workflow(priority: int) -> str:
    """What the priority of a workflow's trigger changes."""
    return f"priority {priority}: its workflow gets {priority} worker slots for 1 of a workflow with priority 1"
