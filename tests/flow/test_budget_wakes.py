"""Who is next in the line of a budget is woken, whatever takes the first one out of it, and whenever a slot is free."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.test_budgets import put, ticks
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker, held, make_trigger, statuses
from tidegate.flow import control
from tidegate.flow.decide.budgets import BudgetState, KeyState
from tidegate.flow.hold import delivery_retry
from tidegate.flow.keep.budgets import BudgetKeeper
from tidegate.model.allowance import Allowance
from tidegate.model.budget import Budget, Reserved
from tidegate.model.ids import DeliveryId
from tidegate.store import budgets
from tidegate.store.budgets import LockedBudget
from tidegate.store.db import Connection, Database

# Whether a transaction waits for the one that asks.
WAITS = "select exists (select from pg_stat_activity where pg_backend_pid() = any (pg_blocking_pids(pid)))"
ATTEMPTS = "select max(attempts) from tidegate.workflow_trigger_deliveries"


@pytest.fixture
async def worker(database: Database, clock: Clock) -> TriggerWorker:
    return TriggerWorker(database)


async def two_wait(database: Database, connection: Connection, worker: TriggerWorker, **first: Any) -> list[Any]:
    """Of the only slot: a run has it, a delivery of trigger `one` is first in line, and one of `two` is behind it."""
    await put(database, "gpu", concurrency=1)
    ids = [await make_trigger(database, "one", event_type="one", budgets=["gpu"], **first),
           await make_trigger(database, "two", event_type="two", budgets=["gpu"])]  # fmt: skip
    for kind in ("two", "one", "two"):
        await publish(connection, kind, "shop")
    await worker.turn()
    assert await statuses(connection) == {"launched": 1, "throttled": 2}
    return ids


async def test_a_paused_trigger_leaves_its_places(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    one, _ = await two_wait(database, connection, worker)
    await worker.end_runs(1)  # the one of the first trigger is offered the slot
    await control.pause_trigger(database, one, actor="ada")
    await worker.delivery_replan.run_once()
    await worker.delivery_retry.run_once()
    assert await statuses(connection) == {"launched": 2, "paused": 1}


async def test_a_delivery_that_cannot_be_decided_leaves_its_place(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two_wait(database, connection, worker)
    first, _ = await held(connection)
    await worker.end_runs(1)  # it is offered the slot
    known = delivery_retry.recheck

    def recheck(facts: Any, row: Any, event: Any) -> Any:
        if row.id == first["id"]:
            raise ValueError("poison")
        return known(facts, row, event)

    monkeypatch.setattr(delivery_retry, "recheck", recheck)
    await worker.delivery_retry.run_once()
    await worker.delivery_retry.run_once()
    assert await statuses(connection) == {"launched": 2, "failed": 1}


async def test_a_trigger_that_no_longer_uses_a_budget_frees_its_slots(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "gpu", concurrency=1)
    one = await make_trigger(database, "one", event_type="one", budgets=["gpu"])
    await make_trigger(database, "two", event_type="two", budgets=["gpu"])
    for kind in ("one", "two"):
        await publish(connection, kind, "shop")
    await worker.turn()
    assert await statuses(connection) == {"launched": 1, "throttled": 1}
    await control.update_trigger(database, one, {"budgets": None}, "ada")
    await worker.turn()
    assert await statuses(connection) == {"launched": 2}


async def test_who_needs_more_than_is_left_is_not_decided_over_and_over(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await put(database, "openai", "10/s", cost="event.payload.tokens")
    await make_trigger(database, budgets=["openai"])
    for tokens in (8, 5, 5):
        await publish(connection, "tick", "shop", tokens=tokens)
    await worker.turn()
    first, _ = await held(connection)
    await control.change_retry(database, "deliveries", first["id"], "force", "ada")
    for _ in range(10):
        await worker.delivery_retry.run_once()
    assert await connection.fetchval(ATTEMPTS) <= 2
    rows = await held(connection)
    assert rows[0]["next_attempt_at"] > clock.now + timedelta(seconds=0.9)


def test_what_is_reserved_for_another_delays_nobody_for_whom_there_is_enough_beside_it() -> None:
    now, line, own_id = datetime(2026, 6, 1, tzinfo=UTC), ("gpu", ""), DeliveryId(uuid.uuid4())
    kept = Reserved(DeliveryId(uuid.uuid4()), 1, now + timedelta(seconds=30))
    spec = Budget("gpu", concurrency=2)
    state = BudgetState({"gpu": LockedBudget(spec)}, {line: KeyState(Allowance(), reserved=kept)})
    assert state.opens_at(line, own_id, 1, now) == now
    state.keys[line].in_use = 1
    assert state.opens_at(line, own_id, 1, now) == kept.until
    assert state.opens_at(line, kept.delivery_id, 1, now) == now


async def test_a_worker_that_dies_after_it_has_swept_a_slot_leaves_nobody_waiting(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(database, "gpu", concurrency=1)
    await make_trigger(database, budgets=["gpu"])
    await ticks(connection, 2)
    await worker.turn()
    # Changed by hand: the note that it holds the slot stays.
    await connection.execute(
        "update tidegate.workflow_runs set status = 'succeeded', finished_at = tidegate.now(), next_attempt_at = null"
    )

    async def die(connection: Connection, due: object) -> int:
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(budgets, "nudge", die)
        with pytest.raises(asyncio.CancelledError):
            await BudgetKeeper(database).run_once()
    await BudgetKeeper(database).run_once()
    await worker.delivery_retry.run_once()
    assert await statuses(connection) == {"launched": 2}


# The order of locks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["delete", "disable", "force", "cancel", "replan"])
async def test_deliveries_are_locked_after_the_budgets_in_whose_lines_they_stand(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker, what: str
) -> None:
    """Who holds a budget makes the first in its line due: nobody may hold that one and wait for the budget."""
    one, _ = await two_wait(database, connection, worker)
    first, _ = await held(connection)
    if what == "replan":
        await control.pause_trigger(database, one, actor="ada")
    change: dict[str, Callable[[], Awaitable[Any]]] = {
        "delete": lambda: control.delete_trigger(database, one, "ada"),
        "disable": lambda: control.update_trigger(database, one, {"status": "disabled"}, "ada"),
        "force": lambda: control.change_retry(database, "deliveries", first["id"], "force", "ada"),
        "cancel": lambda: control.change_retry(database, "deliveries", first["id"], "cancel", "ada"),
        "replan": worker.delivery_replan.run_once,
    }
    async with connection.transaction():
        await budgets.lock(connection, ["gpu"])
        waiting = asyncio.ensure_future(change[what]())
        while not await connection.fetchval(WAITS):  # noqa: ASYNC110 - it is not told
            await asyncio.sleep(0.01)
        await connection.fetch(
            "select from tidegate.workflow_trigger_deliveries where id = $1 for update nowait", first["id"]
        )
        await budgets.nudge(connection, {("gpu", ""): clock.now})
    await waiting
