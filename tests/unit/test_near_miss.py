"""Which names almost match a pattern."""

from __future__ import annotations

import pytest

from tidegate.flow.look.near.triggers import is_one_edit_apart, is_taken
from tidegate.model.trigger import compile_pattern


@pytest.mark.parametrize("pattern", ["*", "a*", "*a", "a*b", "a.*.c", "ab", "*.*", "a**b"])
@pytest.mark.parametrize("value", ["a", "b", "ab", "a.c", "a.b.c", "a.b.c.c", "aab", "x.y", "axb", "ba"])
def test_a_pattern_takes_what_the_trigger_takes(pattern: str, value: str) -> None:
    compiled = compile_pattern(pattern, "event_type", [])
    assert is_taken(pattern, value) is (compiled is None or compiled.fullmatch(value) is not None)


@pytest.mark.parametrize(
    ("pattern", "value", "is_near"),
    [
        ("order.created", "order.create", True),
        ("order.created", "order.craeted", True),
        ("order.created", "order_created", True),
        ("order.created", "order.createdd", True),
        ("order.*", "orders.created", True),
        ("order.created", "order.cancelled", False),
        ("order.created", "invoice.paid", False),
        ("abc", "abd", False),
    ],
)
def test_one_edit(pattern: str, value: str, is_near: bool) -> None:
    assert is_one_edit_apart(pattern, value) is is_near
