"""The line of runs that wait for a slot, with the deliveries that wait for one: order, edits, verbs, who leaves it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.slot_scene import SlotScene
from tests.flow.step_world import World
from tests.flow.trigger_worker import BREAKER
from tidegate import Budget
from tidegate.flow import control
from tidegate.flow.look.health import shared_state, snapshot
from tidegate.model.ids import RunId
from tidegate.store import budget_views, trigger_gates
from tidegate.store.db import Connection, Database

WAITS = "select count(*) from tidegate.slot_waits"
LIMITS: dict[str, Any] = {
    "trigger": {"max_concurrency": 1},
    "key": {"max_concurrency": 1, "concurrency_key": "{{ event.payload.key }}"},
    "budget": {"budgets": [Budget("gpu", concurrency=1, key="{{ event.payload.key }}")]},
}


@pytest.fixture
def scene(database: Database, connection: Connection, clock: Clock, world: World) -> SlotScene:
    return SlotScene(database, connection, clock, world)


@pytest.fixture(params=list(LIMITS))
async def narrow(request: pytest.FixtureRequest, scene: SlotScene) -> SlotScene:
    """One slot, of a trigger, of a key, or of a key of a budget."""
    scene.workflow(**LIMITS[request.param])
    await scene.start()
    return scene


async def one_waits(scene: SlotScene) -> None:
    """Run 2 executes; run 1, which has slept, is due and waits for the slot."""
    await scene.begin(1, key="a")
    await scene.let_go(1)
    await scene.begin(2, key="a")
    await scene.clock.advance(60_000)
    await scene.turn()
    assert scene.order == [1, 2]
    assert await scene.ask(WAITS) == 1


async def test_a_run_that_resumes_goes_before_deliveries_that_came_later(narrow: SlotScene) -> None:
    await one_waits(narrow)
    await narrow.clock.advance(10)
    await narrow.publish(3, key="a")
    await narrow.turn()
    await narrow.let_go(2)  # it sleeps
    await narrow.until(lambda: len(narrow.order) > 2)
    await narrow.turn()
    assert narrow.order == [1, 2, 1]
    await narrow.let_go(1)  # it ends
    await narrow.until(lambda: len(narrow.order) > 3)
    assert narrow.order == [1, 2, 1, 3]
    assert set(narrow.most.values()) == {1}


async def test_a_new_event_does_not_take_the_slot_that_is_free_for_a_run_that_waits(narrow: SlotScene) -> None:
    await one_waits(narrow)
    await narrow.let_go(2)  # the slot is free, run 1 is due, and no worker has looked
    await narrow.publish(3, key="a")
    await narrow.worker.dispatch.run_once()
    assert await narrow.ask("select count(*) from tidegate.workflow_runs") == 2
    await narrow.until(lambda: len(narrow.order) > 2)
    assert narrow.order == [1, 2, 1]


async def test_deliveries_that_came_before_go_first(narrow: SlotScene) -> None:
    await narrow.begin(1, key="a")
    await narrow.let_go(1)
    await narrow.begin(2, key="a")
    await narrow.clock.advance(59_000)
    await narrow.publish(3, key="a")
    await narrow.turn()
    await narrow.clock.advance(1_000)  # run 1 is due now, a second after event 3 came
    await narrow.turn()
    assert narrow.order == [1, 2]
    await narrow.let_go(2)
    await narrow.until(lambda: len(narrow.order) > 2)
    await narrow.turn()
    assert narrow.order == [1, 2, 3]
    await narrow.let_go(3)
    await narrow.until(lambda: len(narrow.order) > 3)
    assert narrow.order == [1, 2, 3, 1]
    assert set(narrow.most.values()) == {1}


async def test_explain_names_the_slot_its_holders_and_until_when_their_lease_lasts(narrow: SlotScene) -> None:
    await one_waits(narrow)
    said = await narrow.explain(1)
    holder = await narrow.run_of(2)
    [outcome] = said.outcomes
    of = "budget gpu for key a" if outcome.state == "budget" else "its trigger"
    assert f"is due since 2026-06-01 12:01:00 UTC and waits for a slot of {of}" in said.summary
    doing = "running since 2026-06-01 12:00:00 UTC, lease until 2026-06-01 13:00:00 UTC"
    assert f"1 of 1 are held by run {holder['id']} ({doing})" in said.summary
    assert said.waits_for == ("a slot of budget gpu" if outcome.state == "budget" else "a free slot")
    run = await narrow.run_of(1)
    assert run["warning"].startswith("waits for a slot of ")
    await narrow.publish(3, key="a")
    await narrow.turn()
    asleep = await narrow.explain(2)
    assert "is executing" in asleep.summary
    await narrow.let_go(2)
    assert "it holds no slot meanwhile" in (await narrow.explain(2)).summary


async def test_cancelled_in_line_it_leaves_its_place_to_the_next(narrow: SlotScene) -> None:
    await one_waits(narrow)
    await narrow.clock.advance(10)
    await narrow.publish(3, key="a")
    await narrow.turn()
    run = await narrow.run_of(1)
    assert await control.cancel_run(narrow.database, RunId(run["id"]), "ada", BREAKER) == "cancelled"
    assert await narrow.ask(WAITS) == 0
    await narrow.let_go(2)
    await narrow.until(lambda: len(narrow.order) > 2)
    assert narrow.order == [1, 2, 3]


@pytest.mark.parametrize("limits", list(LIMITS.values()), ids=list(LIMITS))
async def test_timed_out_in_line_it_ends_without_a_slot(scene: SlotScene, limits: Any) -> None:
    scene.workflow(timeout="90s", **limits)
    await scene.start()
    await scene.begin(1, key="a")
    await scene.let_go(1)
    await scene.clock.advance(50_000)
    await scene.begin(2, key="a")
    await scene.clock.advance(10_000)
    await scene.turn()
    assert await scene.ask(WAITS) == 1
    assert "it times out at 2026-06-01 12:01:30 UTC" in (await scene.explain(1)).summary
    await scene.clock.advance(30_000)
    await scene.turn()
    assert (await scene.run_of(1))["status"] == "failed"
    assert scene.order == [1, 2] and await scene.ask(WAITS) == 0
    assert set(scene.most.values()) == {1}


# Edits ---------------------------------------------------------------------------------------------------------------


async def edit(scene: SlotScene, **fields: Any) -> None:
    await control.update_trigger(scene.database, (await scene.trigger()).id, fields, "ada")


async def test_more_slots_let_those_in_line_go_on(scene: SlotScene) -> None:
    scene.workflow(max_concurrency=1)
    await scene.start()
    await one_waits(scene)
    await edit(scene, max_concurrency=2)
    await scene.until(lambda: len(scene.order) > 2)
    assert scene.order == [1, 2, 1] and scene.most["a"] == 2


async def test_fewer_slots_end_nothing_and_let_nobody_begin_until_there_is_room(scene: SlotScene) -> None:
    scene.workflow(max_concurrency=2)
    await scene.start()
    await scene.begin(1, 2)
    await scene.let_go(1)
    await scene.begin(3)
    await edit(scene, max_concurrency=1)
    await scene.clock.advance(60_000)
    await scene.let_go(2)
    await scene.turn()
    assert scene.order == [1, 2, 3]  # one is left, and holds the only slot
    await scene.let_go(3)
    await scene.until(lambda: len(scene.order) > 3)
    await scene.turn()
    assert scene.order == [1, 2, 3, 1]


async def test_without_limits_nobody_waits(scene: SlotScene) -> None:
    scene.workflow(max_concurrency=1)
    await scene.start()
    await one_waits(scene)
    await edit(scene, max_concurrency=None, holds="unfinished")
    await scene.until(lambda: len(scene.order) > 2)
    assert scene.order == [1, 2, 1] and await scene.ask(WAITS) == 0


async def test_to_unfinished_those_without_a_slot_take_one_first_and_keep_it(scene: SlotScene) -> None:
    scene.workflow(max_concurrency=1)
    await scene.start()
    await one_waits(scene)
    await edit(scene, holds="unfinished")
    await scene.turn()
    assert scene.order == [1, 2]
    await scene.let_go(2)  # it sleeps, and keeps its slot
    await scene.publish(3, key="a")
    await scene.turn()
    assert scene.order == [1, 2]
    await scene.clock.advance(60_000)
    await scene.until(lambda: len(scene.order) > 2)
    await scene.let_go(2)  # it ends
    await scene.until(lambda: len(scene.order) > 3)
    assert scene.order == [1, 2, 2, 1]
    await scene.let_go(1)
    await scene.until(lambda: len(scene.order) > 4)
    assert scene.order == [1, 2, 2, 1, 3] and scene.most["a"] == 1


async def test_to_executing_those_that_sleep_give_their_slots_back(scene: SlotScene) -> None:
    scene.workflow(max_concurrency=1, holds="unfinished")
    await scene.start()
    await scene.begin(1)
    await scene.let_go(1)
    await scene.publish(2)
    await scene.turn()
    assert scene.order == [1]
    await edit(scene, holds="executing")
    await scene.until(lambda: len(scene.order) > 1)
    await scene.clock.advance(60_000)
    await scene.turn()
    assert scene.order == [1, 2] and await scene.ask(WAITS) == 1
    await scene.let_go(2)
    await scene.until(lambda: len(scene.order) > 2)
    assert scene.order == [1, 2, 1] and scene.most[""] == 1


async def test_to_executing_while_it_executes_it_gives_its_slot_back_when_it_sleeps(scene: SlotScene) -> None:
    scene.workflow(max_concurrency=1, holds="unfinished")
    await scene.start()
    await scene.begin(1)
    await scene.publish(2)
    await edit(scene, holds="executing")
    await scene.let_go(1)
    await scene.until(lambda: len(scene.order) > 1)
    assert scene.order == [1, 2]


async def test_a_budget_with_another_key_or_more_slots_is_asked_anew(scene: SlotScene) -> None:
    scene.workflow(budgets=[Budget("gpu", concurrency=1, key="{{ event.payload.key }}")])
    await scene.start()
    await one_waits(scene)
    await control.put_budget(scene.database, Budget("gpu", concurrency=1), "ada")
    await scene.turn()
    assert scene.order == [1, 2]
    assert await scene.ask("select key from tidegate.slot_waits") == ""
    await control.put_budget(scene.database, Budget("gpu", concurrency=2), "ada")
    await scene.until(lambda: len(scene.order) > 2)
    assert scene.order == [1, 2, 1]


# Verbs ---------------------------------------------------------------------------------------------------------------


async def test_retried_and_repeated_runs_take_a_slot_and_give_it_back(narrow: SlotScene) -> None:
    await narrow.begin(1, key="a")
    await narrow.let_go(1)
    run_id = RunId((await narrow.run_of(1))["id"])
    await control.cancel_run(narrow.database, run_id, "ada", BREAKER)
    assert await control.retry_run(narrow.database, run_id, "ada") == "resumed"
    await narrow.publish(2, key="a")
    await narrow.until(lambda: len(narrow.order) > 1)
    await narrow.turn()
    assert narrow.order == [1, 1]  # the other waits
    await narrow.let_go(1)  # it sleeps anew
    await narrow.until(lambda: len(narrow.order) > 2)
    await narrow.let_go(2)
    await control.cancel_run(narrow.database, run_id, "ada", BREAKER)
    await control.rerun_run(narrow.database, run_id, "ada")
    await narrow.until(lambda: len(narrow.order) > 3)
    assert narrow.order == [1, 1, 2, 1]
    await narrow.clock.advance(60_000)
    await narrow.turn()
    assert narrow.order == [1, 1, 2, 1]  # run 2 waits for the one that is repeated
    await narrow.let_go(1)
    await narrow.until(lambda: len(narrow.order) > 4)
    assert narrow.order[-1] == 2 and set(narrow.most.values()) == {1}


# Others --------------------------------------------------------------------------------------------------------------


async def test_a_paused_trigger_launches_nothing_and_what_it_launched_goes_on(narrow: SlotScene) -> None:
    await one_waits(narrow)
    trigger_id = (await narrow.trigger()).id
    await control.pause_trigger(narrow.database, trigger_id, actor="ada")
    await narrow.publish(3, key="a")
    await narrow.let_go(2)
    await narrow.until(lambda: len(narrow.order) > 2)
    assert narrow.order == [1, 2, 1]
    await narrow.let_go(1)
    await narrow.turn()
    assert narrow.order == [1, 2, 1]
    await control.resume_trigger(narrow.database, trigger_id, "ada")
    await narrow.until(lambda: len(narrow.order) > 3)
    assert narrow.order[-1] == 3


async def test_runs_of_a_workflow_that_nobody_executes_keep_no_slot_of_a_budget_from_others(scene: SlotScene) -> None:
    scene.workflow(budgets=[Budget("gpu", concurrency=1)])
    scene.workflow("other", budgets=["gpu"])
    await scene.start()
    await one_waits(scene)
    mine = await scene.ask("select id from tidegate.workflow_definitions where slug = 'other'")
    scene.runners[0].serve([mine])  # nobody has the code of run 1 any more
    await scene.runners[0].announce()
    await scene.publish(3, name="other")
    await scene.let_go(2)
    await scene.until(lambda: len(scene.order) > 2)
    assert scene.order == [1, 2, 3]


async def test_health_metrics_and_states_count_those_that_wait(narrow: SlotScene) -> None:
    await one_waits(narrow)
    is_budget = await narrow.ask("select budget is not null from tidegate.slot_waits")
    state = await shared_state(narrow.connection)
    assert state.deferred["runs", "budget"] == int(is_budget)
    assert state.deferred["runs", "concurrency"] == int(not is_budget)
    found = await trigger_gates.get(narrow.connection, (await narrow.trigger()).id)
    assert found is not None and found.resuming == 1
    if is_budget:
        [line] = await budget_views.key_lines(narrow.connection, "gpu", None, 10)
        assert (line.key, line.waiting, line.resuming, line.in_use) == ("a", 0, 1, 1)
    assert "slot_backlog" not in [cause.code for cause in (await snapshot(narrow.connection)).causes]
    await narrow.clock.advance(3_600_000)
    [cause] = [one for one in (await snapshot(narrow.connection)).causes if one.code == "slot_backlog"]
    run = await narrow.run_of(1)
    assert cause.message == f"1 due runs wait for a slot to go on, the oldest ({run['id']}) for 3600 s"
    assert cause.subject == "work"
