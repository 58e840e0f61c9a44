"""The operator's verbs about triggers and deliveries, one transaction each, on a real database without workers."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from tests.store.builders import make_definition, make_events, make_runs
from tidegate import Tidegate
from tidegate.clock import utc_now, uuid7
from tidegate.errors import Conflict, InvalidInput, NotFound
from tidegate.flow import control
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.model.trigger import Trigger
from tidegate.store import decisions, held_deliveries, locks, trigger_gates, triggers
from tidegate.store.db import Connection, Database
from tidegate.store.trigger_gates import TriggerState

FAR = "tidegate.now() + interval '1 hour'"


@pytest.fixture
async def trigger(database: Database) -> Trigger:
    async with database.connection() as connection:
        await make_definition(connection)
    return await control.create_trigger(
        database, "fulfil", {"name": "t", "event_type": "a", "max_concurrency": 1}, "ann"
    )


async def hold(database: Database, trigger_id: uuid.UUID, at: str = FAR, reason: str = "throttle") -> uuid.UUID:
    delivery_id = uuid7()
    async with database.connection() as connection:
        [event_id] = await make_events(connection)
        sequence = await connection.fetchval(
            "select ingress_sequence from tidegate.workflow_events where id = $1", event_id
        )
        await connection.execute(
            "insert into tidegate.workflow_trigger_deliveries (id, trigger_id, event_id, status, retry_state, "
            "next_attempt_at, reason, source, concurrency_key, ingress_sequence) "
            f"values ($1, $2, $3, 'throttled', 'scheduled', {at}, $4, 'shop.api', '', $5)",
            delivery_id, trigger_id, event_id, reason, sequence,
        )  # fmt: skip
    return delivery_id


async def row(database: Database, delivery_id: uuid.UUID) -> dict[str, Any]:
    async with database.connection() as connection:
        return dict(
            await connection.fetchrow(
                "select *, next_attempt_at <= tidegate.now() as is_due "
                "from tidegate.workflow_trigger_deliveries where id = $1",
                delivery_id,
            )
            or {}
        )


async def state(database: Database, trigger_id: uuid.UUID) -> TriggerState:
    async with database.connection() as connection:
        found = await trigger_gates.get(connection, trigger_id)
        assert found is not None
        return found


async def plan(database: Database, trigger_id: uuid.UUID) -> tuple[int, bool]:
    async with database.connection() as connection:
        found = await connection.fetchrow(
            "select plan_version, is_replanning from tidegate.event_scheduler_triggers where trigger_id = $1",
            trigger_id,
        )
    return (found["plan_version"], found["is_replanning"]) if found else (0, False)


async def test_only_a_real_change_asks_for_a_new_plan(database: Database, trigger: Trigger) -> None:
    await hold(database, trigger.id)
    same = await control.update_trigger(database, trigger.id, {"max_concurrency": 1, "where": None}, "bob")
    assert same == trigger and await plan(database, trigger.id) == (0, False)
    changed = await control.update_trigger(database, trigger.id, {"where": "event.payload.n > 1"}, "bob")
    assert changed.version == 2 and await plan(database, trigger.id) == (1, True)
    await control.pause_trigger(database, trigger.id, duration_ms=1000, actor="bob")
    await control.resume_trigger(database, trigger.id, "bob")
    assert await plan(database, trigger.id) == (3, True)
    assert (await state(database, trigger.id)).paused_at is None


async def test_an_edit_of_the_concurrency_moves_the_slots_of_runs(database: Database, trigger: Trigger) -> None:
    async with database.connection() as connection:
        [event_id] = await make_events(connection, payload='{"n": 5}')
        await connection.execute(
            "insert into tidegate.workflow_runs (id, workflow_definition_id, event_id, trigger_id, concurrency_key, "
            "next_attempt_at) values ($1, $2, $3, $4, '', tidegate.now())",
            uuid7(), trigger.workflow_definition_id, event_id, trigger.id,
        )  # fmt: skip

    async def key() -> Any:
        async with database.connection() as connection:
            return await connection.fetchval("select concurrency_key from tidegate.workflow_runs")

    await control.update_trigger(database, trigger.id, {"concurrency_key": "{{ event.payload.n }}"}, "bob")
    assert await key() == "5"
    await control.update_trigger(database, trigger.id, {"max_concurrency": None, "concurrency_key": None}, "bob")
    assert await key() is None
    both = {"max_concurrency": 2, "concurrency_key": "{{ event.payload.n }}", "status": "disabled"}
    await control.update_trigger(database, trigger.id, both, "bob")
    assert await key() == "5"


async def test_cancelling_one_that_was_to_have_a_slot_wakes_the_next(database: Database, trigger: Trigger) -> None:
    woken = await hold(database, trigger.id, at="tidegate.now()", reason="concurrency")
    following = await hold(database, trigger.id, reason="concurrency")
    last = await hold(database, trigger.id, reason="concurrency")
    await control.change_retry(database, "deliveries", woken, "cancel", "bob")
    assert (await row(database, following))["is_due"] and not (await row(database, last))["is_due"]


async def test_a_delivery_that_someone_has_taken_is_not_cancelled(database: Database, trigger: Trigger) -> None:
    delivery_id = await hold(database, trigger.id)
    async with database.transaction() as worker:
        await worker.execute("select 1 from tidegate.workflow_trigger_deliveries where id = $1 for update", delivery_id)
        cancelling = asyncio.create_task(control.change_retry(database, "deliveries", delivery_id, "cancel", "bob"))
        forcing = asyncio.create_task(control.change_retry(database, "deliveries", delivery_id, "force", "bob"))
        await asyncio.wait([cancelling, forcing], timeout=0.2)
        assert not cancelling.done() and not forcing.done()
        await worker.execute(
            "update tidegate.workflow_trigger_deliveries set status = 'skipped', retry_state = 'completed', "
            "next_attempt_at = null where id = $1",
            delivery_id,
        )
    for late in (cancelling, forcing):
        with pytest.raises(Conflict, match="is no longer waiting: it is skipped"):
            await late
    assert (await row(database, delivery_id))["status"] == "skipped"
    with pytest.raises(NotFound):
        await control.change_retry(database, "deliveries", uuid7(), "cancel", "bob")


async def test_a_verb_waits_for_batches_and_keeps_new_ones_out(database: Database, trigger: Trigger) -> None:
    verbs = {
        "create": lambda: control.create_trigger(database, "fulfil", {"name": "u", "event_type": "a"}, "bob"),
        "update": lambda: control.update_trigger(database, trigger.id, {"where": "event.payload.n > 1"}, "bob"),
        "pause": lambda: control.pause_trigger(database, trigger.id, actor="bob"),
        "resume": lambda: control.resume_trigger(database, trigger.id, "bob"),
        "register": lambda: database.run(Tidegate().register),
        "delete": lambda: control.delete_trigger(database, trigger.id, "bob"),
    }
    for name, verb in verbs.items():
        async with database.transaction() as batch:
            await locks.share(batch, ["shop.api"])
            acting = asyncio.ensure_future(verb())
            await asyncio.wait([acting], timeout=0.1)
            assert not acting.done(), name
        await acting
    # A wrong request holds nobody up, and waits for nobody.
    async with database.transaction() as batch:
        await locks.share(batch, ["shop.api"])
        for wrong in (
            control.create_trigger(database, "fulfil", {"name": "x"}, "bob"),
            control.create_trigger(database, "nobody", {}, "bob"),
            control.update_trigger(database, trigger.id, {}, "bob"),
            control.delete_trigger(database, trigger.id, "bob"),
            control.pause_trigger(database, trigger.id, actor="bob"),
        ):
            with pytest.raises((InvalidInput, NotFound)):
                await asyncio.wait_for(wrong, 5)


async def test_deleting_leaves_no_dead_letters(database: Database, trigger: Trigger) -> None:
    ids = [await hold(database, trigger.id) for _ in range(3)]
    assert (await control.delete_trigger(database, trigger.id, "bob"))[1] == 3
    async with database.connection() as connection:
        assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 0
        for delivery_id in ids:
            found = await held_deliveries.get(connection, delivery_id)
            assert found and (found.status, found.last_error) == ("cancelled", "trigger deleted by bob")
            [line] = await decisions.list_of_event(connection, found.event_id)
            assert (line.stage, line.decision, line.actor, line.trigger_id) == (
                "deliver",
                "cancelled",
                "bob",
                trigger.id,
            )


async def test_registering_changed_code_judges_what_waits_anew(database: Database) -> None:
    def app(throttle: str) -> Tidegate:
        app = Tidegate()

        @app.workflow(on="a", throttle=throttle)
        async def coded(ctx: Any) -> None: ...

        return app

    async def code(connection: Connection) -> Trigger:
        [found] = await triggers.list_of_workflow(connection, "coded")
        return found

    await database.run(app("1/h").register)
    made = await database.run(code)
    await hold(database, made.id)
    await database.run(app("1/h").register)
    assert await plan(database, made.id) == (0, False)
    await database.run(app("2/h").register)
    assert await plan(database, made.id) == (1, True)
    assert (await database.run(code)).version == 2


async def test_what_was_and_what_is_are_on_record(database: Database, trigger: Trigger, connection: Connection) -> None:
    forced, cancelled = await hold(database, trigger.id), await hold(database, trigger.id)
    await control.change_retry(database, "deliveries", forced, "force", "night-shift")
    await control.change_retry(database, "deliveries", cancelled, "cancel", "night-shift")
    [run_id] = await make_runs(connection, [utc_now()])
    await control.cancel_run(database, run_id, "night-shift", TRIGGER_BREAKER)
    found = await connection.fetch(
        "select action, subject, before, after from tidegate.audit_log where actor = 'night-shift' order by id"
    )
    assert [(r["action"], r["subject"]) for r in found] == [
        ("delivery.force", str(forced)), ("delivery.cancel", str(cancelled)), ("run.cancel", str(run_id)),
    ]  # fmt: skip
    assert found[0]["before"]["next_attempt_at"] > found[0]["after"]["next_attempt_at"]
    assert (found[1]["before"]["status"], found[1]["after"]["status"]) == ("throttled", "cancelled")
    assert (found[2]["before"], found[2]["after"]) == ({"status": "pending"}, {"status": "cancelled"})
