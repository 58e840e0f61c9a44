"""Workflows in any language, as users see them: the receiver of the docs, a real API, a worker without code."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from tests.acceptance.conftest import ROOT
from tests.acceptance.test_sources import eventually, ok
from tests.processes import Process, api, run, worker

DOCS = (ROOT / "docs" / "http-workflows.md").read_text()
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
ALLOW = {"HEADGATE_HTTP_ALLOW_PRIVATE": "true"}
URL = "https://example.com/hook"
_http = httpx.Client(timeout=30, trust_env=False)


@pytest.fixture(scope="module", autouse=True)
def _close_http_client() -> Iterator[None]:
    yield
    _http.close()


@pytest.fixture(scope="module")
def private_api(shared_url: str) -> Iterator[tuple[Process, str]]:
    with api(shared_url, **ALLOW) as found:
        yield found


@pytest.fixture(scope="module")
def server(private_api: tuple[Process, str]) -> str:
    return private_api[1]


@pytest.fixture(scope="module")
def a_worker(shared_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A worker whose application has no workflows."""
    file = tmp_path_factory.mktemp("http") / "app.py"
    file.write_text("from headgate import Headgate\n\nhg = Headgate()\n")
    with worker(shared_url, file, **ALLOW) as process:
        yield process


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The receiver of the docs, which checks signatures; its address."""
    found = re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert found is not None
    file = tmp_path_factory.mktemp("receiver") / "receiver.py"
    file.write_text(found[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"WEBHOOK_SECRET": SECRET, "PORT": str(port)}
    process = subprocess.Popen([sys.executable, str(file)], env=env, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.kill()
        process.wait(10)


def act(server: str, method: str, path: str, body: Any = None) -> httpx.Response:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-headgate-actor": "ann"}
    return _http.request(method, f"{server}{path}", content=content, headers=headers)


def create(server: str, slug: str, **fields: Any) -> httpx.Response:
    return act(server, "POST", "/v1/workflows", {"slug": slug, "kind": "http", "url": URL} | fields)


def finished(server: str, slug: str) -> dict[str, Any]:
    def found() -> Any:
        runs = ok(_http.get(f"{server}/v1/runs", params={"workflow": slug}))["runs"]
        return next((r for r in runs if r["status"] in ("succeeded", "failed")), None)

    return dict(eventually(found, f"a finished run of {slug}"))


def launch(server: str, slug: str, **payload: Any) -> dict[str, Any]:
    trigger = {"name": "on", "event_type": f"{slug}.go"}
    ok(act(server, "POST", f"/v1/workflows/{slug}/triggers", trigger), 201)
    ok(act(server, "POST", "/v1/events", {"type": f"{slug}.go", "source": "shop", "payload": payload}), 202)
    return finished(server, slug)


def test_created_while_a_worker_runs_triggered_and_run(server: str, a_worker: Process, receiver: str) -> None:
    made = ok(create(server, "double", url=receiver, secret=SECRET, allow_private=True, timeout_ms=5000), 201)
    assert (made["kind"], made["parameters"], made["version"], made["created_by"]) == ("http", ["*"], 1, "ann")
    assert made["secret"] is None  # it was given, and need not be told
    done = launch(server, "double", n=21)
    assert (done["status"], done["output"]) == ("succeeded", {"doubled": 42})


def test_a_wrong_secret_fails_at_the_receiver_for_good(server: str, a_worker: Process, receiver: str) -> None:
    made = ok(create(server, "stranger", url=receiver, allow_private=True), 201)
    done = launch(server, "stranger", n=1)
    assert done["status"] == "failed" and "answered 401" in done["error"]
    assert made["secret"][6:] not in a_worker.output


def test_the_secret_is_shown_once_and_header_values_never(
    shared_url: str, server: str, private_api: tuple[Process, str]
) -> None:
    headers = {"Authorization": "Bearer canary-1"}
    made = ok(create(server, "shown", headers=headers), 201)
    secret = made["secret"]
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    expected = {"url": URL, "timeout_ms": 30_000, "header_names": ["Authorization"], "allow_private": False,
                "has_secret": True}  # fmt: skip
    assert made["config"] == expected
    rotated = ok(act(server, "PATCH", "/v1/workflows/shown", {"secret": None}))
    assert rotated["secret"] not in (None, secret) and rotated["version"] == 2
    answers = [act(server, "GET", "/v1/workflows/shown"), act(server, "GET", "/v1/workflows")]
    answers += [create(server, "shown", headers=headers), create(server, "shown", headers=headers, secret=secret)]
    answers += [act(server, "PATCH", "/v1/workflows/shown", {"timeout_ms": 1000})]
    assert [a.status_code for a in answers] == [200, 200, 200, 409, 200]
    assert answers[0].json()["config"] == expected
    rows = asyncio.run(_rows(shared_url, "select l::text from headgate.audit_log l where subject = 'shown'"))
    assert len(rows) == 3
    for text in (*(a.text for a in answers), *rows, private_api[0].output):
        assert not any(hidden in text for hidden in (secret[6:], rotated["secret"][6:], "canary"))


async def _rows(url: str, statement: str) -> list[str]:
    connection = await asyncpg.connect(url)
    try:
        return [row[0] for row in await connection.fetch(statement)]
    finally:
        await connection.close()


def test_the_same_again_is_no_error_and_another_is_a_conflict(server: str) -> None:
    ok(create(server, "twice", timeout_ms=1000), 201)
    again = ok(create(server, "twice", timeout_ms=1000))
    assert (again["version"], again["secret"]) == (1, None)
    problem = ok(create(server, "twice", timeout_ms=2000), 409)
    assert problem["errors"] == [{"field": "slug", "message": "is taken, by a http workflow"}]


def test_delete_waits_for_triggers_and_history(server: str) -> None:
    ok(create(server, "gone"), 201)
    made = ok(act(server, "POST", "/v1/workflows/gone/triggers", {"name": "t", "event_type": "gone.go"}), 201)
    assert "has 1 triggers (t)" in ok(act(server, "DELETE", "/v1/workflows/gone"), 409)["detail"]
    ok(act(server, "DELETE", f"/v1/workflows/gone/triggers/{made['id']}"))
    assert "on record" in ok(act(server, "DELETE", "/v1/workflows/gone"), 409)["detail"]
    ok(create(server, "fresh"), 201)
    ok(act(server, "DELETE", "/v1/workflows/fresh"))
    ok(act(server, "GET", "/v1/workflows/fresh"), 404)
    ok(act(server, "DELETE", "/v1/workflows/fresh"), 404)
    ok(act(server, "PATCH", "/v1/workflows/fresh", {}), 404)


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"slug": "a b"}, ["slug"]),
    ({"slug": ""}, ["slug"]),
    ({"slug": "a\x00"}, ["slug"]),
    ({"slug": 7}, ["slug"]),
    ({"kind": "python"}, ["kind"]),
    ({"url": "ftp://e.com"}, ["url"]),
    ({"url": "https://u:p@e.com/"}, ["url"]),
    ({"url": "http://169.254.169.254/latest"}, ["url"]),
    ({"url": "http://0x7f.1/"}, ["url"]),
    ({"url": "http://[::ffff:10.0.0.1]/"}, ["url"]),
    ({"url": "http://0177.0.0.1/", "allow_private": True}, ["url"]),
    ({"url": None}, ["url"]),
    ({"secret": "whsec_short"}, ["secret"]),
    ({"secret": "no prefix"}, ["secret"]),
    ({"secret": "whsec_" + "é" * 40}, ["secret"]),
    ({"timeout_ms": 0}, ["timeout_ms"]),
    ({"timeout_ms": 10**30}, ["timeout_ms"]),
    ({"timeout_ms": "5s"}, ["timeout_ms"]),
    ({"headers": {"Host": "evil"}}, ["headers.Host"]),
    ({"headers": {"webhook-id": "x"}}, ["headers.webhook-id"]),
    ({"headers": {"a b": "x"}}, ["headers.a b"]),
    ({"headers": {"x": "a\r\nb: c"}}, ["headers.x"]),
    ({"headers": {"x": ""}}, ["headers.x"]),
    ({"headers": {"x": "é"}}, ["headers.x"]),
    ({"headers": {"a": "1", "A": "2"}}, ["headers"]),
    ({"headers": {str(n): "x" for n in range(21)}}, ["headers"]),
    ({"headers": ["x"]}, ["headers"]),
    ({"allow_private": "yes"}, ["allow_private"]),
    ({"nonsense": 1}, ["nonsense"]),
    ({"slug": "-/-", "url": "x", "timeout_ms": 1, "secret": "x"}, ["secret", "slug", "timeout_ms", "url"]),
]


@pytest.mark.parametrize(("fields", "named"), WRONG, ids=[f"{i}-{n[0]}" for i, (_, n) in enumerate(WRONG)])
def test_wrong_input_names_the_field(server: str, fields: dict[str, Any], named: list[str]) -> None:
    answer = create(server, **({"slug": "wrong"} | fields))
    assert sorted(e["field"] for e in ok(answer, 422)["errors"]) == named
    assert "whsec_short" not in answer.text
    ok(act(server, "GET", "/v1/workflows/wrong"), 404)


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b"{", b'"x"', b'{"slug": "x"}'])
def test_what_is_no_workflow_at_all(server: str, body: bytes) -> None:
    assert act(server, "POST", "/v1/workflows", body).status_code in (400, 422)


def test_private_addresses_need_the_setting(address: str) -> None:
    problem = ok(create(address, "inside", url="http://127.0.0.1:9/", allow_private=True), 422)
    assert [e["field"] for e in problem["errors"]] == ["allow_private"]


def test_a_name_that_leads_to_loopback_is_refused(server: str, receiver: str, a_worker: Process) -> None:
    """The worker has the setting, the definition does not allow it; found out when the name is resolved."""
    port = receiver.rsplit(":", 1)[1]
    ok(create(server, "rebound", url=f"http://localhost:{port}", secret=SECRET), 201)
    done = launch(server, "rebound", n=1)
    assert done["status"] == "failed" and "localhost is a loopback address" in done["error"]


def test_the_command(server: str, tmp_path: Path) -> None:
    env = {"HEADGATE_URL": server}
    made = run("workflows", "create", "cli", "--url", URL, "--timeout", "20s", "--header", "x-team=a", env=env)
    assert made.returncode == 0, made.stderr
    assert "created cli (http, v1): POST https://example.com/hook, 20s" in made.stdout
    assert re.search(r"secret, shown this once: whsec_\S{44}\n", made.stdout)
    file = tmp_path / "hook.yaml"
    file.write_text(f"slug: from-file\nurl: {URL}\nsecret: {SECRET}\n")
    made = run("workflows", "create", "-f", str(file), "--json", env=env)
    assert made.returncode == 0 and json.loads(made.stdout)["slug"] == "from-file"
    assert SECRET not in made.stdout
    assert "http" in run("workflows", "list", env=env).stdout
    shown = run("workflows", "show", "cli", env=env)
    assert shown.stdout == "cli (http, v1): POST https://example.com/hook, 20s\n"
    assert run("workflows", "create", env=env).returncode == 2
    refused = run("workflows", "create", "bad", "--url", "http://10.0.0.1/", env=env)
    assert refused.returncode == 1 and "url: names a private address" in refused.stderr
    assert run("workflows", "delete", "from-file", env=env).returncode == 0
    assert run("workflows", "show", "from-file", env=env).returncode == 1
