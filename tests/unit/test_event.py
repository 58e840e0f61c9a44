"""What an event may be. One bad event must never reach the store, where it could hurt the others."""

import math
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import FieldError
from tidegate.model import event as event_module
from tidegate.model.event import (
    FIELDS,
    MAX_TTL_MS,
    Event,
    EventLimits,
    NewEvent,
    check_event,
    is_name,
    is_text_id,
    trace_id,
)

from .json_values import JSON, nested

NOW = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
ID = uuid.UUID("019a0000-0000-7000-8000-000000000001")
MINIMAL = {"type": "order.created", "source": "shop.api"}


def check(
    raw: Any, prefix: str = "", limits: EventLimits | None = None, traceparent: str | None = None
) -> tuple[NewEvent | None, list[FieldError]]:
    errors: list[FieldError] = []
    event = check_event(
        raw,
        new_id=ID,
        now=NOW,
        limits=limits or EventLimits(),
        errors=errors,
        prefix=prefix,
        traceparent=traceparent,
    )
    return event, errors


def accepted(raw: Any, **changes: Any) -> NewEvent:
    event, errors = check(raw, **changes)
    assert errors == []
    assert event is not None
    return event


def refused(raw: Any, **changes: Any) -> FieldError:
    """The one error that `raw` makes."""
    event, errors = check(raw, **changes)
    assert event is None
    assert len(errors) == 1, errors
    return errors[0]


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def deep_list(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 2):
        value = [value]
    return {"a": value}


def test_minimal_event() -> None:
    assert accepted(MINIMAL) == NewEvent(
        id=ID,
        external_id=None,
        type="order.created",
        source="shop.api",
        occurred_at=None,
        payload="{}",
        correlation_id=None,
        ttl_ms=None,
        metadata="{}",
    )


