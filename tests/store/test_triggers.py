"""Triggers: versions, what code declared against what an operator changed, and the operator's view of deliveries."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest

from tests.store.builders import HOUR, NOW, make_definition, make_events, make_triggers, set_clock
from tidegate.clock import uuid7
from tidegate.model.ids import delivery_id
from tidegate.model.predicate import Predicate
from tidegate.model.retry import RetryPolicy
from tidegate.model.source import BreakerPolicy
from tidegate.model.trigger import Trigger, TriggerSpec
from tidegate.store import held_deliveries, sources, trigger_gates, triggers
from tidegate.store.db import Connection
from tidegate.store.held_deliveries import DeliveryFilters

FULL = TriggerSpec(
    name="full",
    event_type="order.*",
    event_source="shop.*",
    predicates=[Predicate(path="$.payload.amount", operator="gt", value=100)],
    where="event.payload.id > 1",
    parameter_template={"id": "{{ event.payload.id }}", "list": [1, {"a": None}]},
    idempotency_key="{{ event.payload.id }}",
    idempotency_window_ms=5,
    concurrency_key="{{ event.source }}",
    throttle_count=20,
    throttle_window_ms=60_000,
    max_concurrency=3,
    retry=RetryPolicy(max_attempts=8),
    breaker=BreakerPolicy(threshold=2),
)


def said(trigger: Trigger) -> TriggerSpec:
    return TriggerSpec(**{name: getattr(trigger, name) for name in TriggerSpec.__struct_fields__})


async def required(connection: Connection, trigger_id: uuid.UUID | None) -> Trigger:
    assert trigger_id is not None
    found = await triggers.get(connection, trigger_id)
    assert found is not None
    return found


# Create, update, delete ---------------------------------------------------------------------------------------------


async def test_a_trigger_comes_back_as_it_was_written(connection: Connection) -> None:
    definition = await make_definition(connection)
    made = await required(connection, await triggers.create(connection, definition, FULL, "disabled", "ann"))
    assert said(made) == FULL
    assert (made.workflow, made.status, made.version, made.created_by) == ("fulfil", "disabled", 1, "ann")
    assert (
        await triggers.list_of_workflow(connection, "fulfil")
        == [made]
        == await triggers.list_page(connection, limit=50)
    )
    assert await triggers.list_active(connection) == []
    assert await triggers.create(connection, definition, FULL, "active", "bob") is None  # the name is taken
    assert await triggers.update(connection, made.id, FULL, "active", "bob")
    [(active, names)] = await triggers.list_active(connection)
    assert said(active) == FULL and active.breaker == BreakerPolicy(threshold=2) and names == ["*"]


async def test_every_change_is_a_version(connection: Connection) -> None:
    definition = await make_definition(connection)
    trigger_id = await triggers.create(connection, definition, FULL, "active", "ann")
    assert trigger_id is not None
    renamed = TriggerSpec(name="short", event_type="a")
    assert await triggers.update(connection, trigger_id, renamed, "disabled", "bob")
    changed = await required(connection, trigger_id)
    assert (said(changed), changed.status, changed.version, changed.updated_by) == (renamed, "disabled", 2, "bob")
    assert await triggers.delete(connection, trigger_id, "carol")
    assert not await triggers.delete(connection, trigger_id, "carol")
    assert not await triggers.update(connection, trigger_id, FULL, "active", "dave")
    assert await triggers.get(connection, trigger_id) is None
    assert await triggers.list_page(connection, limit=50) == [] == await triggers.list_of_workflow(connection, "fulfil")
    versions = await triggers.list_versions(connection, trigger_id)
    assert [(v.version, v.changed_by, v.definition["name"]) for v in versions] == [
        (3, "carol", "short"), (2, "bob", "short"), (1, "ann", "full"),
    ]  # fmt: skip
    assert versions[0].definition["deleted_at"] and versions[1].definition["status"] == "disabled"
    assert versions[2].definition["breaker"]["threshold"] == 2
    assert [v.version for v in await triggers.list_versions(connection, trigger_id, before_version=3, limit=1)] == [2]


async def test_a_name_is_free_again_after_a_deletion(connection: Connection) -> None:
    definition = await make_definition(connection)
    first = await triggers.create(connection, definition, FULL, "active", "ann")
    other = await triggers.create(connection, definition, TriggerSpec(name="b", event_type="a"), "active", "ann")
    assert first and other
    assert not await triggers.update(connection, other, FULL, "active", "ann")  # taken by the first
    await triggers.delete(connection, first, "ann")
    assert await triggers.update(connection, other, FULL, "active", "ann")
    assert await triggers.create(connection, definition, TriggerSpec(name="b", event_type="a"), "active", "ann")


# What code declared -------------------------------------------------------------------------------------------------

CODE = TriggerSpec(name="code", event_type="a", max_concurrency=1)


async def declared(connection: Connection, spec: TriggerSpec) -> tuple[uuid.UUID | None, list[Trigger]]:
    definition = await make_definition(connection)
    written = await triggers.upsert_trigger(connection, definition, spec, "code")
    return written, await triggers.list_of_workflow(connection, "fulfil")


async def test_an_operators_edit_stays_until_the_code_changes(connection: Connection) -> None:
    _, [made] = await declared(connection, CODE)
    edited = TriggerSpec(name="code", event_type="a", max_concurrency=9)
    await triggers.update(connection, made.id, edited, "active", "ann")
    written, [same] = await declared(connection, CODE)
    assert written is None and (same.max_concurrency, same.version, same.updated_by) == (9, 2, "ann")
    newer = TriggerSpec(name="code", event_type="b")
    written, [changed] = await declared(connection, newer)
    assert written == made.id and said(changed) == newer and (changed.version, changed.updated_by) == (3, "code")
    assert (await declared(connection, newer))[0] is None
    written, [back] = await declared(connection, CODE)
    assert written == made.id and said(back) == CODE and back.version == 4


async def test_a_disabled_trigger_stays_disabled_when_the_code_changes(connection: Connection) -> None:
    _, [made] = await declared(connection, CODE)
    await triggers.update(connection, made.id, CODE, "disabled", "ann")
    _, [changed] = await declared(connection, TriggerSpec(name="code", event_type="b"))
    assert (changed.status, changed.event_type) == ("disabled", "b")


async def test_a_deleted_trigger_stays_deleted_until_the_code_changes(connection: Connection) -> None:
    _, [made] = await declared(connection, CODE)
    await triggers.delete(connection, made.id, "ann")
    assert await declared(connection, CODE) == (None, [])
    newer = TriggerSpec(name="code", event_type="b")
    written, [again] = await declared(connection, newer)
    assert written == again.id != made.id and again.version == 1
    await triggers.delete(connection, again.id, "ann")
    assert await declared(connection, newer) == (None, [])
    assert len((await declared(connection, CODE))[1]) == 1  # not what the last deleted one was


async def test_rows_that_do_not_know_what_the_code_said(connection: Connection) -> None:
    """As an older installation left them: compared field by field, and known from then on."""
    _, [made] = await declared(connection, CODE)
    await connection.execute("update tidegate.workflow_event_triggers set declared = null")
    written, [same] = await declared(connection, CODE)
    assert written is None and (same.version, same.updated_by) == (made.version, made.updated_by)
    assert len(await triggers.list_versions(connection, made.id)) == 1
    edited = TriggerSpec(name="code", event_type="a", max_concurrency=9)
    await triggers.update(connection, made.id, edited, "active", "ann")
    assert (await declared(connection, CODE))[1][0].max_concurrency == 9
    await connection.execute("update tidegate.workflow_event_triggers set declared = null")
    written, [overwritten] = await declared(connection, CODE)
    assert written == made.id and overwritten.max_concurrency == 1


# Deliveries as operators see them -----------------------------------------------------------------------------------


async def hold(connection: Connection, trigger_id: uuid.UUID, **given: Any) -> uuid.UUID:
    [event_id] = await make_events(connection, source=given.pop("source", "shop.api"))
    row: dict[str, Any] = {
        "id": delivery_id(event_id, trigger_id), "trigger_id": trigger_id, "event_id": event_id, "status": "throttled",
        "retry_state": "scheduled", "next_attempt_at": NOW + HOUR, "reason": "throttle", "retry_attempts": 2,
    } | given  # fmt: skip
    columns = ", ".join(row)
    places = ", ".join(f"${i}" for i in range(1, len(row) + 1))
    await connection.execute(
        f"insert into tidegate.workflow_trigger_deliveries ({columns}) values ({places})", *row.values()
    )
    made: uuid.UUID = row["id"]
    return made


async def etas(connection: Connection) -> list[float | None]:
    return [held.eta_seconds for held in await held_deliveries.list_waiting(connection, limit=10)]


async def test_pages_and_filters_of_what_waits(connection: Connection) -> None:
    await set_clock(connection)
    one, two = await make_triggers(connection, 2)
    [other] = await make_triggers(connection, 1, slug="bill")
    ids = [
        await hold(
            connection, one, next_attempt_at=NOW + timedelta(hours=n), source="shop.web" if n == 2 else "shop.api"
        )
        for n in range(3)
    ]
    second = await hold(connection, two, next_attempt_at=NOW + timedelta(hours=5), reason="paused", status="paused")
    third = await hold(connection, other, next_attempt_at=NOW + timedelta(hours=6))
    done = await hold(connection, one, retry_state="completed", next_attempt_at=None, status="skipped")

    async def waiting(**filters: Any) -> list[uuid.UUID]:
        return [h.id for h in await held_deliveries.list_waiting(connection, DeliveryFilters(**filters), limit=10)]

    assert await waiting() == [*ids, second, third]
    assert await waiting(trigger_id=one) == ids
    assert await waiting(workflow="bill") == [third]
    assert await waiting(source="shop.web") == [ids[2]]
    assert await waiting(reason="paused") == [second]
    assert await waiting(trigger_id=one, source="shop.api", workflow="fulfil", reason="throttle") == ids[:2]
    [first, *_] = await held_deliveries.list_waiting(connection, limit=2)
    assert (first.type, first.workflow, first.trigger, first.eta_seconds) == ("order.created", "fulfil", "t0", 0.0)
    page = await held_deliveries.list_waiting(connection, after=(NOW + HOUR, ids[1]), limit=2)
    assert [(h.id, h.eta_seconds) for h in page] == [(ids[2], 7200.0), (second, 18000.0)]
    settled = await held_deliveries.list_settled(connection, "completed", limit=10)
    assert [(h.id, h.next_attempt_at, h.eta_seconds) for h in settled] == [(done, None, None)]
    of_one = await held_deliveries.list_of_trigger(connection, one, limit=10)
    assert [h.id for h in of_one] == [done, *reversed(ids)]
    assert [h.id for h in await held_deliveries.list_of_trigger(connection, one, before_id=ids[2], limit=1)] == [ids[1]]
    skipped = await held_deliveries.list_of_trigger(connection, one, status="skipped", limit=10)
    assert [h.id for h in skipped] == [done]
    assert len(await held_deliveries.list_recent(connection, limit=10)) == 6


async def test_nobody_can_say_when(connection: Connection) -> None:
    await set_clock(connection)
    [trigger_id] = await make_triggers(connection)
    await hold(connection, trigger_id)
    assert await etas(connection) == [3600.0]
    pause: dict[str, Any] = {"until": None, "duration_ms": None, "reason": None, "actor": "ann"}
    await trigger_gates.pause(connection, trigger_id, **pause)
    assert await etas(connection) == [None]
    await trigger_gates.pause(connection, trigger_id, **pause | {"duration_ms": 1000})
    assert await etas(connection) == [3600.0]
    await trigger_gates.resume(connection, trigger_id)
    await connection.execute("update tidegate.event_scheduler_triggers set breaker_state = 'half_open'")
    assert await etas(connection) == [None]
    await trigger_gates.resume(connection, trigger_id)
    # A paused source matters only to those that wait for it.
    await sources.pause(connection, "shop.api", **pause)
    assert await etas(connection) == [3600.0]
    await connection.execute("update tidegate.workflow_trigger_deliveries set reason = 'source_paused'")
    assert await etas(connection) == [None]
    await connection.execute("update tidegate.workflow_trigger_deliveries set reason = 'concurrency'")
    assert await etas(connection) == [None]
    await connection.execute("update tidegate.workflow_trigger_deliveries set next_attempt_at = $1", NOW)
    assert await etas(connection) == [0.0]  # it has a slot


async def test_cancel_and_force(connection: Connection) -> None:
    await set_clock(connection)
    [trigger_id] = await make_triggers(connection)
    first, second = await hold(connection, trigger_id), await hold(connection, trigger_id)
    [cancelled] = await held_deliveries.cancel(connection, [first], "cancelled by ann")
    assert (cancelled.id, cancelled.trigger_id, cancelled.retry_attempts) == (first, trigger_id, 2)
    row = await held_deliveries.get(connection, first)
    assert row and (row.status, row.retry_state, row.next_attempt_at) == ("cancelled", "cancelled", None)
    assert row.last_error == "cancelled by ann"
    assert await held_deliveries.cancel(connection, [first], "again") == []
    assert await held_deliveries.force(connection, [first, uuid7()]) == []
    assert await held_deliveries.get(connection, uuid7()) is None

    assert await held_deliveries.force(connection, [second])  # a trigger without a state of its own
    await trigger_gates.replan(connection, trigger_id)
    assert await held_deliveries.force(connection, [second])
    forced = await connection.fetchrow("select * from tidegate.workflow_trigger_deliveries where id = $1", second)
    assert forced is not None
    assert (forced["next_attempt_at"], forced["plan_version"], forced["claim_generation"]) == (NOW, 1, 2)


@pytest.mark.parametrize("count", [0, 3])
async def test_cancelling_all_of_a_trigger(connection: Connection, count: int) -> None:
    one, two = await make_triggers(connection, 2)
    for _ in range(count):
        await hold(connection, one)
    await hold(connection, one, retry_state="completed", next_attempt_at=None, status="skipped")
    other = await hold(connection, two)
    assert await held_deliveries.cancel_of_trigger(connection, one, "trigger deleted by ann", "ann") == count
    told = await connection.fetch("select decision, reason, actor from tidegate.event_decisions")
    assert [tuple(row) for row in told] == [("cancelled", "trigger deleted by ann", "ann")] * count
    assert [h.id for h in await held_deliveries.list_waiting(connection, limit=10)] == [other]


async def test_states(connection: Connection) -> None:
    one, two = await make_triggers(connection, 2)
    await hold(connection, one)
    found = await triggers.states(connection, [one, two])
    assert found == {one: await trigger_gates.get(connection, one), two: await trigger_gates.get(connection, two)}
    assert (found[one].waiting, found[two].waiting) == (1, 0)
