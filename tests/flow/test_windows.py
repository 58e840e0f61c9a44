"""Windows: many events, one run, given them all. Judged by what the workflows were given: every event is in one run."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tidegate import Batch, Context, NonRetryable, SyncContext, Tidegate
from tidegate.errors import AppError, Conflict
from tidegate.flow import control
from tidegate.flow.keep.prune import Prune
from tidegate.flow.look import doctor
from tidegate.model.retention import Retention
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import held_deliveries, windows
from tidegate.store.held_deliveries import HeldDelivery
from tidegate.testing import Harness

Taken = list[tuple[str, list[int]]]


def collecting(taken: Taken, **options: Any) -> Tidegate:
    """An application whose workflow `digest` notes the events of each run."""
    app = Tidegate()

    @app.workflow(on="cart.changed", **options)
    async def digest(ctx: Context, customer: str = "", n: int = -1) -> dict[str, object]:
        assert ctx.event is not None and ctx.event == ctx.events[0]
        taken.append((customer, [event.payload["n"] for event in ctx.events]))
        return {"customer": customer, "n": n}

    return app


async def publish(harness: Harness, *numbers: int, customer: str = "ann", **given: Any) -> list[uuid.UUID]:
    return [
        (await harness.publish("cart.changed", source="shop", payload={"customer": customer, "n": n}, **given)).id
        for n in numbers
    ]


async def deliveries(harness: Harness) -> list[HeldDelivery]:
    async with harness.connection() as connection:
        found = await held_deliveries.list_recent(connection, limit=1000)
    return sorted(found, key=lambda one: one.event_id)


async def states(harness: Harness) -> Counter[str]:
    async with harness.connection() as connection:
        return Counter(row[0] for row in await connection.fetch("select state from tidegate.trigger_windows"))


async def is_sound(harness: Harness) -> bool:
    async with harness.connection() as connection:
        return [one for one in await doctor.doctor.orphans(connection, 0) if one.total] == []


@pytest.fixture
def taken() -> Taken:
    return []


async def test_a_debounced_window_closes_when_no_event_has_come_for_a_while(taken: Taken) -> None:
    app = collecting(taken, debounce="30s", max_wait="5m", key="{{ event.payload.customer }}")
    async with Harness(app) as harness:
        for n in range(3):
            await publish(harness, n)
            await publish(harness, 10 + n, customer="bob")
            await harness.advance("20s")
        assert taken == []
        await harness.advance("30s")
        assert sorted(taken) == [("ann", [0, 1, 2]), ("bob", [10, 11, 12])]
        ann, bob = await harness.runs()
        assert {ann.output["n"], bob.output["n"]} == {2, 12}, "the arguments are of the last event"
        found = await deliveries(harness)
        assert {one.status for one in found} == {"collected"}
        assert Counter(one.workflow_run_id for one in found) == {ann.id: 3, bob.id: 3}
        assert all(one.window_id == one.workflow_run_id for one in found)
        assert await is_sound(harness)


async def test_a_debounced_window_stays_open_no_longer_than_max_wait(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="30s", max_wait="1m")) as harness:
        for n in range(8):
            await publish(harness, n)
            await harness.advance("20s")
        await harness.advance("1m")
        assert taken == [("ann", [0, 1, 2]), ("ann", [3, 4, 5]), ("ann", [6, 7])]


async def test_a_batch_is_full_or_its_time_is_over(taken: Taken) -> None:
    async with Harness(collecting(taken, batch=Batch(3, "5s"))) as harness:
        await publish(harness, *range(7))
        await harness.run_until_idle()
        assert taken == [("ann", [0, 1, 2]), ("ann", [3, 4, 5])]
        await harness.advance("4s")
        await publish(harness, 7)
        await harness.advance("1s")
        assert taken[2:] == [("ann", [6, 7])], "5 s after the first, not after the last"
        assert await is_sound(harness)


async def test_with_leading_the_first_runs_at_once_and_the_rest_at_the_end(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="10s", leading=True)) as harness:
        for n in range(4):
            await publish(harness, n)
            await harness.advance("3s")
        assert taken == [("ann", [0])]
        await harness.advance("20s")
        assert taken == [("ann", [0]), ("ann", [1, 2, 3])]
        await publish(harness, 4)
        await harness.run_until_idle()
        assert taken[2:] == [("ann", [4])]
        await harness.advance("10s")
        await publish(harness, 5)
        await harness.run_until_idle()
        assert taken[3:] == [("ann", [5])], "nothing came within the window, so it is the first again"


async def test_synchronous_workflows_have_the_events_too() -> None:
    app, found = Tidegate(), list[int]()

    @app.workflow(on="cart.changed", batch=Batch(2, "5s"))
    def digest(ctx: SyncContext) -> None:
        found.extend(event.payload["n"] for event in ctx.events)

    async with Harness(app) as harness:
        await publish(harness, 1, 2)
        await harness.run_until_idle()
    assert found == [1, 2]


async def test_a_run_without_a_window_has_its_own_event() -> None:
    app, found = Tidegate(), list[int]()

    @app.workflow(on="cart.changed")
    async def plain(ctx: Context) -> None:
        found.extend(event.payload["n"] for event in ctx.events)

    async with Harness(app) as harness:
        await publish(harness, 1)
        await harness.run_until_idle()
    assert found == [1]


async def test_a_run_that_resumes_or_is_retried_or_repeated_has_the_same_events() -> None:
    app, found = Tidegate(), list[list[int]]()

    @app.workflow(on="cart.changed", batch=Batch(3, "5s"))
    async def digest(ctx: Context) -> None:
        found.append([event.payload["n"] for event in ctx.events])
        await ctx.sleep("1h")
        await ctx.step("send", str)

    async with Harness(app) as harness:
        harness.fail_step("send", error=NonRetryable("no"))
        await publish(harness, 1, 2, 3)
        await harness.advance("1h")
        run = await harness.only_run()
        assert run.status == "failed"
        database = harness._inside()[1]
        await control.retry_run(database, run.id, "test")
        await harness.run_until_idle()
        await control.rerun_run(database, run.id, "test")
        await harness.run_until_idle()
        assert found == [[1, 2, 3]] * 4
        assert await is_sound(harness)


@pytest.mark.parametrize("limit", [{"throttle": "1/h"}, {"max_concurrency": 1}])
async def test_a_closed_window_waits_for_its_limit_and_new_events_open_the_next(
    limit: dict[str, Any],
) -> None:
    app, taken = Tidegate(), list[list[int]]()

    @app.workflow(on="cart.changed", batch=Batch(2, "10s"), **limit)
    async def digest(ctx: Context) -> None:
        if ctx.attempt == 1:
            taken.append([event.payload["n"] for event in ctx.events])
        if "max_concurrency" in limit:
            await ctx.sleep("30m")

    async with Harness(app) as harness:
        await publish(harness, 1, 2, 3, 4, 5)
        await harness.advance("1m")
        assert taken[0] == [1, 2] and [3, 4] not in taken
        waits_for = "throttle" if "throttle" in limit else "concurrency"
        assert {one.reason for one in await deliveries(harness)} == {"window", waits_for}
        await publish(harness, 6)
        await harness.run_until_idle()
        await harness.advance("6h")
        assert taken[:3] == [[1, 2], [3, 4], [5]]
        assert sorted(n for one in taken for n in one) == [1, 2, 3, 4, 5, 6]
        assert await is_sound(harness)


async def test_a_paused_trigger_collects_and_launches_when_it_is_resumed(taken: Taken) -> None:
    async with Harness(collecting(taken, batch=Batch(2, "10s"))) as harness:
        await publish(harness, 0)
        await harness.run_until_idle()
        database, trigger_id = harness._inside()[1], (await deliveries(harness))[0].trigger_id
        await control.pause_trigger(database, trigger_id, actor="test")
        await publish(harness, 1, 2)
        await harness.advance("1m")
        assert taken == []
        await control.resume_trigger(database, trigger_id, "test")
        await harness.advance("1m")
        assert taken == [("ann", [0, 1]), ("ann", [2])]
        assert await is_sound(harness)


async def test_explain_says_in_which_window_an_event_waits_and_which_run_took_it(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="30s", key="{{ event.payload.customer }}")) as harness:
        first, second = await publish(harness, 1, 2)
        await harness.run_until_idle()
        for one in (first, second):
            found = await harness.explain(one)
            assert found.summary.startswith("digest waits in a window of 2 events that closes at ")
            assert found.waits_for == "its window to close" and found.until is not None
        await harness.advance("30s")
        run = await harness.only_run()
        for one in (first, second):
            found = await harness.explain(one)
            assert "succeeded" in found.summary and found.waits_for is None
            assert [outcome.run_id for outcome in found.outcomes] == [run.id]


async def test_explain_says_why_a_closed_window_is_not_launched(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="30s", key="{{ event.payload.customer }}")) as harness:
        first, second = await publish(harness, 1, 2)
        await harness.run_until_idle()
        database, trigger_id = harness._inside()[1], (await deliveries(harness))[0].trigger_id
        await control.pause_trigger(database, trigger_id, reason="audit", actor="ann")
        await harness.advance("1m")
        why = "waits for its trigger to be resumed: paused by ann: audit"
        assert (await harness.explain(first)).summary == f"digest {why}"
        found = await harness.explain(second)
        of = "digest waits in a window of 2 events, which is closed and to be launched"
        assert found.summary == f"{of}; its first delivery {why}"
        assert (found.waits_for, found.until) == ("its trigger to be resumed", None)
        await control.resume_trigger(database, trigger_id, "ann")
        await control.pause_trigger(database, trigger_id, duration_ms=60_000, reason="audit", actor="ann")
        await harness.run_until_idle()
        told = [await harness.explain(one) for one in (first, second)]
        assert {one.waits_for for one in told} == {"the end of its trigger's pause"}, [one.summary for one in told]
        assert told[0].until == told[1].until is not None


async def test_cancelled_the_first_takes_the_window_with_it_and_another_only_itself(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="30s", key="{{ event.payload.customer }}")) as harness:
        await publish(harness, 1, 2, 3)
        await publish(harness, 11, 12, customer="bob")
        await harness.run_until_idle()
        database = harness._inside()[1]
        ann, bob = (await deliveries(harness))[:3], (await deliveries(harness))[3:]
        await control.change_retry(database, "deliveries", ann[2].id, "cancel", "test")
        await control.change_retry(database, "deliveries", bob[0].id, "cancel", "test")
        await harness.advance("1m")
        assert taken == [("ann", [1, 2])]
        statuses = [one.status for one in await deliveries(harness)]
        assert statuses == ["collected", "collected", "cancelled", "cancelled", "cancelled"]
        assert (await harness.only_run()).output["n"] == 2, "the arguments are of the last that is left"
        with pytest.raises(Conflict):
            await control.change_retry(database, "deliveries", ann[1].id, "cancel", "test")
        await publish(harness, 13, customer="bob")
        await harness.advance("1m")
        assert taken[1:] == [("bob", [13])]
        assert await is_sound(harness)


@pytest.mark.parametrize("which", [0, 1])
async def test_forced_a_window_is_launched_now_and_takes_no_more(taken: Taken, which: int) -> None:
    async with Harness(collecting(taken, debounce="30s")) as harness:
        await publish(harness, 1, 2)
        await harness.run_until_idle()
        forced = (await deliveries(harness))[which]
        await control.change_retry(harness._inside()[1], "deliveries", forced.id, "force", "test")
        await publish(harness, 3)
        await harness.run_until_idle()
        assert taken == [("ann", [1, 2])]
        await harness.advance("30s")
        assert taken[1:] == [("ann", [3])]


@pytest.mark.parametrize("given", [{"status": "disabled"}, None])
async def test_events_of_a_trigger_that_is_disabled_or_deleted_are_cancelled(
    taken: Taken, given: dict[str, Any] | None
) -> None:
    async with Harness(collecting(taken, debounce="30s")) as harness:
        await publish(harness, 1, 2)
        await harness.run_until_idle()
        database, trigger_id = harness._inside()[1], (await deliveries(harness))[0].trigger_id
        if given is None:
            await control.delete_trigger(database, trigger_id, "test")
        else:
            await control.update_trigger(database, trigger_id, given, "test")
        await harness.advance("1m")
        assert taken == []
        assert [one.status for one in await deliveries(harness)] == ["cancelled", "cancelled"]
        assert await states(harness) == {"ended": 1}
        assert await is_sound(harness)


async def test_an_edit_is_applied_to_each_event_of_an_open_window(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="30s")) as harness:
        await publish(harness, 1, 2, 3, 4)
        await harness.run_until_idle()
        database, trigger_id = harness._inside()[1], (await deliveries(harness))[0].trigger_id
        await control.update_trigger(database, trigger_id, {"where": "event.payload.n in [2, 3]"}, "test")
        await harness.advance("1m")
        assert taken == [("ann", [2, 3])], "also without the event that opened the window"
        assert [one.status for one in await deliveries(harness)] == ["skipped", "collected", "collected", "skipped"]
        assert (await harness.only_run()).output["n"] == 3
        assert await is_sound(harness)


async def test_a_trigger_that_collects_no_more_launches_its_open_window(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="30s")) as harness:
        await publish(harness, 1, 2)
        await harness.run_until_idle()
        database, trigger_id = harness._inside()[1], (await deliveries(harness))[0].trigger_id
        await control.update_trigger(database, trigger_id, {"collect": None}, "test")
        await publish(harness, 3)
        await harness.run_until_idle()
        assert taken == [("ann", [3])]
        await harness.advance("1m")
        assert taken[1:] == [("ann", [1, 2])]
        assert await is_sound(harness)


async def test_an_event_that_expires_in_a_window_leaves_it(taken: Taken) -> None:
    async with Harness(collecting(taken, batch=Batch(10, "1m"))) as harness:
        await publish(harness, 1, ttl_ms=30_000)
        await publish(harness, 2)
        await publish(harness, 3, ttl_ms=600_000)
        await harness.advance("2m")
        assert taken == [("ann", [2, 3])]
        assert [one.status for one in await deliveries(harness)] == ["exhausted", "collected", "collected"]
        assert [letter.kind for letter in await harness.dead_letters()] == ["delivery"]
        assert await is_sound(harness)


async def test_what_fails_as_a_whole_is_one_dead_letter_that_is_replayed_with_all_events(taken: Taken) -> None:
    async with Harness(collecting(taken, batch=Batch(3, "1m"))) as harness:
        await publish(harness, 1, 2)
        await harness.run_until_idle()
        database, trigger_id = harness._inside()[1], (await deliveries(harness))[0].trigger_id
        wrong = {"parameter_template": {"n": "{{ event.payload.n | divided_by: 0 }}"}}
        await control.update_trigger(database, trigger_id, wrong, "test")
        await harness.advance("2m")
        found = await deliveries(harness)
        assert taken == [] and {one.status for one in found} == {"failed"}
        assert len(await harness.dead_letters()) == 1
        assert await is_sound(harness)
        await control.update_trigger(database, trigger_id, {"parameter_template": None}, "test")
        async with harness.connection() as connection:
            letter = await connection.fetchval("select id from tidegate.dead_letters")
        await control.replay_letter(database, letter, "test")
        await harness.advance("1m")
        assert taken == [("ann", [1, 2])]
        assert {one.status for one in await deliveries(harness)} == {"collected"}
        assert await is_sound(harness)


async def test_a_start_runs_at_once_with_its_own_event(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="30s")) as harness:
        started = await harness.start("digest", {"n": 7})
        await harness.run_until_idle()
        assert taken == [("", [7])]
        assert (await started.result())["n"] == 7


async def test_an_event_that_is_replayed_is_not_collected_twice(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="30s")) as harness:
        [first, _] = await publish(harness, 1, 2)
        await harness.run_until_idle()
        await control.replay_event(harness._inside()[1], str(first), "test")
        await harness.advance("1m")
        assert taken == [("ann", [1, 2])]
        assert await is_sound(harness)


async def test_a_window_is_known_until_its_events_are_needed_no_more() -> None:
    app = Tidegate()

    @app.workflow(on="cart.changed", batch=Batch(2, "5s"))
    async def digest(ctx: Context) -> None:
        await ctx.sleep("5h")

    async with Harness(app) as harness:
        await publish(harness, 1, 2)
        await harness.run_until_idle()
        async with harness.connection() as connection:
            for hours in (4, 5):
                await harness.advance(f"{hours}h")
                while await windows.forget(connection, 10):
                    pass
                assert await states(harness) == ({"taken": 1} if hours == 4 else {})


async def test_retention_keeps_the_events_of_a_window_while_its_run_is_unfinished() -> None:
    app, found = Tidegate(), list[list[int]]()

    @app.workflow(on="cart.changed", batch=Batch(3, "5s"))
    async def digest(ctx: Context) -> None:
        found.append([event.payload["n"] for event in ctx.events])
        await ctx.sleep("90d")

    async with Harness(app) as harness:
        await harness.publish("other", source="shop")
        await publish(harness, 1, 2, 3)
        await harness.run_until_idle()
        database = harness._inside()[1]
        kept = []
        for days in (80, 10, 80):
            await harness.advance(f"{days}d")
            async with harness.connection() as connection:
                while await windows.forget(connection, 10):
                    pass
                await Prune(database, Retention(events_seconds=30 * 86_400)).run()
                kept.append(await connection.fetchval("select count(*) from tidegate.workflow_events"))
        assert found == [[1, 2, 3]] * 2
        assert kept[0] == 3, "without the event that is in no window"
        assert kept[2] == 0


async def test_a_cancelled_run_that_is_retried_keeps_the_events_of_its_window() -> None:
    """Also when the window was forgotten after the run had ended, and retention passes while the run sleeps."""
    app, found = Tidegate(), list[list[int]]()

    @app.workflow(on="cart.changed", batch=Batch(3, "5s"))
    async def digest(ctx: Context) -> None:
        found.append([event.payload["n"] for event in ctx.events])
        await ctx.sleep("60d")

    async def keep_house(harness: Harness) -> None:
        async with harness.connection() as connection:
            while await windows.forget(connection, 10):
                pass
        await Prune(harness._inside()[1], Retention(events_seconds=30 * 86_400)).run()

    async with Harness(app) as harness:
        await publish(harness, 1, 2, 3)
        await harness.run_until_idle()
        run, database = await harness.only_run(), harness._inside()[1]
        await control.cancel_run(database, run.id, "test", TRIGGER_BREAKER)
        await harness.advance("5h")
        await keep_house(harness)
        assert await states(harness) == {}
        assert await control.retry_run(database, run.id, "test") == "resumed"
        await harness.run_until_idle()
        for _ in range(7):
            await harness.advance("10d")
            await keep_house(harness)
        assert found == [[1, 2, 3]] * len(found) and len(found) == 3


async def test_keys_that_fail_fail_the_event_alone(taken: Taken) -> None:
    async with Harness(collecting(taken, debounce="30s", key="{{ event.payload.customer }}")) as harness:
        await publish(harness, 1)
        await publish(harness, 2, customer="")
        await harness.advance("1m")
        assert taken == [("ann", [1])]
        assert [one.status for one in await deliveries(harness)] == ["collected", "failed"]


WRONG: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"debounce": "30s", "batch": Batch(2, "5s")}, "batch: cannot be combined with debounce"),
    (lambda: {"batch": Batch(2, "5s"), "max_wait": "5m"}, "max_wait: cannot be combined with batch"),
    (lambda: {"batch": Batch(2, "5s"), "leading": True}, "leading: requires debounce"),
    (lambda: {"debounce": "soon"}, "debounce: a duration is written like"),
    (lambda: {"debounce": "1m", "max_wait": "30s"}, "must be at least debounce_ms"),
    (lambda: {"batch": 5}, "batch: must be a Batch"),
    (lambda: {"key": "{{ event.payload.customer }}"}, "key"),
    (lambda: {"debounce": "30s", "key": "{{ event.payload.customer"}, "key"),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_a_wrong_declaration_names_what_is_wrong(options: Callable[[], dict[str, Any]], said: str) -> None:
    with pytest.raises(AppError, match="workflow digest") as caught:
        collecting([], **options())
    assert said in str(caught.value)


@pytest.mark.parametrize(("size", "within"), [(0, "5s"), (1001, "5s"), (True, "5s"), (5, "soon"), (5, 0)])
def test_a_wrong_batch_is_refused(size: int, within: Any) -> None:
    with pytest.raises(ValueError, match="Batch: "):
        Batch(size, within)
