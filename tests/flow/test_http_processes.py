"""Http workflows in real worker processes that are killed: what was accepted is posted again, under the same id."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import eventually
from tests.flow.http_receiver import LOOPBACK, Receiver
from tests.processes import worker
from tidegate.flow import control
from tidegate.store.db import Connection, Database

QUICK = {"TIDEGATE_LEASE_MS": "1000", "TIDEGATE_STEP_RETRY_BASE_MS": "100", "TIDEGATE_STEP_RETRY_MAX_MS": "200",
         "TIDEGATE_HTTP_ALLOW": "127.0.0.0/8"}  # fmt: skip
KEY = b"k" * 32
SUCCEEDED = "select count(*) = 1 from tidegate.workflow_runs where status = 'succeeded'"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    made.says(200, {"receipt": 7})
    yield made
    made.close()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An application without workflows."""
    file = tmp_path / "app.py"
    file.write_text("from tidegate import Tidegate\n\napp = Tidegate()\n")
    return file


async def launch(database: Database, receiver: Receiver) -> None:
    secret = "whsec_" + base64.b64encode(KEY).decode()
    body = {"slug": "hook", "kind": "http", "url": receiver.url, "secret": secret, "allow_private": True}
    await control.create_workflow(database, body, allowed=LOOPBACK.allowed, actor="ann")
    await control.create_trigger(database, "hook", {"name": "t", "event_type": "go"}, "ann")
    async with database.connection() as connection:
        await connection.execute("select tidegate.publish('go', 'test', '{\"n\": 1}')")


def check_requests(receiver: Receiver, run: Any, attempts: list[int]) -> None:
    """Every request is genuine, of this run, and says the same but for the attempt."""
    bodies = []
    for headers, body in receiver.seen:
        assert headers["webhook-id"] == headers["idempotency-key"] == str(run["id"])
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        bodies.append(json.loads(body))
    assert [body.pop("attempt") for body in bodies] == attempts
    assert all(body == bodies[0] for body in bodies)


async def test_killed_while_the_receiver_holds_the_request(
    database_url: str, database: Database, connection: Connection, receiver: Receiver, app: Path
) -> None:
    await launch(database, receiver)
    receiver.held = threading.Event()
    with worker(database_url, app, **QUICK) as first:
        await receiver.arrived(1)
        first.signal(signal.SIGKILL)
        first.wait()
    held, receiver.held = receiver.held, None
    with worker(database_url, app, **QUICK):
        await eventually(database, SUCCEEDED)
        held.set()  # the first request is answered when nobody waits for it any more
    run = await connection.fetchrow("select id, output, attempts, crashes from tidegate.workflow_runs")
    assert run is not None and tuple(run)[1:] == ({"receipt": 7}, 2, 0)
    assert len(receiver.seen) == 2
    check_requests(receiver, run, [1, 2])


async def test_killed_between_the_answer_and_its_commit(
    database_url: str, database: Database, connection: Connection, receiver: Receiver, app: Path
) -> None:
    await launch(database, receiver)
    with worker(database_url, app, TIDEGATE_FAILPOINTS="step.before_commit=kill@1", **QUICK) as first:
        assert first.wait() == 137
    assert len(receiver.seen) == 1
    with worker(database_url, app, **QUICK):
        await eventually(database, SUCCEEDED)
    run = await connection.fetchrow("select id, output from tidegate.workflow_runs")
    assert run is not None and run["output"] == {"receipt": 7}
    check_requests(receiver, run, [1, 2])


async def test_stopped_while_the_receiver_holds_the_request(
    database_url: str, database: Database, connection: Connection, receiver: Receiver, app: Path
) -> None:
    """SIGTERM: the run is handed back, uses up no life, and the next worker sends it again."""
    await launch(database, receiver)
    receiver.held = threading.Event()
    with worker(database_url, app, TIDEGATE_SHUTDOWN_MS="100", **QUICK) as first:
        await receiver.arrived(1)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    held, receiver.held = receiver.held, None
    held.set()
    with worker(database_url, app, **QUICK):
        await eventually(database, SUCCEEDED)
    run = await connection.fetchrow("select id, crashes from tidegate.workflow_runs")
    assert run is not None and run["crashes"] == 0
    assert len(receiver.seen) == 2
    check_requests(receiver, run, [1, 2])
