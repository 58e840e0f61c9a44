"""Budgets on a real database with a moved clock: rates, costs, slots, keys, several at once, edits, pauses."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from tests.conftest import Clock
from tests.flow.checker import milliseconds, most_in_any_interval
from tests.flow.step_world import POLICY, World
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker, held, launches, make_trigger, statuses
from tidegate import Context, SyncContext
from tidegate.errors import Conflict, InvalidInput, NotFound, RetryAfter
from tidegate.flow import control
from tidegate.flow.hold.delivery_retry import DeliveryRetry
from tidegate.flow.keep.budgets import BudgetKeeper
from tidegate.flow.look.explain import explain
from tidegate.model.budget import Budget
from tidegate.store import budgets
from tidegate.store.db import Connection, Database

TENANT = "{{ event.payload.tenant }}"
STATUS = "select status from tidegate.workflow_trigger_deliveries where id = $1"


@pytest.fixture
async def worker(database: Database, clock: Clock) -> TriggerWorker:
    return TriggerWorker(database)


async def put(database: Database, name: str, rate: str | None = None, **fields: Any) -> None:
    await control.put_budget(database, Budget(name, rate, **fields), "test")


async def ticks(connection: Connection, count: int, **payload: Any) -> list[str]:
    return [await publish(connection, "tick", "shop", n=n, **payload) for n in range(count)]


async def launched_payloads(connection: Connection) -> list[dict[str, Any]]:
    """The payloads of what was launched, in the order of launches."""
    rows = await connection.fetch(
        "select e.payload, d.launched_at from tidegate.workflow_trigger_deliveries d "
        "  join tidegate.workflow_events e on e.id = d.event_id where d.status = 'launched' "
        " order by d.launched_at, d.ingress_sequence, e.ingress_sequence"
    )
    return [row[0] for row in rows]


async def drain(worker: TriggerWorker, connection: Connection, clock: Clock, count: int, step_ms: int = 20) -> None:
    """Turn and move the clock until so many are launched."""
    began = clock.now
    while (await statuses(connection)).get("launched", 0) < count:
        await worker.turn()
        await clock.advance(step_ms)
        assert clock.now - began < timedelta(seconds=60), await statuses(connection)


# Rates --------------------------------------------------------------------------------------------------------------


async def test_over_the_rate_is_held_with_its_budget_key_cost_and_time(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "10/s", cost="event.payload.tokens")
    await make_trigger(database, budgets=["openai"])
    await ticks(connection, 4, tokens=4)
    counts = await worker.turn()
    assert counts.launched == 2
    rows = await held(connection)
    assert [(r["reason"], r["status"], r["budget"], r["budget_key"], r["budget_cost"]) for r in rows] == [
        ("budget", "throttled", "openai", "", 4)
    ] * 2
    assert rows[0]["last_error"] == "budget openai: over 10/s with a cost of 4"
    assert rows[0]["retry_metadata"]["waits_for"]["budget"] == {
        "name": "openai", "key": "", "cost": 4, "why": "rate",
    }  # fmt: skip
    assert rows[1]["last_error"] == "budget openai: waiting in line"
    assert clock.now + timedelta(seconds=1) <= rows[0]["next_attempt_at"] < rows[1]["next_attempt_at"]


async def test_two_triggers_share_one_rate_in_any_sliding_window(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "20/s")
    await make_trigger(database, "one", budgets=["openai"])
    await make_trigger(database, "two", budgets=["openai"])
    await ticks(connection, 60)
    began = clock.now
    await drain(worker, connection, clock, 120)
    times = await launches(connection)
    assert most_in_any_interval(milliseconds(times), 1000) <= 20
    assert clock.now - began <= timedelta(milliseconds=5000 * 1.08), "at least 95 % of the budget is used"
    order = [p["n"] for p in await launched_payloads(connection)]
    assert order == sorted(order)


async def test_costs_are_spent_and_a_large_one_is_not_overtaken(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "10/s", cost="event.payload.tokens")
    await make_trigger(database, budgets=["openai"])
    for tokens in (6, 10, 1, 0, 3):
        await publish(connection, "tick", "shop", tokens=tokens)
    await worker.turn()
    assert [p["tokens"] for p in await launched_payloads(connection)] == [6, 0]  # what is free needs no turn
    await drain(worker, connection, clock, 5)
    rows = await connection.fetch(
        "select (e.payload ->> 'tokens')::int as cost, d.launched_at from tidegate.workflow_trigger_deliveries d "
        "join tidegate.workflow_events e on e.id = d.event_id order by 2, e.ingress_sequence"
    )
    assert [row["cost"] for row in rows] == [6, 0, 10, 1, 3]
    spent = [at for row, at in zip(rows, milliseconds([r["launched_at"] for r in rows]), strict=True)
             for _ in range(row["cost"])]  # fmt: skip
    assert most_in_any_interval(spent, 1000) <= 10


async def test_a_key_that_cannot_be_rendered_names_the_budget(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "10/s", key=TENANT)
    await make_trigger(database, budgets=["openai"])
    await ticks(connection, 1)
    await worker.turn()
    error = await connection.fetchval("select last_error from tidegate.workflow_trigger_deliveries")
    assert error == "budget openai: key: {{ event.payload.tenant }} is not in the event"


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({"tokens": 11}, "budget openai: cost: is 11, more than its rate of 10/s ever allows at once"),
        ({"tokens": -1}, "budget openai: cost: must be a whole number from 0 to 1000000000, not -1"),
        ({"tokens": 1.5}, "budget openai: cost: must be a whole number from 0 to 1000000000, not 1.5"),
        ({"tokens": "many"}, "budget openai: cost: must be a whole number from 0 to 1000000000, not 'many'"),
        ({}, "budget openai: cost: event.payload.tokens is not in the event"),
    ],
)
async def test_a_cost_that_can_never_be_spent_fails_the_delivery(
    database: Database,
    connection: Connection,
    clock: Clock,
    worker: TriggerWorker,
    payload: dict[str, Any],
    error: str,
) -> None:
    await put(database, "openai", "10/s", cost="event.payload.tokens")
    await make_trigger(database, budgets=["openai"])
    await publish(connection, "tick", "shop", **payload)
    await worker.turn()
    row = await connection.fetchrow("select status, last_error from tidegate.workflow_trigger_deliveries")
    assert tuple(row) == ("failed", error)
    assert await connection.fetchval("select count(*) from tidegate.dead_letters where kind = 'delivery'") == 1


# Keys ---------------------------------------------------------------------------------------------------------------


async def test_a_flood_of_one_key_does_not_delay_another(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "per-tenant", "10/s", key=TENANT)
    await make_trigger(database, budgets=["per-tenant"])
    await ticks(connection, 300, tenant="loud")
    await worker.turn()
    for n in range(30):
        await publish(connection, "tick", "shop", tenant="quiet", n=n)
        await worker.turn()
        launched = Counter(p["tenant"] for p in await launched_payloads(connection))
        assert launched["quiet"] == n + 1
        await clock.advance(110)
    times = await connection.fetch(
        "select d.launched_at from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e "
        "on e.id = d.event_id where d.status = 'launched' and e.payload ->> 'tenant' = 'loud' order by 1"
    )
    assert most_in_any_interval(milliseconds([row[0] for row in times]), 1000) <= 10
    assert launched["loud"] >= 0.9 * 10 * 30 * 0.11


async def test_idle_keys_are_forgotten_and_used_ones_are_not(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "per-tenant", "2/min", key=TENANT)
    await make_trigger(database, budgets=["per-tenant"])
    for tenant in range(500):
        await publish(connection, "tick", "shop", tenant=tenant)
    await worker.turn()
    count = "select count(*) from tidegate.budget_keys"
    assert await connection.fetchval(count) == 500
    keeper = BudgetKeeper(database)
    assert (await keeper.run_once()).keys == 0
    await clock.advance(60_000)
    await ticks(connection, 3, tenant=7)
    await worker.turn()
    await clock.advance(130_000)
    assert (await keeper.run_once()).keys == 499
    kept = [row[0] for row in await connection.fetch("select key from tidegate.budget_keys")]
    assert kept == ["7"], "somebody waits for it"
    await ticks(connection, 1, tenant=3)
    await worker.turn()
    assert (await statuses(connection))["launched"] == 504


# Concurrency --------------------------------------------------------------------------------------------------------


async def test_runs_of_all_triggers_hold_the_slots_and_the_end_of_one_makes_the_next_due(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=2)
    await make_trigger(database, "one", budgets=["gpu"])
    await make_trigger(database, "two", budgets=["gpu"])
    await ticks(connection, 2)
    await worker.turn()
    assert await statuses(connection) == {"launched": 2, "throttled": 2}
    rows = await held(connection)
    assert rows[0]["last_error"] == "budget gpu: 2 of 2 slots are in use"
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 2
    freed = await worker.end_runs(1)
    assert freed.woken == 1
    await worker.delivery_retry.run_once()
    assert await statuses(connection) == {"launched": 3, "throttled": 1}
    assert {r["ingress_sequence"] for r in await held(connection)} == {rows[1]["ingress_sequence"]}
    await worker.end_runs(2)
    await worker.delivery_retry.run_once()
    await worker.end_runs(1)
    assert await statuses(connection) == {"launched": 4}
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 0


async def test_a_newcomer_does_not_take_the_slot_of_who_waits(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=1)
    await make_trigger(database, budgets=["gpu"])
    await ticks(connection, 2)
    await worker.turn()
    await worker.end_runs(1)
    await publish(connection, "tick", "shop", n=2)
    await worker.dispatch.run_once()
    assert [p["n"] for p in await launched_payloads(connection)] == [0]
    await worker.delivery_retry.run_once()
    assert [p["n"] for p in await launched_payloads(connection)] == [0, 1]


async def test_who_waits_for_slots_of_a_budget_with_a_rate_is_not_checked_all_the_time(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    """The rate has room, so a time by the rate would be now, again and again."""
    await put(database, "g", "100/s", concurrency=2)
    await make_trigger(database, budgets=["g"])
    await ticks(connection, 6)
    await worker.turn()
    assert await statuses(connection) == {"launched": 2, "throttled": 4}
    for _ in range(3):
        await worker.delivery_retry.run_once()
        await clock.advance(20)
    assert (await worker.delivery_retry.run_once()).due == 0
    for ended in range(1, 5):  # the end of a run wakes the first in line
        assert (await worker.end_runs(1)).woken == 1
        await worker.delivery_retry.run_once()
        assert (await statuses(connection))["launched"] == 2 + ended


async def test_a_rate_and_slots_of_each_key(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "per-tenant", "5/s", concurrency=2, key=TENANT)
    await make_trigger(database, budgets=["per-tenant"])
    for _ in range(8):
        await publish(connection, "tick", "shop", tenant="a")
        await publish(connection, "tick", "shop", tenant="b")
    most: Counter[str] = Counter()
    for _ in range(400):
        await worker.turn()
        rows = await connection.fetch(
            "select h.key, count(*) from tidegate.budget_holders h join tidegate.workflow_runs r on r.id = h.run_id "
            "where r.status in ('pending', 'running') group by 1"
        )
        for key, count in rows:
            most[key] = max(most[key], count)
        await clock.advance(50)
        await worker.end_runs(1)
        if (await statuses(connection)).get("launched") == 16:
            break
    assert await statuses(connection) == {"launched": 16}
    assert most == {"a": 2, "b": 2}


# Several budgets ----------------------------------------------------------------------------------------------------


async def test_a_launch_spends_all_of_its_budgets_or_none(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "all", "3/s")
    await put(database, "per-tenant", "1/s", key=TENANT)
    await make_trigger(database, budgets=["per-tenant", "all"])
    for tenant in ("a", "a", "a", "b"):
        await publish(connection, "tick", "shop", tenant=tenant)
    await worker.turn()
    assert [p["tenant"] for p in await launched_payloads(connection)] == ["a", "b"]
    assert {r["budget"] for r in await held(connection)} == {"per-tenant"}
    await publish(connection, "tick", "shop", tenant="c")  # there is room: who was refused has spent nothing
    await worker.turn()
    assert [p["tenant"] for p in await launched_payloads(connection)] == ["a", "b", "c"]
    await publish(connection, "tick", "shop", tenant="d")
    await worker.turn()
    assert [r["budget"] for r in await held(connection)] == ["per-tenant", "per-tenant", "all"]
    await drain(worker, connection, clock, 6)


async def test_who_needs_two_scarce_budgets_is_not_passed_for_ever(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    """Each of the two is asked for by others all the time, and they never have room at the same moment by chance."""
    await put(database, "a", "1/s")
    await put(database, "b", "1/s")
    await make_trigger(database, "only-a", event_type="a", budgets=["a"])
    await make_trigger(database, "only-b", event_type="b", budgets=["b"])
    both = await make_trigger(database, "both", event_type="both", budgets=["a", "b"])
    await publish(connection, "a", "shop")
    await worker.turn()
    await clock.advance(500)
    await publish(connection, "b", "shop")
    await worker.turn()
    for _ in range(10):
        await publish(connection, "a", "shop")
        await publish(connection, "b", "shop")
    await worker.turn()
    await publish(connection, "both", "shop")
    for _ in range(10):
        await publish(connection, "a", "shop")
        await publish(connection, "b", "shop")
    for _ in range(1700):
        await worker.turn()
        await clock.advance(10)
        if await launches(connection, both):
            break
    assert await launches(connection, both)
    await drain(worker, connection, clock, 43)


# Edits and pauses ---------------------------------------------------------------------------------------------------


async def test_a_raised_limit_takes_effect_for_what_waits(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "1/h")
    await make_trigger(database, budgets=["openai"])
    await ticks(connection, 50)
    await worker.turn()
    assert (await statuses(connection))["launched"] == 1
    await put(database, "openai", "20/s")
    began = clock.now
    await drain(worker, connection, clock, 50)
    assert clock.now - began <= timedelta(seconds=3.2)
    order = [p["n"] for p in await launched_payloads(connection)]
    assert order == sorted(order)


async def test_a_lowered_limit_holds_from_the_edit_on(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "100/s")
    await make_trigger(database, budgets=["openai"])
    await ticks(connection, 300)
    await worker.turn()
    await put(database, "openai", "10/s")
    edited = clock.now
    await drain(worker, connection, clock, 130)
    times = [at for at in await launches(connection) if at > edited]
    assert most_in_any_interval(milliseconds(times), 1000) <= 10
    attempts = await connection.fetchval("select max(attempts) from tidegate.workflow_trigger_deliveries")
    assert attempts <= 12


@pytest.mark.parametrize(("duration_ms", "until"), [(None, "it is resumed"), (10_000, "2026-06-01 12:00:10 UTC")])
async def test_a_pause_is_told_of_what_was_in_line_before_and_of_what_came_later(
    database: Database,
    connection: Connection,
    clock: Clock,
    worker: TriggerWorker,
    duration_ms: int | None,
    until: str,
) -> None:
    await put(database, "openai", "2/min")
    await make_trigger(database, budgets=["openai"])
    await ticks(connection, 5)
    await worker.turn()
    await control.pause_budget(database, "openai", duration_ms=duration_ms, reason="costs", actor="ada")
    await ticks(connection, 1)
    await worker.turn()
    rows = await held(connection)
    assert len(rows) == 4
    for number, row in enumerate(rows, 1):
        told = await explain(connection, str(row["event_id"]))
        pause = (
            f": budget openai: paused by ada until {until}: costs; it is number {number} in line; 0 of 2/min are left"
        )
        assert pause in told.summary and told.summary.count("paused") == 1, told.summary
        assert told.waits_for == (
            "its budget to be resumed" if duration_ms is None else "the end of its budget's pause"
        )
        assert (told.until is None) == (duration_ms is None)


async def test_a_paused_budget_holds_everything_without_an_end_until_it_is_resumed(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "10/s")
    await make_trigger(database, budgets=["openai"])
    await control.pause_budget(database, "openai", reason="costs", actor="ada")
    await ticks(connection, 15)
    await worker.turn()
    rows = await held(connection)
    assert len(rows) == 15 and rows[0]["last_error"] == "budget openai: paused by ada: costs"
    await clock.advance(7_200_000)  # longer than the policy keeps what is refused
    await worker.turn()
    assert (await statuses(connection)) == {"throttled": 15}
    await control.resume_budget(database, "openai", "ada")
    began = clock.now
    await drain(worker, connection, clock, 15)
    assert clock.now - began <= timedelta(seconds=1.2)
    assert most_in_any_interval(milliseconds(await launches(connection)), 1000) <= 10
    actions = [r[0] for r in await connection.fetch("select action from tidegate.audit_log order by id")]
    assert [a for a in actions if a.startswith("budget.")] == ["budget.create", "budget.pause", "budget.resume"]


async def test_a_pause_with_an_end_ends_by_itself(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=5)
    await make_trigger(database, budgets=["gpu"])
    await control.pause_budget(database, "gpu", duration_ms=5000, actor="ada")
    await ticks(connection, 3)
    await worker.turn()
    await clock.advance(4900)
    await worker.turn()
    assert await statuses(connection) == {"throttled": 3}
    await clock.advance(200)
    await worker.turn()
    assert await statuses(connection) == {"launched": 3}


async def test_another_key_template_takes_effect_for_what_waits_and_what_runs(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=1)
    await make_trigger(database, budgets=["gpu"])
    for tenant in ("a", "b", "a"):
        await publish(connection, "tick", "shop", tenant=tenant)
    await worker.turn()
    assert await statuses(connection) == {"launched": 1, "throttled": 2}
    await put(database, "gpu", concurrency=1, key=TENANT)
    await worker.turn()
    assert [p["tenant"] for p in await launched_payloads(connection)] == ["a", "b"]
    assert [(r["budget_key"], r["last_error"]) for r in await held(connection)] == [
        ("a", "budget gpu: 1 of 1 slots for key a are in use")
    ]


async def test_a_trigger_that_no_longer_uses_the_budget_launches_what_waits(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=1)
    trigger_id = await make_trigger(database, budgets=["gpu"])
    await ticks(connection, 3)
    await worker.turn()
    await control.update_trigger(database, trigger_id, {"budgets": None}, "ada")
    await worker.turn()
    assert await statuses(connection) == {"launched": 3}
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 0


async def test_a_budget_given_to_a_trigger_counts_the_runs_that_are_unfinished(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=2)
    trigger_id = await make_trigger(database)
    await ticks(connection, 2)
    await worker.turn()
    await control.update_trigger(database, trigger_id, {"budgets": ["gpu"]}, "ada")
    await ticks(connection, 1)
    await worker.turn()
    assert await statuses(connection) == {"launched": 2, "throttled": 1}
    await worker.end_runs(1)
    await worker.turn()
    assert await statuses(connection) == {"launched": 3}


async def test_a_throttle_and_slots_of_the_trigger_hold_beside_a_budget(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "30/s")
    await make_trigger(database, "one", budgets=["openai"], throttle_count=10, throttle_window_ms=1000)
    await make_trigger(database, "two", budgets=["openai"], max_concurrency=3)
    await ticks(connection, 40)
    began = clock.now
    while (await statuses(connection)).get("launched", 0) < 80:
        await worker.turn()
        await clock.advance(40)
        await worker.end_runs(2)
        assert clock.now - began < timedelta(seconds=30), await statuses(connection)
    times = milliseconds(await launches(connection))
    assert most_in_any_interval(times, 1000) <= 30


# Verbs --------------------------------------------------------------------------------------------------------------


async def test_a_trigger_names_budgets_that_exist(database: Database, connection: Connection) -> None:
    trigger_id = await make_trigger(database)
    with pytest.raises(InvalidInput, match=r"budgets\[0\]: there is no budget 'nope'"):
        await control.update_trigger(database, trigger_id, {"budgets": ["nope"]}, "ada")


async def test_a_budget_in_use_is_not_deleted(database: Database, connection: Connection) -> None:
    await put(database, "gpu", concurrency=1)
    trigger_id = await make_trigger(database, budgets=["gpu"])
    with pytest.raises(Conflict) as refused:
        await control.delete_budget(database, "gpu", "ada")
    assert refused.value.errors[0].message == "tick/main use it; remove it from their budgets first"
    await control.update_trigger(database, trigger_id, {"budgets": []}, "ada")
    await control.delete_budget(database, "gpu", "ada")
    with pytest.raises(NotFound):
        await control.pause_budget(database, "gpu", actor="ada")


async def test_code_that_says_the_same_does_not_undo_what_an_operator_changed(
    database: Database, connection: Connection
) -> None:
    async def declare(rate: str) -> None:
        async def work(connection: Connection) -> None:
            await control.declare_budgets(connection, [Budget("openai", rate)], "code")

        await database.run(work)

    await declare("10/s")
    await put(database, "openai", "20/s")
    await declare("10/s")
    limit = "select rate_limit from tidegate.budgets"
    assert await connection.fetchval(limit) == 20
    await declare("30/s")
    assert await connection.fetchval(limit) == 30


async def test_a_cancelled_delivery_leaves_its_place(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=1)
    await make_trigger(database, budgets=["gpu"])
    await ticks(connection, 3)
    await worker.turn()
    first, second = await held(connection)
    await worker.end_runs(1)  # the first is offered the slot
    await control.change_retry(database, "deliveries", first["id"], "cancel", "ada")
    await worker.delivery_retry.run_once()
    assert await connection.fetchval(STATUS, second["id"]) == "launched"


async def test_a_deleted_trigger_leaves_its_places(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=1)
    gone = await make_trigger(database, "one", event_type="one", budgets=["gpu"])
    await make_trigger(database, "two", event_type="two", budgets=["gpu"])
    for kind in ("two", "one", "two"):
        await publish(connection, kind, "shop")
    await worker.turn()
    await worker.end_runs(1)  # the one of the first trigger is offered the slot
    await control.delete_trigger(database, gone, "ada")
    await worker.delivery_retry.run_once()
    assert await statuses(connection) == {"launched": 2, "cancelled": 1}


async def test_a_retried_or_repeated_run_holds_a_slot_again(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=1, key=TENANT)
    await make_trigger(database, budgets=["gpu"])
    await ticks(connection, 1, tenant="a")
    await worker.turn()
    await worker.end_runs(1, "failed")
    run_id = await connection.fetchval("select id from tidegate.workflow_runs")
    assert await control.retry_run(database, run_id, "ada") == "resumed"
    await ticks(connection, 1, tenant="a")
    await worker.turn()
    assert await statuses(connection) == {"launched": 1, "throttled": 1}
    with pytest.raises(Conflict, match="has not ended"):
        await control.rerun_run(database, run_id, "ada")
    await worker.end_runs(1)
    await worker.turn()
    with pytest.raises(Conflict, match="all 1 slots of budget gpu for key a are in use"):
        await control.rerun_run(database, run_id, "ada")
    await worker.end_runs(1)
    again = await control.rerun_run(database, run_id, "ada")
    assert await connection.fetchval("select run_id from tidegate.budget_holders where key = 'a'") == again


# Closed for everyone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["step", "outside", "sync"])
async def test_a_run_closes_a_budget_for_everyone_and_one_goes_first_afterwards(
    database: Database, connection: Connection, clock: Clock, world: World, where: str
) -> None:
    """One run is told 429: nobody of its tenant is launched before the time, of any workflow; then one goes first."""
    openai = Budget("openai", "1000/s", key=TENANT)

    def call(tenant: str, what: str) -> str:
        world.done.append(f"{what} {tenant}")
        if len(world.done) == 1:
            raise RetryAfter(60, "429 Too Many Requests", everyone="openai")
        return "ok"

    if where == "sync":

        @world.app.workflow(on="ask", budgets=[openai])
        def ask(ctx: SyncContext, tenant: str) -> str:
            return ctx.step("call", call, tenant, "ask")
    else:

        @world.app.workflow(on="ask", budgets=[openai])
        async def ask(ctx: Context, tenant: str) -> str:
            return await ctx.step("call", call, tenant, "ask") if where == "step" else call(tenant, "ask")

    @world.app.workflow(on="draw", budgets=["openai"])
    async def draw(ctx: Context, tenant: str) -> None:
        await ctx.step("call", call, tenant, "draw")
        await ctx.sleep("10s")

    runner = await world.runner()
    retry = DeliveryRetry(database, batch_size=10, after_launch=lambda: None)
    await publish(connection, "ask", "shop", tenant="a")
    await world.turn(runner)
    for tenant in ("a", "a", "b"):
        await publish(connection, "draw", "shop", tenant=tenant)
    await world.turn(runner)
    assert world.done == ["ask a", "draw b"]
    rows = await held(connection)
    assert [(r["budget"], r["budget_key"]) for r in rows] == [("openai", "a")] * 2
    assert rows[0]["last_error"] == "budget openai: closed for key a: RetryAfter: 429 Too Many Requests"
    told = await explain(connection, str(rows[0]["event_id"]))
    assert told.waits_for == "the time that a run asked everyone to wait for"
    assert told.until == clock.now + timedelta(seconds=60)
    await clock.advance(59_000)
    await retry.run_once()
    assert len(await held(connection)) == 2
    await clock.advance(1100)
    await retry.run_once()
    [waits] = await held(connection)
    assert "half open for key a: run" in waits["last_error"]
    await world.turn(runner)  # the one that goes first sleeps, and the run that was told 429 has its retry
    assert sorted(world.done) == ["ask a", "ask a", "draw a", "draw b"]
    await retry.run_once()
    assert len(await held(connection)) == 1, "the first has not ended"
    await clock.advance(10_100)
    await world.turn(runner)
    await retry.run_once()
    assert await held(connection) == []


@pytest.mark.parametrize("where", ["step", "outside"])
async def test_a_run_that_gives_up_closes_the_budget_too(
    database: Database, connection: Connection, clock: Clock, world: World, where: str
) -> None:
    openai = Budget("openai", "1000/s", concurrency=1, key=TENANT)

    def call(tenant: str) -> None:
        world.done.append(tenant)
        raise RetryAfter(60, "429 Too Many Requests", everyone="openai")

    @world.app.workflow(on="ask", budgets=[openai])
    async def ask(ctx: Context, tenant: str) -> None:
        await ctx.step("call", call, tenant) if where == "step" else call(tenant)

    runner = await world.runner(policy=msgspec.structs.replace(POLICY, max_attempts=1))
    retry = DeliveryRetry(database, batch_size=10, after_launch=lambda: None)
    for tenant in ("a", "a", "b"):
        await publish(connection, "ask", "shop", tenant=tenant)
    for _ in range(3):  # the second waited for the slot of the first, which has given it back
        await world.turn(runner)
        await retry.run_once()
    assert sorted(world.done) == ["a", "b"]
    [waits] = await held(connection)
    assert waits["last_error"] == "budget openai: closed for key a: RetryAfter: 429 Too Many Requests"
    await clock.advance(61_000)  # the one that goes first gives up, too: the budget is closed again
    await publish(connection, "ask", "shop", tenant="a")
    for _ in range(3):
        await retry.run_once()
        await world.turn(runner)
    assert sorted(world.done) == ["a", "a", "b"]
    assert "closed for key a" in (await held(connection))[0]["last_error"]


async def test_who_goes_first_is_waited_for_a_minute_at_most_and_may_close_it_again(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=5)
    await make_trigger(database, budgets=["gpu"])

    async def close(connection: Connection) -> None:
        await budgets.lock(connection, ["gpu"])
        await budgets.close(connection, ("gpu", ""), 30_000, "429")

    await database.run(close)
    await ticks(connection, 3)
    await worker.turn()
    assert await statuses(connection) == {"throttled": 3}
    await clock.advance(30_100)
    await worker.turn()
    assert await statuses(connection) == {"launched": 1, "throttled": 2}
    await database.run(close)
    await worker.turn()
    await clock.advance(29_000)
    await worker.end_runs(1)  # one that was launched before it was closed again opens nothing
    await worker.turn()
    assert await statuses(connection) == {"launched": 1, "throttled": 2}
    await clock.advance(1100)
    await worker.turn()
    assert await statuses(connection) == {"launched": 2, "throttled": 1}
    await clock.advance(60_100)
    await worker.turn()
    assert await statuses(connection) == {"launched": 3}


async def test_resuming_opens_what_was_closed_and_a_closed_key_is_not_forgotten(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "5/s", key=TENANT)
    await make_trigger(database, budgets=["openai"])

    async def close(connection: Connection) -> None:
        await budgets.lock(connection, ["openai"])
        await budgets.close(connection, ("openai", "a"), 7_200_000, "429")

    await database.run(close)
    await clock.advance(3_600_000)
    assert (await BudgetKeeper(database).run_once()).keys == 0
    await ticks(connection, 2, tenant="a")
    await worker.turn()
    assert await statuses(connection) == {"throttled": 2}
    await control.resume_budget(database, "openai", "ada")
    await worker.turn()
    assert await statuses(connection) == {"launched": 2}


async def test_a_name_that_is_no_budget_holds_up_nobody_else(
    connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow(on="ask")
    async def ask(ctx: Context) -> None:
        world.done.append("ask")
        if len(world.done) == 1:
            raise RetryAfter(60, "429", everyone="nothing")

    runner = await world.runner()
    await publish(connection, "ask", "shop")
    await world.turn(runner)
    await publish(connection, "ask", "shop")
    await world.turn(runner)
    assert world.done == ["ask", "ask"]
    await clock.advance(61_000)
    await world.turn(runner)
    assert world.done == ["ask", "ask", "ask"]
