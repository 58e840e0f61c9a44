"""Workflows in any language, as users see them: the receiver of the docs, a real API, a worker without code."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
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
from tests.flow.http_receiver import Receiver
from tests.processes import Process, api, run, worker

DOCS = (ROOT / "docs" / "http-workflows.md").read_text()
SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
ALLOW = {"TIDEGATE_HTTP_ALLOW": "127.0.0.0/8, localhost"}
URL = "https://example.com/hook"
# Every table but the one that holds them.
TABLES = """
select table_name from information_schema.tables
 where table_schema = 'tidegate' and table_type = 'BASE TABLE' and table_name <> 'workflow_definitions'
"""
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
    file.write_text("from tidegate import Tidegate\n\napp = Tidegate()\n")
    with worker(shared_url, file, **ALLOW) as process:
        yield process


@contextlib.contextmanager
def documented(language: str, command: str, folder: Path) -> Iterator[str]:
    """The receiver of the docs, which checks signatures; its address."""
    found = re.search(rf"```{language}\n(.*?)```", DOCS, re.DOTALL)
    assert found is not None
    file = folder / f"receiver.{language}"
    file.write_text(found[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"WEBHOOK_SECRET": SECRET, "PORT": str(port)}
    process = subprocess.Popen([command, str(file)], env=env, stderr=subprocess.DEVNULL)
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


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with documented("python", sys.executable, tmp_path_factory.mktemp("receiver")) as url:
        yield url


@pytest.fixture
def hostile() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def act(server: str, method: str, path: str, body: Any = None) -> httpx.Response:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-tidegate-actor": "ann"}
    return _http.request(method, f"{server}{path}", content=content, headers=headers)


def create(server: str, slug: str, **fields: Any) -> httpx.Response:
    return act(server, "POST", "/v1/workflows", {"slug": slug, "kind": "http", "url": URL} | fields)


def finished(server: str, slug: str, *statuses: str) -> dict[str, Any]:
    def found() -> Any:
        runs = ok(_http.get(f"{server}/v1/runs", params={"workflow": slug}))["runs"]
        return next((r for r in runs if r["status"] in (statuses or ("succeeded", "failed"))), None)

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


def test_the_receiver_in_node(server: str, a_worker: Process, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node here")
    with documented("js", node, tmp_path) as url:
        for slug, secret in (("node", SECRET), ("node-stranger", None)):
            ok(create(server, slug, url=url, secret=secret, allow_private=True), 201)
        assert launch(server, "node", n=21)["output"] == {"doubled": 42}
        assert "answered 401" in launch(server, "node-stranger", n=1)["error"]


def test_a_receiver_changes_over_when_it_likes(server: str, a_worker: Process, receiver: str) -> None:
    """It knows the old secret only, and takes requests until that one ends."""
    ok(create(server, "turning", url=receiver, secret=SECRET, allow_private=True), 201)
    rotated = ok(act(server, "POST", "/v1/workflows/turning/rotate"))
    assert rotated["secret"].startswith("whsec_") and rotated["changed"]
    assert launch(server, "turning", n=4)["output"] == {"doubled": 8}
    ended = ok(act(server, "POST", "/v1/workflows/turning/rotate", {"keep_ms": 0}))
    assert ended["config"]["old_secrets_until"] == []
    ok(act(server, "POST", "/v1/events", {"type": "turning.go", "source": "shop", "payload": {"n": 1}}), 202)
    failed = finished(server, "turning", "failed")
    assert "answered 401" in failed["error"]


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
                "has_secret": True, "old_secrets_until": []}  # fmt: skip
    assert made["config"] == expected
    rotated = ok(act(server, "PATCH", "/v1/workflows/shown", {"secret": None}))
    assert rotated["secret"] not in (None, secret) and rotated["version"] == 2
    answers = [act(server, "GET", "/v1/workflows/shown"), act(server, "GET", "/v1/workflows")]
    answers += [create(server, "shown", headers=headers), create(server, "shown", headers=headers, secret=secret)]
    answers += [act(server, "PATCH", "/v1/workflows/shown", {"timeout_ms": 1000})]
    assert [a.status_code for a in answers] == [200, 200, 200, 409, 200]
    assert answers[0].json()["config"] == expected | {"old_secrets_until": rotated["config"]["old_secrets_until"]}
    assert len(rotated["config"]["old_secrets_until"]) == 1
    rows = asyncio.run(_rows(shared_url, "select l::text from tidegate.audit_log l where subject = 'shown'"))
    assert len(rows) == 3
    for text in (*(a.text for a in answers), *rows, private_api[0].output):
        assert not any(hidden in text for hidden in (secret[6:], rotated["secret"][6:], "canary"))


async def _rows(url: str, statement: str) -> list[str]:
    connection = await asyncpg.connect(url)
    try:
        return [row[0] for row in await connection.fetch(statement)]
    finally:
        await connection.close()


@pytest.fixture
def own_api(database_url: str) -> Iterator[tuple[Process, str]]:
    with api(database_url, **ALLOW | {"TIDEGATE_LOG_LEVEL": "debug"}) as found:
        yield found


def test_no_secret_is_anywhere(
    database_url: str, own_api: tuple[Process, str], tmp_path: Path, hostile: Receiver
) -> None:
    """Planted secrets, a receiver that repeats what it was sent, and every place that people look at."""
    process, server = own_api
    given = "whsec_" + base64.b64encode(b"planted-canary-planted-canary-" * 2).decode()
    file = tmp_path / "app.py"
    file.write_text("from tidegate import Tidegate\n\napp = Tidegate()\n")
    slug, env = "planted", {"TIDEGATE_URL": server}
    headers = {"Authorization": "Bearer canary/token-77", "x-key": "canary-key-88"}
    ok(create(server, slug, url=hostile.url, secret=given, headers=headers, allow_private=True), 201)
    made = ok(act(server, "POST", f"/v1/workflows/{slug}/rotate"))["secret"]
    parts = [given[6:], made[6:], "canary/token-77", "canary\\/token-77", "canary-key-88"]
    hostile.says(400, {"error": "no", "sent": headers, "token": "canary/token-77", "secrets": [given, made]})
    settings = ALLOW | {"TIDEGATE_LOG_LEVEL": "debug", "TIDEGATE_STEP_RETRY_BASE_MS": "60000"}
    with worker(database_url, file, **settings) as working:
        failed = launch(server, slug, n=1)
        assert "answered 400" in failed["error"] and "[hidden]" in failed["error"]
        body = hostile.answer()[2].replace(b"/", b"\\/")
        hostile.answer = lambda: (503, {}, body)
        event = {"id": "planted-event", "type": f"{slug}.go", "source": "shop", "payload": {"n": 2}}
        ok(act(server, "POST", "/v1/events", event), 202)
        eventually(lambda: "step.failed" in working.output, "a request that is to be sent again")
        run_id = eventually(lambda: next((r["id"] for r in ok(_http.get(
            f"{server}/v1/runs", params={"workflow": slug}))["runs"] if r["warning"]), None), "its run")  # fmt: skip
        refused = act(
            server, "PATCH", f"/v1/workflows/{slug}", {"secret": given + "!", "headers": {"a b": "canary/token-77"}}
        )
        texts = {
            path: ok_text(act(server, "GET", path))
            for path in (
                "/v1/workflows", f"/v1/workflows/{slug}", f"/v1/workflows/{slug}/triggers", "/v1/runs",
                f"/v1/runs/{failed['id']}", f"/v1/runs/{run_id}", "/v1/events/planted-event",
                "/v1/events/planted-event/explain", "/v1/deliveries", "/admin/event-health",
                "/admin/retries?kind=steps", "/metrics",
            )
        }  # fmt: skip
        shows = ["workflows", "show", slug]
        for command in (
            ("workflows", "list"), shows, [*shows, "--json"], ("runs", "show", failed["id"]), ("runs", "show", run_id),
            ("explain", "planted-event"), ("workflows", "update", slug, "--timeout", "9s", "--json"),
        ):  # fmt: skip
            done = run(*command, env=env)
            assert done.returncode == 0, done.stderr
            texts[" ".join(command)] = done.stdout + done.stderr
    texts |= {"refused": ok_text(refused, 422), "api log": process.output, "worker log": working.output}
    for table in asyncio.run(_rows(database_url, TABLES)):
        rows = asyncio.run(_rows(database_url, f"select t::text from tidegate.{table} t"))
        texts[table] = "\n".join(rows)
    for place, text in texts.items():
        assert not any(part in text for part in parts), place
    assert all("[hidden]" in texts[t] for t in ("workflow_runs", "workflow_run_steps", "dead_letters", "worker log"))


def ok_text(answer: httpx.Response, status: int = 200) -> str:
    assert answer.status_code == status, answer.text
    return answer.text


def test_the_same_again_is_no_error_and_another_is_a_conflict(server: str) -> None:
    ok(create(server, "twice", timeout_ms=1000), 201)
    again = ok(create(server, "twice", timeout_ms=1000))
    assert (again["version"], again["secret"]) == (1, None)
    problem = ok(create(server, "twice", timeout_ms=2000), 409)
    [error] = problem["errors"]
    assert error["field"] == "slug" and "is taken by a workflow of kind http; use another name" in error["message"]


def test_delete_waits_for_triggers_and_keeps_history(server: str, a_worker: Process, receiver: str) -> None:
    ok(create(server, "gone", url=receiver, secret=SECRET, allow_private=True), 201)
    done = launch(server, "gone", n=1)
    problem = ok(act(server, "DELETE", "/v1/workflows/gone"), 409)
    [trigger] = ok(act(server, "GET", "/v1/workflows/gone/triggers"))["triggers"]
    [error] = problem["errors"]
    assert problem["detail"] == "workflow gone is in use"
    assert error["field"] == "triggers" and f"on ({trigger['id']}) would launch it" in error["message"]
    ok(act(server, "DELETE", f"/v1/workflows/gone/triggers/{trigger['id']}"))
    ok(act(server, "DELETE", "/v1/workflows/gone"))
    for method, path in (("GET", ""), ("DELETE", ""), ("PATCH", ""), ("POST", "/rotate"), ("GET", "/triggers")):
        ok(act(server, method, f"/v1/workflows/gone{path}"), 404)
    assert [r["id"] for r in ok(act(server, "GET", "/v1/runs?workflow=gone"))["runs"]] == [done["id"]]
    ok(act(server, "GET", f"/v1/runs/{done['id']}"))
    assert "gone" not in [w["slug"] for w in ok(act(server, "GET", "/v1/workflows"))["workflows"]]
    assert ok(create(server, "gone"), 201)["version"] == 1


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"slug": "a b"}, ["slug"]),
    ({"slug": ""}, ["slug"]),
    ({"slug": ".."}, ["slug"]),
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
    env = {"TIDEGATE_URL": server}
    made = run("workflows", "create", "cli", "--url", URL, "--timeout", "20s", "--header", "x-team=a", env=env)
    assert made.returncode == 0, made.stderr
    assert "created cli (http, v1): POST https://example.com/hook, 20s" in made.stdout
    assert re.search(r"secret \(shown only once\): whsec_\S{44}\n", made.stdout)
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
    assert refused.returncode == 1 and "url: points to a private address" in refused.stderr
    again = run("workflows", "create", "cli", "--url", URL, "--timeout", "20s", "--header", "x-team=a", env=env)
    assert again.stdout == "unchanged cli (http, v1): POST https://example.com/hook, 20s\n"
    changed = run("workflows", "update", "cli", "--url", f"{URL}/2", env=env)
    assert changed.stdout == "changed cli (http, v2): POST https://example.com/hook/2, 20s\n"
    assert run("workflows", "update", "cli", env=env).returncode == 2
    assert "is for from-file, not cli" in run("workflows", "update", "cli", "-f", str(file), env=env).stderr
    rotated = run("workflows", "rotate", "cli", "--keep", "2h", env=env)
    assert "rotated cli (http, v3)" in rotated.stdout and "signed with an old secret too, until 20" in rotated.stdout
    assert re.search(r"secret \(shown only once\): whsec_\S{44}\n", rotated.stdout)
    assert "old secret" not in run("workflows", "rotate", "cli", "--keep", "0s", env=env).stdout
    refused = run("workflows", "rotate", "cli", "--keep", "31d", env=env)
    assert refused.returncode == 1 and "--keep: must lie between 0 and" in refused.stderr
    assert run("workflows", "delete", "from-file", env=env).returncode == 0
    assert run("workflows", "show", "from-file", env=env).returncode == 1
