"""An operator's edit loses nothing that waits: what a budget needs of an event could be evaluated when the event came;
if it cannot be after an edit, the delivery waits for the correction. On a real database with a moved clock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.test_budgets import drain, launched_payloads, put, ticks
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker, held, make_trigger, statuses
from tidegate.errors import InvalidInput
from tidegate.flow import control
from tidegate.flow.look.explain import explain
from tidegate.flow.look.health import facts, snapshot
from tidegate.flow.predict import budget_edit
from tidegate.model.budget import Budget, BudgetSpec
from tidegate.model.health import HEALTH
from tidegate.store import budgets, doctor, held_deliveries, troubled_budgets
from tidegate.store.db import Connection, Database

TYPO = "event.payload.tokes"
LETTERS = "select count(*) from tidegate.dead_letters"


@pytest.fixture
async def worker(database: Database, clock: Clock) -> TriggerWorker:
    return TriggerWorker(database)


async def waiting(
    database: Database, connection: Connection, worker: TriggerWorker, count: int = 8, **payload: Any
) -> list[str]:
    """So many deliveries that wait for the budget openai."""
    await put(database, "openai", "2/s", cost="event.payload.tokens")
    await make_trigger(database, budgets=["openai"])
    ids = await ticks(connection, count + 2, tokens=1, **payload)
    await worker.turn()
    assert await statuses(connection) == {"launched": 2, "throttled": count}
    return ids[2:]


@pytest.mark.parametrize("is_paused", [False, True], ids=["open", "paused"])
@pytest.mark.parametrize(
    ("edit", "error"),
    [
        ({"cost": TYPO}, "budget openai: cost: event.payload.tokes is not in the event"),
        ({"key": "{{ event.payload.tenat }}"}, "budget openai: key:"),
        (
            {"cost": "event.payload.tokens * 3"},
            "budget openai: cost: is 3, more than its rate of 2/s ever allows at once",
        ),
    ],
    ids=["cost", "key", "never"],
)
async def test_a_typo_in_an_edit_loses_nothing_that_waits(
    database: Database,
    connection: Connection,
    clock: Clock,
    worker: TriggerWorker,
    edit: Any,
    error: str,
    is_paused: bool,
) -> None:
    ids = await waiting(database, connection, worker)
    if is_paused:
        await control.pause_budget(database, "openai", reason="costs", actor="ada")
    await put(database, "openai", "2/s", **edit)
    for _ in range(3):
        await worker.turn()
        await clock.advance(2_000)
    assert await statuses(connection) == {"launched": 2, "throttled": 8}
    assert await connection.fetchval(LETTERS) == 0
    rows = await held(connection)
    assert {(row["reason"], row["budget"], row["budget_key"], row["budget_cost"]) for row in rows} == {
        ("budget", "openai", None, None)
    }
    assert rows[0]["last_error"].startswith(error)
    assert rows[0]["last_error"].endswith("; it waits until the budget is corrected")
    told = await explain(connection, ids[0])
    assert told.waits_for == "its budget to be corrected" and told.until is None
    assert error in told.summary
    found = await held_deliveries.list_waiting(connection, limit=10)
    assert {one.eta_seconds for one in found} == {None}
    record = await budgets.get(connection, "openai")
    assert record is not None and (record.waiting, record.unread) == (8, 8)
    await clock.advance(7_200_000)  # longer than the policy keeps what is refused
    await worker.turn()
    assert await statuses(connection) == {"launched": 2, "throttled": 8}
    causes = {cause.code: cause for cause in (await snapshot(connection, HEALTH, "book")).causes}
    expected = "budget_paused" if is_paused else "budget_unread"
    assert expected in causes and "budget_backlog" not in causes
    assert [one for one in await doctor.orphans(connection, 1000) if one.total] == []
    if is_paused:
        await control.resume_budget(database, "openai", "ada")
        await worker.turn()
    await put(database, "openai", "10/s", cost="event.payload.tokens")
    await drain(worker, connection, clock, 10)
    order = [one["n"] for one in await launched_payloads(connection)]
    assert order == sorted(order), "each has its place again"


async def test_a_rate_that_is_raised_again_frees_what_it_never_allowed(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "10/s", cost="event.payload.tokens")
    await make_trigger(database, budgets=["openai"])
    await ticks(connection, 4, tokens=9)
    await worker.turn()
    await put(database, "openai", "8/s", cost="event.payload.tokens")
    await clock.advance(1_100)
    await worker.turn()
    assert (await held(connection))[0]["budget_key"] is None
    await put(database, "openai", "10/s", cost="event.payload.tokens")
    await drain(worker, connection, clock, 4)
    assert await connection.fetchval(LETTERS) == 0


async def test_those_that_cannot_be_evaluated_hold_up_nobody_and_are_passed(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await waiting(database, connection, worker, count=3)
    await put(database, "openai", "2/s", cost="event.payload.units")
    await publish(connection, "tick", "shop", n=100, units=1)
    await clock.advance(1_100)
    await worker.turn()
    await worker.turn()
    assert [one["n"] for one in await launched_payloads(connection)] == [0, 1, 100]
    assert len(await held(connection)) == 3


async def test_a_new_event_that_cannot_be_evaluated_fails_but_not_while_the_budget_is_paused(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "2/s", cost=TYPO)
    await make_trigger(database, budgets=["openai"])
    await control.pause_budget(database, "openai", actor="ada")
    await ticks(connection, 1, tokens=1)
    await worker.turn()
    assert await statuses(connection) == {"throttled": 1}
    await control.resume_budget(database, "openai", "ada")
    await ticks(connection, 1, tokens=1)
    await worker.turn()
    assert await statuses(connection) == {"throttled": 1, "failed": 1}
    reason = await connection.fetchval(
        "select reason from tidegate.workflow_trigger_deliveries where status = 'failed'"
    )
    assert reason == "budget_error"


async def test_costs_that_cannot_be_evaluated_open_no_breaker_of_the_source_but_that_of_the_trigger(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    """The source sent what it always sends. The breaker of the trigger keeps the rest from becoming dead letters."""
    await put(database, "openai", "100/s", cost=TYPO)
    await make_trigger(database, budgets=["openai"])
    for _ in range(20):
        await publish(connection, "tick", "shop", tokens=1)
        await worker.turn()
    state = await connection.fetchval(
        "select breaker_state from tidegate.event_scheduler_sources where source = 'shop'"
    )
    assert state in (None, "closed")
    assert await connection.fetchval("select breaker_state from tidegate.event_scheduler_triggers") == "open"
    found = await statuses(connection)
    assert found["failed"] < 10 and found["paused"] > 10


async def test_a_replayed_delivery_that_still_cannot_be_evaluated_fails_again(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "2/s", cost="event.payload.tokens")
    await make_trigger(database, budgets=["openai"])
    await publish(connection, "tick", "shop")
    await worker.turn()
    letter = await connection.fetchval("select id from tidegate.dead_letters")
    await control.replay_letter(database, letter, "ada")
    await worker.turn()
    assert await statuses(connection) == {"failed": 1}
    assert await connection.fetchval(LETTERS) == 2


async def test_an_edit_is_checked_for_what_waits(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    ids = await waiting(database, connection, worker)
    found = await budget_edit.check(database, Budget("openai", "2/s", cost=TYPO))
    assert (found.waiting, found.unread, found.is_cut) == (8, 8, False)
    assert str(found.examples[0].event_id) == ids[0]
    assert found.examples[0].error == "budget openai: cost: event.payload.tokes is not in the event"
    assert (await budget_edit.check(database, Budget("openai", "5/s", cost="event.payload.tokens"))).unread == 0
    cut = await budget_edit.check(database, Budget("openai", "2/s", cost=TYPO), most=5)
    assert (cut.waiting, cut.unread, cut.is_cut) == (5, 5, True)
    with pytest.raises(InvalidInput, match="not valid"):
        await budget_edit.check(database, BudgetSpec(name="openai"))


async def test_the_list_and_explain_agree_about_a_timed_pause_and_a_closed_budget(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    ids = await waiting(database, connection, worker)

    async def agree() -> None:
        listed = {str(one.event_id): one for one in await held_deliveries.list_waiting(connection, limit=20)}
        for event_id in ids:
            told = await explain(connection, event_id)
            assert told.until == listed[event_id].expected_at, event_id
            assert listed[event_id].eta_seconds == (told.until - clock.now).total_seconds()

    await control.pause_budget(database, "openai", duration_ms=600_000, actor="ada")
    await agree()
    await worker.turn()
    await agree()
    await clock.advance(3_000)
    await worker.turn()
    await agree()
    await control.resume_budget(database, "openai", "ada")

    async def close(connection: Connection) -> None:
        await budgets.lock(connection, ["openai"])
        await budgets.close(connection, ("openai", ""), 300_000, "429")

    await database.run(close)
    await agree()
    await worker.turn()
    await agree()


async def test_a_closed_and_a_half_open_key_are_shown_and_reported(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "100/s", key="{{ event.payload.tenant }}")
    await make_trigger(database, budgets=["openai"])

    async def close(connection: Connection) -> None:
        await budgets.lock(connection, ["openai"])
        await budgets.close(connection, ("openai", "a"), 1_200_000, "429")
        await budgets.close(connection, ("openai", "b"), 60_000, "503")

    await database.run(close)
    found = (await troubled_budgets.closed_keys(connection, ["openai"], 20))["openai"]
    assert [(one.key, one.state, one.reason, one.until - clock.now) for one in found.keys] == [
        ("a", "closed", "429", timedelta(minutes=20)), ("b", "closed", "503", timedelta(minutes=1)),
    ]  # fmt: skip
    [cause] = [one for one in (await snapshot(connection, HEALTH, "book")).causes if one.code == "budget_closed"]
    assert "key a is closed" in cause.message and "429" in cause.message
    assert [one.total for one in (await facts(connection, HEALTH)).closed_budgets] == [1]
    await ticks(connection, 2, tenant="b")
    await worker.turn()
    await clock.advance(61_000)
    [_, b] = (await troubled_budgets.closed_keys(connection, ["openai"], 20))["openai"].keys
    assert (b.key, b.state, b.run_id) == ("b", "half_open", None)
    await worker.turn()
    [_, b] = (await troubled_budgets.closed_keys(connection, ["openai"], 20))["openai"].keys
    assert (b.key, b.state) == ("b", "half_open") and b.run_id is not None
    [waits] = await held(connection)
    told = await explain(connection, str(waits["event_id"]))
    assert told.waits_for == f"run {b.run_id}, which is tried first, to end"
    await worker.end_runs(1)
    await worker.turn()
    assert [one.key for one in (await troubled_budgets.closed_keys(connection, ["openai"], 20))["openai"].keys] == ["a"]
