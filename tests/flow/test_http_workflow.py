"""Workflows that post their runs to a URL: a real server on loopback, a real database with a moved clock."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from tests.conftest import Clock
from tests.flow.http_receiver import LOOPBACK, Receiver, dripping
from tests.flow.test_dispatch import publish
from tidegate import Tidegate, __version__
from tidegate.errors import Conflict, InvalidInput, NonRetryable, RetryAfter
from tidegate.flow import control
from tidegate.flow.code import http
from tidegate.flow.code.http import MAX_ANSWER_BYTES, GuardedTransport, HttpWorkflows, Outgoing, post
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.flow.run.runner import Runner
from tidegate.model.addresses import parse_allowed
from tidegate.model.budget import Budget
from tidegate.model.http_workflow import HttpConfig
from tidegate.model.retry import RetryPolicy
from tidegate.store.db import Connection, Database

POLICY = RetryPolicy(base_ms=1000, factor=2, max_ms=8000, jitter_ratio=0, max_attempts=3)
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
CANARY = "Bearer canary-7f3a/b"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


class World:
    """A definition with a trigger, and a worker without code, turned by hand."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._dispatch = Dispatch(database, batch_size=500, after_launch=lambda: None)
        self._workflows: dict[str, Any] = {}
        self._http = HttpWorkflows(database, LOOPBACK)
        self.runner = Runner(database, self._workflows, worker="t", concurrency=10, lease_ms=60_000, policy=POLICY)

    async def define(self, url: str, slug: str = "hook", **fields: Any) -> None:
        body = {"slug": slug, "kind": "http", "url": url, "secret": SECRET, "allow_private": True} | fields
        await control.create_workflow(self.database, body, allowed=LOOPBACK.allowed, actor="ann")
        await control.create_trigger(self.database, slug, {"name": "t", "event_type": "go"}, "ann")

    async def turn(self) -> None:
        await self._dispatch.run_once()
        found = await self._http.refresh(self._workflows)
        if found is not None:
            self.runner.serve(found)
        while await self.runner.run_once():
            await asyncio.wait_for(self.runner.idle(), 30)


@pytest.fixture
async def world(database: Database, clock: Clock) -> AsyncIterator[World]:
    made = World(database)
    yield made
    await made.runner.stop(0)


async def the_run(connection: Connection) -> Any:
    return await connection.fetchrow("select * from tidegate.workflow_runs order by id limit 1")


async def the_step(connection: Connection) -> Any:
    return await connection.fetchrow("select * from tidegate.workflow_run_steps")


def config(receiver: Receiver, **fields: Any) -> HttpConfig:
    return HttpConfig(**({"url": receiver.url, "secret": SECRET, "allow_private": True} | fields))


async def send(receiver: Receiver, **fields: Any) -> Any:
    return await post(config(receiver, **fields), [SECRET], "id-1", b"{}", LOOPBACK)


