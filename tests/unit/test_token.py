"""API tokens: the form of a secret, what scopes allow, and the rules of a new one."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest

from tidegate.model.conversion import convert
from tidegate.model.token import (
    ALPHABET,
    SCOPES,
    SECRET_CHARACTERS,
    Scope,
    TokenBody,
    allows,
    secret_hash,
    secret_of,
    token_errors,
)

SECRET = secret_of("a" * SECRET_CHARACTERS)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"rate": "100/s", "networks": ["10.0.0.0/8", "2001:db8::1"]}, []),
        ({"rate": "100"}, ["rate"]),
        ({"rate": "0/s"}, ["rate"]),
        ({"networks": []}, ["networks"]),
        ({"networks": ["10.0.0.1/8", "here", ""]}, ["networks[0]", "networks[1]", "networks[2]"]),
        ({"networks": ["10.0.0.0/8"] * 51}, ["networks"]),
    ],
)
def test_the_bounds_of_a_token(given: dict[str, Any], fields: list[str]) -> None:
    body = convert({"name": "ci", "scopes": ["read"]} | given, TokenBody, "the token is not valid")
    assert [error.field for error in token_errors(body)] == fields


def test_a_secret_is_long_enough_and_recognisable() -> None:
    assert SECRET.startswith("tg_") and len(SECRET) == 52
    assert SECRET_CHARACTERS * math.log2(len(ALPHABET)) >= 256
    assert secret_hash(SECRET) == hashlib.sha256(SECRET.encode()).digest()


@pytest.mark.parametrize(
    "text",
    ["", "tg_", SECRET[:-1], SECRET + "a", SECRET.upper(), " " + SECRET, SECRET[:-1] + "é", SECRET + "\n",
     *(SECRET[:i] + "b" + SECRET[i + 1 :] for i in (3, 20, 45, 46, 51))],
)  # fmt: skip
def test_what_cannot_be_a_secret(text: str) -> None:
    assert secret_hash(text) is None


def test_scopes_include_nothing_but_themselves_except_admin() -> None:
    for has in SCOPES:
        for needed in SCOPES:
            assert allows([has], needed) is (has in (needed, "admin"))
    nothing: list[Scope] = []
    assert not any(allows(nothing, needed) for needed in SCOPES)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, None),
        ({"sources": ["shop.*", "https://shop.example/orders"]}, None),
        ({"name": ""}, "name"),
        ({"name": "two words"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": "tg_x"}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["publish", "publish"]}, "scopes"),
        ({"scopes": ["read", "operate"], "sources": ["a"]}, None),
        ({"scopes": ["publish", "admin"], "sources": ["a"]}, "sources"),
        ({"sources": []}, "sources"),
        ({"sources": ["a"] * 51}, "sources"),
        ({"sources": ["a", ""]}, "sources[1]"),
        ({"sources": ["a\x00"]}, "sources[0]"),
        ({"expires_at": "2030-01-01T00:00:00Z", "expires_in_ms": 5}, "expires_in_ms"),
    ],
)
def test_rules(changes: dict[str, Any], field: str | None) -> None:
    body = convert({"name": "ci", "scopes": ["publish"]} | changes, TokenBody, "no")
    assert [error.field for error in token_errors(body)] == ([field] if field else [])
