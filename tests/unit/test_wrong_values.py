"""Values that JSON does not have are named by field."""

from __future__ import annotations

import pytest

from tidegate.api.wrong_values import MAX_BYTES, MAX_NAMED, wrong_values

FOUND = [
    (b'{"a": NaN}', ["a"], "finite"),
    (b'{"a": {"b": [1, -Infinity]}}', ["a.b[1]"], "finite"),
    (b'[{"payload": {"x": 1e400}}]', ["[0].payload.x"], "finite"),
    (b"NaN", ["body"], "finite"),
    (b'{"a": "\\ud800", "b": "\\udc00x"}', ["a", "b"], "unpaired surrogate"),
    (b'{"a": {"\\ud800": {"x": NaN}}}', ["a", "a.\ufffd.x"], ""),
    (b'{"a": "\\ud83d\\ude00"}', [], ""),
    (b'{"a": "NaN"}', [], ""),
    (b'{"a": NaN', [], ""),
    (b"[" * 20_000 + b"NaN", [], ""),
]


@pytest.mark.parametrize(("raw", "fields", "text"), FOUND)
def test_fields_are_named(raw: bytes, fields: list[str], text: str) -> None:
    found = wrong_values(raw)
    assert [one.field for one in found] == fields
    assert all(text in one.message for one in found)
    assert all(one.field.encode() for one in found), "it can be sent"


def test_the_work_is_bounded() -> None:
    assert len(wrong_values(b"[" + b"NaN," * 100 + b"NaN]")) == MAX_NAMED
    assert wrong_values(b'{"a": NaN, "b": "' + b"x" * MAX_BYTES + b'"}') == []