def test_full_event() -> None:
    raw = {
        "id": "o-7",
        "type": "order.created",
        "source": "shop.api",
        "occurred_at": "2026-01-31T10:29:59.5+01:00",
        "payload": {"id": 7},
        "correlation_id": "c-1",
        "ttl_ms": 1000,
        "metadata": {"k": "v"},
        "priority": 3,
    }
    assert raw.keys() | {"deliver_at", "delay_ms"} == FIELDS
    event = accepted(raw, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    assert (event.external_id, event.correlation_id, event.ttl_ms) == ("o-7", "c-1", 1000)
    assert event.occurred_at == datetime(2026, 1, 31, 9, 29, 59, 500_000, tzinfo=UTC)
    assert (event.payload, event.metadata) == ('{"id":7}', '{"k":"v"}')
    assert event.traceparent is not None


@pytest.mark.parametrize(
    "change",
    [
        {"payload": None},
        {"metadata": None},
        {"id": None},
        {"occurred_at": None},
        {"ttl_ms": None},
        {"ttl_ms": 1},
        {"ttl_ms": MAX_TTL_MS},
        {"id": "x" * 200},
        {"id": "Ünïcödé ❤ עברית"},
        {"id": "a b"},
        {"correlation_id": "0"},
        {"type": "x"},
        {"type": "x" * 200},
        {"source": "https://shop.example/api?a=1&b=2#f"},
        {"source": "urn:uuid:1-2~3_4+5%20@6"},
        {"payload": {"n": 2**63 - 1, "m": -(2**63), "f": 1e300}},
        {"payload": {"text": "9" * 400}},
        {"payload": {"literal": "\\u0000"}},
        {"payload": {"null": None, "text": "null"}},
        {"payload": deep(64)},
        {"payload": deep_list(64)},
        {"payload": {"many": [[]] * 1000}},
        {"payload": {str(i): i for i in range(10_000)}},
        {"payload": {"": {"": ""}}},
        {"payload": {"a": "x" * (256 * 1024 - 8)}},
        {"metadata": {"a": "x" * (16 * 1024 - 8)}},
    ],
)
def test_accepted(change: dict[str, Any]) -> None:
    event = accepted(MINIMAL | change)
    for field in ("payload", "metadata"):
        assert msgspec.json.decode(getattr(event, field)) == (change.get(field) or {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T09:30:00Z", NOW),
        ("2026-01-31t09:30:00z", NOW),
        ("2026-01-31T09:30:00-00:00", NOW),
        ("2026-02-01T09:29:00+23:59", NOW),
        ("2026-01-31T09:30:00.000001Z", NOW + timedelta(microseconds=1)),
        ("2026-02-01T09:30:00Z", NOW + timedelta(days=1)),
        ("2016-02-03T09:30:00Z", NOW - timedelta(days=3650)),
    ],
)
def test_accepted_times(text: str, expected: datetime) -> None:
    assert accepted(MINIMAL | {"occurred_at": text}).occurred_at == expected


@pytest.mark.parametrize(
    "value",
    [
        "2026-01-31T09:30:00",  # naive
        "2026-01-31T09:30Z",
        "2026-01-31 09:30:00Z",
        "2026-01-31",
        "20000-01-01T00:00:00Z",
        "2026-12-31T23:59:60Z",  # leap second
        "2026-01-31T24:00:00Z",
        "2026-02-30T00:00:00Z",
        "2026-01-31T09:30:00+24:00",
        "infinity",
        "-infinity",
        "now",
        "",
        "\x00",
        "1769851800",
        1769851800,
        1e400,
        True,
        ["2026-01-31T09:30:00Z"],
        {},
    ],
)
def test_what_is_no_time_is_refused(value: Any) -> None:
    error = refused(MINIMAL | {"occurred_at": value})
    assert error.field == "occurred_at"
    assert "RFC 3339" in error.message


@pytest.mark.parametrize(
    ("value", "given"),
    [("noon", ""), ("2026-01-31T09:30:00", ": the time zone is missing"), (5, ", not a number")],
)
def test_a_refused_time_is_explained_and_not_repeated(value: Any, given: str) -> None:
    error = refused(MINIMAL | {"occurred_at": value})
    assert error.message == f"must be an RFC 3339 time with a time zone, such as 2026-01-31T09:30:00Z{given}"


@pytest.mark.parametrize(
    "text",
    [
        "1970-01-01T00:00:00Z",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
        "2026-02-01T09:30:01Z",
        "2016-02-03T09:29:59Z",
    ],
)
def test_time_too_far_away_is_refused(text: str) -> None:
    error = refused(MINIMAL | {"occurred_at": text})
    assert error.field == "occurred_at"
    assert "last 3650 days and at most 1 day(s) ahead" in error.message


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"type": None}, "type", "is required"),
        ({"type": ""}, "type", "is empty; expected 1 to 200"),
        ({"type": "x" * 201}, "type", "has 201 characters; expected 1 to 200"),
        ({"type": "a b"}, "type", "contains ' '; expected"),
        ({"type": "order.*"}, "type", "contains '*'"),
        ({"type": "a\n"}, "type", "contains '\\n'"),
        ({"type": "é"}, "type", "contains 'é'"),
        ({"type": "٣"}, "type", "contains '٣'"),
        ({"type": "a\x00"}, "type", "contains '\\x00'"),
        ({"type": "\ud800"}, "type", "contains '\\ud800'"),
        ({"type": 7}, "type", "must be text"),
        ({"source": None}, "source", "is required"),
        ({"source": "x" * 5000}, "source", "1 to 200"),
        ({"source": "\u202eabc"}, "source", "contains '\\u202e'"),
        ({"source": {}}, "source", "must be text"),
        ({"id": ""}, "id", "1 to 200"),
        ({"id": " "}, "id", "1 to 200"),
        ({"id": "x" * 201}, "id", "1 to 200"),
        ({"id": "a\x00b"}, "id", "control"),
        ({"id": "a\x1b[31m"}, "id", "control"),
        ({"id": "a\x85"}, "id", "control"),
        ({"id": "\ud800"}, "id", "control"),
        ({"id": 7}, "id", "must be text"),
        ({"correlation_id": "a\nb"}, "correlation_id", "control"),
        ({"correlation_id": ["x"]}, "correlation_id", "must be text"),
        ({"ttl_ms": 0}, "ttl_ms", "from 1 to"),
        ({"ttl_ms": -1}, "ttl_ms", "from 1 to"),
        ({"ttl_ms": MAX_TTL_MS + 1}, "ttl_ms", "from 1 to"),
        ({"ttl_ms": 2**64}, "ttl_ms", "from 1 to"),
        ({"ttl_ms": 1.0}, "ttl_ms", "whole number"),
        ({"ttl_ms": True}, "ttl_ms", "whole number"),
        ({"ttl_ms": "1000"}, "ttl_ms", "whole number"),
        ({"payload": []}, "payload", "must be an object, not an array"),
        ({"payload": "x"}, "payload", "must be an object, not text"),
        ({"payload": 1}, "payload", "must be an object, not a number"),
        ({"payload": False}, "payload", "must be an object, not true or false"),
        ({"payload": {"a": ["x", "b\x00"]}}, "payload.a[1]", "U+0000"),
        ({"payload": {"a": {"b\x00": 1}}}, "payload.a", "U+0000"),
        ({"payload": {"a": [{"n": 2**63}]}}, "payload.a[0].n", "beyond 64 bits"),
        ({"payload": {"n": -(2**63) - 1}}, "payload.n", "beyond 64 bits"),
        ({"payload": {"n": 10**400}}, "payload.n", "beyond 64 bits"),
        ({"payload": {"n": math.nan}}, "payload.n", "finite"),
        ({"payload": {"n": [-math.inf]}}, "payload.n[0]", "finite"),
        ({"payload": {"a": "\ud800"}}, "payload", "surrogate"),
        ({"payload": {"\udfff": 1}}, "payload", "surrogate"),
        ({"payload": deep(65)}, "payload", "deeper than 64 levels"),
        ({"payload": deep_list(65)}, "payload", "deeper than 64 levels"),
        ({"payload": deep(30_000)}, "payload", "deeper than 64 levels"),
        ({"payload": {str(i): i for i in range(10_001)}}, "payload", "more than 10000 keys"),
        ({"payload": {"a": [{"b": 1}] * 10_000}}, "payload", "more than 10000 keys"),
        ({"metadata": "x"}, "metadata", "must be an object, not text"),
        ({"metadata": {"k": "\x00"}}, "metadata.k", "U+0000"),
        ({"metadata": {"k": 2**64}}, "metadata.k", "beyond 64 bits"),
        ({"metadata": deep(65)}, "metadata", "deeper than 64 levels"),
        ({"payloads": {}}, "payloads", "unknown field"),
        ({"external_id": "x"}, "external_id", "unknown field"),
        ({"received_at": "2026-01-31T09:30:00Z"}, "received_at", "unknown field"),
        ({"a\x1b[31m\ud800": 1}, "a?[31m?", "unknown field"),
        ({"x" * 5000: 1}, "x" * 60, "unknown field"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "[3]."])
