"""An event that nearly woke a run: `explain` of the event names the run, `explain` of the run the event, and both in
what they differ."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.why_scene import Scene
from tidegate import Context, On
from tidegate.flow import control
from tidegate.flow.look.explain import Explanation, explain_any
from tidegate.store.db import Connection, Database

WHERE = "event.payload.id == run.parameters.id"
AS_TEXT = 'payload.id is text ("10") in the event, and it waits for a number (10)'


@pytest.fixture
def scene(database: Database, connection: Connection, clock: Clock, world: World) -> Scene:
    return Scene(database, connection, clock, world)


async def waiting(scene: Scene, *patterns: On, timeout: str = "3d", **payload: Any) -> None:
    """A run that waits for one of the patterns."""

    @scene.workflow()
    async def fulfil(ctx: Context, id: object = None) -> Any:
        return bool(await ctx.wait_any(*patterns, timeout=timeout))

    await scene.register()
    await scene.publish(**payload)
    await scene.execute()


def near(found: Explanation) -> list[str]:
    return [line.reason or "" for line in found.decisions if (line.stage, line.decision) == ("wait", "near_miss")]


@pytest.mark.parametrize(
    ("on", "given", "told"),
    [
        (On("order.approved", where=WHERE), {"id": "10"}, AS_TEXT),
        (On("order.approved", match={"id": 10}), {"id": "10"}, AS_TEXT),
        (On("order.approved", match={"id": "10"}), {"id": 10},
         'payload.id is a number (10) in the event, and it waits for text ("10")'),
        (On("order.approved", match={"by": "Ann"}), {"by": "ann"},
         'it waits for payload.by = "Ann", and the event has "ann": they differ only in upper and lower case'),
        (On("order.approved", match={"ok": True}), {"ok": "true"},
         'payload.ok is text ("true") in the event, and it waits for true or false (true)'),
        (On("order.approved", match={"id": 10, "line": 2}), {"id": "10", "line": "2"},
         f'{AS_TEXT}; payload.line is text ("2") in the event, and it waits for a number (2)'),
        (On("order.approved", match={"id": 10}), {"order_id": 10},
         "it waits for payload.id = 10, and the event has no such field"),
        (On("Order.Approved", match={"id": 10}), {"id": 10},
         "its type is Order.Approved, and the event's is order.approved: they differ only in upper and lower case"),
        (On("order.approved", match={"id": 10}, source="Shop"), {"id": 10},
         "its source is Shop, and the event's is shop: they differ only in upper and lower case"),
        (On("order.approved", match={"id": 10}, source="desk.*"), {"id": 10},
         "its source is desk.*, and the event's is shop"),
        (On("order.approved", where="event.payload.amount > 100"), {"amount": "120"},
         'where: event.payload.amount is text ("120") and 100 is a number: > takes two of one type'),
    ],
)  # fmt: skip
async def test_one_difference(scene: Scene, on: On, given: dict[str, Any], told: str) -> None:
    await waiting(scene, on, id=10)
    event_id, run_id = await scene.publish("order.approved", **given), await scene.run_id()
    await scene.execute()
    of_event, of_run = await scene.explain(event_id), await scene.explain(run_id)
    assert f"near miss: run {run_id} of fulfil waits for event " in of_event.summary
    assert told in of_event.summary
    [of_wait] = near(of_event)
    assert of_wait in of_event.summary
    assert f"{event_id}) nearly ended the wait 'wait_any': {told}" in of_run.summary
    assert of_run.waits_for is not None, "it waits still"


@pytest.mark.parametrize(
    ("on", "given"),
    [
        (On("order.approved", match={"id": 10}), {"id": 11}),
        (On("order.approved", match={"id": 10}), {"id": "11"}),
        (On("order.approved", match={"id": 10}, source="desk"), {"id": "10"}),
        (On("order.refused", match={"id": 10}), {"id": 10}),
    ],
)
async def test_what_was_meant_for_another_run_is_no_near_miss(scene: Scene, on: On, given: dict[str, Any]) -> None:
    await waiting(scene, on, id=10)
    event_id = await scene.publish("order.approved", **given)
    await scene.execute()
    assert near(await scene.explain(event_id)) == near(await scene.explain(await scene.run_id())) == []


async def test_an_event_that_came_before_the_run(scene: Scene) -> None:
    event_id = await scene.publish("order.approved", id=10)
    await scene.decide()
    await scene.clock.advance(1000)
    await waiting(scene, On("order.approved", match={"id": 10}), id=10)
    told = "it came at 2026-06-01 12:00:00 UTC, before the event that launched the run"
    assert told in (await scene.explain(event_id)).summary
    assert told in (await scene.explain(await scene.run_id())).summary


async def test_an_event_that_is_held_is_named_by_the_run(scene: Scene) -> None:
    await waiting(scene, On("order.approved", match={"id": 10}), id=10)
    await control.pause(scene.database, "desk", actor="ann")
    event_id = await scene.publish("order.approved", "desk", id=10)
    await scene.decide()
    found = await scene.explain(await scene.run_id())
    assert f"it fits, and is not decided: tidegate explain {event_id}" in found.summary


async def test_a_wait_that_timed_out_names_what_nearly_ended_it(scene: Scene) -> None:
    await waiting(scene, On("order.approved", where=WHERE), timeout="1h", id=10)
    await scene.publish("order.approved", id="10")
    await scene.execute()
    await scene.clock.advance(3_600_000)
    await scene.execute()
    found = await scene.explain(await scene.run_id())
    assert found.outcomes[0].state == "succeeded" and AS_TEXT in found.summary
    assert [line.decision for line in found.decisions if line.stage == "step"] == ["timed_out"]


async def test_a_run_that_was_woken_has_no_near_miss(scene: Scene) -> None:
    await waiting(scene, On("order.approved", match={"id": 10}), id=10)
    event_id = await scene.publish("order.approved", id=10)
    await scene.execute()
    assert near(await scene.explain(event_id)) == near(await scene.explain(await scene.run_id())) == []


async def test_runs_and_events_of_other_sources_are_hidden(scene: Scene) -> None:
    await waiting(scene, On("order.approved", match={"id": 10}), id=10)  # launched by an event of shop
    event_id = await scene.publish("order.approved", "desk", id="10")
    await scene.decide()
    found = await explain_any(scene.connection, event_id, lambda source: source == "desk")
    assert near(found) == [] and "fulfil" not in found.summary
    found = await explain_any(scene.connection, str(await scene.run_id()), lambda source: source == "shop")
    assert near(found) == [] and event_id not in found.summary


async def test_only_one_difference_counts_and_values_come_before_missing_fields(scene: Scene) -> None:
    """Events without the field, from before the run and after it, do not hide the one with the value as text."""
    early = [await scene.publish("order.approved", order_id=n) for n in range(6)]
    await scene.clock.advance(1000)
    await waiting(scene, On("order.approved", match={"id": 10}), id=10)
    meant = await scene.publish("order.approved", id="10")
    later = [await scene.publish("order.approved", order_id=n) for n in range(60)]
    await scene.execute()
    told = near(await scene.explain(await scene.run_id()))
    assert len(told) == 5 and meant in told[0] and AS_TEXT in told[0]
    assert all("no such field" in one for one in told[1:]) and all(any(id in one for id in later) for one in told[1:])
    assert not near(await scene.explain(early[-1]))


async def test_a_wait_for_all_says_what_it_has_and_the_event_whom_it_is_kept_for(scene: Scene) -> None:
    @scene.workflow()
    async def both(ctx: Context, id: int) -> Any:
        found = await ctx.wait_all(On("all.a", match={"id": id}), On("all.b", match={"id": id}), timeout="1h", name="w")
        return found and [event.type for event in found]

    await scene.register()
    await scene.publish(id=7)
    await scene.execute()
    run_id = await scene.run_id()
    open_text = "event all.a with id = 7 and event all.b with id = 7"
    warning = await scene.connection.fetchval("select warning from tidegate.workflow_runs")
    assert warning.startswith(f"waits for {open_text} until")
    second = await scene.publish("all.b", id=7)
    await scene.execute()
    of_run, of_event = await scene.explain(run_id), await scene.explain(second)
    assert of_run.waits_for == "event all.a with id = 7" and f"it has all.b (event {second})" in of_run.summary
    assert near(of_run) == [] and "still waits until" in of_run.summary
    assert of_event.summary == f"is kept for run {run_id}, which still waits for event all.a with id = 7"
    assert [(line.decision, line.run_ids) for line in of_event.decisions][-1] == ("kept", [of_run.outcomes[0].run_id])
    first = await scene.publish("all.a", id=7)
    await scene.execute()
    assert (await scene.explain(first)).summary == f"woke run {run_id}"
    assert (await scene.explain(second)).summary == f"ended the wait 'w' of run {run_id} together with event {first}"
    assert await scene.connection.fetchval("select output from tidegate.workflow_runs") == ["all.a", "all.b"]
    kept = "select retry_metadata ? 'kept' from tidegate.workflow_run_steps where name = 'w'"
    assert not await scene.connection.fetchval(kept)


async def test_a_wait_for_all_that_timed_out_and_one_that_finds_everything_when_it_begins(scene: Scene) -> None:
    @scene.workflow()
    async def both(ctx: Context, id: int) -> Any:
        await ctx.sleep("1m")
        found = await ctx.wait_all(On("all.a", match={"id": id}), On("all.b", match={"id": id}), timeout="1h", name="w")
        return bool(found)

    await scene.register()
    for number in (1, 2):
        await scene.publish(id=number)
    await scene.execute()
    a, b, alone = [await scene.publish(type, id=n) for type, n in (("all.a", 1), ("all.b", 1), ("all.b", 2))]
    await scene.execute()
    await scene.clock.advance(60_000)
    await scene.execute()
    ids = [str(row[0]) for row in await scene.connection.fetch("select id from tidegate.workflow_runs order by id")]
    assert (await scene.explain(b)).summary == f"woke run {ids[0]}"
    assert (await scene.explain(a)).summary == f"ended the wait 'w' of run {ids[0]} together with event {b}"
    await scene.clock.advance(3_700_000)
    await scene.execute()
    assert (await scene.explain(alone)).summary == (
        f"was kept for run {ids[1]}, whose wait 'w' ended without event all.a with id = 2"
    )


@pytest.mark.parametrize("correlation", [None, "another"])
async def test_what_would_cancel_a_run_of_another_correlation(scene: Scene, correlation: str | None) -> None:
    @scene.workflow(cancel_on="stop")
    async def fulfil(ctx: Context) -> None:
        await ctx.sleep("1h")

    await scene.register()
    mine = await scene.publish()
    await scene.execute()
    stop = await scene.connection.fetchval("select tidegate.publish('stop', 'shop', correlation_id => $1)", correlation)
    await scene.execute()
    run_id = await scene.run_id()
    of_event, of_run = await scene.explain(stop), await scene.explain(run_id)
    if correlation is None:
        why = f'it waits for correlation_id = "{mine}", and the event was published without one'
    else:
        why = f'it waits for correlation_id = "{mine}", and the event has "another"'
    assert f"(event {stop}) nearly cancelled it: {why}" in of_run.summary
    assert f"near miss: run {run_id} of fulfil would be cancelled by event stop with" in of_event.summary
    assert why in of_event.summary


async def test_what_cancelled_another_run_is_no_near_miss(scene: Scene) -> None:
    @scene.workflow(cancel_on="stop")
    async def fulfil(ctx: Context) -> None:
        await ctx.sleep("1h")

    await scene.register()
    for _ in range(2):
        await scene.publish()
    await scene.execute()
    ids = await scene.connection.fetch("select id, correlation_id from tidegate.workflow_runs order by id")
    publish = "select tidegate.publish('stop', 'shop', correlation_id => $1)"
    await scene.connection.fetchval(publish, ids[0]["correlation_id"])
    await scene.execute()
    assert near(await scene.explain(str(ids[1]["id"]))) == []
    stray = await scene.connection.fetchval(publish, "of nobody")
    await scene.execute()
    [told] = near(await scene.explain(str(ids[1]["id"])))
    assert f"(event {stray}) nearly cancelled it" in told
