"""Stored secrets in real processes: keys change while all runs, and a missing key loses nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.test_sources import eventually, ok
from tests.acceptance.test_webhooks import rows, signed
from tests.flow.http_receiver import Receiver
from tests.processes import api, run, worker
from tidegate.model.secrets import new_key

SIGNING = b"k" * 32
STORED = """
    select string_agg(row, ' ') as text from (
      select w::text as row from tidegate.webhooks w union all
      select d::text from tidegate.workflow_definitions d) as rows
"""
ALLOWED = {"TIDEGATE_HTTP_ALLOW": "127.0.0.0/8"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    file = tmp_path / "app.py"
    file.write_text("from tidegate import Tidegate\n\napp = Tidegate()\n")
    return file


def ask(method: str, url: str, **more: Any) -> httpx.Response:
    return httpx.request(method, url, timeout=30, trust_env=False, **more)


def send(url: str, source: str, headers: dict[str, str]) -> httpx.Response:
    return ask(
        "POST", f"{url}/v1/webhooks/{source}", content=b"{}", headers={"content-type": "application/json", **headers}
    )


def set_webhook(url: str, source: str) -> dict[str, Any]:
    done: dict[str, Any] = ok(ask("PUT", f"{url}/admin/sources/{source}/webhook", json={"scheme": "github"}))
    return done


def define(url: str, receiver: Receiver) -> str:
    """A webhook whose events are posted by an http workflow; the secret of its sender."""
    body: dict[str, Any] = {"slug": "hook", "kind": "http", "url": receiver.url, "allow_private": True}
    body["secret"] = "whsec_" + base64.b64encode(SIGNING).decode()
    ok(ask("POST", f"{url}/v1/workflows", json=body), 201)
    trigger = {"name": "t", "event_type": "*", "event_source": "acme"}
    ok(ask("POST", f"{url}/v1/workflows/hook/triggers", json=trigger), 201)
    secret: str = set_webhook(url, "acme")["secret"]
    return secret


def is_signed(headers: dict[str, str], body: bytes) -> bool:
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    signature = base64.b64encode(hmac.new(SIGNING, content, hashlib.sha256).digest()).decode()
    return headers["webhook-signature"] == f"v1,{signature}"


class Sender(threading.Thread):
    """Sends one webhook after the other until it is stopped; `answers` are the statuses."""

    def __init__(self, url: str, secret: str) -> None:
        super().__init__(daemon=True)
        self._url, self._secret = url, secret
        self._stopping = threading.Event()
        self.answers: list[int] = []

    def run(self) -> None:
        while not self._stopping.is_set():
            headers = signed("github", self._secret, b"{}", message_id=f"m-{len(self.answers)}")
            self.answers.append(send(self._url, "acme", headers).status_code)

    def stop(self) -> None:
        self._stopping.set()
        self.join(60)


def test_keys_change_while_everything_runs(database_url: str, app: Path, receiver: Receiver) -> None:
    printed = [run("secrets", "key").stdout.strip() for _ in range(2)]
    assert len(set(printed)) == 2
    a, b = printed
    with api(database_url, **ALLOWED) as (_, url):
        secret = define(url, receiver)
    plain = (secret, base64.b64encode(SIGNING).decode())
    assert all(text in rows(database_url, STORED)[0]["text"] for text in plain)
    both = {"TIDEGATE_SECRETS_KEY": f"{b},{a}", **ALLOWED}
    with api(database_url, **both) as (serving, url), worker(database_url, app, **both) as working:
        for process in (serving, working):
            process.wait_for_line("secrets_in_plain")
        sender = Sender(url, secret)
        sender.start()
        for keys in (a, f"{b},{a}"):
            seen = len(sender.answers)
            eventually(lambda seen=seen: len(sender.answers) > seen + 3, "webhooks are sent")
            done = run("secrets", "rotate", env={"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_SECRETS_KEY": keys})
            assert (done.returncode, done.stderr) == (0, ""), done.stderr
            assert "re-encrypted: 2" in done.stdout
            text = rows(database_url, STORED)[0]["text"]
            assert not [one for one in plain if one in text]
            # Whoever changes a webhook forgets what it knew: it reads what has just been encrypted.
            set_webhook(url, "other")
            seen = len(sender.answers)
            eventually(lambda seen=seen: len(sender.answers) > seen + 3, "webhooks are sent")
        sender.stop()
        assert set(sender.answers) == {202}
        sent = len(sender.answers)
        eventually(lambda: len(receiver.seen) >= sent, "every event is posted")
        assert all(is_signed(headers, body) for headers, body in receiver.seen)
        printed_text = serving.output + working.output
        assert not [one for one in (*plain, a, b) if one in printed_text]
    checked = run("doctor", "--json", env={"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_SECRETS_KEY": b})
    assert '"encrypted with the first key"' in checked.stdout


def test_a_missing_key_is_503_and_nothing_is_lost(database_url: str, app: Path, receiver: Receiver) -> None:
    key, other = new_key(), new_key()
    with api(database_url, TIDEGATE_SECRETS_KEY=key, **ALLOWED) as (_, url):
        secret = define(url, receiver)
    headers = signed("github", secret, b"{}", message_id="m-1")
    for wrong in ({}, {"TIDEGATE_SECRETS_KEY": other}):
        with api(database_url, **wrong) as (process, url):
            assert "TIDEGATE_SECRETS_KEY" in process.wait_for_line("secrets_unreadable.*")[0]
            answer = send(url, "acme", headers)
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert "KEY" not in answer.text
            assert send(url, "nobody", headers).status_code == 401
            assert "TIDEGATE_SECRETS_KEY" in process.wait_for_line(".*webhook.unreadable")[0]
            [warning] = ok(ask("GET", f"{url}/admin/event-health"))["warnings"][-1:]
            assert warning["code"] == "secrets_unreadable" and "webhook acme" in warning["message"]
    rotated = run("secrets", "rotate", env={"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_SECRETS_KEY": other})
    assert rotated.returncode == 1 and "webhooks acme" in rotated.stderr
    both = {"TIDEGATE_SECRETS_KEY": f"{other},{key}", **ALLOWED}
    with api(database_url, **both) as (_, url), worker(database_url, app, **both):
        assert send(url, "acme", headers).status_code == 202
        eventually(lambda: len(receiver.seen) == 1, "the event is posted")
        assert is_signed(*receiver.seen[0])


def test_a_wrong_key_is_refused_without_showing_it() -> None:
    done = run("secrets", "rotate", env={"TIDEGATE_SECRETS_KEY": f"{new_key()},not-a-key"})
    assert done.returncode == 2 and "TIDEGATE_SECRETS_KEY: number 2 is not a key" in done.stderr
    assert "not-a-key" not in done.stderr
