"""Signatures of webhooks: published vectors, what breaks them, and the event that a request becomes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.clock import uuid7
from tidegate.errors import FieldError
from tidegate.model import webhook as rules
from tidegate.model.event import EventLimits, check_event
from tidegate.model.webhook import (
    MAX_SECRETS,
    Scheme,
    Webhook,
    WebhookBody,
    WebhookConfig,
    WebhookSecret,
    body_errors,
    fingerprint,
    refusal,
    rotated,
    secret_errors,
    shown,
)
from tidegate.model.webhook_event import FORM, NotReadable, decode, event_fields

AT = 1_614_265_330
NOW = datetime.fromtimestamp(AT, UTC)
# The test vector of the Standard Webhooks libraries.
STANDARD_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
STANDARD_BODY = b'{"test": 2432232314}'
STANDARD = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": str(AT),
    "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}
# The test values in GitHub's documentation.
GITHUB_SECRET = "It's a Secret to Everybody"
GITHUB_BODY = b"Hello, World!"
GITHUB = {"x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"}
# Stripe publishes none; this one was computed with openssl dgst -sha256 -hmac.
STRIPE_SECRET = "whsec_test_0123456789abcdef"
STRIPE_BODY = b'{"id":"evt_1","object":"event"}'
STRIPE = {"stripe-signature": "t=1614265330,v1=1eb68cea367e6077ae077c50970b6e1a40cd5eebb1611a1bee6a64366fd041c3"}

VECTORS: list[tuple[Scheme, str, dict[str, str], bytes]] = [
    ("standard", STANDARD_SECRET, STANDARD, STANDARD_BODY),
    ("github", GITHUB_SECRET, GITHUB, GITHUB_BODY),
    ("stripe", STRIPE_SECRET, STRIPE, STRIPE_BODY),
]
TIMED = [vector for vector in VECTORS if vector[0] != "github"]


def config(scheme: Scheme, *secrets: str, tolerance: int = 300, event_type: str | None = None) -> WebhookConfig:
    return WebhookConfig(
        scheme=scheme,
        event_type=event_type,
        tolerance_seconds=None if scheme == "github" else tolerance,
        secrets=[WebhookSecret(secret=secret, added_at=NOW) for secret in secrets],
    )


def signed(scheme: Scheme, secret: str, body: bytes, at: int | str = AT, message_id: str = "msg_1") -> dict[str, str]:
    """The headers of a sender, implemented independently of the code under test."""

    def digest(key: bytes, content: bytes) -> bytes:
        return hmac.new(key, content, hashlib.sha256).digest()

    if scheme == "github":
        return {"x-hub-signature-256": f"sha256={digest(secret.encode(), body).hex()}"}
    if scheme == "stripe":
        return {"stripe-signature": f"t={at},v1={digest(secret.encode(), f'{at}.'.encode() + body).hex()}"}
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(digest(key, f"{message_id}.{at}.".encode() + body)).decode()
    return {"webhook-id": message_id, "webhook-timestamp": str(at), "webhook-signature": f"v1,{signature}"}


@pytest.mark.parametrize(("scheme", "secret", "headers", "body"), VECTORS)
def test_published_vectors(scheme: Scheme, secret: str, headers: dict[str, str], body: bytes) -> None:
    assert refusal(config(scheme, secret), headers, body, NOW) is None
    assert refusal(config(scheme, secret), headers, body + b" ", NOW) == "no_match"
    assert refusal(config(scheme, secret), {}, body, NOW) == "missing_signature"
    assert refusal(None, headers, body, NOW) == "unknown_source"
    assert secret_errors(scheme, secret) == []


@pytest.mark.parametrize(("scheme", "secret", "headers", "body"), VECTORS)
@given(data=st.data())
def test_one_changed_byte_anywhere_is_refused(
    scheme: Scheme, secret: str, headers: dict[str, str], body: bytes, data: st.DataObject
) -> None:
    where = data.draw(st.sampled_from(["body", "secret", *headers]), label="where")
    text = {"body": body.decode(), "secret": secret, **headers}[where]
    i = data.draw(st.integers(0, len(text) - 1), label="position")
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(lambda c: c != text[i]), label="byte")
    changed = text[:i] + other + text[i + 1 :]
    if where == "secret" and secret_errors(scheme, changed):
        return  # cannot be stored
    if where == "secret" and scheme == "standard" and same_key(changed, secret):
        return  # base64 has several texts for the same key
    found = refusal(
        config(scheme, changed if where == "secret" else secret),
        headers | ({where: changed} if where in headers else {}),
        changed.encode() if where == "body" else body,
        NOW,
    )
    assert found is not None


def same_key(one: str, other: str) -> bool:
    return base64.b64decode(one.removeprefix("whsec_")) == base64.b64decode(other.removeprefix("whsec_"))


@given(
    body=st.binary(max_size=200), message_id=st.text("abc._-", min_size=1, max_size=20), scheme=st.sampled_from(VECTORS)
)
def test_what_a_sender_signs_holds_for_its_secret_alone(body: bytes, message_id: str, scheme: Any) -> None:
    name, secret, _, _ = scheme
    other = {"standard": "whsec_" + base64.b64encode(b"x" * 32).decode()}.get(name, "whsec_another secret")
    headers = signed(name, secret, body, message_id=message_id)
    assert refusal(config(name, secret), headers, body, NOW) is None
    assert refusal(config(name, other, secret), headers, body, NOW) is None
    assert refusal(config(name, other), headers, body, NOW) == "no_match"


@pytest.mark.parametrize(("scheme", "secret", "headers", "body"), TIMED)
@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, None), (300, None), (301, "too_old"), (-300, None), (-301, "too_new"), (86_400, "too_old")],
)
def test_old_and_future_times(
    scheme: Scheme, secret: str, headers: dict[str, str], body: bytes, seconds: int, expected: str | None
) -> None:
    assert refusal(config(scheme, secret), headers, body, NOW + timedelta(seconds=seconds)) == expected


def test_the_tolerance_is_the_webhooks_own() -> None:
    later = NOW + timedelta(seconds=20)
    assert refusal(config("standard", STANDARD_SECRET, tolerance=20), STANDARD, STANDARD_BODY, later) is None
    assert refusal(config("standard", STANDARD_SECRET, tolerance=19), STANDARD, STANDARD_BODY, later) == "too_old"


@pytest.mark.parametrize("at", ["", "x", "-1", "1e9", "1614265330.5", " 1614265330", "٣", "9" * 12, "0x10"])
def test_what_is_no_time(at: str) -> None:
    headers = {"webhook-id": "m", "webhook-timestamp": at.encode().decode("latin-1")} | {"webhook-signature": "v1,x"}
    assert refusal(config("standard", STANDARD_SECRET), headers, b"{}", NOW) == "bad_timestamp"
    stripe = {"stripe-signature": f"t={at.encode().decode('latin-1').strip()}x,v1=x"}
    assert refusal(config("stripe", STRIPE_SECRET), stripe, b"{}", NOW) == "bad_timestamp"


def test_one_of_several_signatures_is_enough() -> None:
    good = STANDARD["webhook-signature"]
    zeros = "v1," + base64.b64encode(bytes(32)).decode()

    def standard(text: str) -> str | None:
        return refusal(config("standard", STANDARD_SECRET), STANDARD | {"webhook-signature": text}, STANDARD_BODY, NOW)

    assert standard(f"{zeros} {good}") is None
    assert standard(f"v1a,abc v2,{good} {good} nonsense") is None
    for wrong in ("", zeros, good.replace("v1,", "v2,"), good.replace("v1,", ""), good.replace("v1,", "v1a,"),
                  good.replace("v1,", "v1="), good.rstrip("="), " ".join([zeros] * 20 + [good])):  # fmt: skip
        assert standard(wrong) == "no_match", wrong

    hexadecimal = STRIPE["stripe-signature"].partition("v1=")[2]

    def stripe(text: str) -> str | None:
        return refusal(config("stripe", STRIPE_SECRET), {"stripe-signature": text}, STRIPE_BODY, NOW)

    assert stripe(f"t={AT},v1={'0' * 64},v1={hexadecimal}") is None
    assert stripe(f"t={AT}, v0=abc, v1={hexadecimal}") is None
    assert stripe(f"v1={hexadecimal},t={AT}") is None
    assert stripe(f"t={AT},v0={hexadecimal}") == "no_match"
    assert stripe(f"t={AT},v1={hexadecimal.upper()}") == "no_match"
    assert stripe(f"t={AT},t={AT},v1={hexadecimal}") == "bad_timestamp"
    assert stripe(f"v1={hexadecimal}") == "bad_timestamp"

    def github(text: str) -> str | None:
        return refusal(config("github", GITHUB_SECRET), {"x-hub-signature-256": text}, GITHUB_BODY, NOW)

    assert github(GITHUB["x-hub-signature-256"].removeprefix("sha256=")) == "no_match"
    assert github(GITHUB["x-hub-signature-256"].replace("sha256", "sha1")) == "no_match"


def test_another_schemes_signature_does_not_count() -> None:
    body = b"{}"
    for mine, secret, _, _ in VECTORS:
        for other, _, _, _ in VECTORS:
            if mine != other and not secret_errors(other, secret):
                assert refusal(config(mine, secret), signed(other, secret, body), body, NOW) == "missing_signature"


def test_rotation() -> None:
    body = b"{}"
    new = "whsec_" + base64.b64encode(b"n" * 32).decode()
    held = rotated(config("standard", STANDARD_SECRET).secrets, new, 60_000, NOW)
    assert [secret.secret for secret in held] == [new, STANDARD_SECRET]
    assert [secret.until for secret in held] == [None, NOW + timedelta(seconds=60)]

    def holds(secret: str, seconds: float) -> bool:
        now = NOW + timedelta(seconds=seconds)
        given = WebhookConfig(scheme="standard", event_type=None, tolerance_seconds=300, secrets=held)
        return refusal(given, signed("standard", secret, body), body, now) is None

    assert holds(new, 0) and holds(STANDARD_SECRET, 0) and holds(STANDARD_SECRET, 59.9)
    assert not holds(STANDARD_SECRET, 60) and holds(new, 60)
    assert rotated(held, new, 1000, NOW) == held  # the same again changes nothing, and prolongs nothing
    assert [s.secret for s in rotated(held, new, 0, NOW)] == [new]
    longer = rotated(held, "whsec_third", 3_600_000, NOW)
    assert [secret.until for secret in longer[1:]] == [NOW + timedelta(hours=1), NOW + timedelta(seconds=60)]
    for i in range(10):
        held = rotated(held, f"whsec_{i}", 60_000, NOW)
    assert len(held) == MAX_SECRETS and held[0].secret == "whsec_9"
    ended = rotated(held, "whsec_last", 60_000, NOW + timedelta(hours=1))
    assert [secret.secret for secret in ended] == ["whsec_last", "whsec_9"]


def test_without_a_secret_that_holds_everything_is_refused() -> None:
    nothing = config("github")
    assert refusal(nothing, signed("github", "", b"{}"), b"{}", NOW) == "unknown_source"
    nobody = rules._UNKNOWN_SOURCE_KEY.decode()
    assert refusal(nothing, signed("github", nobody, b"{}"), b"{}", NOW) == "unknown_source"
    assert refusal(None, signed("github", nobody, b"{}"), b"{}", NOW) == "unknown_source"
    with pytest.raises(ValueError, match="not valid"):
        refusal(config("github", ""), signed("github", "", b"{}"), b"{}", NOW)


@pytest.mark.parametrize(
    ("scheme", "secret"),
    [
        ("standard", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
        ("standard", "whsec_AAAA"),
        ("standard", "whsec_" + base64.b64encode(b"x" * 23).decode()),
        ("standard", "whsec_" + base64.b64encode(b"x" * 65).decode()),
        ("standard", "whsec_ü" + "x" * 40),
        ("github", "short"),
        ("github", "x" * 257),
        ("github", " " + "x" * 20),
        ("github", "x" * 20 + "\n"),
        ("github", "é" * 20),
        ("stripe", "sk_live_0123456789abcdef"),
    ],
)
def test_secrets_that_are_refused(scheme: Scheme, secret: str) -> None:
    [error] = secret_errors(scheme, secret)
    assert error.field == "secret" and secret not in error.message


def test_configurations_that_are_refused() -> None:
    def fields(**body: Any) -> list[str]:
        return [error.field for error in body_errors(WebhookBody(**body))]

    assert fields(scheme="github", secret=GITHUB_SECRET, event_type="push") == []
    assert fields(scheme="github", tolerance_seconds=300) == ["tolerance_seconds"]
    assert fields(scheme="stripe", tolerance_seconds=0) == ["tolerance_seconds"]
    assert fields(scheme="stripe", tolerance_seconds=3601) == ["tolerance_seconds"]
    assert fields(scheme="standard", event_type="a b", secret="x") == ["event_type", "secret"]


def test_what_is_shown_has_no_secret() -> None:
    given = config("standard", STANDARD_SECRET)
    stamps = {"version": 1, "created_by": "ann", "created_at": NOW, "updated_by": "ann", "updated_at": NOW}
    text = repr(shown(Webhook(source="s", config=given, **stamps), NOW))  # type: ignore[arg-type]
    assert STANDARD_SECRET not in text and STANDARD_SECRET[6:] not in text
    assert hashlib.sha256(STANDARD_SECRET.encode()).hexdigest()[:8] == fingerprint(STANDARD_SECRET)
    assert fingerprint(STANDARD_SECRET) in text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b'{"a": NaN}', "is not JSON"),
        (b"\xff", "is not"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a": 1, "a": 1}', "the key 'a' twice"),
        (b'{"a": 1, "\\u0061": 2}', "the key 'a' twice"),
        (b'{"x": [{"b": {"c": 1, "d": 2, "c": 3}}]}', "the key 'c' twice"),
        (b'{"\\n": 1, "\\n": 2}', "the key '?' twice"),
    ],
)
def test_bodies_that_cannot_be_read(body: bytes, reason: str) -> None:
    with pytest.raises(NotReadable) as caught:
        decode(body, "application/json")
    assert reason in str(caught.value)
    form = urlencode({"payload": body.decode("latin-1")}).encode()
    if body.isascii() and body:
        with pytest.raises(NotReadable):
            decode(form, FORM)


def test_the_same_key_in_several_objects_is_fine() -> None:
    assert decode(b'[{"a": 1}, {"a": {"a": 2}}]', "") == [{"a": 1}, {"a": {"a": 2}}]


def test_forms() -> None:
    value = {"action": "opened", "text": "a&b=c + ü"}
    assert decode(urlencode({"payload": json.dumps(value)}).encode(), FORM) == value
    for body in (b"", b"payload", b"other=1", b"payload=1&payload=2", b"payload=%ff", b"&" * 30 + b"payload=1"):
        with pytest.raises(NotReadable):
            decode(body, FORM)


def fields(given: WebhookConfig, headers: dict[str, str], found: Any) -> tuple[dict[str, Any], list[FieldError]]:
    errors: list[FieldError] = []
    event = event_fields(given, "acme", headers, found, now=NOW, limits=EventLimits(), errors=errors)
    return event, errors


@pytest.mark.parametrize(
    ("scheme", "headers", "found", "expected"),
    [
        ("standard", STANDARD, {"type": "a.b", "timestamp": "2021-02-25T15:00:00Z"},
         ("msg_p5jXN8AQM9LWM0D4loKWxJek", "a.b", "2021-02-25T15:00:00+00:00")),
        ("standard", STANDARD, {"type": "a.b", "timestamp": "2021-02-25T15:00:00"},
         ("msg_p5jXN8AQM9LWM0D4loKWxJek", "a.b", "2021-02-25T15:02:10+00:00")),
        ("standard", STANDARD, {"type": "a.b", "timestamp": "1812-02-25T15:00:00Z"},
         ("msg_p5jXN8AQM9LWM0D4loKWxJek", "a.b", "2021-02-25T15:02:10+00:00")),
        ("standard", STANDARD, {"type": "a.b", "timestamp": 7},
         ("msg_p5jXN8AQM9LWM0D4loKWxJek", "a.b", "2021-02-25T15:02:10+00:00")),
        ("stripe", STRIPE, {"id": "evt_1", "type": "invoice.paid", "created": AT - 100},
         ("evt_1", "invoice.paid", "2021-02-25T15:00:30+00:00")),
        ("stripe", STRIPE, {"id": "evt_1", "type": "invoice.paid", "created": 10**18},
         ("evt_1", "invoice.paid", "2021-02-25T15:02:10+00:00")),
        ("stripe", STRIPE, {"id": "evt_1", "type": "invoice.paid", "created": "2021-02-25T15:00:00.5Z"},
         ("evt_1", "invoice.paid", "2021-02-25T15:00:00.500000+00:00")),
        ("stripe", STRIPE, {"id": "evt_1", "type": "invoice.paid"},
         ("evt_1", "invoice.paid", "2021-02-25T15:02:10+00:00")),
        ("github", {"x-github-event": "push", "x-github-delivery": "d-1"}, {"ref": "main"},
         ("d-1", "github.push", None)),
        ("github", {"x-github-event": "pull_request", "x-github-delivery": "d-1"}, {"action": "opened"},
         ("d-1", "github.pull_request.opened", None)),
        ("github", {"x-github-event": "check_run", "x-github-delivery": "d-1"}, {"action": {"x": 1}},
         ("d-1", "github.check_run", None)),
    ],
)  # fmt: skip
def test_the_event_of_a_request(
    scheme: Scheme, headers: dict[str, str], found: dict[str, Any], expected: tuple[str, str, str | None]
) -> None:
    event, errors = fields(config(scheme), headers, found)
    assert errors == []
    assert (event["id"], event["type"], event["occurred_at"]) == expected
    assert event["payload"] == found and event["metadata"]["webhook"] == scheme
    checked = check_event(event, new_id=uuid7(), now=NOW, limits=EventLimits(), errors=errors)
    assert checked is not None and checked.source == "acme", errors


def test_an_event_type_of_the_webhooks_own() -> None:
    for found in ({"type": "theirs"}, [1, 2], 7, None, "text"):
        event, errors = fields(config("standard", event_type="ours"), STANDARD, found)
        assert errors == [] and event["type"] == "ours"
        assert event["payload"] == (found if isinstance(found, dict) else {"data": found})


@pytest.mark.parametrize(
    ("scheme", "headers", "found", "missing"),
    [
        ("standard", STANDARD, {}, ["type"]),
        ("standard", STANDARD, {"type": 7}, ["type"]),
        ("standard", STANDARD, {"type": "a b"}, ["type"]),
        ("standard", STANDARD, [{"type": "a.b"}], ["type"]),
        ("standard", STANDARD | {"webhook-id": ""}, {"type": "a"}, ["webhook-id"]),
        ("standard", STANDARD | {"webhook-id": "x" * 201}, {"type": "a"}, ["webhook-id"]),
        ("stripe", STRIPE, {}, ["id", "type"]),
        ("stripe", STRIPE, {"id": 7, "type": "a"}, ["id"]),
        ("github", {}, {}, ["x-github-delivery", "x-github-event"]),
        ("github", {"x-github-event": "a b", "x-github-delivery": "d"}, {}, ["x-github-event"]),
    ],
)
def test_what_is_missing_is_named(scheme: Scheme, headers: dict[str, str], found: Any, missing: list[str]) -> None:
    assert [error.field for error in fields(config(scheme), headers, found)[1]] == missing
