"""Webhooks on real processes: senders without a token, one event for all attempts, secrets that nobody sees."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import json
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import asyncpg
import httpx
import pytest

from tests.acceptance.conftest import ROOT
from tests.acceptance.test_readme import blocks, shell
from tests.acceptance.test_sources import eventually, ok
from tests.processes import Process, api, run, worker
from tidegate.embedded import EmbeddedPostgres
from tidegate.model.webhook import SIGNATURE_HEADERS, fingerprint
from tidegate.store import migrate
from tidegate.store.db import Database

APP = """
from tidegate import Tidegate

app = Tidegate()


@app.workflow(on="*", source="launch.*", params={"type": "{{ event.type }}", "payload": "{{ event.payload }}"})
async def seen(ctx, type: str, payload: dict):
    return {"type": type, "payload": payload}
"""
FORM = "application/x-www-form-urlencoded"
_numbers = itertools.count(1)
_http = httpx.Client(timeout=30, trust_env=False)


@pytest.fixture(scope="module", autouse=True)
def _close_http_client() -> Iterator[None]:
    yield
    _http.close()


@pytest.fixture(scope="module")
def token(shared_url: str) -> str:
    done = run("token", "create", "ann", "--scope", "admin", env={"TIDEGATE_DATABASE_URL": shared_url})
    assert done.returncode == 0, done.stderr
    secret: str = done.stdout.strip()
    return secret


class Admin:
    """An operator with a token."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token

    def __call__(self, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {self._token}"}
        return _http.request(method, f"{self._url}{path}", json=body, headers=headers)

    def set(self, source: str, scheme: str, **more: Any) -> str:
        """Set a webhook; its secret."""
        if scheme == "stripe":
            more.setdefault("secret", f"whsec_{uuid.uuid4().hex}")
        done = ok(self("PUT", f"/admin/sources/{source}/webhook", {"scheme": scheme, **more}))
        secret: str = more.get("secret") or done["secret"]
        return secret

    def events(self, source: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ok(self("GET", f"/v1/events?source={source}"))["events"]
        return found


@pytest.fixture(scope="module")
def admin(url: str, token: str) -> Admin:
    return Admin(url, token)


@pytest.fixture
def source() -> str:
    return f"s{next(_numbers)}.hooks"


def digest(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, hashlib.sha256).digest()


def signed(
    scheme: str, secret: str, body: bytes, *, message_id: str = "m-1", at: float | None = None, event: str = "push"
) -> dict[str, str]:
    """The headers that a sender adds."""
    stamp = str(int(time.time() if at is None else at))
    if scheme == "github":
        signature = f"sha256={digest(secret.encode(), body).hex()}"
        return {"x-hub-signature-256": signature, "x-github-delivery": message_id, "x-github-event": event}
    if scheme == "stripe":
        return {"stripe-signature": f"t={stamp},v1={digest(secret.encode(), f'{stamp}.'.encode() + body).hex()}"}
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(digest(key, f"{message_id}.{stamp}.".encode() + body)).decode()
    return {"webhook-id": message_id, "webhook-timestamp": stamp, "webhook-signature": f"v1,{signature}"}


def send(url: str, source: str, headers: dict[str, str], body: Any, media: str = "application/json") -> httpx.Response:
    return _http.post(f"{url}/v1/webhooks/{source}", content=body, headers={"content-type": media, **headers})


def rows(database_url: str, query: str, *arguments: Any) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        connection = await asyncpg.connect(database_url)
        try:
            return [dict(row) for row in await connection.fetch(query, *arguments)]
        finally:
            await connection.close()

    return asyncio.run(ask())


def test_each_scheme_publishes_and_launches(
    url: str, admin: Admin, shared_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("webhooks") / "app.py"
    file.write_text(APP)
    opened = b'{"action": "opened", "number": 7}'
    cases = [
        ("standard", b'{"type": "order.paid", "data": {"id": 7}}', "application/json", "order.paid"),
        ("stripe", b'{"id": "m-1", "type": "invoice.paid", "created": 1700000000}', "application/json; charset=utf-8",
         "invoice.paid"),
        ("github", opened, "application/json", "github.pull_request.opened"),
        ("github", urlencode({"payload": opened.decode()}).encode(), FORM, "github.pull_request.opened"),
    ]  # fmt: skip
    with worker(shared_url, file):
        for i, (scheme, body, media, expected) in enumerate(cases):
            source = f"launch.{i}"
            secret = admin.set(source, scheme)
            headers = signed(scheme, secret, body, event="pull_request")
            accepted = ok(send(url, source, headers, body, media), 202)
            assert (accepted["status"], accepted["external_id"]) == ("accepted", "m-1")

            def outputs(event_id: str = accepted["id"]) -> list[dict[str, Any]]:
                found = rows(shared_url, _OUTPUTS, uuid.UUID(event_id))
                return [json.loads(row["output"]) for row in found if row["output"] is not None]

            [output] = eventually(outputs, "the run has ended")
            payload = json.loads(opened if media == FORM else body)
            assert output == {"type": expected, "payload": payload}
            [event] = admin.events(source)
            assert event["metadata"]["webhook"] == scheme and event["id"] == accepted["id"]
            if scheme == "stripe":
                assert event["occurred_at"].startswith("2023-11-14T22:13:20")


_OUTPUTS = """
select r.output from tidegate.workflow_runs r
  join tidegate.workflow_trigger_deliveries d on d.workflow_run_id = r.id where d.event_id = $1
"""


@pytest.mark.parametrize("scheme", SIGNATURE_HEADERS)
def test_a_replayed_signed_request_is_one_event(url: str, admin: Admin, source: str, scheme: str) -> None:
    secret = admin.set(source, scheme)
    body = b'{"id": "m-1", "type": "a.b", "pending_webhooks": 2}'
    headers = signed(scheme, secret, body)
    first = ok(send(url, source, headers, body), 202)
    # The same request; a later attempt; a later attempt with another body, as Stripe makes it.
    other = body.replace(b"2", b"1")
    for attempt, given in (
        (headers, body),
        (signed(scheme, secret, body, at=time.time() - 60), body),
        (signed(scheme, secret, other), other),
    ):
        assert ok(send(url, source, attempt, given), 202) == first | {"status": "duplicate"}
    [event] = admin.events(source)
    assert event["payload"]["pending_webhooks"] == 2


def test_signature_checked_before_json_parse(url: str, admin: Admin, source: str) -> None:
    secret = admin.set(source, "github")
    good = signed("github", secret, b"{}")
    for body in (b"{", b"", b"\xff", b'{"a": 1, "a": 2}', b"[" * 50_000):
        assert send(url, source, good, body).status_code == 401, body
        answer = send(url, source, signed("github", secret, body), body)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (400, "body"), body
    assert send(url, source, good, b"{}", "text/plain").status_code == 415
    assert send(url, source, good, b"{ }", "text/plain").status_code == 401
    assert admin.events(source) == []


def test_duplicate_keys_in_signed_body_400(url: str, admin: Admin, source: str) -> None:
    secret = admin.set(source, "standard")
    body = b'{"type": "a.b", "data": {"amount": 1, "\\u0061mount": 1000}}'
    answer = send(url, source, signed("standard", secret, body), body)
    assert answer.status_code == 400 and "'amount' twice" in answer.json()["detail"]
    assert admin.events(source) == []


def test_strangers_learn_nothing(url: str, admin: Admin, source: str) -> None:
    secret = admin.set(source, "standard")
    body = b'{"type": "a.b"}'
    other = "whsec_" + base64.b64encode(b"o" * 32).decode()
    answers = [
        send(url, source, signed("standard", other, body), body),
        send(url, source, signed("standard", secret, body), body + b" "),
        send(url, source, signed("standard", secret, body, at=time.time() - 400), body),
        send(url, source, signed("standard", secret, body, at=time.time() + 400), body),
        send(url, source, signed("standard", secret, body) | {"webhook-id": "m-2"}, body),
        send(url, source, signed("standard", secret, body) | {"webhook-timestamp": "soon"}, body),
        send(url, source, signed("github", secret, body), body),
        send(url, source, {}, body),
        send(url, "nobody", signed("standard", secret, body), body),
        send(url, "nobody", {}, body),
        send(url, "no%20name", signed("standard", secret, body), body),
        send(url, f"{source}/x", signed("standard", secret, body), body),
    ]
    told = {(a.status_code, a.content, str(sorted(a.headers.items()))) for a in answers}
    assert len(told) == 1 and answers[0].status_code == 401
    assert answers[0].headers["content-type"] == "application/problem+json"
    assert admin.events(source) == []
    assert ok(send(url, source, signed("standard", secret, body), body), 202)["status"] == "accepted"


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature", "x-hub-signature-256"])
def test_a_header_that_came_twice_is_believed_neither_time(url: str, admin: Admin, source: str, name: str) -> None:
    body = b'{"type": "a.b"}'
    headers = {"x-hub-signature-256": "sha256=00"} | signed("standard", admin.set(source, "standard"), body)
    doubled = [("content-type", "application/json"), *headers.items(), (name, headers[name])]
    answer = _http.post(f"{url}/v1/webhooks/{source}", content=body, headers=doubled)
    assert answer.status_code == 401 and admin.events(source) == []
    assert ok(send(url, source, headers, body), 202)["status"] == "accepted"


def test_svix_names_are_the_standards(url: str, admin: Admin, source: str) -> None:
    secret = admin.set(source, "standard")
    body = b'{"type": "order.created", "n": 1}'
    names = {"webhook-id": "svix-id", "webhook-timestamp": "svix-timestamp", "webhook-signature": "svix-signature"}
    given = signed("standard", secret, body, message_id="m-svix")
    svix = {names[name]: value for name, value in given.items()}
    answer = send(url, source, svix, body)
    assert (answer.status_code, answer.json()["external_id"]) == (202, "m-svix"), answer.text
    assert send(url, source, given, body).json()["status"] == "duplicate"
    # What is signed belongs together: the names are never mixed.
    for name, other in names.items():
        mixed = {k: v for k, v in svix.items() if k != other} | {name: given[name]}
        assert send(url, source, mixed, body).status_code == 401, name
    twice = [*svix.items(), ("svix-id", "m-other"), ("content-type", "application/json")]
    assert _http.post(f"{url}/v1/webhooks/{source}", content=body, headers=twice).status_code == 401


def test_no_token_for_senders_but_for_operators(url: str, admin: Admin, source: str, shared_url: str) -> None:
    made = run("token", "create", f"reader-{source}", "--scope", "read", env={"TIDEGATE_DATABASE_URL": shared_url})
    reader = {"authorization": f"Bearer {made.stdout.strip()}"}
    at = f"{url}/admin/sources/{source}/webhook"
    for method, path in (("PUT", ""), ("GET", ""), ("DELETE", ""), ("POST", "/rotate"), ("DELETE", "/secrets/x")):
        assert _http.request(method, at + path).status_code == 401
        assert _http.request(method, at + path, headers=reader).status_code == (404 if method == "GET" else 403)
    secret = admin.set(source, "github")
    assert _http.get(at, headers=reader).status_code == 200
    # A token of someone's does no harm and no good.
    for headers in ({}, reader, {"authorization": "Bearer nonsense"}):
        assert send(url, source, signed("github", secret, b"{}") | headers, b"{}").status_code == 202
        assert send(url, source, signed("github", "x" * 20, b"{}") | headers, b"{}").status_code == 401


def test_bad_configurations_name_the_field(admin: Admin, source: str) -> None:
    at = f"/admin/sources/{source}/webhook"
    for body, field in (
        ({}, "scheme"),
        ({"scheme": "paypal"}, "scheme"),
        ({"scheme": "github", "secret": "short"}, "secret"),
        ({"scheme": "stripe"}, "secret"),
        ({"scheme": "github", "tolerance_seconds": 5}, "tolerance_seconds"),
        ({"scheme": "standard", "tolerance_seconds": "5"}, "tolerance_seconds"),
        ({"scheme": "standard", "event_type": "a b"}, "event_type"),
        ({"scheme": "standard", "nonsense": 1}, "nonsense"),
    ):
        answer = admin("PUT", at, body)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field), (body, answer.text)
    assert admin("PUT", "/admin/sources/a%20b/webhook", {"scheme": "github"}).status_code == 422
    for method, path in (("GET", at), ("DELETE", at), ("POST", f"{at}/rotate"), ("DELETE", f"{at}/secrets/x")):
        assert admin(method, path).status_code == 404
    admin.set(source, "github")
    assert admin("POST", f"{at}/rotate", {"keep_ms": -1}).json()["errors"][0]["field"] == "keep_ms"
    assert admin("POST", f"{at}/rotate", {"secret": "short"}).json()["errors"][0]["field"] == "secret"


def test_rotation_and_what_other_processes_see(url: str, admin: Admin, source: str, shared_url: str) -> None:
    at = f"/admin/sources/{source}/webhook"
    first = admin.set(source, "github")
    ids = itertools.count(1)

    def status(address: str, secret: str) -> int:
        return send(address, source, signed("github", secret, b"{}", message_id=f"r-{next(ids)}"), b"{}").status_code

    with api(shared_url, TIDEGATE_AUTH="on") as (_, other):
        assert status(other, first) == 202
        rotated = ok(admin("POST", f"{at}/rotate", {"keep_ms": 3_600_000}))
        second = rotated["secret"]
        assert [s["fingerprint"] for s in rotated["secrets"]] == [fingerprint(second), fingerprint(first)]
        assert rotated["secrets"][0]["until"] is None and rotated["secrets"][1]["until"] is not None
        assert (status(url, first), status(url, second)) == (202, 202)  # at once, where it was changed
        eventually(lambda: status(other, second) == 202, "the other process knows the new secret")
        assert status(other, first) == 202
        assert admin("DELETE", f"{at}/secrets/{fingerprint(second)}").status_code == 409
        retired = ok(admin("DELETE", f"{at}/secrets/{fingerprint(first)}"))
        assert [s["fingerprint"] for s in retired["secrets"]] == [fingerprint(second)]
        assert (status(url, first), status(url, second)) == (401, 202)
        eventually(lambda: status(other, first) == 401, "the other process knows that the first secret has ended")
        third = ok(admin("POST", f"{at}/rotate", {"keep_ms": 0}))["secret"]
        assert (status(url, second), status(url, third)) == (401, 202)
        same = ok(admin("PUT", at, {"scheme": "github"}))
        assert (same["changed"], same["secret"], same["version"]) == (False, None, 4)
        assert ok(admin("PUT", at, {"scheme": "github", "event_type": "hub"}))["secret"] is None
        assert status(url, third) == 202 and admin.events(source)[0]["type"] == "hub"
        assert ok(admin("DELETE", at))["source"] == source
        assert status(url, third) == 401
        eventually(lambda: status(other, third) == 401, "the other process knows that the webhook is gone")


def test_audit_rows_have_actor_before_and_after_without_secrets(admin: Admin, source: str, shared_url: str) -> None:
    at = f"/admin/sources/{source}/webhook"
    first = admin.set(source, "standard", tolerance_seconds=60)
    admin.set(source, "standard", secret=first, tolerance_seconds=60)  # the same: no row
    second = ok(admin("POST", f"{at}/rotate"))["secret"]
    ok(admin("DELETE", f"{at}/secrets/{fingerprint(first)}"))
    ok(admin("DELETE", at))
    found = rows(shared_url, "select * from tidegate.audit_log where subject = $1 order by id", source)
    assert [(r["actor"], r["action"]) for r in found] == [
        ("ann", "webhook.set"), ("ann", "webhook.rotate"), ("ann", "webhook.retire"), ("ann", "webhook.delete"),
    ]  # fmt: skip

    def prints(text: str | None) -> list[str] | None:
        return None if text is None else [secret["fingerprint"] for secret in json.loads(text)["secrets"]]

    one, two = fingerprint(first), fingerprint(second)
    assert [(prints(r["before"]), prints(r["after"])) for r in found] == [
        (None, [one]), ([one], [two, one]), ([two, one], [two]), ([two], None),
    ]  # fmt: skip
    assert json.loads(found[0]["after"])["tolerance_seconds"] == 60
    assert first not in str(found) and second not in str(found)


def test_sizes(url: str, admin: Admin, source: str) -> None:
    secret = admin.set(source, "github")
    large = json.dumps({"x": "y" * 300_000}).encode()
    answer = send(url, source, signed("github", secret, large), large)
    assert answer.status_code == 413 and answer.json()["errors"][0]["field"] == "payload"
    huge = json.dumps({"x": "y" * 2_000_000}).encode()
    for given in (huge, iter([huge[i : i + 65_536] for i in range(0, len(huge), 65_536)])):
        answer = send(url, source, signed("github", secret, huge), given)
        assert answer.status_code == 413 and "larger than 1048576 bytes" in answer.json()["detail"]
    assert send(url, "nobody", signed("github", secret, huge), huge).status_code == 413  # as for everyone
    assert send(url, source, {}, huge).status_code == 401  # not read
    assert send(url, source, signed("github", secret, b"{}") | {"content-encoding": "gzip"}, b"{}").status_code == 415
    fits = json.dumps({"x": "y" * 200_000}).encode()
    assert send(url, source, signed("github", secret, fits), fits).status_code == 202


def test_what_cannot_be_an_event(url: str, admin: Admin, source: str) -> None:
    secret = admin.set(source, "standard")
    for body, field in (
        (b"{}", "type"),
        (b"[1]", "type"),
        (b'{"type": "a.b", "x": 123456789012345678901234567890}', "payload.x"),
        (b'{"type": "a.b", "x": "\\u0000"}', "payload.x"),
    ):
        answer = send(url, source, signed("standard", secret, body), body)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field), answer.text
    admin.set(source, "standard", event_type="list.sent")
    ok(send(url, source, signed("standard", secret, b"[1]"), b"[1]"), 202)
    [event] = admin.events(source)
    assert (event["type"], event["payload"]) == ("list.sent", {"data": [1]})


def test_trace_and_correlation(url: str, admin: Admin, source: str) -> None:
    secret = admin.set(source, "github")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for i, more in enumerate(({"traceparent": trace}, {"x-request-id": "req-1"}, {"x-request-id": "x" * 500})):
        headers = signed("github", secret, b"{}", message_id=f"c-{i}")
        ok(send(url, source, headers | more, b"{}"), 202)
    headers = signed("github", secret, b"{}", message_id="c-3")
    twice = [("content-type", "application/json"), *headers.items(), ("traceparent", trace), ("traceparent", trace)]
    ok(_http.post(f"{url}/v1/webhooks/{source}", content=b"{}", headers=twice), 202)
    doubled, third, second, first = admin.events(source)
    assert (doubled["correlation_id"], doubled["traceparent"]) == (doubled["id"], None)
    assert first["correlation_id"] == trace[3:35] and first["traceparent"] == trace
    assert second["correlation_id"] == "req-1" and third["correlation_id"] == third["id"]


def test_a_paused_source_is_received_all_the_same(url: str, admin: Admin, source: str) -> None:
    secret = admin.set(source, "github")
    ok(admin("POST", f"/admin/sources/{source}/pause", {"reason": "storm"}))
    ok(send(url, source, signed("github", secret, b"{}"), b"{}"), 202)
    assert len(admin.events(source)) == 1


def test_secrets_are_nowhere_but_in_their_table(
    guarded: tuple[Process, str], admin: Admin, source: str, shared_url: str
) -> None:
    process, url = guarded
    at = f"/admin/sources/{source}/webhook"
    canary = "canary-of-a-body"
    secrets = [admin.set(source, "github")]
    secrets.append(ok(admin("POST", f"{at}/rotate"))["secret"])
    secrets.append("a secret that we were given")
    answers = [admin("POST", f"{at}/rotate", {"secret": secrets[-1]})]
    body = json.dumps({"x": canary}).encode()
    headers = signed("github", secrets[0], body)
    answers += [
        send(url, source, headers, body),
        send(url, source, headers, body + b" "),
        send(url, source, signed("github", secrets[1], b"{"), b"{" + canary.encode()),
        send(url, source, signed("github", secrets[0], b"{"), b"{"),
        admin("GET", at),
        admin("GET", "/admin/webhooks"),
        admin("PUT", at, {"scheme": "github"}),
        admin("GET", "/metrics"),
        admin("GET", "/v1/events"),
        admin("DELETE", f"{at}/secrets/{secrets[1]}"),
    ]
    assert [a.status_code for a in answers] == [200, 202, 401, 401, 400, 200, 200, 200, 200, 200, 404]
    tables = rows(
        shared_url,
        "select table_name as name from information_schema.tables "
        "where table_schema = 'tidegate' and table_type = 'BASE TABLE' and table_name <> 'webhooks'",
    )
    dumped = [
        row["line"]
        for table in tables
        for row in rows(shared_url, f"select t::text as line from tidegate.{table['name']} t")
    ]
    process.wait_for_line(rf"webhook.refused.*{re.escape(source)}|{re.escape(source)}.*webhook.refused")
    text = "\n".join([*(a.text + str(a.headers) for a in answers), *dumped, process.output])
    assert "webhook.rotate" in text and fingerprint(secrets[0]) in text
    for secret in secrets:
        assert secret not in text
    assert canary not in process.output and headers["x-hub-signature-256"][7:] not in text
    assert f'tidegate_webhooks_total{{outcome="unsigned",source="{source}"}}' in text


def test_refusals_are_told_with_their_reason(guarded: tuple[Process, str], admin: Admin, source: str) -> None:
    process, url = guarded
    secret = admin.set(source, "standard")
    body = b'{"type": "a.b"}'
    for reason, headers, given in (
        ("no_match", signed("standard", secret, b"x"), body),
        ("too_old", signed("standard", secret, body, at=time.time() - 400), body),
        ("too_new", signed("standard", secret, body, at=time.time() + 400), body),
        ("missing_signature", {}, body),
        ("not_readable", signed("standard", secret, b"x"), b"x"),
        ("not_an_event", signed("standard", secret, b"{}"), b"{}"),
    ):
        send(url, source, headers, given)
        line = json.loads(process.wait_for_line(rf'.*"{source}".*"{reason}".*|.*"{reason}".*"{source}".*')[0])
        assert (line["action"], line["source"], line["scheme"], line["reason"]) == (
            "webhook.refused", source, "standard", reason,
        )  # fmt: skip


def outcomes(admin: Admin, source: str) -> dict[str, float]:
    text = ok_text(admin("GET", "/metrics"))
    found = re.findall(rf'tidegate_webhooks_total{{outcome="(\w+)",source="{re.escape(source)}"}} (\S+)', text)
    return {outcome: float(count) for outcome, count in found}


def ok_text(answer: httpx.Response) -> str:
    assert answer.status_code == 200
    return answer.text


def test_every_outcome_is_counted(url: str, admin: Admin, source: str) -> None:
    secret = admin.set(source, "github")
    strangers = outcomes(admin, "other").get("unsigned", 0)
    for headers, body in (
        (signed("github", secret, b"{}"), b"{}"),
        (signed("github", secret, b"{}"), b"{}"),
        (signed("github", secret, b"[]"), b"[]"),
        (signed("github", secret, b"{"), b"{"),
        (signed("github", secret, b"{}"), b"{ }"),
        ({}, b"{}"),
    ):
        send(url, source, headers, body)
    send(url, "nobody.at.all", signed("github", secret, b"{}"), b"{}")
    assert outcomes(admin, source) == {"accepted": 1, "duplicate": 2, "invalid": 1, "unsigned": 2}
    assert outcomes(admin, "other")["unsigned"] >= strangers + 1
    assert "nobody.at.all" not in admin("GET", "/metrics").text


def test_a_database_that_is_away_is_503_for_everyone(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path)
    database_url = server.start()

    async def prepare() -> None:
        database = Database(database_url, "test", size=1)
        await migrate.migrate(database)
        await database.close()

    asyncio.run(prepare())
    try:
        with api(database_url) as (_, url):
            admin = Admin(url, "none")
            secret = admin.set("acme", "github")
            assert send(url, "acme", signed("github", secret, b"{}"), b"{}").status_code == 202
            server.stop(immediate=True)
            for source, key in (("acme", secret), ("nobody", secret)):
                answer = eventually_503(url, source, key)
                assert int(answer.headers["retry-after"]) >= 1
            server.start()
            headers = signed("github", secret, b"{}", message_id="m-2")
            eventually(lambda: send(url, "acme", headers, b"{}").status_code == 202, "the database is back")
            assert len(admin.events("acme")) == 2
            counted = outcomes(admin, "acme") | {"other": outcomes(admin, "other")["unavailable"]}
            assert counted["accepted"] == 2 and counted["other"] >= 1
    finally:
        server.stop()


def eventually_503(url: str, source: str, secret: str) -> httpx.Response:
    """An answer from before the database went away may be kept for a second; an event is accepted never."""

    def ask() -> httpx.Response | None:
        answer = send(url, source, signed("github", secret, b"{}", message_id="m-2"), b"{}")
        assert answer.status_code in (401, 503), answer.text
        return answer if answer.status_code == 503 else None

    found: httpx.Response = eventually(ask, "503")
    return found


def test_commands(url: str, token: str, source: str, tmp_path: Path) -> None:
    def command(*arguments: str, **kwargs: Any) -> Any:
        return run("webhooks", *arguments, env={"TIDEGATE_URL": url, "TIDEGATE_TOKEN": token}, **kwargs)

    made = command("set", source, "--scheme", "github", "--event-type", "hub")
    assert made.returncode == 0, made.stderr
    found = re.search(r"shown only once\): ([0-9a-f]{64})", made.stdout)
    assert found is not None and f"address: /v1/webhooks/{source}" in made.stdout
    body = b"{}"
    assert send(url, source, signed("github", found[1], body), body).status_code == 202
    (tmp_path / "secret").write_text("a secret from a file\n")
    rotated = command("rotate", source, "--secret-file", str(tmp_path / "secret"), "--keep", "1h", "--json")
    shown = json.loads(rotated.stdout)
    assert shown["secret"] is None and len(shown["secrets"]) == 2
    assert send(url, source, signed("github", "a secret from a file", body), body).status_code == 202
    assert fingerprint("a secret from a file") in command("show", source).stdout
    assert command("retire", source, fingerprint(found[1])).returncode == 0
    assert send(url, source, signed("github", found[1], body), body).status_code == 401
    changed = command("set", source, "--scheme", "stripe", "--secret-file", "-", "--tolerance", "1m",
                      input="whsec_from_standard_input\n")  # fmt: skip
    assert changed.returncode == 0, changed.stderr
    listed = json.loads(command("list", "--json").stdout)["webhooks"]
    [mine] = [w for w in listed if w["source"] == source]
    assert (mine["scheme"], mine["tolerance_seconds"], mine["event_type"]) == ("stripe", 60, None)
    assert source in command("list").stdout
    for wrong, status in (
        (["set", source, "--scheme", "paypal"], 2),
        (["set", source, "--scheme", "standard", "--tolerance", "1500ms"], 2),
        (["rotate", source, "--ask", "--secret-file", "x"], 2),
        (["rotate", source, "--secret-file", str(tmp_path / "none")], 2),
        (["rotate", source], 1),  # Stripe's secrets are Stripe's
        (["show", "nobody"], 1),
    ):
        assert command(*wrong).returncode == status, wrong
    assert command("delete", source).returncode == 0
    assert command("show", source).returncode == 1


def test_the_commands_in_the_documentation_run(database_url: str) -> None:
    text = (ROOT / "docs" / "webhooks.md").read_text()
    first, second = blocks(text, "bash")
    with api(database_url) as (_, url):
        told = shell(first, url)
        assert '"status":"accepted"' in told and "invoice.paid" in told
        assert "acme.billing" in shell(second, url)
    [event] = rows(database_url, "select type, external_id, occurred_at from tidegate.workflow_events")
    assert (event["type"], event["external_id"]) == ("invoice.paid", "msg_1")
