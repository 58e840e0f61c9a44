"""Secrets and payloads planted as canaries: whatever the processes write or answer, they are not in it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from tests.processes import PATIENCE_SECONDS, api, run, tidegate, worker
from tidegate.embedded import ROLE
from tidegate.model.masking import masked

SECRETS = {
    "database": "canaryDbPw8812",
    "redis": "canaryRedisPw8813",
    "token": "tg_canaryToken8814" + "x" * 34,
    "query": "canaryQuery8815",
    "header": "canaryHeader8816",
    "signing": "whsec_" + "Y2FuYXJ5ODgxN2NhbmFyeTg4MTdjYW5hcnk4ODE3",
    "workflow header": "canaryWorkflowHeader8818",
}
PAYLOAD = {
    "payload": "canaryPayload8821",
    "nested": "canaryNested8822",
    "metadata": "canaryMetadata8823",
    "refused": "canaryRefused8824",
    "key": "canaryKey8825",
}
APP = """
from tidegate import Tidegate, NonRetryable

app = Tidegate()

@app.workflow(on="order.created", idempotency_key="{{ event.payload.key }}")
async def fulfil(ctx, card: str):
    await ctx.step("charge", lambda: card)
    return {"card": card}

@app.workflow(on="order.created", where="event.payload.card > 5")
async def cannot_compare(ctx): ...

@app.workflow(on="order.created", params={"n": "{{ event.payload.card | divided_by: 0 }}"})
async def cannot_render(ctx, n): ...

@app.workflow(on="order.created", params={"n": "{{ event.payload.deep.nested.missing }}"})
async def cannot_find(ctx, n): ...

@app.workflow(on="order.broken")
async def broken(ctx, card: str):
    raise NonRetryable("x" * 100_000)

