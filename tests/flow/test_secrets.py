"""Secrets at rest, on a real database: what is stored, who reads it, keys that change and keys that are missing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.conftest import Clock
from tests.flow.http_receiver import LOOPBACK, Receiver
from tests.flow.test_dispatch import publish
from tests.flow.test_http_workflow import World
from tests.flow.test_webhook_receiving import received
from tidegate.errors import SecretsUnreadable, SettingsError, Unavailable, first_line
from tidegate.flow import control
from tidegate.flow.keep import secrets
from tidegate.flow.look import doctor
from tidegate.flow.look.health import Snapshots
from tidegate.model.retry import STEP_RETRY
from tidegate.model.secrets import RETRY_SECONDS, SecretKeys, new_key
from tidegate.model.webhook import UNREADABLE
from tidegate.store import secrets as store
from tidegate.store import webhooks
from tidegate.store.db import Connection, Database

SIGNING = b"k" * 32
WORKFLOW_SECRET = "whsec_" + base64.b64encode(SIGNING).decode()
SENDERS_SECRET = "a secret of the sender"
AUTHORIZATION = "Bearer canary-7f3a"
PLAIN = (WORKFLOW_SECRET, SENDERS_SECRET, AUTHORIZATION)
A, B = new_key(), new_key()
# Everything that is stored of webhooks, workflows and what was done to them.
STORED = """
    select string_agg(row, ' ') from (
      select w::text as row from tidegate.webhooks w union all
      select d::text from tidegate.workflow_definitions d union all
      select a::text from tidegate.audit_log a) as rows
