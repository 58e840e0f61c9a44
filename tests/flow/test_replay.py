"""Dead letters on a real database: what a replay brings back, its lineage, its refusals, its rate."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import World
from tests.flow.step_world import the_run, the_steps
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker, make_trigger
from tests.store.builders import make_events
from tidegate import Context, failpoints
from tidegate.errors import Conflict, InvalidInput, NotFound
from tidegate.flow import control
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.flow.keep.replay import Replay
from tidegate.flow.look.explain import explain
from tidegate.model.retry import RetryPolicy
from tidegate.store import dead_letters
from tidegate.store.db import Connection, Database
from tidegate.store.dead_letters import DeadLetter, DeadLetterFilters


async def letters(connection: Connection, state: Any = "open", **filters: Any) -> list[DeadLetter]:
    return await dead_letters.list_page(connection, DeadLetterFilters(**filters), state=state, limit=100)


async def bury(connection: Connection, count: int = 1, reason: str = "broken", **changes: Any) -> list[uuid.UUID]:
    """Events that were dead-lettered."""
    ids = await make_events(connection, count, **changes)
    await connection.execute("delete from tidegate.event_inbox")
    for event_id in ids:
        await connection.execute(
            "insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason) "
            "values (tidegate.uuid7(), 'event', $1, $1, $2)",
            event_id,
            reason,
        )
    return ids


async def broken_run(connection: Connection, clock: Clock, world: World) -> Any:
    """A run that has failed with its second step; the world decides whether it fails again."""

    async def first() -> str:
        world.done.append("first")
        return "one"

    async def second() -> str:
        world.done.append("second")
        if "mended" not in world.done:
            raise ValueError("never")
        return "two"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> list[str]:
        return [await ctx.step("first", first), await ctx.step("second", second)]

    runner = await world.runner()
    await publish(connection, "go")
    await fail(clock, world, runner)
    return runner


async def fail(clock: Clock, world: World, runner: Any) -> None:
    for _ in range(4):
        await world.turn(runner)
        await clock.advance(10_000)


async def test_a_failed_run_goes_on_as_the_same_run_after_its_finished_steps(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    runner = await broken_run(connection, clock, world)
    failed = await the_run(connection)
    [letter] = await letters(connection, kind="step", workflow="work", reason="NEVER")
    assert (letter.workflow_run_id, letter.step, failed["status"]) == (failed["id"], "second", "failed")
    world.done.append("mended")
    done = await control.replay_letter(database, letter.id, "ann")
    assert done.into == failed["id"]
    run, step = await the_run(connection), (await the_steps(connection))["second"]
    assert (run["status"], run["finished_at"], run["error"], run["replayed_from"]) == ("pending", None, None, letter.id)
    assert (step["status"], step["retry_attempts"], step["error"]) == ("pending", 0, None)
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["id"], run["status"], run["output"]) == (failed["id"], "succeeded", ["one", "two"])
    assert world.done == ["first", "second", "second", "second", "mended", "second"]
    [told] = await letters(connection, "replayed")
    assert (told.replayed_by, told.replayed_into, told.replayed_at is not None) == ("ann", run["id"], True)
    audited = await connection.fetchrow("select actor, action, subject from tidegate.audit_log")
    assert audited is not None and tuple(audited) == ("ann", "dead_letter.replay", str(letter.id))
    story = await explain(connection, str(run["event_id"]))
    entries = [(line.decision, line.reason, line.actor) for line in story.decisions if line.stage == "run"]
    assert entries == [
        ("failed", "step 'second' failed: ValueError: never", None),
        ("replayed", f"from dead letter {letter.id}", "ann"),
        ("succeeded", None, None),
    ]
    assert story.summary == "work succeeded"
    with pytest.raises(Conflict, match="was replayed by ann"):
        await control.replay_letter(database, letter.id, "bob")
    with pytest.raises(Conflict, match="it is succeeded"):
        await control.replay_letter(database, letter.id, "bob", force=True)


async def test_attempts_are_counted_anew_and_a_second_end_is_a_new_letter(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    runner = await broken_run(connection, clock, world)
    [first] = await letters(connection)
    await clock.advance(30 * 86_400_000)  # however old it is by now
    await control.replay_letter(database, first.id, "ann")
    [replayed] = await letters(connection, "replayed")
    assert (replayed.id, replayed.last_replayed_from) == (first.id, None), "it does not come of itself"
    await fail(clock, world, runner)
    assert world.done.count("second") == 6 and world.done.count("first") == 1
    [again] = await letters(connection)
    assert (again.id != first.id, again.subject_id, again.last_replayed_from) == (True, first.subject_id, first.id)
    with pytest.raises(Conflict, match=f"as dead letter {again.id}"):
        await control.replay_letter(database, first.id, "ann", force=True)


async def test_a_run_of_a_deleted_workflow_is_refused(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    await broken_run(connection, clock, world)
    [letter] = await letters(connection)
    await connection.execute("update tidegate.workflow_definitions set deleted_at = tidegate.now()")
    with pytest.raises(Conflict, match=r"workflow work of run .* was deleted"):
        await control.replay_letter(database, letter.id, "ann")
    await control.replay_letters(database, DeadLetterFilters(), "ann", rate=1)
    assert await Replay(database, batch_size=10).run_once() == 1
    [letter] = await letters(connection)
    assert letter.replay_error and "was deleted" in letter.replay_error and letter.replay_at is None
    assert (await the_run(connection))["status"] == "failed"


async def test_a_run_waits_for_a_slot_of_its_trigger(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    async def broken() -> None:
        raise ValueError("never")

    @world.app.workflow(on="go", max_concurrency=1)
    async def work(ctx: Context, wait: bool = False) -> None:
        if wait:
            await ctx.sleep("1h")
        elif "mended" not in world.done:
            await ctx.step("call", broken)

    runner = await world.runner()
    await publish(connection, "go")
    await fail(clock, world, runner)
    [letter] = await letters(connection)
    await publish(connection, "go", wait=True)
    await world.turn(runner)
    assert (await control.replay_letter(database, letter.id, "ann")).into is None
    audited = await connection.fetch("select actor, action, subject from tidegate.audit_log")
    assert [tuple(row) for row in audited] == [("ann", "dead_letter.schedule", str(letter.id))]
    replay = Replay(database, batch_size=10)
    await clock.advance(2000)
    assert await replay.run_once() == 0
    await clock.advance(3_600_000)
    await world.turn(runner)
    world.done.append("mended")
    assert await replay.run_once() == 1
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "succeeded"


async def test_an_event_is_decided_anew_however_old_it_is(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow(on="order.created")
    async def work(ctx: Context) -> None: ...

    await world.runner()
    [event_id] = await bury(connection, ttl_ms=1000)
    await clock.advance(86_400_000)
    [letter] = await letters(connection, kind="event", source="shop.api")
    assert (await control.replay_letter(database, letter.id, "ann")).into == event_id
    row = await connection.fetchrow("select * from tidegate.event_ingress_retries")
    assert row is not None and (row["retry_state"], row["reason"], row["replayed_from"]) == (
        "scheduled", "replay", letter.id,
    )  # fmt: skip
    with pytest.raises(Conflict, match="already"):
        await control.replay_letter(database, letter.id, "ann", force=True)
    turn = await EventRetry(database, batch_size=10, after_launch=lambda: None).run_once()
    assert (turn.due, turn.launched, turn.expired) == (1, 1, 0)
    story = await explain(connection, str(event_id))
    assert ("gate", "replayed", "ann") in [(d.stage, d.decision, d.actor) for d in story.decisions]
    with pytest.raises(Conflict, match="it has 1 deliveries"):
        await control.replay_letter(database, letter.id, "ann", force=True)


async def test_a_delivery_is_judged_by_the_current_trigger(
    database: Database, connection: Connection, clock: Clock
) -> None:
    policy = RetryPolicy(base_ms=1000, factor=1, max_ms=1000, jitter_ratio=0, max_attempts=3, max_age_ms=60_000)
    worker = TriggerWorker(database)
    trigger_id = await make_trigger(database, max_concurrency=1, retry=policy)
    for n in range(2):
        await publish(connection, "tick", "shop", n=n)
    for _ in range(6):
        await worker.turn()
        await clock.advance(15_000)
    [letter] = await letters(connection, kind="delivery", trigger_id=trigger_id)
    await clock.advance(7 * 86_400_000)
    await control.update_trigger(database, trigger_id, {"max_concurrency": 2}, "ann")
    assert (await control.replay_letter(database, letter.id, "ann")).into == letter.subject_id
    await worker.turn()
    row = await connection.fetchrow(
        "select * from tidegate.workflow_trigger_deliveries where id = $1", letter.subject_id
    )
    assert row is not None and (row["status"], row["replayed_from"]) == ("launched", letter.id)
    assert row["trigger_version"] == 2
    with pytest.raises(Conflict, match="it is launched"):
        await control.replay_letter(database, letter.id, "ann", force=True)


async def test_a_delivery_whose_template_failed_is_launched_once_the_template_is_mended(
    database: Database, connection: Connection, clock: Clock
) -> None:
    worker = TriggerWorker(database)
    trigger_id = await make_trigger(database, parameter_template={"n": "{{ event.payload.missing }}"})
    event_id = await publish(connection, "tick", "shop", n=7)
    await worker.turn()
    [letter] = await letters(connection, kind="delivery", trigger_id=trigger_id)
    assert str(letter.event_id) == event_id and "event.payload.missing" in letter.reason
    await control.replay_letter(database, letter.id, "ann")
    await worker.turn()
    [again] = await letters(connection, kind="delivery", trigger_id=trigger_id)  # the template is as it was
    assert again.id != letter.id and again.subject_id == letter.subject_id
    await control.update_trigger(database, trigger_id, {"parameter_template": {"n": "{{ event.payload.n }}"}}, "ann")
    assert (await control.replay_letter(database, again.id, "ann")).into == again.subject_id
    await worker.turn()
    runs = await connection.fetch("select parameters from tidegate.workflow_runs")
    assert [row["parameters"] for row in runs] == [{"n": 7}]
    assert await letters(connection) == []


async def test_many_are_replayed_at_a_rate_and_counted_before(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await bury(connection, 5, reason="Broken pipe")
    await bury(connection, 3, reason="other", source="else")
    asked = DeadLetterFilters(kind="event", source="shop.api", reason="broken")
    assert await control.preview_replay(database, asked, rate=2) == 5
    assert await letters(connection, "scheduled") == []
    done = await control.replay_letters(database, asked, "ann", rate=2)
    assert (done.total, done.first_at, done.last_at) == (5, clock.now, clock.now + timedelta(seconds=2))
    assert (await control.replay_letters(database, asked, "ann", rate=2)).total == 0  # nothing is done twice
    replay = Replay(database, batch_size=10)
    seen = []
    for _ in range(4):
        seen.append(await replay.run_once())
        await clock.advance(500)
    assert seen == [1, 1, 1, 1]
    assert await control.stop_replays(database, "ann") == 1
    assert await replay.run_once() == 0
    assert (len(await letters(connection)), len(await letters(connection, "replayed"))) == (4, 4)
    for rate in (0, -1, float("nan"), 1e9):
        with pytest.raises(InvalidInput, match="rate"):
            await control.replay_letters(database, asked, "ann", rate=rate)
    with pytest.raises(NotFound):
        await control.replay_letter(database, uuid.uuid4(), "ann")


async def test_workers_at_once_and_crashes_lose_and_double_nothing(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await bury(connection, 40)
    await control.replay_letters(database, DeadLetterFilters(), "ann", rate=1000)
    await clock.advance(1000)
    failpoints.arm("replay.after_commit=raise@7")
    with pytest.raises(failpoints.FailpointHit):
        await Replay(database, batch_size=100).run_once()
    assert len(await letters(connection, "replayed")) == 7
    done = await asyncio.gather(*(Replay(database, batch_size=100).run_once() for _ in range(4)))
    assert sum(done) == 33
    assert await connection.fetchval("select count(*) from tidegate.event_ingress_retries") == 40
    assert await connection.fetchval("select max(claim_generation) from tidegate.event_ingress_retries") == 0
    audited = "select count(distinct subject) from tidegate.audit_log where action = 'dead_letter.replay'"
    assert await connection.fetchval(audited) == 40


async def test_a_failure_before_the_commit_is_that_letters_alone(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await bury(connection, 3)
    await control.replay_letters(database, DeadLetterFilters(), "ann", rate=1000)
    await clock.advance(1000)
    failpoints.arm("replay.before_commit=raise@2")
    assert await Replay(database, batch_size=100).run_once() == 3
    assert len(await letters(connection, "replayed")) == 2
    [refused] = await letters(connection)
    assert refused.replay_error == "FailpointHit: replay.before_commit"
    assert await connection.fetchval("select count(*) from tidegate.event_ingress_retries") == 2


async def test_a_replayed_event_of_a_source_without_a_state_can_be_forced(
    database: Database, connection: Connection, clock: Clock
) -> None:
    """It waits while no worker looks; its source has no row, since it never had a limit."""
    [event_id] = await bury(connection)
    [letter] = await letters(connection)
    await control.replay_letter(database, letter.id, "ann")
    at = await clock.advance(5000)
    await control.change_retry(database, "events", event_id, "force", "bob")
    due = await connection.fetchval("select next_attempt_at from tidegate.event_ingress_retries")
    assert due == at


async def test_a_replayed_event_that_fails_again_counts_against_its_source(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await make_trigger(database, event_type="order.created", parameter_template={"id": "{{ event.payload.id }}"})
    await bury(connection)
    [letter] = await letters(connection)
    await control.replay_letter(database, letter.id, "ann")
    await TriggerWorker(database).retry.run_once()
    assert await connection.fetchval("select status from tidegate.workflow_trigger_deliveries") == "failed"
    failures = await connection.fetchval("select (outcomes->0->1)::int from tidegate.event_scheduler_sources")
    assert failures == 1


async def test_the_rate_holds_after_a_time_without_workers(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await bury(connection, 30)
    await control.replay_letters(database, DeadLetterFilters(), "ann", rate=1)
    await clock.advance(3_600_000)
    workers = [Replay(database, batch_size=10) for _ in range(3)]
    seen = []
    for _ in range(5):
        seen.append(sum(await asyncio.gather(*(worker.run_once() for worker in workers))))
        await clock.advance(1000)
    assert seen == [1, 1, 1, 1, 1]
    assert len(await letters(connection, "scheduled")) == 25