@app.workflow(on="order.created", params={"number": "{{ event.payload.card }}"})
async def cannot_call(ctx, number: int): ...
"""
READS = (
    "/metrics", "/admin/event-health", "/admin/sources", "/admin/triggers", "/admin/audit?limit=500", "/admin/tokens",
    "/admin/retries?kind=events", "/admin/retries?kind=deliveries", "/admin/retries?kind=steps", "/openapi.json",
    "/admin/dead-letters", "/v1/workflows", "/v1/workflows/fulfil/triggers", "/readyz", "/livez", "/docs", "/",
)  # fmt: skip
COMMANDS = (
    ("health", "--json"), ("sources", "list", "--json"), ("triggers", "list", "--json"), ("audit", "list", "--json"),
    ("token", "list", "--json"), ("workflows", "list", "--json"), ("retries", "list", "--json"),
    ("dlq", "list", "--json"),
    ("workflows", "show", "hook", "--json"), ("audit", "list"), ("workflows", "list"),
)  # fmt: skip


def with_password(url: str, password: str) -> str:
    return url.replace(f"{ROLE}@", f"{ROLE}:{password}@", 1)


def until(question: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.05)
    return answer


def bad_events() -> list[Any]:
    """Events that are refused, each with a canary where it is wrong."""
    canary, good = PAYLOAD["refused"], {"type": "order.created", "source": "shop"}
    return [
        good | {"payload": canary}, good | {"payload": [canary]}, good | {"ttl_ms": canary},
        good | {"metadata": canary},
        good | {"occurred_at": canary}, good | {"id": {"x": canary}}, good | {"correlation_id": [canary]},
        good | {"payload": {"x": canary * 20_000}}, good | {"type": {"x": canary}}, [good, good | {"payload": canary}],
        canary, good | {"payload": {"x": canary + "\x00"}},
    ]  # fmt: skip


def drive(http: httpx.Client) -> dict[str, str]:
    """Use the API rightly and wrongly; what it answered to what was wrong."""
    event = {
        "type": "order.created", "source": "shop", "metadata": {"m": PAYLOAD["metadata"]},
        "payload": {"card": PAYLOAD["payload"], "deep": {"nested": [PAYLOAD["nested"]]}, "key": PAYLOAD["key"]},
    }  # fmt: skip
    planted = {"cookie": f"session={SECRETS['header']}", "x-api-key": SECRETS["header"]}
    assert http.post("/v1/events", json=event | {"id": "one"}, headers=planted).status_code == 202
    assert http.post("/v1/events", json=event | {"type": "order.broken"}).status_code == 202
    hook = {"slug": "hook", "kind": "http", "url": "https://shop.example/", "secret": SECRETS["signing"],
            "headers": {"authorization": SECRETS["workflow header"]}}  # fmt: skip
    assert http.post("/v1/workflows", json=hook).status_code == 201
    answers = [http.post("/v1/events", json=body, headers=planted) for body in bad_events()]
    answers.append(http.post("/v1/events", json=event | {"id": "one", "payload": {"x": PAYLOAD["refused"]}}))
    answers.append(http.post("/v1/events", content=b'{"type": "' + PAYLOAD["refused"].encode()))
    answers += [
        http.get(path, params={"token": SECRETS["query"], "access_token": SECRETS["query"]})
        for path in ("/v1/runs", "/v1/events", "/admin/audit", "/nothing/here", "/v1/events/none")
    ]
    for scheme in ("Bearer ", "Basic ", ""):
        answers.append(http.get("/v1/runs", headers={"authorization": scheme + SECRETS["token"]}))
    answers.append(http.delete(f"/admin/tokens/{SECRETS['token']}"))
    answers.append(http.post("/v1/workflows", json=hook | {"slug": "x", "secret": SECRETS["signing"] + "!"}))
    answers.append(http.patch("/v1/workflows/hook", json={"headers": {"a b": SECRETS["workflow header"]}}))
    answers.append(http.post("/v1/workflows", json=hook | {"url": f"https://u:{SECRETS['query']}@shop.example/"}))
    refused = {f"{a.request.method} {a.request.url.path} #{n}": a for n, a in enumerate(answers)}
    assert not [(place, answer.text) for place, answer in refused.items() if not 400 <= answer.status_code < 500]
    return {place: answer.text + str(answer.headers) for place, answer in refused.items()}


# What the commands print does not depend on the processes' logs.
@pytest.mark.parametrize(("log_format", "commands"), [("json", COMMANDS), ("console", ())], ids=["json", "console"])
def test_canary_secret_nowhere(
    database_url: str, tmp_path: Path, log_format: str, commands: Sequence[tuple[str, ...]]
) -> None:
    (tmp_path / "app.py").write_text(APP)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    guarded = with_password(database_url, SECRETS["database"])
    env = {
        "TIDEGATE_AUTH": "on", "TIDEGATE_QUEUE": "bullmq", "TIDEGATE_LOG_LEVEL": "debug",
        "TIDEGATE_LOG_FORMAT": log_format,
        "TIDEGATE_REDIS_URL": f"redis://user:{SECRETS['redis']}@127.0.0.1:1/0", "TIDEGATE_METRICS_PORT": str(port),
    }  # fmt: skip
    made = run("token", "create", "chief", "--scope", "admin", env={"TIDEGATE_DATABASE_URL": guarded})
    chief = made.stdout.strip()
    texts = {"token create": made.stderr}
    with api(guarded, **env) as (serving, url), worker(guarded, tmp_path / "app.py", **env) as working:
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {chief}"}, trust_env=False) as http:
            texts |= drive(http)
            until(lambda: {"succeeded", "failed"} <= {r["status"] for r in http.get("/v1/runs").json()["runs"]})
            shown = http.get("/v1/events").text + http.get("/v1/runs").text  # where payloads belong
            assert PAYLOAD["payload"] in shown and PAYLOAD["nested"] in shown
            texts |= {path: http.get(path).text for path in READS}
            at = f"http://127.0.0.1:{port}/metrics"
            texts["worker's metrics"] = http.get(at).text
        for command in commands:
            done = run(*command, env={"TIDEGATE_URL": url, "TIDEGATE_TOKEN": chief})
            assert done.returncode == 0, done.stderr
            texts[" ".join(command)] = done.stdout + done.stderr
        until(lambda: "queue." in working.output)  # a Redis that cannot be reached was logged
    texts |= {"api log": serving.output, "worker log": working.output, "audit": audit_rows(database_url)}
    assert all(texts.values())
    for place, text in texts.items():
        for name, canary in (SECRETS | PAYLOAD | {"chief": chief}).items():
            assert canary not in text and canary.removeprefix("whsec_") not in text, f"{name} in {place}"
    assert max(len(line) for line in working.output.splitlines()) < 12_000


def audit_rows(url: str) -> str:
    async def ask() -> str:
        connection = await asyncpg.connect(url)
        try:
            return str(await connection.fetch("select a::text from tidegate.audit_log a"))
        finally:
            await connection.close()

    return asyncio.run(ask())


DATABASE = SECRETS["database"]


@pytest.mark.parametrize(
    "env",
    [
        {"TIDEGATE_DATABASE_URL": f"postgresql://u:{DATABASE}@127.0.0.1:1/db"},
        {"TIDEGATE_DATABASE_URL": f"postgresql://u:{DATABASE}@127.0.0.1:port/db"},
        {"TIDEGATE_DATABASE_URL": f"postgresql://u:{DATABASE}@[::1/db"},
        {"TIDEGATE_DATABASE_URL": f"mysql://u:{DATABASE}@127.0.0.1/db"},
        {"TIDEGATE_DATABASE_URL": f"postgresql://127.0.0.1:1/db?user=u&password={DATABASE}"},
        {"TIDEGATE_DATABASE_URL": f"postgresql://127.0.0.1:1/db?password={DATABASE}&sslmode=nonsense"},
        {"TIDEGATE_DATABASE_URL": "postgresql://127.0.0.1:1/db", "TIDEGATE_QUEUE": "bullmq",
         "TIDEGATE_REDIS_URL": f"redis://u:{DATABASE}@host:port/x"},
        {"TIDEGATE_DATABASE_URL": "postgresql://127.0.0.1:1/db", "TIDEGATE_TOKEN": DATABASE, "TIDEGATE_PORT": "x"},
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_without_their_secrets(env: dict[str, str]) -> None:
    done = run("migrate", env=env)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert DATABASE not in done.stdout + done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("url", [f"http://u:{DATABASE}@127.0.0.1:1", f"http://127.0.0.1:1/?token={DATABASE}"])
def test_a_server_that_does_not_answer(url: str) -> None:
    done = run("runs", "list", env={"TIDEGATE_URL": url, "TIDEGATE_TOKEN": SECRETS["query"]})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert DATABASE not in done.stderr and SECRETS["query"] not in done.stderr, done.stderr


def test_the_welcome_of_dev(database_url: str) -> None:
    env = {"TIDEGATE_DATABASE_URL": with_password(database_url, DATABASE)}
    with tidegate("dev", "--port", "0", **env) as process:
        line = process.wait_for_line("database:").string
        process.wait_for_line("Press Ctrl-C to stop")
        assert ":[hidden]@" in line and DATABASE not in process.output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:pw@h/db", "postgresql://u:[hidden]@h/db"),
        ("redis://:pw@h", "redis://:[hidden]@h"),
        ("to postgres://u:p%40w@h:1/db?x=1 and back", "to postgres://u:[hidden]@h:1/db?x=1 and back"),
        ("GET /x?token=abc&y=1", "GET /x?token=[hidden]&y=1"),
        ("host=h password=pw user=u", "host=h password=[hidden] user=u"),
        ("https://shop.example:8080/a@b", "https://shop.example:8080/a@b"),
        ("ERROR: no\nDETAIL:  Failing row contains (pw).\n\nabove", "ERROR: no\nDETAIL: [hidden]\n\nabove"),
        ("a = b, 3:4@5", "a = b, 3:4@5"),
        ("sent Bearer tg_pw" + "x" * 47 + " to", "sent Bearer tg_[hidden] to"),
        ("{'secret': 'whsec_pwpwpwpwpwpwpwpwpwpwpw/+abc='}", "{'secret': 'whsec_[hidden]'}"),
    ],
)
def test_what_is_hidden(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert json.dumps(shown) and not re.search("pw|abc", shown)
