"""The token of an approval's link: it names the approval, and only the key can make it."""

from __future__ import annotations

import base64
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.model.approval import LINK_PATH, is_token, link_of, signed_id, text_errors
from tidegate.model.ids import StepId

KEY = bytes(range(32))


def token(approval_id: uuid.UUID, key: bytes = KEY) -> str:
    return link_of("https://gate.example", key, StepId(approval_id)).removeprefix(f"https://gate.example{LINK_PATH}")


@given(st.uuids(), st.binary(min_size=32, max_size=32))
def test_a_token_is_that_of_its_approval(approval_id: uuid.UUID, key: bytes) -> None:
    made = token(approval_id, key)
    assert is_token(made) and signed_id(key, made) == approval_id
    assert signed_id(bytes(32) if key != bytes(32) else KEY, made) is None


@given(st.uuids(), st.integers(0, 48 * 8 - 1))
def test_every_bit_counts(approval_id: uuid.UUID, bit: int) -> None:
    raw = bytearray(base64.urlsafe_b64decode(token(approval_id)))
    raw[bit // 8] ^= 1 << bit % 8
    assert signed_id(KEY, base64.urlsafe_b64encode(raw).decode()) is None


@given(st.text(max_size=80))
def test_other_texts_are_refused(text: str) -> None:
    assert signed_id(KEY, text) is None


def test_the_address_may_have_a_path() -> None:
    one = StepId(uuid.UUID(int=7))
    for base in ("https://gate.example/tidegate", "https://gate.example/tidegate/"):
        assert link_of(base, KEY, one).startswith("https://gate.example/tidegate/approvals/")


@pytest.mark.parametrize("text", [None, "", "fine", "two\r\nlines\twith tabs", "ä€😀", "x" * 10])
def test_texts_that_people_read(text: object) -> None:
    assert text_errors("note", text, 20) == []


@pytest.mark.parametrize("text", ["x" * 21, "\x00", "\x1b[2J", "\ud800", "\x85", 7, b"x"])
def test_texts_that_nobody_can_read(text: object) -> None:
    [error] = text_errors("note", text, 20)
    assert (error.field, error.message) == ("note", "must be printable text of at most 20 characters")
