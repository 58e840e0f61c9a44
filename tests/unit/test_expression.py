"""`where`: CEL over the event. True or false; on an event it cannot answer for, false with the reason."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import FieldError
from headgate.model.expression import MAX_LENGTH, CompiledExpression, compile_expression

from .json_values import EVENTS

EVENT = {
    "type": "order.created",
    "source": "shop.api",
    "occurred_at": "2026-01-31T09:30:00Z",
    "payload": {"amount": 120, "f": 1.5, "zero": 0, "name": "Ann", "tags": ["a", "b"], "none": None, "big": 10**30},
    "metadata": {},
}


def compiled(source: str) -> CompiledExpression:
    errors: list[FieldError] = []
    found = compile_expression(source, "where", errors)
    assert errors == []
    assert found is not None
    return found


@pytest.mark.parametrize(
    "source",
    [
        "event.payload.amount > 100",
        "event.payload['amount'] == 120",
        "event.type == 'order.created' && event.source.startsWith('shop.')",
        "event.payload.name in ['Ann', 'Bob']",
        "'a' in event.payload.tags",
        "event.payload.tags.exists(t, t == 'b')",
        "event.payload.tags.all(t, size(t) == 1)",
        "has(event.payload.amount) && !has(event.payload.nope)",
        "event.payload.none == null",
        "event.payload.f < 2.0",
        "event.payload.name.matches('^A[a-z]+$')",
        "timestamp(event.occurred_at) > timestamp('2026-01-01T00:00:00Z')",
        "event.payload.amount > 100 ? true : false",
        "!(event.payload.amount < 100)",
    ],
)
def test_true(source: str) -> None:
    assert compiled(source).reason(EVENT) is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("event.payload.amount > 200", "is false"),
        ("event.payload.nope > 100", "nope is not in the event"),
        ("event.payload.name.first == 'A'", ""),
        ("event.payload.amount", "neither true nor false"),
        ("event.payload.none", "neither true nor false"),
        ("event.payload.name > 100", ""),
        ("event.payload.amount + 'x' == 'y'", "No such overload"),
        ("event.payload.amount / event.payload.zero > 1", "division by zero"),
        ("event.payload.amount % event.payload.zero > 1", "by zero"),
        ("event.payload.tags[9] == 'a'", "out of bounds"),
        ("event.payload.tags[-1] == 'a'", "out of bounds"),
        ("event.payload.amount * 9223372036854775807 > 1", "overflow"),
        ("event.payload.name.matches('(')", "regex"),
        ("int(event.payload.name) > 1", "int"),
        ("timestamp(event.payload.name) > timestamp('2026-01-01T00:00:00Z')", ""),
        ("event.payload.amount > limit", "limit"),
        ("nosuch(event.payload.amount)", "nosuch"),
        ("event.payload.tags.all(t, t / 0 > 1)", ""),
        ("event.payload.none.x == 1", ""),
    ],
)
def test_not_true_with_the_reason(source: str, reason: str) -> None:
    found = compiled(source).reason(EVENT)
    assert found is not None
    assert found.startswith("where")
    assert reason in found
    assert "\n" not in found
    assert len(found) < 250


def test_event_data_is_not_changed_by_evaluation() -> None:
    event = {"payload": {"l": [1, 2]}}
    compiled("event.payload.l.map(x, x + 1) == [2, 3]").reason(event)
    assert event == {"payload": {"l": [1, 2]}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "1 to 2000 characters"),
        ("event.x == '" + "x" * MAX_LENGTH + "'", "1 to 2000 characters"),
        ("event.payload.amount >", "not a CEL expression"),
        ("event.payload.amount > 100 AND true", "not a CEL expression"),
        ("event.x == 9223372036854775808", "not a CEL expression"),
        ("(" * 900 + "event.x" + ")" * 900, "not a CEL expression"),
        ("1 > 0", "does not look at `event`"),
        ("payload.amount > 100", "does not look at `event`"),
        ("\x00", "not a CEL expression"),
    ],
)
def test_refused(source: str, message: str) -> None:
    errors: list[FieldError] = []
    assert compile_expression(source, "where", errors) is None
    assert [e.field for e in errors] == ["where"]
    assert message in errors[0].message
    assert len(errors[0].message) < 400


EXPRESSIONS = [
    compiled(source)
    for source in (
        "event.payload.a > 1",
        "event.payload.a / event.payload.b == 1",
        "event.payload.a[event.payload.b] == event.payload.items",
        "event.payload.items.all(x, x == event.payload.a)",
        "event.payload.items.map(x, x + x) == event.payload.a",
        "size(event.payload.a) > 1",
        "event.payload.a.matches(event.payload.b)",
        "event.payload.a in event.payload.items",
        "-event.payload.a < int(event.payload.b)",
        "duration(event.payload.a) < duration(event.payload.b)",
        "event.payload.a ? event.payload.b : event.payload.items",
        "event.payload.a.b.items == event",
    )
]


@given(EVENTS, st.sampled_from(EXPRESSIONS))
def test_reason_never_raises(event: dict[str, Any], expression: CompiledExpression) -> None:
    reason = expression.reason(event)
    assert reason is None or reason.startswith("where")


@given(st.text(max_size=50) | st.text("event.payl()[]{}<>=!&|?:+-*/%'\"0123,", max_size=50).map("event.{}".format))
def test_any_text_compiles_or_is_refused(source: str) -> None:
    errors: list[FieldError] = []
    found = compile_expression(source, "where", errors)
    assert (found is None) == bool(errors)
    if found is not None:
        found.reason(EVENT)
