"""The verbs about http workflows: delete with everything that may be in its way, secrets that follow each other."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.http_receiver import LOOPBACK, Receiver
from tests.flow.test_dispatch import publish
from tests.flow.test_http_workflow import SECRET, World, the_run
from tidegate import Tidegate
from tidegate.errors import Conflict, InvalidInput, NotFound
from tidegate.flow import control
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.model.http_workflow import DEFAULT_KEEP_MS, MAX_KEEP_MS, MAX_OLD_SECRETS
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import locks, runs, triggers, workers
from tidegate.store.db import Connection, Database

URL = "https://example.com/hook"
WAITS = "select count(*) = $1 from pg_locks where locktype = 'advisory' and not granted"
# Triggers that would launch, and runs that wait, of a workflow that nobody serves.
LOST = """
select (select count(*) from tidegate.workflow_event_triggers t
          join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
         where w.deleted_at is not null and t.deleted_at is null)
     + (select count(*) from tidegate.workflow_runs r
          join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
         where w.deleted_at is not null and r.status in ('pending', 'running'))
"""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
async def world(database: Database, clock: Clock) -> Any:
    made = World(database)
    yield made
    await made.runner.stop(0)


async def create(database: Database, slug: str = "hook", **fields: Any) -> Any:
    body = {"slug": slug, "kind": "http", "url": URL, "secret": SECRET} | fields
    return await control.create_workflow(database, body, allowed=LOOPBACK.allowed, actor="ann")


async def refused(database: Database, slug: str = "hook") -> dict[str, str]:
    with pytest.raises(Conflict, match=f"workflow {slug} is in use") as caught:
        await control.delete_workflow(database, slug, actor="ann")
    return {error.field: error.message for error in caught.value.errors}


async def test_deleted_when_nothing_more_may_come_and_all_has_ended(
    connection: Connection, clock: Clock, database: Database, world: World, receiver: Receiver
) -> None:
    receiver.says(503)
    await world.define(receiver.url, headers={"Authorization": "Bearer canary"})
    await publish(connection, "go")
    await world.turn()
    run = await the_run(connection)
    [trigger] = await triggers.list_of_workflow(connection, "hook")
    told = await refused(database)
    assert sorted(told) == ["runs", "triggers"]
    assert f"t ({trigger.id}) would launch it; delete them first" in told["triggers"]
    assert f"{run['id']} are unfinished; wait for them, or cancel" in told["runs"]
    await control.delete_trigger(database, trigger.id, "ann")
    assert sorted(await refused(database)) == ["runs"]
    await clock.advance(1500)
    receiver.says(200, 7)
    await world.turn()  # what was accepted is done, with the definition that it needs

    gone = await control.delete_workflow(database, "hook", actor="ann")
    assert gone.slug == "hook"
    done = await runs.get(connection, run["id"])
    assert done is not None and (done.workflow, done.status, done.output) == ("hook", "succeeded", 7)
    kept = await connection.fetchval("select w::text from tidegate.workflow_definitions w")
    assert "canary" not in kept and SECRET[6:] not in kept  # no secret outlives it
    for verb in (
        control.delete_workflow(database, "hook", actor="ann"),
        control.update_workflow(database, "hook", {}, allowed=LOOPBACK.allowed, actor="ann"),
        control.rotate_secret(database, "hook", {}, actor="ann"),
        control.create_trigger(database, "hook", {"name": "t", "event_type": "go"}, "ann"),
    ):
        with pytest.raises(NotFound, match="no workflow 'hook'"):
            await verb
    audited = await connection.fetch("select action, subject, after from tidegate.audit_log order by id desc limit 1")
    assert [tuple(row) for row in audited] == [("workflow.delete", "hook", None)]


async def test_many_are_counted(connection: Connection, database: Database) -> None:
    made = await create(database)
    for n in range(7):
        await control.create_trigger(database, "hook", {"name": f"t{n}", "event_type": "go"}, "ann")
        await connection.execute(
            "insert into tidegate.workflow_runs (id, workflow_definition_id, next_attempt_at) values ($1, $2, now())",
            uuid.uuid4(), made.definition.id,
        )  # fmt: skip
    told = await refused(database)
    assert "and 2 more would launch it" in told["triggers"] and "t4 (" in told["triggers"]
    assert "and more are unfinished" in told["runs"] and told["runs"].count("-") == 5 * 4


async def test_the_name_is_free_again(
    connection: Connection, clock: Clock, database: Database, world: World, receiver: Receiver
) -> None:
    """For another of its kind, or for code; the workers tell them apart."""
    receiver.says(200, "first")
    await world.define(receiver.url)
    await publish(connection, "go")
    await world.turn()
    [trigger] = await triggers.list_of_workflow(connection, "hook")
    await control.delete_trigger(database, trigger.id, "ann")
    await control.delete_workflow(database, "hook", actor="ann")
    receiver.says(200, "second")
    await world.define(f"http://127.0.0.1:{receiver.port}/second")
    await publish(connection, "go")
    await world.turn()
    found = await runs.list_page(connection, workflow="hook", limit=10)
    assert [run.output for run in found] == ["second", "first"]
    assert receiver.paths == ["/hook?x=1", "/second"]
    [trigger] = await triggers.list_of_workflow(connection, "hook")
    await control.delete_trigger(database, trigger.id, "ann")
    gone = await control.delete_workflow(database, "hook", actor="ann")
    assert gone.version == 1
    app = Tidegate()

    @app.workflow(on="go")
    async def hook(ctx: Any) -> None: ...

    [definition_id] = await database.run(app.register)
    assert definition_id != gone.id
    await workers.heartbeat(connection, "host:1", [definition_id], 1, 10_000)
    with pytest.raises(Conflict, match="declared in code") as caught:
        await control.delete_workflow(database, "hook", actor="ann")
    assert "on worker host:1: stop it" in caught.value.errors[0].message


async def test_a_workflow_that_no_worker_has_any_more_is_deleted(connection: Connection, database: Database) -> None:
    app = Tidegate()

    @app.workflow(every="1h")
    async def gone(ctx: Any) -> None: ...

    [definition_id] = await database.run(app.register)
    with pytest.raises(Conflict, match="workflow gone is in use") as caught:
        await control.delete_workflow(database, "gone", actor="ann")
    assert "tidegate triggers delete gone/" in caught.value.errors[0].message
    for trigger in await triggers.list_of_workflow(connection, "gone"):
        await control.delete_trigger(database, trigger.id, "ann")
    assert (await control.delete_workflow(database, "gone", actor="ann")).kind == "python"
    assert await triggers.get_definition(connection, "gone") is None
    assert await connection.fetchval("select count(*) from tidegate.schedules") == 0
    assert await connection.fetchval("select action from tidegate.audit_log order by id desc limit 1") == (
        "workflow.delete"
    )
    [again] = await database.run(app.register)  # the code is back
    assert again != definition_id and len(await triggers.list_of_workflow(connection, "gone")) > 0


async def test_a_trigger_that_comes_while_its_workflow_is_deleted(connection: Connection, database: Database) -> None:
    """It has seen the workflow, and waits for its turn while the deletion commits."""
    made = await create(database)
    async with database.transaction() as deleting:
        await locks.exclude_triggers(deleting)
        await triggers.delete_definition(deleting, made.definition.id, {}, "bob")
        late = asyncio.create_task(control.create_trigger(database, "hook", {"name": "t", "event_type": "go"}, "ann"))
        await eventually(database, WAITS, 1)
    with pytest.raises(NotFound, match="no workflow 'hook'; `tidegate workflows list`"):
        await late
    assert await connection.fetchval("select count(*) from tidegate.workflow_event_triggers") == 0


async def test_a_trigger_is_made_for_the_workflow_that_has_the_name_now(
    connection: Connection, database: Database
) -> None:
    made = await create(database)
    async with database.transaction() as deleting:
        await locks.exclude_triggers(deleting)
        await triggers.delete_definition(deleting, made.definition.id, {}, "bob")
        new = await triggers.upsert_definition(
            deleting, slug="hook", kind="python", parameters=["n"], config={}, actor="code"
        )
        late = asyncio.create_task(control.create_trigger(database, "hook", {"name": "t", "event_type": "go"}, "ann"))
        await eventually(database, WAITS, 1)
    assert (await late).workflow_definition_id == new


async def test_a_deletion_that_comes_while_a_trigger_is_made(connection: Connection, database: Database) -> None:
    made = await create(database)
    async with database.transaction() as creating:
        await locks.exclude_triggers(creating)
        await creating.execute(
            "insert into tidegate.workflow_event_triggers (id, workflow_definition_id, name, event_type, created_by, "
            "updated_by) values ($1, $2, 't', 'go', 'ann', 'ann')",
            uuid.uuid4(), made.definition.id,
        )  # fmt: skip
        late = asyncio.create_task(control.delete_workflow(database, "hook", actor="bob"))
        await eventually(database, WAITS, 1)
    with pytest.raises(Conflict, match="is in use") as caught:
        await late
    assert [error.field for error in caught.value.errors] == ["triggers"]


async def test_nothing_is_lost_in_a_race_of_everyone(connection: Connection, database: Database) -> None:
    """The last trigger goes, another comes, an event is launched and the workflow is deleted, all at once."""
    outcomes: Counter[str] = Counter()
    dispatch = Dispatch(database, batch_size=20, after_launch=lambda: None)
    luck = random.Random(7)

    async def trying(name: str, verb: Callable[[], Awaitable[Any]]) -> None:
        await asyncio.sleep(luck.uniform(0, 0.02))
        try:
            await verb()
            outcomes[name] += 1
        except (Conflict, NotFound) as exc:  # anything else is a failure
            outcomes[f"{name}: {type(exc).__name__}"] += 1

    async def launch() -> None:
        async with database.connection() as one:
            await publish(one, "go")
        await dispatch.run_once()

    for n in range(24):
        await create(database)
        deletes = [trying("delete", partial(control.delete_workflow, database, "hook", actor="bob")) for _ in range(3)]
        new = {"name": "new", "event_type": "go"}
        makes = trying("trigger", partial(control.create_trigger, database, "hook", new, "ann"))
        if n % 2:
            first = await control.create_trigger(database, "hook", {"name": "first", "event_type": "go"}, "ann")
            removes = trying("remove", partial(control.delete_trigger, database, first.id, "ann"))
            await asyncio.gather(makes, *deletes, removes, trying("launch", launch))
        else:
            before = outcomes["trigger"] + outcomes["delete"]
            await asyncio.gather(makes, *deletes)
            assert outcomes["trigger"] + outcomes["delete"] == before + 1  # one of them comes first, and wins
        assert await connection.fetchval(LOST) == 0, outcomes
        for trigger in await triggers.list_of_workflow(connection, "hook"):
            await control.delete_trigger(database, trigger.id, "ann")
        for row in await connection.fetch("select id from tidegate.workflow_runs where status = 'pending'"):
            await control.cancel_run(database, row["id"], "ann", TRIGGER_BREAKER)


def signs(secret: str, headers: dict[str, str], body: bytes) -> bool:
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return f"v1,{expected}" in headers["webhook-signature"].split(" ")


async def test_old_secrets_sign_until_their_time_is_over(
    connection: Connection, clock: Clock, database: Database, world: World, receiver: Receiver
) -> None:
    await world.define(receiver.url)
    secrets = [SECRET]

    async def rotate(**given: Any) -> None:
        done = await control.rotate_secret(database, "hook", given, actor="bob")
        secrets.append(done.secret or given["secret"])

    async def signing() -> list[int]:
        """Which of the secrets, oldest first, sign a request now."""
        await publish(connection, "go")
        await world.turn()
        headers, body = receiver.seen[-1]
        return [n for n, secret in enumerate(secrets) if signs(secret, headers, body)]

    assert await signing() == [0]
    await rotate()
    assert await signing() == [0, 1]
    await clock.advance(1000)
    await rotate(keep_ms=3_600_000)
    assert await signing() == [0, 1, 2]
    await clock.advance(3_600_000)
    assert await signing() == [0, 2]
    await clock.advance(DEFAULT_KEEP_MS)
    assert await signing() == [2]
    await rotate(secret="whsec_" + base64.b64encode(b"z" * 24).decode())
    assert await signing() == [2, 3]
    await rotate(keep_ms=0)  # someone has stolen it
    assert await signing() == [4]
    for _ in range(MAX_OLD_SECRETS + 2):
        await rotate()
    assert await signing() == list(range(len(secrets)))[-MAX_OLD_SECRETS - 1 :]
    again = await control.rotate_secret(database, "hook", {"secret": secrets[-1]}, actor="bob")
    assert not again.is_written and again.secret is None
    done = await control.update_workflow(database, "hook", {"secret": None}, allowed=LOOPBACK.allowed, actor="bob")
    secrets.append(done.secret or "")
    assert await signing() == list(range(len(secrets)))[-MAX_OLD_SECRETS - 1 :]
    audited = await connection.fetch("select action, l::text as text from tidegate.audit_log l where actor = 'bob'")
    assert Counter(row["action"] for row in audited) == {
        "workflow.rotate": 4 + MAX_OLD_SECRETS + 2,
        "workflow.update": 1,
    }
    assert not any(secret[6:] in row["text"] for secret in secrets for row in audited)


async def test_a_change_leaves_old_secrets_alone(database: Database) -> None:
    await create(database)
    await control.rotate_secret(database, "hook", {"keep_ms": MAX_KEEP_MS}, actor="ann")
    before = control.shown_workflow((await control.update_workflow(
        database, "hook", {"timeout_ms": 1000}, allowed=LOOPBACK.allowed, actor="ann")).definition)  # fmt: skip
    assert len(before.config["old_secrets_until"]) == 1
    again = await create(database, secret=None, timeout_ms=1000)  # the same, whichever secrets it had
    assert not again.is_written


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"keep_ms": -1}, "keep_ms"),
        ({"keep_ms": MAX_KEEP_MS + 1}, "keep_ms"),
        ({"keep_ms": "1h"}, "keep_ms"),
        ({"secret": "whsec_short"}, "secret"),
        ({"secret": 7}, "secret"),
        ({"keep": 1}, "keep"),
        ([], "body"),
    ],
    ids=range(7),
)
async def test_wrong_rotations_name_the_field(database: Database, given: Any, field: str) -> None:
    await create(database)
    with pytest.raises(InvalidInput, match="the rotation is not valid") as caught:
        await control.rotate_secret(database, "hook", given, actor="ann")
    assert [error.field for error in caught.value.errors] == [field]
    assert "whsec_short" not in str(caught.value)