"""


def keyed(database: Database, *keys: str) -> Database:
    """The same database, as a process with these keys sees it."""
    database.keys = SecretKeys(",".join(keys))
    return database


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
async def world(database: Database, clock: Clock) -> AsyncIterator[World]:
    made = World(database)
    yield made
    await made.runner.stop(0)


async def fill(world: World, url: str = "http://127.0.0.1:9/hook") -> None:
    """A webhook and an http workflow, each with a secret that was replaced too."""
    database = world.database
    await world.define(url, headers={"Authorization": AUTHORIZATION})
    await control.rotate_secret(database, "hook", {}, actor="ann")
    await control.set_webhook(database, "acme", {"scheme": "github", "secret": SENDERS_SECRET}, actor="ann")
    await control.rotate_webhook(database, "acme", {}, actor="ann")


async def stored(connection: Connection) -> str:
    text: str = await connection.fetchval(STORED)
    return text


async def webhook_secrets(database: Database) -> list[str]:
    async with database.connection() as connection:
        found = await webhooks.get(connection, "acme", database.keys)
    assert found is not None
    return [secret.secret for secret in found.config.secrets]


async def test_with_a_key_no_secret_is_stored_as_it_is(world: World, connection: Connection) -> None:
    keyed(world.database, A)
    await fill(world)
    text = await stored(connection)
    assert not [secret for secret in PLAIN if secret in text]
    assert "whsec_" not in text, "those that were made are not there either"
    assert (await webhook_secrets(world.database))[1] == SENDERS_SECRET
    found = await store.survey(connection, world.database.keys)
    assert (found.plain, found.old, found.unreadable, found.examples) == (0, 0, 0, None)


async def test_without_a_key_secrets_are_stored_in_plain_and_it_is_told(world: World, connection: Connection) -> None:
    with capture_logs() as silent:
        await secrets.log_notices(world.database)
    await fill(world)
    text = await stored(connection)
    assert all(secret in text for secret in PLAIN)
    with capture_logs() as logs:
        await secrets.log_notices(world.database)
    assert not silent and [line["code"] for line in logs] == ["secrets_in_plain"]
    assert not [secret for secret in PLAIN if secret in str(logs)]
    with pytest.raises(SettingsError, match="TIDEGATE_SECRETS_KEY"):
        await secrets.rotate(world.database, actor="ann")


async def test_keys_change_and_every_secret_is_read_throughout(world: World, connection: Connection) -> None:
    await fill(world)
    before = await webhook_secrets(world.database)
    versions = "select array_agg(version) from (select version, 1 as n from tidegate.webhooks union all " \
               "select version, 2 from tidegate.workflow_definitions order by n) as v"  # fmt: skip
    was = await connection.fetchval(versions)
    for keys, old in (([A], []), ([B, A], [A])):
        keyed(world.database, *keys)
        done = await secrets.rotate(world.database, actor="ann", batch_size=1)
        assert (done.rotated, done.current, done.unreadable) == (2, 0, [])
        again = await secrets.rotate(world.database, actor="ann")
        assert (again.rotated, again.current, again.unreadable) == (0, 2, [])
        assert not [secret for secret in PLAIN if secret in await stored(connection)]
        assert await webhook_secrets(keyed(world.database, keys[0])) == before
        for gone in old:
            found = await store.survey(connection, SecretKeys(gone))
            assert (found.unreadable, found.examples) == (2, ["webhook acme", "workflow hook"])
    assert await connection.fetchval(versions) == was, "nobody has changed a secret"


async def test_a_secret_that_changes_during_a_rotation_is_kept(
    world: World, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(world)
    keyed(world.database, A)
    replace, new = store.replace, "another secret of the sender"
    changes = iter([{"secret": new, "keep_ms": 0}])

    async def late(*given: Any) -> set[str]:
        if (change := next(changes, None)) is not None:
            other = Database(world.database.url, "test", size=1)  # of a process that has no key yet
            await control.rotate_webhook(other, "acme", change, actor="bob")
            await other.close()
        return await replace(*given)

    monkeypatch.setattr(store, "replace", late)
    done = await secrets.rotate(world.database, actor="ann")
    assert (done.rotated, done.unreadable) == (2, [])
    assert await webhook_secrets(world.database) == [new] and new not in await stored(connection)


async def test_rotations_at_once(world: World) -> None:
    await fill(world)
    for n in range(20):
        await control.set_webhook(world.database, f"s{n}", {"scheme": "github"}, actor="ann")
    keyed(world.database, A)
    done = await asyncio.gather(*(secrets.rotate(world.database, actor="ann", batch_size=3) for _ in range(3)))
    assert sum(one.rotated for one in done) == 22
    assert [one.rotated + one.current for one in done] == [22] * 3


async def test_without_its_key_a_webhook_waits_for_it(world: World, connection: Connection) -> None:
    keyed(world.database, A)
    await fill(world)
    receiving = received(keyed(world.database, B))
    with capture_logs() as logs:
        for _ in range(5):
            with pytest.raises(Unavailable) as refused:
                await receiving.find("acme")
    assert refused.value.retry_after_seconds == RETRY_SECONDS
    assert "KEY" not in str(refused.value), "strangers are told nothing of how it is set up"
    [line] = [line for line in logs if line["event"] == "webhook.unreadable"]
    assert line["source"] == "acme" and "TIDEGATE_SECRETS_KEY" in line["reason"]
    keyed(world.database, B, A)
    receiving.forget()
    found = await receiving.find("acme")
    assert found is not None and found.config.secrets[1].secret == SENDERS_SECRET


async def test_a_webhook_whose_key_is_lost_is_shown_and_given_another_secret(world: World) -> None:
    keyed(world.database, A)
    await fill(world)
    keyed(world.database, B)
    kept = await control.set_webhook(world.database, "acme", {"scheme": "github", "event_type": "x"}, actor="ann")
    assert {secret.fingerprint for secret in kept.secrets} == {UNREADABLE}
    assert (await webhook_secrets(keyed(world.database, A)))[1] == SENDERS_SECRET, "what cannot be read is not lost"
    done = await control.rotate_webhook(keyed(world.database, B), "acme", {"keep_ms": 0}, actor="ann")
    assert [secret.fingerprint for secret in done.secrets] != [UNREADABLE]
    assert await received(world.database).find("acme") is not None


async def test_without_its_key_a_workflow_waits_for_it(
    world: World, connection: Connection, clock: Clock, receiver: Receiver
) -> None:
    keyed(world.database, A)
    await fill(world, receiver.url)
    keyed(world.database, B)
    await publish(connection, "go")
    for _ in range(STEP_RETRY.max_attempts + 3):  # it is not the step's fault: no attempt is used, none is the last
        await world.turn()
        await clock.advance(RETRY_SECONDS * 1000)
    step = await connection.fetchrow("select * from tidegate.workflow_run_steps")
    assert (step["status"], step["retry_state"], step["retry_attempts"]) == ("pending", "scheduled", 0)
    assert not receiver.seen and await connection.fetchval("select count(*) from tidegate.dead_letters") == 0
    reason = "SecretsUnreadable: a secret of workflow hook is encrypted"
    assert step["error"].startswith(reason) and "TIDEGATE_SECRETS_KEY" in first_line(step["error"])
    warning = await connection.fetchval("select warning from tidegate.workflow_runs")
    assert warning.startswith("step 'request' waits, next at ") and reason in warning
    with pytest.raises(SecretsUnreadable, match="TIDEGATE_SECRETS_KEY"):
        await control.update_workflow(
            world.database, "hook", {"timeout_ms": 500}, allowed=LOOPBACK.allowed, actor="ann"
        )
    keyed(world.database, B, A)
    await clock.advance(RETRY_SECONDS * 1000)
    await world.turn()
    [(headers, body)] = receiver.seen
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    signature = base64.b64encode(hmac.new(SIGNING, signed, hashlib.sha256).digest()).decode()
    assert f"v1,{signature}" in headers["webhook-signature"].split() and headers["authorization"] == AUTHORIZATION
    assert await connection.fetchval("select status from tidegate.workflow_runs") == "succeeded"


async def test_health_and_doctor_name_what_cannot_be_read(world: World) -> None:
    async def said() -> tuple[list[str], bool, str]:
        [check] = [check for check in await doctor.examine(world.database) if check.name == "secrets"]
        snapshot = await Snapshots(world.database).read()
        return [notice.code for notice in snapshot.warnings], check.is_ok, check.detail

    assert await said() == ([], True, "none are stored")
    await fill(world)
    codes, is_ok, detail = await said()
    assert (codes, is_ok) == (["secrets_in_plain"], True) and "stored in plaintext: 2" in detail
    keyed(world.database, A)
    assert (await said())[1] is False, "a key is set, and they are still in plain"
    await secrets.rotate(world.database, actor="ann")
    assert await said() == ([], True, "encrypted with the first key")
    keyed(world.database, B, A)
    codes, is_ok, detail = await said()
    assert (codes, is_ok) == ([], True) and "tidegate secrets rotate" in detail
    keyed(world.database, B)
    codes, is_ok, detail = await said()
    assert (codes, is_ok) == (["secrets_unreadable"], False) and "webhook acme, workflow hook" in detail
    keyed(world.database)
    assert (await said())[:2] == (["secrets_unreadable"], False)