def test_refused(change: dict[str, Any], field: str, message: str, prefix: str) -> None:
    error = refused(MINIMAL | change, prefix=prefix)
    assert error.field == prefix + field
    assert message in error.message
    assert not error.too_large


@pytest.mark.parametrize(
    ("change", "field", "size"),
    [
        ({"payload": {"a": "x" * (256 * 1024 - 7)}}, "payload", 256 * 1024 + 1),
        ({"payload": {"a": "é" * (128 * 1024)}}, "payload", 256 * 1024 + 8),
        ({"metadata": {"a": "x" * (16 * 1024 - 7)}}, "metadata", 16 * 1024 + 1),
    ],
)
def test_oversize_is_refused_as_too_large(change: dict[str, Any], field: str, size: int) -> None:
    error = refused(MINIMAL | change)
    assert (error.field, error.too_large) == (field, True)
    assert f"is {size} bytes" in error.message


def test_limits_are_the_callers() -> None:
    limits = EventLimits(max_payload_bytes=10, max_depth=2, max_keys=1, max_past=timedelta(days=1))
    assert refused(MINIMAL | {"payload": {"a": "12345"}}, limits=limits).too_large
    assert "2 levels" in refused(MINIMAL | {"metadata": {"a": [[]]}}, limits=limits).message
    assert "1 keys" in refused(MINIMAL | {"metadata": {"a": 1, "b": 2}}, limits=limits).message
    assert "last 1 days" in refused(MINIMAL | {"occurred_at": "2026-01-29T00:00:00Z"}, limits=limits).message


@pytest.mark.parametrize(
    ("raw", "kind"), [([], "an array"), ("x", "text"), (1.5, "a number"), (None, "null"), (True, "true or false")]
)
@pytest.mark.parametrize(("prefix", "field"), [("", "event"), ("[0].", "[0]")])
def test_what_is_no_object_is_refused(raw: Any, kind: str, prefix: str, field: str) -> None:
    assert refused(raw, prefix=prefix) == FieldError(field, f"must be an object, not {kind}")


