"""What an http workflow may say, and which of its secrets sign, by table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from tidegate.model.http_workflow import (
    MAX_HEADER_VALUE,
    MAX_OLD_SECRETS,
    HttpConfig,
    HttpWorkflowPatch,
    changed,
    config_errors,
    described,
    is_same,
    rotated,
    signing_secrets,
    slug_errors,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = 3_600_000
CONFIG = HttpConfig(url="https://example.com/", secret="whsec_" + "a" * 32, headers={"x": "1"}, timeout_ms=500)


def later(hours: float) -> datetime:
    return NOW + timedelta(hours=hours)


def test_each_old_secret_has_its_own_time() -> None:
    config = rotated(CONFIG, "b", 3 * HOUR, NOW)
    config = rotated(config, "c", HOUR, NOW)
    assert signing_secrets(config, NOW) == ["c", "b", CONFIG.secret]
    assert signing_secrets(config, later(1)) == ["c", CONFIG.secret]
    assert signing_secrets(config, later(3)) == ["c"]
    assert [old.secret for old in rotated(config, "d", HOUR, later(2)).old_secrets] == ["c", CONFIG.secret]


def test_what_is_rotated_back_is_not_old() -> None:
    config = rotated(rotated(CONFIG, "b", HOUR, NOW), CONFIG.secret, HOUR, NOW)
    assert signing_secrets(config, NOW) == [CONFIG.secret, "b"]


def test_the_same_secret_again_changes_nothing_and_zero_ends_the_others() -> None:
    config = rotated(CONFIG, "b", HOUR, NOW)
    assert rotated(config, "b", HOUR, NOW) == config
    assert signing_secrets(rotated(config, "b", 0, NOW), NOW) == ["b"]


def test_there_are_not_too_many_old_ones() -> None:
    config = CONFIG
    for n in range(20):
        config = rotated(config, str(n), HOUR, NOW)
    assert signing_secrets(config, NOW) == [str(n) for n in range(19, 18 - MAX_OLD_SECRETS, -1)]


def test_null_has_its_default_and_the_rest_stays() -> None:
    given = msgspec.convert({"timeout_ms": None, "headers": None, "secret": None}, HttpWorkflowPatch)
    assert changed(CONFIG, given) == HttpConfig(url=CONFIG.url, secret=CONFIG.secret)
    assert changed(CONFIG, HttpWorkflowPatch()) == CONFIG


def test_a_description_holds_no_secret() -> None:
    config = rotated(msgspec.structs.replace(CONFIG, headers={"b": "canary"}), "whsec_canary", HOUR, NOW)
    text = msgspec.json.encode(described(config)).decode()
    assert "canary" not in text and CONFIG.secret not in text
    assert set(described(config)) == {*(set(HttpConfig.__struct_fields__) - {"secret", "headers", "old_secrets"}),
                                      "header_names", "has_secret", "old_secrets_until"}  # fmt: skip
    assert not is_same(config, CONFIG) and is_same(rotated(CONFIG, CONFIG.secret, HOUR, NOW), CONFIG)


@pytest.mark.parametrize("slug", ["a", "a.b", "...", "A-b_9", "x" * 100])
def test_slugs_that_are_taken(slug: str) -> None:
    assert slug_errors(slug) == []


@pytest.mark.parametrize("slug", ["", ".", "..", "a/b", "a b", "é", "a\n", "x" * 101, "%2e"])
def test_slugs_that_are_refused(slug: str) -> None:
    assert [error.field for error in slug_errors(slug)] == ["slug"]


@pytest.mark.parametrize(
    ("value", "is_taken"),
    [("a", True), ("a b", True), ("x" * MAX_HEADER_VALUE, True), ("x" * (MAX_HEADER_VALUE + 1), False), (" a", False),
     ("a ", False), ("", False), ("a\tb", False), ("a\n", False), ("\x7f", False)],
    ids=range(10),
)  # fmt: skip
def test_header_values(value: str, is_taken: bool) -> None:
    errors = config_errors(msgspec.structs.replace(CONFIG, headers={"x-y": value}))
    assert [error.field for error in errors] == ([] if is_taken else ["headers.x-y"])
    assert all(value not in error.message for error in errors if len(value) > 3)
