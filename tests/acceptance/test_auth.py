"""Tokens on real processes: every route with every scope, the first token, revocation, where a secret may be seen."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest

from tests.acceptance.conftest import DEMO, ROOT
from tests.processes import PATIENCE_SECONDS, Process, api, run, tidegate, worker
from tidegate.client import AsyncClient, Client
from tidegate.embedded import EmbeddedPostgres
from tidegate.errors import InvalidInput, RequestRefused
from tidegate.flow.accept import lookups
from tidegate.model.token import SCOPES

UNKNOWN = "tg_" + "0" * 43
BODIES: dict[str, Any] = {"/v1/events": {"type": "a.b", "source": "matrix"}}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def secrets(shared_url: str) -> dict[str, str]:
    """A token for each scope, made on the database: it is how the first one comes to be."""
    return {scope: create(shared_url, scope, "--scope", scope) for scope in SCOPES}


def create(database_url: str, *arguments: str) -> str:
    done = run("token", "create", *arguments, env={"TIDEGATE_DATABASE_URL": database_url})
    assert done.returncode == 0, done.stderr
    secret: str = done.stdout.strip()
    assert re.fullmatch(r"tg_\w{49}", secret) and secret not in done.stderr
    return secret


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def rows(database_url: str, query: str, *arguments: Any) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        connection = await asyncpg.connect(database_url)
        try:
            return [dict(row) for row in await connection.fetch(query, *arguments)]
        finally:
            await connection.close()

    return asyncio.run(ask())


def operations(http: httpx.Client, url: str) -> list[tuple[str, str, str | None]]:
    """Method, path and scope of every operation in the document."""
    document = http.get(f"{url}/openapi.json").json()
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            scopes = [scope for entry in operation["security"] for scope in entry["token"]]
            found.append((method.upper(), path, scopes[0] if scopes else None))
    assert len(found) > 40
    return found


def test_every_route_with_every_scope(http: httpx.Client, url: str, secrets: dict[str, str]) -> None:
    for method, path, needed in operations(http, url):
        # Things that do not exist: whoever may ask is told so, nobody else gets that far.
        address = url + re.sub(r"\{\w+\}", lambda _: str(uuid.uuid4()), path)
        body = BODIES.get(path)
        for scope, secret in [(None, None), *secrets.items()]:
            answer = http.request(method, address, json=body, headers=bearer(secret) if secret else {})
            told = answer.headers.get("www-authenticate")
            case = (method, path, scope, answer.status_code)
            if path.startswith("/v1/webhooks/"):  # a token is no signature
                assert (answer.status_code, told) == (401, 'Signature realm="tidegate"'), case
                continue
            if needed is None or scope in (needed, "admin"):
                assert answer.status_code not in (401, 403, 500) and told is None, case
                continue
            problem = answer.json()
            assert answer.headers["content-type"] == "application/problem+json", case
            assert answer.headers["cache-control"] == "no-store", case
            if scope is None:
                assert (answer.status_code, problem["status"], told) == (401, 401, 'Bearer realm="tidegate"'), case
            else:
                assert (answer.status_code, problem["status"]) == (403, 403), case
                assert f"the scope {needed}" in problem["detail"], case
                assert told is not None and f'scope="{needed}"' in told and "insufficient_scope" in told, case


def test_head_is_guarded_like_get(http: httpx.Client, url: str) -> None:
    assert http.head(f"{url}/v1/events").status_code == 401
    assert http.head(f"{url}/livez").status_code == 200


@pytest.mark.parametrize(
    "authorization", [f"Bearer {UNKNOWN}", "Bearer", "Basic YTpi", "nonsense", "Bearer " + "x" * 5000]
)
def test_what_is_no_token(http: httpx.Client, url: str, authorization: str) -> None:
    for method, path in (("GET", "/v1/runs"), ("POST", "/v1/events")):
        answer = http.request(method, url + path, headers={"authorization": authorization})
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer"), answer.text
        assert UNKNOWN not in answer.text


def test_nobody_without_a_token_makes_us_read_a_body(http: httpx.Client, url: str) -> None:
    answer = http.post(f"{url}/v1/events", content=b"x" * 3_000_000)
    assert answer.status_code == 401


def test_publishing_bound_to_sources(http: httpx.Client, url: str, shared_url: str) -> None:
    mine = bearer(create(shared_url, "shop", "--scope", "publish", "--source", "shop.*", "--source", "crm"))

    def publish(events: Any, **headers: str) -> httpx.Response:
        return http.post(f"{url}/v1/events", json=events, headers=mine | headers)

    def event(source: str) -> dict[str, str]:
        return {"type": "a.b", "source": source}

    assert publish(event("shop.api")).status_code == publish(event("crm")).status_code == 202
    assert publish([event("shop.a"), event("shop.b")]).status_code == 202
    for source in ("shop", "crm.x", "xcrm", "bank"):
        refused = publish(event(source))
        assert refused.status_code == 403 and refused.json()["errors"][0]["field"] == "source", source
        assert f"publish for the source {source}" in refused.json()["detail"]
    batch = publish([event("shop.none"), event("bank")])
    assert batch.status_code == 403 and [e["field"] for e in batch.json()["errors"]] == ["[1].source"]
    cloud = {"ce-specversion": "1.0", "ce-id": "1", "ce-type": "a.b", "ce-source": "bank"}
    assert publish({}, **cloud).status_code == 403
    assert publish({}, **cloud | {"ce-source": "shop.cloud"}).status_code == 202
    assert publish({}, **cloud | {"ce-source": "%62ank"}).status_code == 403  # as it will be stored
    structured = {"specversion": "1.0", "id": "1", "type": "a.b", "source": "bank"}
    inside = structured | {"source": "shop.inside", "id": "2"}
    for media, body, status in (
        ("cloudevents+json", structured, 403), ("cloudevents-batch+json", [inside, structured], 403),
        ("cloudevents+json", inside, 202), ("cloudevents-batch+json", [inside | {"id": "3"}], 202),
    ):  # fmt: skip
        assert publish(body, **{"content-type": f"application/{media}"}).status_code == status, (media, status)
    found = rows(shared_url, "select source from tidegate.workflow_events where source in ('bank', 'shop.none')")
    assert found == []


def test_who_acted_is_the_tokens_name(http: httpx.Client, url: str, shared_url: str) -> None:
    operator = bearer(create(shared_url, "night-shift", "--scope", "operate")) | {"x-tidegate-actor": "somebody-else"}
    chief = bearer(create(shared_url, "chief", "--scope", "admin")) | {"x-tidegate-actor": "somebody-else"}
    at = f"{url}/admin/sources/audited"
    assert http.post(f"{at}/pause", json={"reason": "x"}, headers=operator).status_code == 200
    assert http.post(f"{at}/resume", headers=operator).status_code == 200
    assert http.put(f"{at}/limit", json={"limit": 1, "interval_ms": 1000}, headers=chief).status_code == 200
    found = rows(shared_url, "select * from tidegate.audit_log where subject = 'audited' order by id")
    assert [(r["actor"], r["action"]) for r in found] == [
        ("night-shift", "source.pause"), ("night-shift", "source.resume"), ("chief", "source.limit"),
    ]  # fmt: skip
    assert json.loads(found[1]["before"])["is_paused"] and not json.loads(found[1]["after"])["is_paused"]


def test_the_life_of_a_token_over_the_api(
    http: httpx.Client, url: str, shared_url: str, secrets: dict[str, str]
) -> None:
    chief = bearer(secrets["admin"])
    body = {"name": "short", "scopes": ["read"], "expires_in_ms": 3_600_000}
    made = http.post(f"{url}/admin/tokens", json=body, headers=chief)
    assert made.status_code == 201
    secret, token = made.json()["secret"], made.json()["token"]
    assert token["created_by"] == "admin" and token["expires_at"] is not None
    assert http.post(f"{url}/admin/tokens", json=body, headers=chief).status_code == 409
    wrong = http.post(f"{url}/admin/tokens", json={"name": "x", "scopes": ["root"]}, headers=chief)
    assert wrong.status_code == 422 and wrong.json()["errors"][0]["field"].startswith("scopes")
    assert http.get(f"{url}/v1/runs", headers=bearer(secret)).status_code == 200
    listed = http.get(f"{url}/admin/tokens", headers=chief)
    assert secret not in listed.text and "hash" not in listed.text
    assert token["id"] in [t["id"] for t in listed.json()["tokens"]]
    assert http.delete(f"{url}/admin/tokens/{secret}", headers=chief).status_code == 404
    gone = http.delete(f"{url}/admin/tokens/short", headers=chief)
    assert gone.status_code == 200 and gone.json()["revoked_at"] is not None
    refused = http.get(f"{url}/v1/runs", headers=bearer(secret))  # at once, where it was revoked
    assert refused.status_code == 401 and "revoked" in refused.json()["detail"]
    assert 'error="invalid_token"' in refused.headers["www-authenticate"]
    found = rows(shared_url, "select actor, action from tidegate.audit_log where subject = $1 order by id", token["id"])
    assert [tuple(r.values()) for r in found] == [("admin", "token.create"), ("admin", "token.revoke")]


def test_revoked_elsewhere_within_a_second(http: httpx.Client, url: str, shared_url: str) -> None:
    secret = create(shared_url, "leaked", "--scope", "read", "--scope", "publish")
    assert http.get(f"{url}/v1/runs", headers=bearer(secret)).status_code == 200
    assert run("token", "revoke", "leaked", env={"TIDEGATE_DATABASE_URL": shared_url}).returncode == 0
    assert lookups.KEEP_SECONDS <= 1  # how long a busy machine takes is not judged
    until(lambda: http.get(f"{url}/v1/runs", headers=bearer(secret)).status_code == 401)
    assert http.post(f"{url}/v1/events", json=BODIES["/v1/events"], headers=bearer(secret)).status_code == 401


def test_an_expired_token(http: httpx.Client, url: str, shared_url: str) -> None:
    secret = create(shared_url, "brief", "--scope", "read", "--expires", "1ms")
    refused = http.get(f"{url}/v1/runs", headers=bearer(secret))
    assert refused.status_code == 401 and "expired" in refused.json()["detail"]


def test_commands_and_clients_send_the_token(
    url: str, secrets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(*arguments: str, **env: str) -> Any:
        return run(*arguments, env={"TIDEGATE_URL": url} | env)

    refused = command("runs", "list")
    assert refused.returncode == 1 and "TIDEGATE_TOKEN" in refused.stderr
    assert command("runs", "list", TIDEGATE_TOKEN=secrets["read"]).returncode == 0
    assert command("sources", "pause", "x", TIDEGATE_TOKEN=secrets["read"]).returncode == 1
    made = command("token", "create", "by-api", "--scope", "read", "--json", TIDEGATE_TOKEN=secrets["admin"])
    assert made.returncode == 0 and json.loads(made.stdout)["token"]["created_by"] == "admin"
    assert "by-api" in command("token", "list", TIDEGATE_TOKEN=secrets["admin"]).stdout
    assert command("token", "revoke", "by-api", TIDEGATE_TOKEN=secrets["admin"]).returncode == 0
    assert command("token", "revoke", "by-api", TIDEGATE_TOKEN=secrets["operate"]).returncode == 1
    with Client(url) as client, pytest.raises(RequestRefused) as caught:
        client.publish("a.b", source="client")
    assert caught.value.status == 401
    with Client(url, secrets["publish"]) as client:
        assert client.publish("a.b", source="client").status == "accepted"
    monkeypatch.setenv("TIDEGATE_TOKEN", secrets["publish"] + "\n")
    with Client(url) as client:
        assert client.publish("a.b", source="client").status == "accepted"

    async def publish() -> str:
        async with AsyncClient(url) as client:
            return (await client.publish("a.b", source="client")).status

    assert asyncio.run(publish()) == "accepted"
    with pytest.raises(InvalidInput):
        Client(url, "tg_\N{SNOWMAN}")


def passed_on_by_nginx(url: str, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """What a stranger gets through nginx on the same machine whose only line is `proxy_pass URL`: it speaks HTTP/1.0
    and names the API itself as `Host`, with nothing of the stranger but the rest of the head."""
    target, content = urlsplit(url), json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.0\r\nHost: {target.netloc}\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
        "User-Agent: curl/8.5.0\r\nAccept: */*\r\nContent-Type: application/json\r\n\r\n"
    )
    answer = b""
    with socket.create_connection((target.hostname, target.port), timeout=PATIENCE_SECONDS) as nginx:
        nginx.sendall(head.encode() + content)
        while part := nginx.recv(65536):
            answer += part
    return int(answer.split()[1]), answer


def test_a_stranger_behind_a_proxy_on_this_machine_gets_nothing(
    http: httpx.Client, database_url: str, tmp_path: Path
) -> None:
    """With no setting at all, and no token yet: nobody but the owner of the database makes the first."""
    with tidegate("serve", "--port", "0", cwd=tmp_path, TIDEGATE_DATABASE_URL=database_url) as process:
        url = process.wait_for_line(r"API on (http://\S+)")[1]
        body = {"name": "mine", "scopes": ["admin"]}
        wanted = (("/admin/tokens", body), ("/v1/events", BODIES["/v1/events"]), ("/admin/sources/x/pause", {}))
        for path, given in wanted:
            status, answer = passed_on_by_nginx(url, "POST", path, given)
            assert status == 401 and b"tidegate token create" in answer, answer
        assert http.post(f"{url}/admin/tokens", json=body).status_code == 401
        assert run("token", "create", "x", "--scope", "admin", env={"TIDEGATE_URL": url}, cwd=tmp_path).returncode == 1
        assert rows(database_url, "select name from tidegate.api_tokens") == []
        ready = http.get(f"{url}/readyz").json()
        assert (ready["status"], ready["warnings"]) == ("ok", []) and "process.notice" not in process.output
        first = bearer(create(database_url, "first", "--scope", "admin"))
        assert http.get(f"{url}/v1/runs", headers=first).status_code == 200
        assert http.get(f"{url}/admin/event-health", headers=first).json()["warnings"] == []


def test_an_open_api_says_so(http: httpx.Client, database_url: str) -> None:
    with api(database_url, TIDEGATE_AUTH="off") as (process, url):
        assert http.get(f"{url}/v1/runs", headers=bearer(UNKNOWN)).status_code == 200
        line = json.loads(process.wait_for_line(r".*process\.notice.*")[0])
        assert (line["code"], line["level"]) == ("open_access", "warning") and "TIDEGATE_AUTH=on" in line["message"]
        for path in ("/readyz", "/admin/event-health"):
            [warning] = http.get(url + path).json()["warnings"]
            assert warning["code"] == "open_access" and "without a token" in warning["message"], path
        assert "warning: the API is open" in run("health", env={"TIDEGATE_URL": url}).stdout
        create(database_url, "first", "--scope", "admin")  # it was said to be open, and stays so
        assert http.get(f"{url}/v1/runs").status_code == 200


def test_a_refused_token_is_told_with_its_address(http: httpx.Client, database_url: str) -> None:
    proxies = {"TIDEGATE_AUTH": "on", "TIDEGATE_TRUSTED_PROXIES": "127.0.0.0/8, 10.0.0.0/8"}
    with api(database_url, **proxies) as (process, url):
        create(database_url, "old", "--scope", "read")

        def told(address: str) -> dict[str, Any]:
            line: dict[str, Any] = json.loads(
                process.wait_for_line(rf'.*"address":"{address}".*"access\.refused".*')[0]
            )
            return line

        for path in ("/v1/runs", "/v1/events"):
            for _ in range(5):
                answer = http.request(
                    "POST" if path == "/v1/events" else "GET",
                    url + path,
                    headers=bearer(UNKNOWN) | {"x-forwarded-for": "198.51.100.9, 203.0.113.7, 10.1.2.3"},
                    json=BODIES["/v1/events"],
                )
                assert answer.status_code == 401
        assert told("203.0.113.7")["level"] == "warning"
        assert "198.51.100.9" not in process.output and UNKNOWN not in process.output
        for n in range(200):  # many addresses do not flood the log either
            http.get(f"{url}/v1/runs", headers=bearer(UNKNOWN) | {"x-forwarded-for": f"192.0.2.{n}"})
        lines = [line for line in process.lines if "access.refused" in line]
        assert 1 < len(lines) < 200
        secret = create(database_url, "gone", "--scope", "read")
        assert run("token", "revoke", "gone", env={"TIDEGATE_DATABASE_URL": database_url}).returncode == 0
        until(lambda: "gone" in refused_lines(http, url, secret, process))


def refused_lines(http: httpx.Client, url: str, secret: str, process: Process) -> str:
    """The lines about refused tokens, after one more was refused."""
    answer = http.get(f"{url}/v1/runs", headers=bearer(secret) | {"x-forwarded-for": "203.0.113.8"})
    assert answer.status_code == 401
    return "".join(line for line in process.lines if "access.refused" in line and "203.0.113.8" in line)


def until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_token_for_networks(http: httpx.Client, database_url: str) -> None:
    secret = create(database_url, "crm", "--scope", "read", "--scope", "publish", "--network", "203.0.113.0/24")
    for proxies, forwarded, expected in (
        ({}, "203.0.113.7", 401),  # anyone can send the header
        ({"TIDEGATE_TRUSTED_PROXIES": "127.0.0.1"}, "203.0.113.7", 200),
        ({"TIDEGATE_TRUSTED_PROXIES": "127.0.0.1"}, "203.0.113.7, 198.51.100.9", 401),
        ({"TIDEGATE_TRUSTED_PROXIES": "127.0.0.1"}, "", 401),
    ):
        with api(database_url, TIDEGATE_AUTH="on", **proxies) as (_, url):
            headers = bearer(secret) | ({"x-forwarded-for": forwarded} if forwarded else {})
            answer = http.get(f"{url}/v1/runs", headers=headers)
            assert answer.status_code == expected, (proxies, forwarded)
            published = http.post(f"{url}/v1/events", headers=headers, json=BODIES["/v1/events"])
            assert published.status_code == (202 if expected == 200 else 401)
            if expected == 401:
                assert "is not valid from this address" in answer.json()["detail"]


def test_a_token_with_a_rate(http: httpx.Client, url: str, shared_url: str) -> None:
    slow = bearer(create(shared_url, "slow", "--scope", "read", "--scope", "publish", "--rate", "3/h"))
    answers = [http.get(f"{url}/v1/runs", headers=slow) for _ in range(2)]
    answers += [http.post(f"{url}/v1/events", headers=slow, json=BODIES["/v1/events"]) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200, 202, 429]
    assert 1000 < int(answers[-1].headers["retry-after"]) <= 1200
    assert "slow has reached its rate limit" in answers[-1].json()["detail"]
    other = bearer(create(shared_url, "other-one", "--scope", "read"))
    assert http.get(f"{url}/v1/runs", headers=other).status_code == 200


def test_the_audit_log_names_token_and_address(http: httpx.Client, database_url: str) -> None:
    secret = create(database_url, "night", "--scope", "admin")
    [token] = rows(database_url, "select id from tidegate.api_tokens")
    with api(database_url, TIDEGATE_AUTH="on", TIDEGATE_TRUSTED_PROXIES="127.0.0.1") as (_, url):
        headers = bearer(secret) | {"forwarded": 'for="[2001:db8::7]:4711";proto=https'}
        assert http.post(f"{url}/admin/sources/audited/pause", headers=headers).status_code == 200
        assert http.post(f"{url}/admin/sources/audited/resume", headers=bearer(secret)).status_code == 200
        resumed, paused, created = http.get(f"{url}/admin/audit", headers=bearer(secret)).json()["entries"]
        assert (paused["token_id"], paused["address"]) == (str(token["id"]), "2001:db8::7")
        assert (resumed["token_id"], resumed["address"]) == (str(token["id"]), "127.0.0.1")
        assert (created["action"], created["token_id"], created["address"]) == ("token.create", None, None)
        listed = run("audit", "list", env={"TIDEGATE_URL": url, "TIDEGATE_TOKEN": secret})
        assert "2001:db8::7" in listed.stdout and "FROM" in listed.stdout


def test_a_workers_metrics_ask_for_the_same_token(http: httpx.Client, shared_url: str, secrets: dict[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with worker(shared_url, DEMO, TIDEGATE_METRICS_PORT=str(port), TIDEGATE_AUTH="on"):
        at = f"http://127.0.0.1:{port}/metrics"
        refused = http.get(at)
        assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Bearer")
        assert http.get(at, headers=bearer(secrets["publish"])).status_code == 403
        assert "tidegate_" in http.get(at, headers=bearer(secrets["read"])).text


def test_a_secret_is_nowhere_but_in_the_answer_that_made_it(
    http: httpx.Client,
    guarded: tuple[Process, str],
    shared_url: str,
    secrets: dict[str, str],
    postgres: EmbeddedPostgres,
) -> None:
    process, url = guarded
    for method, path, _ in operations(http, url):
        address = url + re.sub(r"\{\w+\}", lambda _: str(uuid.uuid4()), path)
        for secret in secrets.values():
            answer = http.request(method, address, headers=bearer(secret), content=b"{")
            assert secret not in answer.text + str(answer.headers), (method, path)
    dumped = []
    for table in rows(
        shared_url, "select table_name as name from information_schema.tables where table_schema = 'tidegate'"
    ):
        found = rows(shared_url, f"select t::text as line from tidegate.{table['name']} t")
        dumped += [row["line"] for row in found]
    text = "\n".join(dumped) + process.output
    assert "token.create" in text
    for secret in secrets.values():
        assert secret not in text and secret[3:46] not in text


def test_the_commands_in_the_documentation_run(database_url: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "auth.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert blocks
    with api(database_url, TIDEGATE_AUTH="on") as (_, url):
        path = f"{Path(ROOT, '.venv', 'bin')}:/usr/bin:/bin"
        script = "set -eu\n" + "".join(blocks).replace("http://127.0.0.1:8700", url)
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
            env={"PATH": path, "TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_URL": url},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