def test_every_broken_rule_is_named() -> None:
    _, errors = check({"payload": 1, "id": "", "ttl_ms": 0, "occurred_at": "x", "zzz": 1}, prefix="[1].")
    expected = {"zzz", "type", "source", "id", "occurred_at", "ttl_ms", "payload"}
    assert {e.field for e in errors} == {f"[1].{name}" for name in expected}


def test_errors_found_before_do_not_refuse_a_good_event() -> None:
    errors = [FieldError("[0].type", "is required")]
    event = check_event(MINIMAL, new_id=ID, now=NOW, limits=EventLimits(), errors=errors, prefix="[1].")
    assert event is not None
    assert len(errors) == 1


def test_many_unknown_fields_make_few_errors() -> None:
    _, errors = check(MINIMAL | {f"x{i}": i for i in range(1000)})
    assert len(errors) == 20


# Beyond JSON text: what a Python producer can put into a payload (NaN, halves of surrogate pairs).
PYTHON = nested(st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()))
FIELD_VALUES = st.sampled_from(["order.created", "2026-01-31T09:00:00Z", 5, {}, {"a": 1}]) | st.text() | PYTHON


@given(JSON | st.dictionaries(st.sampled_from(sorted(FIELDS)) | st.text(), FIELD_VALUES), st.sampled_from(["", "[3]."]))
def test_any_value_is_an_event_or_says_what_is_wrong(raw: Any, prefix: str) -> None:
    event, errors = check(raw, prefix=prefix)
    assert (event is None) == bool(errors)
    assert all(e.field.startswith(prefix.rstrip(".")) and e.message for e in errors)
    msgspec.json.encode(errors)  # an answer can be written


@given(st.dictionaries(st.text(st.characters()), PYTHON))
def test_payload_is_kept_exactly_or_refused(payload: dict[str, Any]) -> None:
    event, errors = check(MINIMAL | {"payload": payload})
    if event is None:
        assert all(e.field.startswith("payload") for e in errors)
    else:
        assert msgspec.json.decode(event.payload) == payload


OFFSETS = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
RECENT = st.datetimes(datetime(2016, 1, 1), datetime(2026, 3, 1), timezones=OFFSETS)  # noqa: DTZ001


@given(st.datetimes(timezones=OFFSETS) | RECENT)
def test_any_time_is_kept_exactly_or_refused(at: datetime) -> None:
    event, errors = check(MINIMAL | {"occurred_at": at.isoformat()})
    if event is None:
        assert [e.field for e in errors] == ["occurred_at"]
    else:
        assert event.occurred_at == at


@given(st.text(st.characters()))
def test_identifier_grammar(text: str) -> None:
    assert is_text_id(text) == (check(MINIMAL | {"id": text})[0] is not None)
    if is_text_id(text):
        assert "\x00" not in text
        assert len(text.encode()) <= 800


def test_envelope_is_plain_json() -> None:
    event = Event(
        id=ID,
        external_id="o-7",
        type="order.created",
        source="shop.api",
        occurred_at=NOW,
        received_at=NOW,
        ingress_sequence=1,
        payload={"id": 7},
        correlation_id="c",
        ttl_ms=None,
        metadata={},
    )
    envelope = event.envelope()
    assert msgspec.json.decode(msgspec.json.encode(envelope)) == envelope
    assert (envelope["id"], envelope["occurred_at"]) == (str(ID), "2026-01-31T09:30:00+00:00")


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "a" * 32),
        ("00-" + "0" * 32 + "-" + "b" * 16 + "-01", None),
        ("00-" + "A" * 32 + "-" + "b" * 16 + "-01", None),
        ("00-" + "a" * 31 + "-" + "b" * 16 + "-01", None),
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01\n", None),
        ("", None),
        (None, None),
    ],
)
def test_trace_id(header: str | None, expected: str | None) -> None:
    assert trace_id(header) == expected


def test_names_that_are_too_long_are_not_remembered() -> None:
    before = event_module._is_name.cache_info().currsize
    assert not any(is_name("x" * 201 + str(n)) for n in range(50))
    assert event_module._is_name.cache_info().currsize == before
