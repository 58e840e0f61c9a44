"""Webhooks inside one process: how long what it knows is kept, what a flood costs, and verbs that meet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.conftest import Clock
from tidegate.clock import utc_now, uuid7
from tidegate.errors import Conflict, InvalidInput, NotFound, Unavailable
from tidegate.flow import control
from tidegate.flow.accept import lookups
from tidegate.flow.accept import webhooks as module
from tidegate.flow.accept.ingest import Ingest
from tidegate.flow.accept.webhooks import Webhooks
from tidegate.model.event import EventLimits, NewEvent, check_event
from tidegate.model.secrets import NO_KEYS, SecretKeys
from tidegate.model.webhook import fingerprint, holding
from tidegate.store import webhooks as store
from tidegate.store.db import Connection, Database

GITHUB = {"scheme": "github", "secret": "a secret of the sender"}


def received(database: Database) -> Webhooks:
    return Webhooks(database, Ingest(database, max_waiting=100, after_commit=lambda: None))


def event(**fields: Any) -> NewEvent:
    given = {"type": "a.b", "source": "acme", "id": "m-1"} | fields
    made = check_event(given, new_id=uuid7(), now=utc_now(), limits=EventLimits(), errors=[])
    assert made is not None
    return made


async def test_one_look_serves_many_and_ends(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    get = store.get

    async def counted(connection: Connection, source: str, keys: SecretKeys) -> Any:
        nonlocal looks
        looks += 1
        return await get(connection, source, keys)

    monkeypatch.setattr(module.store, "get", counted)
    webhooks = received(database)
    assert set(await asyncio.gather(*(webhooks.find("acme") for _ in range(50)))) == {None}
    assert looks == 1  # that there is none is kept too
    await control.set_webhook(database, "acme", GITHUB, actor="ann")
    looks = 0
    assert await webhooks.find("acme") is None
    assert lookups.KEEP_SECONDS == 1
    webhooks.forget()
    assert await webhooks.find("acme") is not None
    assert looks == 1
    monkeypatch.setattr(lookups, "KEEP_SECONDS", -1)
    webhooks.forget()
    await webhooks.find("acme")
    await control.delete_webhook(database, "acme", actor="ann")
    assert await webhooks.find("acme") is None
    looks = 0
    for name in ("", "a b", "x" * 201, "ü"):
        assert await webhooks.find(name) is None
    assert looks == 0


async def test_strangers_cannot_fill_the_memory(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MAX_KEPT", 5)
    monkeypatch.setattr(module, "MAX_KEPT", 5)
    webhooks = received(database)
    for i in range(23):
        await webhooks.find(f"s{i}")
        webhooks.refused(f"s{i}", None, "unsigned", f"reason {i}")
    assert len(webhooks._recent) <= 5 and len(webhooks._quiet) <= 5


async def test_nobody_is_judged_while_the_database_is_away(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await control.set_webhook(database, "acme", GITHUB, actor="ann")
    webhooks = received(database)
    monkeypatch.setattr(lookups, "KEEP_SECONDS", -1)
    assert await webhooks.find("acme") is not None
    get = store.get

    async def away(*_: Any) -> Any:
        raise Unavailable("the database cannot be reached")

    monkeypatch.setattr(module.store, "get", away)
    for source in ("acme", "nobody", "acme"):
        with pytest.raises(Unavailable):
            await webhooks.find(source)
    monkeypatch.setattr(module.store, "get", get)
    assert await webhooks.find("acme") is not None


async def test_a_flood_is_a_line_a_second(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await control.set_webhook(database, "acme", GITHUB, actor="ann")
    webhooks = received(database)
    found = await webhooks.find("acme")
    monkeypatch.setattr(module, "QUIET_SECONDS", 3600)
    with capture_logs() as lines:
        for i in range(100):
            webhooks.refused(f"stranger {i}", None, "unsigned", "unknown_source")
            webhooks.refused("acme", found, "unsigned", "no_match")
        webhooks.refused("acme", found, "unsigned", "too_old")
    told = [(line["source"], line["scheme"], line["reason"], line["suppressed"]) for line in lines]
    assert told == [
        ("?", None, "unknown_source", 0), ("acme", "github", "no_match", 0), ("acme", "github", "too_old", 0),
    ]  # fmt: skip
    monkeypatch.setattr(module, "QUIET_SECONDS", 0)
    with capture_logs() as lines:
        webhooks.refused("acme", found, "unsigned", "no_match")
    assert lines[0]["suppressed"] == 99


async def test_the_first_body_counts(database: Database, connection: Connection) -> None:
    webhooks = received(database)
    first = await webhooks.accept(event(payload={"n": 1}))
    for _ in range(2):
        again = await webhooks.accept(event(payload={"n": 2}))
        assert (again.id, again.status) == (first.id, "duplicate")
    other = await webhooks.accept(event(payload={"n": 2}, source="other"))
    assert other.status == "accepted"
    done = await asyncio.gather(*(webhooks.accept(event(id="m-2", payload={"n": n})) for n in range(20)))
    assert sorted(one.status for one in done) == ["accepted"] + ["duplicate"] * 19
    assert len({one.id for one in done}) == 1
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 3


async def test_only_one_secret_is_made_when_verbs_meet(database: Database, connection: Connection) -> None:
    done = await asyncio.gather(
        *(control.set_webhook(database, "acme", {"scheme": "standard"}, actor="ann") for _ in range(5))
    )
    assert [one.changed for one in done].count(True) == 1
    [secret] = [one.secret for one in done if one.secret is not None]
    rotated = await asyncio.gather(*(control.rotate_webhook(database, "acme", {}, actor="ann") for _ in range(3)))
    found = await store.get(connection, "acme", NO_KEYS)
    assert found is not None
    assert {s.secret for s in found.config.secrets} == {secret, *(one.secret for one in rotated)}
    assert [s.until is None for s in found.config.secrets] == [True, False, False, False]
    assert await connection.fetchval("select count(*) from tidegate.audit_log") == 4


async def test_the_databases_clock_ends_secrets(database: Database, connection: Connection, clock: Clock) -> None:
    await control.set_webhook(database, "acme", GITHUB, actor="ann")
    await control.rotate_webhook(database, "acme", {"secret": "another of the sender", "keep_ms": 60_000}, actor="ann")
    found = await store.get(connection, "acme", NO_KEYS)
    assert found is not None and len(holding(found.config.secrets, clock.now)) == 2
    later = await clock.advance(60_000)
    assert [s.secret for s in holding(found.config.secrets, later)] == ["another of the sender"]
    old = fingerprint("a secret of the sender")
    with pytest.raises(NotFound):
        await control.retire_webhook_secret(database, "acme", old, actor="ann")
    with pytest.raises(Conflict):
        current = fingerprint("another of the sender")
        await control.retire_webhook_secret(database, "acme", current, actor="ann")


async def test_another_scheme_has_other_secrets(database: Database, connection: Connection) -> None:
    await control.set_webhook(database, "acme", GITHUB, actor="ann")
    with pytest.raises(InvalidInput, match="Stripe creates it"):
        await control.set_webhook(database, "acme", {"scheme": "stripe"}, actor="ann")
    made = await control.set_webhook(database, "acme", {"scheme": "standard"}, actor="ann")
    found = await store.get(connection, "acme", NO_KEYS)
    assert found is not None and [s.secret for s in found.config.secrets] == [made.secret]
    assert made.tolerance_seconds == 300 and made.version == 2