async def test_a_run_is_posted_signed_and_its_answer_is_the_output(
    connection: Connection, world: World, receiver: Receiver
) -> None:
    receiver.says(200, {"receipt": 7})
    await world.define(receiver.url, headers={"Authorization": CANARY})
    event_id = await publish(connection, "go", amount=7, ctx="a name that code would trip over")
    await world.turn()
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", {"receipt": 7})
    [(headers, body)] = receiver.seen
    sent = json.loads(body)
    assert (sent["run_id"], sent["workflow"], sent["attempt"]) == (str(run["id"]), "hook", 1)
    assert sent["parameters"] == sent["event"]["payload"] == {"amount": 7, "ctx": "a name that code would trip over"}
    assert (sent["event"]["id"], sent["event"]["type"]) == (str(event_id or sent["event"]["id"]), "go")
    assert receiver.paths == ["/hook?x=1"]
    assert headers["host"] == f"127.0.0.1:{receiver.port}"
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"] == f"tidegate/{__version__}"
    assert headers["authorization"] == CANARY
    assert headers["webhook-id"] == headers["idempotency-key"] == str(run["id"])
    assert abs(int(headers["webhook-timestamp"]) - datetime.now(UTC).timestamp()) < 60
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(b"k" * 32, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"


def test_the_signature_is_that_of_the_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the Standard Webhooks specification."""
    monkeypatch.setattr(http, "utc_now", lambda: datetime.fromtimestamp(1614265330, UTC))
    headers = http.signed_headers(
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"], "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}'
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_what_passes_is_tried_again_with_the_same_id(
    connection: Connection, clock: Clock, world: World, receiver: Receiver
) -> None:
    receiver.says(500, b"oh\nno")
    await world.define(receiver.url)
    await publish(connection, "go")
    await world.turn()
    run, step = await the_run(connection), await the_step(connection)
    assert (run["status"], step["name"], step["retry_state"], step["retry_attempts"]) == (
        "pending", "request", "scheduled", 1,
    )  # fmt: skip
    assert "answered 500: oh no" in run["warning"]
    receiver.says(200, b"fine")
    await clock.advance(1500)
    await world.turn()
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", "fine")
    assert len({headers["webhook-id"] for headers, _ in receiver.seen}) == 1
    assert [json.loads(body)["attempt"] for _, body in receiver.seen] == [1, 2]


async def test_given_up_it_is_a_dead_letter(
    connection: Connection, clock: Clock, world: World, receiver: Receiver
) -> None:
    receiver.says(502)
    await world.define(receiver.url)
    await publish(connection, "go")
    for _ in range(5):
        await world.turn()
        await clock.advance(10_000)
    assert len(receiver.seen) == POLICY.max_attempts
    assert (await the_run(connection))["status"] == "failed"
    assert await connection.fetchval("select kind from tidegate.dead_letters") == "step"


async def test_a_refusal_is_final_and_tells_no_secrets(
    connection: Connection, world: World, receiver: Receiver
) -> None:
    token = CANARY.removeprefix("Bearer ")
    receiver.says(422, f"you sent {CANARY}\x00 and {SECRET}, {token} {'x' * 3000}".encode())
    await world.define(receiver.url, headers={"Authorization": CANARY})
    await publish(connection, "go")
    await world.turn()
    run = await the_run(connection)
    assert run["status"] == "failed" and len(receiver.seen) == 1
    assert "127.0.0.1 answered 422: you sent [hidden] and [hidden], [hidden] xxx" in run["error"]
    assert len(run["error"]) < 1500
    for table in (
        "workflow_runs",
        "workflow_run_steps",
        "dead_letters",
        "audit_log",
        "workflow_event_trigger_versions",
    ):
        text = str([tuple(row) for row in await connection.fetch(f"select t::text from tidegate.{table} t")])
        assert "canary" not in text and SECRET[6:] not in text, table


async def test_retry_after_decides_when(connection: Connection, clock: Clock, world: World, receiver: Receiver) -> None:
    receiver.says(429, b"slow down", retry_after="120")
    await world.define(receiver.url)
    await publish(connection, "go")
    await world.turn()
    run = await the_run(connection)
    assert run["status"] == "pending"
    assert abs((run["next_attempt_at"] - clock.now).total_seconds() - 120) < 5
    receiver.says(204)
    await clock.advance(121_000)
    await world.turn()
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", None)


async def test_a_receiver_closes_a_budget_for_everyone(
    connection: Connection, clock: Clock, database: Database, world: World, receiver: Receiver
) -> None:
    receiver.says(429, b"slow down", retry_after="120", tidegate_everyone="openai")
    await control.put_budget(database, Budget("openai", "100/s"), "ann")
    await world.define(receiver.url)
    [trigger_id] = [row[0] for row in await connection.fetch("select id from tidegate.workflow_event_triggers")]
    await control.update_trigger(database, trigger_id, {"budgets": ["openai"]}, "ann")
    await publish(connection, "go")
    await world.turn()
    await publish(connection, "go")
    await world.turn()
    held = await connection.fetchrow(
        "select budget, last_error, next_attempt_at from tidegate.workflow_trigger_deliveries "
        "where retry_state = 'scheduled'"
    )
    assert held["budget"] == "openai" and "closed: " in held["last_error"] and "slow down" in held["last_error"]
    assert abs((held["next_attempt_at"] - clock.now).total_seconds() - 120) < 5
    assert len(receiver.seen) == 1


async def test_a_change_counts_for_the_next_request(
    connection: Connection, clock: Clock, database: Database, world: World, receiver: Receiver
) -> None:
    receiver.says(503)
    await world.define(receiver.url)
    await publish(connection, "go")
    await world.turn()
    fields = {"url": f"http://127.0.0.1:{receiver.port}/new", "secret": None}
    changed = await control.update_workflow(database, "hook", fields, allowed=LOOPBACK.allowed, actor="bob")
    assert changed.secret is not None and changed.definition.version == 2
    receiver.says(200)
    await clock.advance(1500)
    await world.turn()
    assert receiver.paths == ["/hook?x=1", "/new"]
    headers, body = receiver.seen[-1]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(changed.secret[6:])
    assert base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() in headers["webhook-signature"]
    rows = await connection.fetch(
        "select actor, action, after::text from tidegate.audit_log where action like 'workf%'"
    )
    assert [tuple(row)[:2] for row in rows] == [("ann", "workflow.create"), ("bob", "workflow.update")]
    assert changed.secret not in str(rows) and '"secret": "changed"' in rows[1]["after"]


@pytest.mark.parametrize(
    ("body", "output"),
    [
        (b"", None),
        (b" \n", None),
        (b"null", None),
        (b'{"a": [1, 2.5, "x"]}', {"a": [1, 2.5, "x"]}),
        (b"0", 0),
        (b"plain", "plain"),
        ("Grüße".encode(), "Grüße"),
        (b"\xff\xfe", None),
        (b'"a\\u0000"', None),
        (b"a\x00b", None),
        (b"[" * 100_000, "[" * 100_000),
        (b'"' + b"x" * (MAX_ANSWER_BYTES - 2) + b'"', "x" * (MAX_ANSWER_BYTES - 2)),
        (b'"' + b"x" * MAX_ANSWER_BYTES + b'"', None),
    ],
    ids=range(13),
)
async def test_what_becomes_of_an_answer(receiver: Receiver, body: bytes, output: Any) -> None:
    receiver.says(200, body)
    assert await send(receiver) == output


async def test_an_endless_answer_is_cut_off(receiver: Receiver) -> None:
    receiver.says(200, b"x" * 4 * MAX_ANSWER_BYTES, content_length=str(10**12))
    assert await asyncio.wait_for(send(receiver), 20) is None


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "gzip, gzip", "nonsense"])
async def test_a_packed_answer_is_not_unpacked(receiver: Receiver, encoding: str, status: int) -> None:
    """So a megabyte that becomes a gigabyte stays a megabyte."""
    receiver.says(status, gzip.compress(b"x" * 10_000_000), content_encoding=encoding)
    if status == 200:
        assert await send(receiver) is None
    else:
        with pytest.raises(ConnectionError, match=r"answered 500$"):
            await send(receiver)
    assert receiver.seen[0][0]["accept-encoding"] == "identity"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422, 451])
async def test_final_refusals(receiver: Receiver, status: int) -> None:
    receiver.says(status, b"why\r\n  not")
    with pytest.raises(NonRetryable, match=f"127.0.0.1 answered {status}: why not"):
        await send(receiver)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
async def test_passing_failures(receiver: Receiver, status: int) -> None:
    receiver.says(status, retry_after="soon")
    with pytest.raises(ConnectionError, match=f"answered {status}"):
        await send(receiver)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(receiver: Receiver, status: int) -> None:
    receiver.says(status, location="http://169.254.169.254/latest/meta-data/")
    with pytest.raises(NonRetryable, match="a redirect; they are not followed"):
        await send(receiver)
    assert len(receiver.seen) == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        (" 30 ", 30),
        ("0" * 20 + "5", 5),
        ("9" * 12, 86_400),
        ("9" * 5000, 86_400),
        ("DATE", 90),
        ("NO ZONE", 90),
        ("ASCTIME", 90),
        ("FAR", 86_400),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_as_seconds_and_as_a_date(receiver: Receiver, status: int, text: str, seconds: float) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=90)
    dates = {
        "DATE": format_datetime(soon, usegmt=True),
        "NO ZONE": soon.strftime("%a, %d %b %Y %H:%M:%S"),
        "ASCTIME": soon.strftime("%a %b %d %H:%M:%S %Y"),
        "FAR": "Fri, 31 Dec 9999 23:59:59 GMT",
    }
    receiver.says(status, retry_after=dates.get(text, text))
    with pytest.raises(RetryAfter) as caught:
        await send(receiver)
    assert abs(caught.value.seconds - seconds) < 5


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "1.5", "1e9", "soon", "\xb2", "Sun, 06 Nov 1994 08:49:37 GMT", "Mon, 99 Foo 2026", "5, 6"],
    ids=range(10),
)
async def test_a_retry_after_that_says_nothing_leaves_it_to_the_policy(receiver: Receiver, text: str) -> None:
    """Not at once: a receiver whose clock is wrong would use up every attempt within a second."""
    receiver.says(503, retry_after=text)
    with pytest.raises(ConnectionError, match="answered 503"):
        await send(receiver)


async def test_a_slow_receiver_is_not_waited_for(receiver: Receiver) -> None:
    receiver.delay = 2
    with pytest.raises(TimeoutError, match=r"127\.0\.0\.1 did not answer within 200 ms"):
        await send(receiver, timeout_ms=200)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"", b""),
        (OK, b"x: y\r\n"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        (OK + b"content-length: 100000\r\n\r\n", b"x"),
        (OK + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (OK + b"\r\n", b" "),
        (b"HTTP/1.1 500 No\r\ncontent-length: 100000\r\n\r\n", b"x"),
    ],
    ids=["nothing", "headers", "hints", "body", "chunks", "until closed", "refusal"],
)
async def test_the_timeout_is_for_the_whole_answer(receiver: Receiver, start: bytes, drop: bytes) -> None:
    """Each byte comes well within the timeout, the last one never."""
    with dripping(start, drop, 0.05) as (url, _):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="did not answer within 500 ms"):
            await send(receiver, url=url, timeout_ms=500)
        assert time.monotonic() - began > 0.4


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (OK + b"transfer-encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"),
        (OK + b"\r\n", b"x" * 65536),
    ],
    ids=["chunks", "until closed"],
)
async def test_the_cap_counts_what_arrives(receiver: Receiver, start: bytes, drop: bytes) -> None:
    with dripping(start, drop, 0) as (url, taken):
        assert await asyncio.wait_for(send(receiver, url=url), 20) is None
    assert taken() < 16 * MAX_ANSWER_BYTES  # what the system's buffers take included


@pytest.mark.parametrize(
    "start",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1_000_000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x28",
    ],
    ids=["ssh", "headers", "chunks", "length", "tls"],
)
async def test_what_is_not_http_is_tried_again(receiver: Receiver, start: bytes) -> None:
    with dripping(start, b"", 60) as (url, _), pytest.raises(ConnectionError, match=r"to 127\.0\.0\.1 failed"):
        await send(receiver, url=url, timeout_ms=20_000)


async def test_nobody_listens(receiver: Receiver) -> None:
    receiver.close()
    with pytest.raises(ConnectionError, match=r"the request to 127\.0\.0\.1 failed"):
        await send(receiver)


@pytest.mark.parametrize(("definition", "setting"), [(False, False), (True, False), (False, True)])
async def test_private_addresses_need_both_the_definition_and_the_setting(
    receiver: Receiver, definition: bool, setting: bool
) -> None:
    for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"):
        one = config(receiver, url=f"http://{host}:{receiver.port}/", allow_private=definition)
        with pytest.raises(NonRetryable, match="is a loopback address"):
            await post(one, [SECRET], "id-1", b"{}", LOOPBACK if setting else Outgoing())
    assert receiver.seen == []


@pytest.mark.parametrize(
    ("allowed", "is_let"),
    [
        ("127.0.0.0/8:{port}", True), ("127.0.0.1", True), ("localhost:{port}", True), ("localhost", True),
        ("127.0.0.0/8:1", False), ("localhost:1", False), ("10.0.0.0/8, hooks.internal", False), ("::1", False),
    ],
)  # fmt: skip
async def test_what_the_operator_allows(receiver: Receiver, allowed: str, is_let: bool) -> None:
    receiver.says(200, b"1")
    by = Outgoing(parse_allowed(allowed.format(port=receiver.port)))

    async def here(_: str, __: int) -> list[str]:
        return ["127.0.0.1"]

    async with httpx.AsyncClient(transport=GuardedTransport(by, here)) as client:
        sending = client.post(f"http://localhost:{receiver.port}/")
        if is_let:
            assert (await sending).status_code == 200
        else:
            with pytest.raises(NonRetryable, match=f"TIDEGATE_HTTP_ALLOW names it with port {receiver.port}"):
                await sending


async def test_no_proxy_of_the_environment(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    receiver.says(200, b"1")
    assert await send(receiver) == 1


async def test_the_checked_address_is_the_one_connected_to(receiver: Receiver) -> None:
    """A name that leads to a public address when it is checked and to loopback when asked again gains nothing."""
    asked: list[str] = []

    async def rebinding(host: str, _: int) -> list[str]:
        asked.append(host)
        return ["1.1.1.1"] if len(asked) == 1 else ["127.0.0.1"]

    tried: list[tuple[str, str, Any]] = []

    async def connect(request: httpx.Request) -> httpx.Response:
        tried.append((request.url.host, request.headers["host"], request.extensions["sni_hostname"]))
        return httpx.Response(204)

    for scheme in ("http", "https"):
        asked.clear()
        transport = GuardedTransport(Outgoing(), rebinding)
        transport._inner = httpx.MockTransport(connect)  # type: ignore[assignment]
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            await client.post(f"{scheme}://rebind.example:{receiver.port}/")
        assert asked == ["rebind.example"]
    assert tried == [("1.1.1.1", f"rebind.example:{receiver.port}", "rebind.example")] * 2


async def test_one_private_address_among_public_ones_is_refused() -> None:
    async def both(_: str, __: int) -> list[str]:
        return ["1.1.1.1", "10.0.0.1"]

    async with httpx.AsyncClient(transport=GuardedTransport(Outgoing(), both)) as client:
        with pytest.raises(NonRetryable, match=r"two\.example is a private address"):
            await client.post("http://two.example/")


async def test_the_next_address_is_tried_when_one_does_not_answer(receiver: Receiver) -> None:
    async def two(_: str, __: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]  # the receiver listens on the second only

    async with httpx.AsyncClient(transport=GuardedTransport(LOOPBACK, two)) as client:
        assert (await client.post(f"http://two.example:{receiver.port}/", content=b"{}")).status_code == 200
    assert receiver.seen[0][0]["host"] == f"two.example:{receiver.port}"


async def test_code_does_not_take_over_a_slug_nor_the_other_way_round(
    database: Database, world: World, receiver: Receiver
) -> None:
    app = Tidegate()

    @app.workflow(on="go")
    async def hook(ctx: Any) -> None: ...

    @app.workflow(on="go")
    async def coded(ctx: Any) -> None: ...

    await world.define(receiver.url)
    with pytest.raises(Conflict, match="there is a workflow hook of kind http"):
        await database.run(app.register)
    del app.workflows["hook"]
    await database.run(app.register)
    body = {"slug": "coded", "kind": "http", "url": "https://example.com/"}
    with pytest.raises(Conflict, match="coded already exists"):
        await control.create_workflow(database, body, allowed=(), actor="ann")
    with pytest.raises(Conflict, match="declared in code"):
        await control.update_workflow(database, "coded", {"url": "https://e.com"}, allowed=(), actor="ann")


async def test_allow_private_needs_the_setting_when_it_is_asked_for(database: Database) -> None:
    body = {"slug": "h", "kind": "http", "url": "http://127.0.0.1/", "allow_private": True}
    with pytest.raises(InvalidInput) as caught:
        await control.create_workflow(database, body, allowed=(), actor="ann")
    assert [e.field for e in caught.value.errors] == ["allow_private"]
