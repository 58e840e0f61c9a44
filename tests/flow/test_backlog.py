"""Backlogs of triggers: how much waits, what happens when it is full, and what leaves. Judged by what the workflows
did, and by what explain says of each event."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.flow.test_by_key import KEY, application
from tests.flow.test_windows import deliveries, is_sound, publish
from tidegate import Batch, Budget, Context, Tidegate
from tidegate.flow import control
from tidegate.flow.hold.stale import StaleDeliveries
from tidegate.flow.look import health
from tidegate.model.budget import BudgetSpec
from tidegate.model.ids import TriggerId
from tidegate.telemetry import metrics
from tidegate.testing import Harness

WAITING = "select count(*) from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled'"


async def waiting(harness: Harness) -> int:
    async with harness.connection() as connection:
        count: int = await connection.fetchval(WAITING)
    return count


async def the_trigger(harness: Harness) -> TriggerId:
    async with harness.connection() as connection:
        found: TriggerId = await connection.fetchval("select id from tidegate.workflow_event_triggers")
    return found


async def summary(harness: Harness, event_id: Any) -> str:
    return (await harness.explain(event_id)).summary


@pytest.mark.parametrize(
    ("when_full", "done_at_last", "said"),
    [
        ("skip", [0, 1, 2], "handle skipped: 2 deliveries wait (max_waiting), and the trigger skips what is over"),
        ("drop_oldest", [0, 4, 5], "handle skipped: 2 deliveries wait (max_waiting), and the oldest leaves for event "),
        ("dead_letter", [0, 1, 2], "handle exhausted: 2 deliveries wait (max_waiting), and the trigger dead-letters"),
    ],
)
async def test_no_more_wait_than_may(when_full: Any, done_at_last: list[int], said: str) -> None:
    done: list[int] = []
    async with Harness(application(done, throttle="1/min", max_waiting=2, when_full=when_full)) as harness:
        events = []
        for n in range(6):
            events += await publish(harness, n)
            await harness.run_until_idle()
            assert await waiting(harness) <= 2
        left = [n for n in range(6) if n not in done_at_last]
        for n in left:
            assert (await summary(harness, events[n])).startswith(said)
        counts = Counter((one.status, one.reason) for one in await deliveries(harness))
        assert counts["exhausted" if when_full == "dead_letter" else "skipped", "backlog_full"] == 3
        await harness.advance("3m")  # nobody waits for the slot of one that has left
        assert done == done_at_last
        assert len(await harness.dead_letters()) == (3 if when_full == "dead_letter" else 0)
        assert await is_sound(harness)
        outcome = {"skip": "skipped", "drop_oldest": "dropped", "dead_letter": "dead_lettered"}[when_full]
        assert f'kind="trigger",name="handle/code",outcome="{outcome}"' in metrics.text().decode()


async def test_one_batch_may_fill_it_several_times_over() -> None:
    done: list[int] = []
    async with Harness(application(done, throttle="1/min", max_waiting=3, when_full="drop_oldest")) as harness:
        await publish(harness, *range(50))
        await harness.run_until_idle()
        assert await waiting(harness) == 3
        await harness.advance("4m")
        assert done == [0, 47, 48, 49]
        assert Counter(one.status for one in await deliveries(harness)) == {"launched": 4, "skipped": 46}
        async with harness.connection() as connection:
            [counts] = (await health.snapshot(connection)).triggers
        assert (counts.counts.launched, counts.counts.skipped) == (4, 46)


async def test_a_cap_is_for_each_key() -> None:
    done: list[int] = []
    async with Harness(application(done, sleep="1h", while_running="queue", key=KEY, max_waiting=1)) as harness:
        await publish(harness, 0, 1, 2, 3)
        await publish(harness, 10, 11, 12, customer="bob")
        await harness.run_until_idle()
        assert await waiting(harness) == 2
        found = await deliveries(harness)
        of_ann, of_bob = ["launched", "throttled", "skipped", "skipped"], ["launched", "throttled", "skipped"]
        assert [one.status for one in found] == [*of_ann, *of_bob]
        assert "1 delivery waits of key ann (max_waiting)" in (found[2].last_error or "")
        await harness.advance("3h")
        assert sorted(done) == [0, 1, 10, 11]


async def test_the_oldest_of_a_key_leaves_and_the_slot_is_not_lost() -> None:
    done: list[int] = []
    options: dict[str, Any] = {"while_running": "queue", "key": KEY, "max_waiting": 2, "when_full": "drop_oldest"}
    async with Harness(application(done, sleep="1h", **options)) as harness:
        await publish(harness, *range(6))
        await harness.run_until_idle()
        assert await waiting(harness) == 2
        await harness.advance("5h")
        assert done == [0, 4, 5]


@pytest.mark.parametrize(
    ("budget", "options", "expected"),
    [
        (Budget("mail", "1/min"), {"max_waiting": 2, "when_full": "drop_oldest"}, [0, 4, 5]),
        (Budget("mail", "1/min"), {"max_waiting": 2}, [0, 1, 2]),
        (Budget("mail", "1/min"), {"keep": "latest"}, [0, 5]),
        (Budget("mail", "1/min"), {"max_wait": "90s"}, [0, 1]),
        (Budget("mail", concurrency=1), {"max_waiting": 2, "when_full": "drop_oldest"}, [0, 4, 5]),
    ],
)
async def test_what_waits_for_a_budget_is_a_backlog_too(
    budget: BudgetSpec, options: dict[str, Any], expected: list[int]
) -> None:
    done: list[int] = []
    sleep = "1m" if budget.concurrency else None
    async with Harness(application(done, sleep=sleep, budgets=[budget], **options)) as harness:
        for n in range(6):
            await publish(harness, n)
            await harness.run_until_idle()
        await harness.advance("4m")
        assert done == expected


@pytest.mark.parametrize("key", [None, KEY])
async def test_only_the_latest_waits(key: str | None) -> None:
    done: list[int] = []
    async with Harness(application(done, throttle="1/min", keep="latest", key=key)) as harness:
        events = []
        for n in range(6):
            events += await publish(harness, n)
            await harness.run_until_idle()
            assert await waiting(harness) == int(n > 0)
        for n in (1, 2, 3, 4):
            by = f"event {events[n + 1]} came later, and the trigger keeps the latest (keep)"
            assert await summary(harness, events[n]) == f"handle skipped: {by}"
        assert {one.reason for one in await deliveries(harness) if one.status == "skipped"} == {"superseded"}
        await harness.advance("2m")
        assert done == [0, 5]
        assert await is_sound(harness)


async def test_the_latest_of_each_key_waits() -> None:
    done: list[int] = []
    async with Harness(application(done, throttle="1/min", keep="latest", key=KEY)) as harness:
        await publish(harness, 0)
        for n in range(1, 5):
            await publish(harness, n)
            await publish(harness, n * 10, customer="bob")
        await harness.run_until_idle()
        assert await waiting(harness) == 2
        await harness.advance("3m")
        assert done == [0, 4, 40]


async def test_what_has_waited_too_long_leaves_at_its_time() -> None:
    done: list[int] = []
    async with Harness(application(done, throttle="1/min", max_wait="90s")) as harness:
        events = await publish(harness, *range(6))
        await harness.run_until_idle()
        assert await waiting(harness) == 5
        await harness.advance("89s")
        assert done == [0, 1]
        assert await waiting(harness) == 4
        await harness.advance("2s")
        assert await waiting(harness) == 0
        said = await summary(harness, events[4])
        assert said.startswith(
            "handle skipped: it has waited for longer than the trigger's max_wait: over the throttle"
        )
        assert {one.reason for one in await deliveries(harness) if one.status == "skipped"} == {"max_wait"}
        assert await harness.dead_letters() == []
        await publish(harness, 6)  # it does not get a slot behind those that have left
        await harness.run_until_idle()
        await harness.advance("75s")
        assert done == [0, 1, 6]
        assert 'kind="trigger",name="handle/code",outcome="too_old"' in metrics.text().decode()


async def test_what_has_waited_too_long_is_not_launched_when_its_turn_comes() -> None:
    done: list[int] = []
    async with Harness(application(done, sleep="2m", max_concurrency=1, max_wait="1m")) as harness:
        await publish(harness, 0, 1, 2)
        await harness.run_until_idle()
        await harness.advance("3m")
        assert done == [0]
        assert [one.reason for one in await deliveries(harness)] == [None, "max_wait", "max_wait"]


async def test_a_paused_trigger_fills_its_backlog_and_no_more() -> None:
    done: list[int] = []
    async with Harness(application(done, max_waiting=2, when_full="drop_oldest")) as harness:
        _, database = harness._inside()
        trigger_id = await the_trigger(harness)
        await publish(harness, 0)
        await harness.run_until_idle()
        await control.pause_trigger(database, trigger_id, actor="test")
        await publish(harness, 1, 2, 3, 4)
        await harness.run_until_idle()
        assert await waiting(harness) == 2
        await control.resume_trigger(database, trigger_id, "test")
        await harness.run_until_idle()
        assert done == [0, 3, 4]


async def test_an_event_whose_template_fails_counts_while_it_waits() -> None:
    app = Tidegate()

    @app.workflow(on="cart.changed", params={"n": "{{ event.payload.missing }}"}, max_waiting=1)
    async def handle(ctx: Context, n: int) -> None: ...

    async with Harness(app) as harness:
        _, database = harness._inside()
        trigger_id = await the_trigger(harness)
        await control.pause_trigger(database, trigger_id, actor="test")
        await publish(harness, 0, 1)
        await harness.run_until_idle()
        assert [one.status for one in await deliveries(harness)] == ["paused", "skipped"]
        await control.resume_trigger(database, trigger_id, "test")
        await harness.run_until_idle()
        assert [one.status for one in await deliveries(harness)] == ["failed", "skipped"]


async def test_a_full_window_backlog_drops_the_window_with_all_of_its_events() -> None:
    taken: list[list[int]] = []
    app = Tidegate()

    @app.workflow(on="cart.changed", batch=Batch(2, "1h"), throttle="1/h", max_waiting=2, when_full="drop_oldest")
    async def handle(ctx: Context) -> None:
        taken.append([event.payload["n"] for event in ctx.events])

    async with Harness(app) as harness:
        await publish(harness, 0, 1)
        await harness.run_until_idle()
        for n in range(2, 10):
            await publish(harness, n)
            await harness.run_until_idle()
            assert await waiting(harness) <= 2
        found = await deliveries(harness)
        assert [one.status for one in found[2:6]] == ["skipped"] * 4
        assert {one.reason for one in found[2:6]} == {"backlog_full"}
        await harness.advance("5h")
        assert taken == [[0, 1], [6, 7], [8, 9]]
        assert await is_sound(harness)


@pytest.mark.parametrize("when_full", ["skip", "dead_letter"])
async def test_an_event_that_would_open_one_window_too_many_is_kept_out(when_full: Any) -> None:
    app = Tidegate()

    @app.workflow(on="cart.changed", debounce="1h", key=KEY, throttle="1/d", max_waiting=1, when_full=when_full)
    async def handle(ctx: Context) -> None: ...

    async with Harness(app) as harness:
        await publish(harness, 0, 1)
        await publish(harness, 2, customer="bob")
        await harness.advance("2h")  # ann's is launched, and bob's is closed and waits for the throttle
        await publish(harness, 3, customer="bob")
        await publish(harness, 4)
        await harness.run_until_idle()
        status = {"skip": "skipped", "dead_letter": "exhausted"}[when_full]
        assert [one.status for one in await deliveries(harness)] == [
            "collected", "collected", "throttled", status, "collected",
        ]  # fmt: skip


async def test_a_lower_cap_drops_nothing_by_itself_and_the_next_newcomer_brings_it_down() -> None:
    done: list[int] = []
    async with Harness(application(done, throttle="1/min", max_waiting=10, when_full="drop_oldest")) as harness:
        _, database = harness._inside()
        await publish(harness, *range(9))
        await harness.run_until_idle()
        given = {"backlog": {"max_waiting": 3, "when_full": "drop_oldest"}}
        await control.update_trigger(database, await the_trigger(harness), given, "test")
        await harness.run_until_idle()
        assert await waiting(harness) == 8
        await publish(harness, 9)
        await harness.run_until_idle()
        assert await waiting(harness) == 3
        await harness.advance("4m")
        assert done == [0, 7, 8, 9]


async def test_a_cap_that_is_added_counts_what_waits_already() -> None:
    done: list[int] = []
    async with Harness(application(done, throttle="1/min")) as harness:
        _, database = harness._inside()
        await publish(harness, *range(5))
        await harness.run_until_idle()
        await control.update_trigger(database, await the_trigger(harness), {"backlog": {"max_waiting": 4}}, "test")
        await publish(harness, 5)
        await harness.run_until_idle()
        assert await waiting(harness) == 4
        await harness.advance("90s")
        await publish(harness, 6, 7)
        await harness.run_until_idle()
        assert await waiting(harness) == 4


async def test_a_replayed_dead_letter_waits_if_there_is_room_and_is_one_again_if_not() -> None:
    done: list[int] = []
    async with Harness(application(done, throttle="1/min", max_waiting=1, when_full="dead_letter")) as harness:
        _, database = harness._inside()
        await publish(harness, 0, 1, 2, 3)
        await harness.run_until_idle()
        async with harness.connection() as connection:
            rows = await connection.fetch("select id from tidegate.dead_letters order by id")
        [first, second] = [row[0] for row in rows]
        await control.replay_letter(database, first, "test")
        await harness.run_until_idle()
        assert await waiting(harness) == 1
        async with harness.connection() as connection:
            left = "select count(*) from tidegate.dead_letters where replayed_at is null"
            assert await connection.fetchval(left) == 2
        await harness.advance("61s")
        assert done == [0, 1]
        await control.replay_letter(database, second, "test")
        await harness.run_until_idle()
        await harness.advance("61s")
        assert len(done) == 3


async def test_cancelled_and_forced_deliveries_make_room() -> None:
    done: list[int] = []
    async with Harness(application(done, throttle="1/min", max_waiting=2)) as harness:
        _, database = harness._inside()
        await publish(harness, 0, 1, 2, 3)
        await harness.run_until_idle()
        found = await deliveries(harness)
        assert found[3].status == "skipped"
        await control.change_retry(database, "deliveries", found[1].id, "cancel", "test")
        await publish(harness, 4)
        await harness.run_until_idle()
        assert await waiting(harness) == 2
        await control.change_retry(database, "deliveries", found[2].id, "force", "test")
        await publish(harness, 5)
        await harness.run_until_idle()
        assert await waiting(harness) == 2
        await harness.advance("3m")
        assert done == [0, 2, 4]


async def test_a_start_is_never_kept_out() -> None:
    done: list[int] = []
    app = application(done, throttle="1/min", max_waiting=1, when_full="drop_oldest")
    async with Harness(app) as harness:
        await publish(harness, 0, 1)
        await harness.run_until_idle()
        await harness.start("handle", {"n": 100})
        await harness.start("handle", {"n": 101})
        await publish(harness, 2)
        await harness.run_until_idle()
        await harness.advance("5m")
        assert sorted(done) in ([0, 100, 101], [0, 2, 100, 101])
        assert {100, 101} <= {*done}


async def test_health_says_so_before_it_is_full() -> None:
    async with Harness(application([], throttle="1/h", max_waiting=5)) as harness:
        await publish(harness, *range(4))
        await harness.run_until_idle()
        async with harness.connection() as connection:
            assert "trigger_backlog" not in [one.code for one in (await health.snapshot(connection)).causes]
        await publish(harness, 4)
        await harness.run_until_idle()
        async with harness.connection() as connection:
            [cause] = [one for one in (await health.snapshot(connection)).causes if one.code == "trigger_backlog"]
            gauges = await health.shared_state(connection)
        assert cause.message == (
            "handle/code: 4 of 5 deliveries that may wait do; when it is full, each new delivery is skipped"
        )
        assert cause.do.startswith("tidegate triggers show handle/code")
        assert cause.runbook.endswith("#trigger-backlog")
        assert gauges.filling_backlogs == {"source": 0, "trigger": 1}


async def test_two_that_let_them_leave_at_once_let_each_leave_once() -> None:
    async with Harness(application([], throttle="1/h", max_wait="1m")) as harness:
        _, database = harness._inside()
        await publish(harness, *range(20))
        await harness.run_until_idle()
        await harness._set_clock(harness.now + (await harness.advance("1s") - harness.now))
        async with harness.connection() as connection:
            await connection.execute("update tidegate.workflow_trigger_deliveries set stale_at = tidegate.now()")
        counts = await asyncio.gather(*(StaleDeliveries(database).run_once() for _ in range(4)))
        assert sum(counts) == 19
        async with harness.connection() as connection:
            said = await connection.fetch(
                "select event_id from tidegate.event_decisions where decision = 'skipped' and stage = 'deliver'"
            )
        assert len(said) == len({row[0] for row in said}) == 19
