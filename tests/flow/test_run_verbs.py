"""Retry and rerun runs, one and many; replay events; find runs."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.trigger_worker import BREAKER
from tests.flow.why_scene import Scene
from tests.store.builders import new_event
from tidegate import Context, On
from tidegate.errors import Conflict, NotFound, Unavailable
from tidegate.flow import control
from tidegate.flow.control import run_bulk
from tidegate.flow.keep.event_replay import EventReplays
from tidegate.flow.look.explain import find_event
from tidegate.flow.predict import replay
from tidegate.model.ids import EventId, RunId
from tidegate.store import event_replays, events, run_search
from tidegate.store.db import Connection, Database
from tidegate.store.event_replays import EventRange
from tidegate.store.run_search import RunFilters


@pytest.fixture
def scene(database: Database, connection: Connection, clock: Clock, world: World) -> Scene:
    return Scene(database, connection, clock, world)


def flaky(scene: Scene, calls: list[str], **options: Any) -> list[bool]:
    """A workflow of two steps; the second fails while the list says so."""
    fails = [True]

    def second() -> str:
        calls.append("second")
        if fails[0]:
            raise ValueError("no paper")
        return "printed"

    @scene.workflow(**options)
    async def fulfil(ctx: Context, id: int = 0) -> Any:
        await ctx.step("first", lambda: calls.append("first"))
        await ctx.sleep("1h")
        if fails[0]:
            second()
        return await ctx.step("second", second)

    return fails


async def status_of(scene: Scene, run_id: uuid.UUID) -> str:
    found: str = await scene.ask("select status from tidegate.workflow_runs where id = $1", run_id)
    return found


async def actions(scene: Scene) -> list[str]:
    rows = await scene.connection.fetch("select action from tidegate.audit_log where actor = 'ann' order by id")
    return [row[0] for row in rows]


async def test_a_failed_run_resumes_after_its_completed_steps(scene: Scene) -> None:
    calls: list[str] = []
    fails = flaky(scene, calls)
    await scene.register()
    await scene.publish(id=7)
    await scene.execute()
    await scene.clock.advance(3_600_000)
    await scene.execute()
    run_id = RunId(await scene.run_id())
    assert await status_of(scene, run_id) == "failed"
    assert calls == ["first", "second"]
    fails[0] = False
    assert await control.retry_run(scene.database, run_id, "ann") == "resumed"
    with pytest.raises(Conflict, match="it is pending"):
        await control.retry_run(scene.database, run_id, "ann")
    await scene.execute()
    assert await status_of(scene, run_id) == "succeeded"
    assert calls == ["first", "second", "second"], "what was completed is not repeated"
    assert await scene.ask("select count(*) from tidegate.dead_letters where replayed_at is null") == 0
    assert await actions(scene) == ["dead_letter.replay", "run.retry"]


async def test_a_cancelled_run_resumes_and_needs_no_dead_letter(scene: Scene) -> None:
    calls: list[str] = []
    fails = flaky(scene, calls)
    fails[0] = False
    await scene.register()
    event_id = await scene.publish(id=7)
    await scene.execute()
    run_id = RunId(await scene.run_id())
    await control.cancel_run(scene.database, run_id, "ann", BREAKER)
    assert await control.retry_run(scene.database, run_id, "ann") == "resumed"
    await scene.execute()
    assert (await scene.explain(run_id)).outcomes[0].state == "sleeping"
    await scene.clock.advance(3_600_000)
    await scene.execute()
    assert await status_of(scene, run_id) == "succeeded"
    assert calls == ["first", "second"]
    assert await scene.ask("select count(*) from tidegate.dead_letters") == 0
    lines = [(line.decision, line.actor) for line in (await scene.explain(event_id)).decisions if line.stage == "run"]
    assert lines == [("cancelled", "ann"), ("retried", "ann"), ("succeeded", None)]


async def test_a_retried_run_waits_for_a_free_slot(scene: Scene) -> None:
    """Cancelled and failed runs count for max_concurrency as soon as they resume, and not before."""
    fails = flaky(scene, [], max_concurrency=1)
    fails[0] = False
    await scene.register()
    await scene.publish(id=1)
    await scene.execute()
    first = RunId(await scene.run_id())
    await control.cancel_run(scene.database, first, "ann", BREAKER)
    await scene.publish(id=2)
    await scene.execute()
    assert await control.retry_run(scene.database, first, "ann") == "scheduled"
    told = await scene.explain(first)
    assert told.waits_for == "its retry" and "waiting for a free slot of its trigger" in told.summary
    await scene.clock.advance(1000)
    await scene.replay_due()
    assert await status_of(scene, first) == "cancelled"
    await scene.clock.advance(3_600_000)
    await scene.execute()  # the other one ends
    await scene.replay_due()
    assert await status_of(scene, first) == "pending"
    unfinished = "select count(*) from tidegate.workflow_runs where status in ('pending', 'running')"
    assert await scene.ask(unfinished) == 1
    with pytest.raises(Conflict, match="all 1 slots of its trigger are in use"):
        ended = await scene.ask("select id from tidegate.workflow_runs where status = 'succeeded'")
        await control.rerun_run(scene.database, RunId(ended), "ann")


async def test_a_rerun_is_a_new_run_from_the_start(scene: Scene) -> None:
    calls: list[str] = []
    fails = flaky(scene, calls)
    fails[0] = False
    await scene.register()
    event_id = await scene.publish(id=7)
    await scene.execute()
    run_id = RunId(await scene.run_id())
    with pytest.raises(Conflict, match="it is pending; cancel it first"):
        await control.rerun_run(scene.database, run_id, "ann")
    await scene.clock.advance(3_600_000)
    await scene.execute()
    new_id = await control.rerun_run(scene.database, run_id, "ann")
    again = await control.rerun_run(scene.database, new_id, "ann") if await _ends(scene, new_id) else None
    row = await scene.connection.fetchrow("select * from tidegate.workflow_runs where id = $1", new_id)
    assert row is not None and (row["rerun_of"], row["parameters"], row["delivery_id"]) == (run_id, {"id": 7}, None)
    assert str(row["event_id"]) == event_id
    assert calls == ["first", "second", "first", "second"]
    told = await scene.explain(event_id)
    assert [one.run_id for one in told.outcomes] == [run_id, new_id, again]
    decided = [line.decision for line in told.decisions if line.stage == "run"]
    assert decided.count("rerun") >= 2
    assert (await scene.explain(new_id)).kind == "run"


async def test_a_rerun_that_is_asked_for_twice_with_one_id_is_one(scene: Scene) -> None:
    calls: list[str] = []
    flaky(scene, calls)[0] = False
    await scene.register()
    await scene.publish(id=7)
    await scene.execute()
    await scene.clock.advance(3_600_000)
    await scene.execute()
    run_id = RunId(await scene.run_id())
    both = await asyncio.gather(*(control.rerun_run(scene.database, run_id, "ann", "call-1") for _ in range(2)))
    other = await control.rerun_run(scene.database, run_id, "ann", "call-2")
    assert both[0] == both[1] == await control.rerun_run(scene.database, run_id, "ann", "call-1") != other
    assert await scene.ask("select count(*) from tidegate.workflow_runs where rerun_of is not null") == 2
    assert await scene.ask("select count(*) from tidegate.audit_log where action = 'run.rerun'") == 2


async def test_many_reruns_whose_first_answer_was_lost_are_made_once(scene: Scene) -> None:
    """The cursor of the preview makes the first call one that can be repeated."""
    calls: list[str] = []
    flaky(scene, calls)[0] = False
    await scene.register()
    for id in (7, 8):
        await scene.publish(id=id)
    await scene.execute()
    await scene.clock.advance(3_600_000)
    await scene.execute()
    begin = await control.preview_runs(scene.database, "rerun", RunFilters(workflow="fulfil"))
    assert begin.remaining == 2
    for _ in range(2):
        await control.change_runs(
            scene.database, "rerun", RunFilters(workflow="fulfil"), "ann", BREAKER, after_id=begin.after_id,
            before=begin.before, call_id=begin.call_id,
        )  # fmt: skip
        await scene.execute()
        await scene.clock.advance(3_600_000)
        await scene.execute()
    assert await scene.ask("select count(*) from tidegate.workflow_runs where rerun_of is not null") == 2


async def _ends(scene: Scene, run_id: uuid.UUID) -> bool:
    await scene.execute()
    await scene.clock.advance(3_600_000)
    await scene.execute()
    return await status_of(scene, run_id) == "succeeded"


async def test_many_runs_are_counted_and_changed_call_by_call(scene: Scene) -> None:
    fails = flaky(scene, [])
    fails[0] = False
    await scene.register()
    for n in range(5):
        await scene.publish(id=n)
    await scene.execute()
    await scene.clock.advance(1000)
    cancel = RunFilters(workflow="fulfil")
    assert (await control.preview_runs(scene.database, "cancel", cancel)).remaining == 5
    assert (await control.preview_runs(scene.database, "retry", cancel)).remaining == 0
    done = await control.change_runs(scene.database, "cancel", cancel, "ann", BREAKER, limit=3)
    assert (done.done, done.refused, done.remaining) == (3, 0, 2)
    done = await control.change_runs(
        scene.database, "cancel", cancel, "ann", BREAKER, after_id=done.after_id, before=done.before
    )
    assert (done.done, done.remaining, done.after_id) == (2, 0, None)
    await scene.clock.advance(1000)
    visited = 0
    after_id = before = call_id = None
    while True:  # the runs that it creates are not repeated
        done = await control.change_runs(
            scene.database, "rerun", cancel, "ann", BREAKER, after_id=after_id, before=before, call_id=call_id, limit=2
        )
        visited += done.done
        after_id, before, call_id = done.after_id, done.before, done.call_id
        if after_id is None:
            break
    assert visited == 5
    assert await scene.ask("select count(*) from tidegate.workflow_runs where rerun_of is not null") == 5
    assert (await actions(scene)).count("run.rerun") == 5


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("nth", [1, 3])
async def test_many_are_rerun_once_although_the_database_goes_down_in_the_middle(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, nth: int, is_committed: bool
) -> None:
    """Also when the connection is lost after the commit, before its answer."""
    await finished(scene, 5)
    really, calls = run_bulk.rerun_run, []

    async def rerun_run(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == nth and not is_committed:
            raise Unavailable("the database is down")
        done = await really(*args)
        if len(calls) == nth:
            raise Unavailable("the connection was lost")
        return done

    monkeypatch.setattr(run_bulk, "rerun_run", rerun_run)
    rerun = partial(control.change_runs, scene.database, "rerun", RunFilters(workflow="fulfil"), "ann", BREAKER)
    first = await rerun()
    assert (first.done, first.refused, first.remaining) == (nth - 1, 0, 6 - nth)
    going_on = {"after_id": first.after_id, "before": first.before, "call_id": first.call_id}
    second = await rerun(**going_on)
    assert (second.done, second.refused, second.remaining, second.after_id) == (6 - nth, 0, 0, None)
    assert await reruns(scene) == (5, 5) and (await actions(scene)).count("run.rerun") == 5
    await asyncio.gather(rerun(**going_on), rerun(**going_on))
    assert await reruns(scene) == (5, 5)


async def test_a_call_that_arrives_twice_at_once_reruns_once(scene: Scene) -> None:
    await finished(scene, 5)
    rerun = partial(control.change_runs, scene.database, "rerun", RunFilters(workflow="fulfil"), "ann", BREAKER)
    first = await rerun(limit=1)
    going_on = {"after_id": first.after_id, "before": first.before, "call_id": first.call_id}
    await asyncio.gather(*(rerun(**going_on) for _ in range(4)))
    assert await reruns(scene) == (5, 5) and (await actions(scene)).count("run.rerun") == 5


async def test_a_later_call_reruns_again(scene: Scene) -> None:
    """Although the filters, with a time before which runs were created, and the clock are the same."""
    await finished(scene, 2)
    filters = RunFilters(workflow="fulfil", created_to=datetime(2100, 1, 1, tzinfo=UTC))
    for _ in range(2):
        done = await control.change_runs(scene.database, "rerun", filters, "ann", BREAKER)
        assert done.done == 2
    assert await reruns(scene) == (2, 4)


async def finished(scene: Scene, count: int) -> None:
    """So many runs that have succeeded."""
    flaky(scene, [])[0] = False
    await scene.register()
    for n in range(count):
        await scene.publish(id=n)
    await scene.execute()
    await scene.clock.advance(3_600_000)
    await scene.execute()
    await scene.clock.advance(1000)


async def reruns(scene: Scene) -> tuple[int, int]:
    """How many runs were repeated, and by how many."""
    [row] = await scene.connection.fetch(
        "select count(distinct rerun_of), count(rerun_of) as runs from tidegate.workflow_runs"
    )
    return row["count"], row["runs"]


async def test_refusals_of_many_are_told_with_their_reasons(scene: Scene) -> None:
    fails = flaky(scene, [], max_concurrency=1)
    fails[0] = False
    await scene.register()
    for n in range(3):
        await scene.publish(id=n)
        await scene.execute()
        await scene.clock.advance(3_600_000)
        await scene.execute()
    done = await control.change_runs(scene.database, "rerun", RunFilters(workflow="fulfil"), "ann", BREAKER)
    assert (done.done, done.refused) == (1, 2)
    assert list(done.reasons) == ["all 1 slots of its trigger are in use; try again when a run has ended"]


async def test_runs_are_found_by_what_is_known_about_them(scene: Scene) -> None:
    fails = flaky(scene, [])
    await scene.register()
    await scene.ask("select tidegate.publish('order.created', 'shop', '{\"id\": 7}', correlation_id => 'cart-1')")
    own = await scene.publish(id=8)
    await scene.execute()
    await scene.clock.advance(3_600_000)
    await scene.execute()
    fails[0] = False
    await scene.publish(id=9)
    await scene.execute()
    now = scene.clock.now

    async def found(**filters: Any) -> list[Any]:
        listed = await run_search.list_page(scene.connection, RunFilters(**filters), limit=10)
        return sorted(run.parameters["id"] for run in listed)

    assert await found() == [7, 8, 9]
    assert await found(correlation_id="cart-1") == [7]
    assert await found(correlation_id=own) == [8]
    assert await found(correlation_id="cart-2") == []
    assert await found(error="NO PAPER") == [7, 8]
    assert await found(statuses=["pending"]) == [9]
    assert await found(parameters='{"id": 8}') == [8]
    assert await found(created_from=now) == [9]
    assert await found(created_to=now) == [7, 8]
    assert await found(workflow="other") == []


async def test_unknown_runs(scene: Scene) -> None:
    for verb in (control.retry_run, control.rerun_run):
        with pytest.raises(NotFound):
            await verb(scene.database, RunId(uuid.uuid4()), "ann")


# Replay of events ---------------------------------------------------------------------------------------------------


async def test_a_replayed_event_launches_only_what_it_had_not(scene: Scene) -> None:
    scene.idle("audit")
    await scene.register()
    event_id = await scene.publish(id=7)
    await scene.execute()
    scene.idle("fulfil", throttle="1/s")
    await scene.register()
    event = await find_event(scene.connection, event_id)
    predicted = {one.workflow: one for one in await replay.predict(scene.connection, [event])}
    assert {name: (one.would_launch, one.already_decided) for name, one in predicted.items()} == {
        "audit": (0, 1),
        "fulfil": (1, 0),
    }
    await control.replay_event(scene.database, event.id, "ann")
    with pytest.raises(Conflict, match="already waiting to be decided"):
        await control.replay_event(scene.database, event.id, "ann")
    assert (await scene.explain(event_id)).waits_for == "a worker to decide it again"
    await scene.execute()
    launched = await scene.connection.fetch(
        "select d.slug, count(*) from tidegate.workflow_runs r join tidegate.workflow_definitions d "
        "on d.id = r.workflow_definition_id group by 1"
    )
    assert {row[0]: row[1] for row in launched} == {"audit": 1, "fulfil": 1}
    assert (await scene.explain(event_id)).summary == "audit succeeded; fulfil succeeded"
    await control.replay_event(scene.database, event.id, "ann")  # again: nothing is left to launch
    await scene.execute()
    assert await scene.ask("select count(*) from tidegate.workflow_runs") == 2
    assert await actions(scene) == ["event.replay", "event.replay"]


async def test_events_of_a_range_are_replayed_at_a_rate(scene: Scene) -> None:
    await scene.register()
    for n in range(4):
        await scene.publish("order.created" if n else "order.other", id=n)
    await scene.decide()
    scene.idle()
    await scene.register()
    scheduled = await control.replay_events(scene.database, EventRange(type="order.created"), "ann", rate=1)
    assert scheduled.total == 3 and scheduled.first_at == scene.clock.now
    stage = EventReplays(scene.database, batch_size=10)
    counts = []
    for _ in range(3):
        assert await stage.run_once() == 1
        await scene.execute()
        counts.append(await scene.ask("select count(*) from tidegate.workflow_runs"))
        await scene.clock.advance(1000)
    assert counts == [1, 2, 3]
    assert await stage.next_due_seconds() is None
    assert await control.replay_events(scene.database, EventRange(type="order.created"), "ann", rate=1) is not None
    told = await scene.explain(
        await scene.ask("select event_id from tidegate.event_replays order by replay_at desc limit 1")
    )
    assert told.decisions[-1].decision == "replay_scheduled"
    await scene.clock.advance(60_000)  # no worker was running: the rate holds, in place of all at once
    assert await stage.run_once() == 1
    assert await control.stop_event_replays(scene.database, "ann") == 2


async def taken_back(scene: Scene, **payload: Any) -> EventId:
    """An event for in an hour that was taken back."""
    later = scene.clock.now + timedelta(hours=1)
    own = new_event(
        type="order.created", source="shop", payload=msgspec.json.encode(payload).decode(), deliver_at=later
    )
    await events.insert(scene.connection, [own])
    await control.cancel_event(scene.database, own.id, "ann")
    return own.id


async def test_events_that_were_taken_back_are_replayed_only_by_name(scene: Scene) -> None:
    scene.idle()
    await scene.register()
    gone = [await taken_back(scene, id=n) for n in range(3)]
    assert await event_replays.count(scene.connection, EventRange(source="shop"), 10) == (0, 3, False)
    assert (await control.replay_events(scene.database, EventRange(source="shop"), "ann", rate=1)).total == 0
    await scene.publish(id=7)
    wanted = EventRange(type="order.created")
    assert await event_replays.count(scene.connection, wanted, 10) == (1, 3, False)
    assert await event_replays.count(scene.connection, wanted, 2) == (0, 2, True)
    assert (await control.replay_events(scene.database, wanted, "ann", rate=1)).total == 1
    await EventReplays(scene.database, batch_size=10).run_once()
    await scene.execute()
    assert await scene.ask("select count(*) from tidegate.workflow_runs") == 1
    assert await control.replay_event(scene.database, gone[0], "ann") is True
    await scene.execute()
    assert await scene.ask("select count(*) from tidegate.workflow_runs") == 2
    assert await event_replays.count(scene.connection, wanted, 10) == (2, 2, False)
    assert await control.replay_event(scene.database, gone[0], "ann") is False


async def test_an_event_that_is_taken_back_while_its_replay_waits_is_not_replayed(scene: Scene) -> None:
    await scene.register()
    event_id = EventId(uuid.UUID(await scene.publish(id=7)))
    await scene.decide()
    scene.idle()
    await scene.register()
    await control.replay_events(scene.database, EventRange(source="shop"), "ann", rate=1)
    await control.pause(scene.database, "shop", actor="ann", duration_ms=60_000, reason="busy")
    await control.replay_event(scene.database, event_id, "ann")
    await control.cancel_event(scene.database, event_id, "ann")
    await control.resume(scene.database, "shop", actor="ann")
    assert await EventReplays(scene.database, batch_size=10).run_once() == 1
    await scene.execute()
    assert await scene.ask("select count(*) from tidegate.workflow_runs") == 0


async def test_a_rerun_is_not_cancelled_by_what_cancelled_the_run(scene: Scene) -> None:
    """It begins anew: only an event that comes after the rerun cancels it."""
    done = []

    @scene.workflow(cancel_on=On("order.cancelled", match={"id": 7}))
    async def fulfil(ctx: Context, id: int) -> str:
        done.append("begun")
        await ctx.sleep("1h")
        done.append("slept")
        return "done"

    await scene.register()
    await scene.publish(id=7)
    await scene.execute()
    await scene.clock.advance(1000)
    await scene.publish("order.cancelled", id=7)
    await scene.execute()
    first = await scene.ask("select id from tidegate.workflow_runs")
    assert await status_of(scene, first) == "cancelled"
    await scene.clock.advance(1000)
    second = await control.rerun_run(scene.database, first, "ann")
    await scene.execute()
    assert (await status_of(scene, second), done) == ("pending", ["begun", "begun"])
    await scene.publish("order.cancelled", id=7)
    await scene.execute()
    assert await status_of(scene, second) == "cancelled"
    await scene.clock.advance(1000)
    third = await control.rerun_run(scene.database, second, "ann")
    await scene.execute()
    await scene.clock.advance(3_600_001)
    await scene.execute()
    assert await status_of(scene, third) == "succeeded" and done[-1] == "slept"


async def test_a_scheduled_replay_keeps_its_event(scene: Scene) -> None:
    event_id = await scene.publish()
    await scene.decide()
    await control.replay_events(scene.database, EventRange(source="shop"), "ann", rate=1)
    day = datetime.fromtimestamp((uuid.UUID(event_id).int >> 80) / 1000, UTC).date()
    needed = await scene.connection.fetch("select tidegate.needed_stories($1, 'infinity')", day)
    assert len(needed) == 1


async def test_a_replay_of_an_event_that_is_gone(scene: Scene) -> None:
    with pytest.raises(Conflict, match="no longer exists"):
        await control.replay_event(scene.database, EventId(uuid.uuid4()), "ann")
