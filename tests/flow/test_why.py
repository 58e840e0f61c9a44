"""Why did it not run? Each situation is built with the product's own verbs and answered by one call of explain: a
sentence, what is waited for, and until when."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.trigger_worker import BREAKER
from tests.flow.why_scene import CASES, HOST, Case, Scene, case
from tidegate import Breaker, Context, NonRetryable, RetryAfter
from tidegate.errors import Conflict, NotFound
from tidegate.flow import control
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.look import why_run
from tidegate.flow.look.explain import Explanation, explain_any
from tidegate.model.ids import DeliveryId, EventId, RunId
from tidegate.model.source import RateLimit, SourceBreakerPolicy
from tidegate.store import circumstances, refusals
from tidegate.store.db import Connection, Database
from tidegate.store.dead_letters import DeadLetterFilters
from tidegate.store.refusals import NewRefusal

NO_WORKER = "a worker: none is running"


@pytest.fixture
def scene(database: Database, connection: Connection, clock: Clock, world: World) -> Scene:
    return Scene(database, connection, clock, world)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.build.__name__)
async def test_situation(scene: Scene, one: Case) -> None:
    began = scene.clock.now
    found = await scene.explain(await one.build(scene))
    assert "\n" not in found.summary and found.summary
    for text in one.says:
        assert text in found.summary, found.summary
    assert found.waits_for == one.waits_for, found.summary
    until = None if one.seconds is None else began + timedelta(seconds=one.seconds)
    assert found.until == until, found.summary
    assert [outcome.state for outcome in found.outcomes][-1:] == ([one.state] if one.state else []), found.summary
    assert found.decisions, "the story is never empty"


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 40
    assert len({one.build.__name__ for one in CASES}) == len(CASES)


# The event itself ---------------------------------------------------------------------------------------------------


@case("", "waits in the inbox: no worker is running; start one: tidegate worker APP", waits_for=NO_WORKER)
async def undecided_and_no_worker(scene: Scene) -> object:
    return await scene.publish()


@case(
    "",
    "waits in the inbox for a worker to decide it; 2 undecided events of its source are before it",
    waits_for="a worker to decide it",
)
async def undecided_behind_others(scene: Scene) -> object:
    scene.idle()
    await scene.register()
    await scene.alive()
    return [await scene.publish() for _ in range(3)][-1]


@case("", "held until 2026-06-01 12:00:01 UTC: over the limit of 1/s", waits_for="room in the limit of its source",
      seconds=1.015625)  # fmt: skip
async def over_the_limit_of_its_source(scene: Scene) -> object:
    await control.set_limit(scene.database, "shop", RateLimit(limit=1, interval_ms=1000), "ann")
    ids = [await scene.publish() for _ in range(2)]
    await scene.decide()
    return ids[1]


@case("", "over the limit of 1/s; 1 event of its source is before it", waits_for="room in the limit of its source",
      seconds=2.03125)  # fmt: skip
async def behind_others_of_its_source(scene: Scene) -> object:
    await control.set_limit(scene.database, "shop", RateLimit(limit=1, interval_ms=1000), "ann")
    ids = [await scene.publish() for _ in range(3)]
    await scene.decide()
    return ids[2]


@case(
    "",
    "held until 2026-06-01 12:01:00 UTC: paused by ann: stocktaking",
    waits_for="the end of its source's pause",
    seconds=60,
)
async def source_paused_for_a_while(scene: Scene) -> object:
    await control.pause(scene.database, "shop", duration_ms=60_000, reason="stocktaking", actor="ann")
    event_id = await scene.publish()
    await scene.decide()
    return event_id


@case("", "held until its source is resumed: paused by ann: stocktaking", waits_for="its source to be resumed")
async def source_paused_until_resumed(scene: Scene) -> object:
    await control.pause(scene.database, "shop", reason="stocktaking", actor="ann")
    event_id = await scene.publish()
    await scene.decide()
    return event_id


@case("", "held until 2026-06-01 12:00:10 UTC", "breaker", waits_for="the breaker of its source to close", seconds=10)
async def source_breaker_open(scene: Scene) -> object:
    await control.set_breaker(
        scene.database, "shop", SourceBreakerPolicy(threshold=1, window_ms=60_000, pause_ms=10_000), "ann"
    )
    scene.idle(params={"id": "{{ event.payload.missing.deeper }}"})
    await scene.register()
    await scene.publish()
    await scene.decide()
    event_id = await scene.publish()
    await scene.decide()
    return event_id


@case("", "expired: its ttl_ms of 5 passed before it could be decided")
async def time_to_live_over(scene: Scene) -> object:
    event_id = await scene.ask("select tidegate.publish('order.created', 'shop', '{}', ttl_ms => 5)")
    await scene.clock.advance(1000)
    await scene.decide()
    return event_id


@case("", "held: cancelled by ann")
async def held_event_cancelled(scene: Scene) -> object:
    await control.pause(scene.database, "shop", actor="ann")
    event_id = await scene.publish()
    await scene.decide()
    await control.change_retry(scene.database, "events", EventId(uuid.UUID(event_id)), "cancel", "ann")
    return event_id


@case("", "OverflowError: date value out of range; dead letter ", ": tidegate dlq replay ")
async def event_that_cannot_be_read(scene: Scene) -> object:
    scene.idle()
    await scene.register()
    event_id = await scene.publish()
    await scene.connection.execute(
        "alter table tidegate.workflow_events drop constraint workflow_events_occurred_at_check"
    )
    await scene.connection.execute("update tidegate.workflow_events set occurred_at = '20000-01-01'")
    await scene.decide()
    await scene.connection.execute("update tidegate.workflow_events set occurred_at = '2026-01-01'")
    return event_id


# No trigger, and near misses ----------------------------------------------------------------------------------------


@case("", "launched nothing: no active trigger matches events of type order.created from shop")
async def no_trigger_at_all(scene: Scene) -> object:
    event_id = await scene.publish()
    await scene.decide()
    return event_id


async def _decided(scene: Scene, event_type: str = "order.created", source: str = "shop", **payload: object) -> str:
    await scene.register()
    event_id = await scene.publish(event_type, source, **payload)
    await scene.decide()
    return event_id


@case(
    "",
    "near miss fulfil/code: its type is order.created, and the event's is Order.Created: they differ only in upper and",
)
async def type_in_another_case(scene: Scene) -> object:
    scene.idle()
    return await _decided(scene, "Order.Created")


@case(
    "",
    "near miss fulfil/code: its source is Shop.*, and the event's is shop.api: they differ only in upper and",
)
async def source_in_another_case(scene: Scene) -> object:
    scene.idle(source="Shop.*")
    return await _decided(scene, source="shop.api")


@case(
    "",
    "its type is order.created, and the event's is order.created.v2: order.created.* would take it",
)
async def type_with_a_further_part(scene: Scene) -> object:
    scene.idle()
    return await _decided(scene, "order.created.v2")


@case("", "its source is shop.*, and the event's is shop: the pattern needs a further part")
async def source_without_the_part_of_the_pattern(scene: Scene) -> object:
    scene.idle(source="shop.*")
    return await _decided(scene)


@case("", "its type is order.created, and the event's is order.craeted: they differ by one character")
async def type_misspelt(scene: Scene) -> object:
    scene.idle()
    return await _decided(scene, "order.craeted")


@case("", "near miss fulfil/code: it would match, and is disabled by ann since 2026-06-01 12:00:00 UTC")
async def trigger_disabled(scene: Scene) -> object:
    scene.idle()
    await scene.register()
    await control.update_trigger(scene.database, await scene.trigger_id(), {"status": "disabled"}, "ann")
    return await _decided(scene)


@case("", "near miss fulfil/code: it would match, and was deleted by ann at 2026-06-01 12:00:00 UTC")
async def trigger_deleted(scene: Scene) -> object:
    scene.idle()
    await scene.register()
    await control.delete_trigger(scene.database, await scene.trigger_id(), "ann")
    return await _decided(scene)


@case("", "it would match now: it was created by ", " at 2026-06-01 12:00:01 UTC, after the event was decided")
async def trigger_created_afterwards(scene: Scene) -> object:
    event_id = await _decided(scene)
    await scene.clock.advance(1000)
    scene.idle()
    await scene.register()
    return event_id


@case("", "it would match now: it was changed by ann at 2026-06-01 12:00:01 UTC, after the event was decided "
      "(in version 1 event_type was 'order.updated')")  # fmt: skip
async def trigger_changed_afterwards(scene: Scene) -> object:
    scene.idle(on="order.updated")
    event_id = await _decided(scene)
    await scene.clock.advance(1000)
    await control.update_trigger(scene.database, await scene.trigger_id(), {"event_type": "order.created"}, "ann")
    return event_id


@case("", "launched nothing: fulfil/code: $.payload.amount gt 100 does not hold for 50")
async def filtered_by_a_predicate(scene: Scene) -> object:
    scene.idle(predicates=[{"path": "$.payload.amount", "operator": "gt", "value": 100}])
    return await _decided(scene, amount=50)


@case("", "launched nothing: fulfil/code: where is false: event.payload.amount > 100")
async def filtered_by_where(scene: Scene) -> object:
    scene.idle(where="event.payload.amount > 100")
    return await _decided(scene, amount=50)


@case("", 'where: event.payload.amount is text ("120") and 100 is a number: > takes two of one type')
async def where_meets_another_type(scene: Scene) -> object:
    scene.idle(where="event.payload.amount > 100")
    return await _decided(scene, amount="120")


@case("", "where: event.payload.amount is not in the event")
async def where_misses_its_field(scene: Scene) -> object:
    scene.idle(where="event.payload.amount > 100")
    return await _decided(scene)


# Deliveries ---------------------------------------------------------------------------------------------------------


@case("throttle", "fulfil waits until 2026-06-01 12:00:01 UTC: over the throttle of 1/s",
      waits_for="room in the throttle of its trigger", seconds=1.015625)  # fmt: skip
async def over_the_throttle(scene: Scene) -> object:
    scene.idle(throttle="1/s")
    await scene.register()
    ids = [await scene.publish() for _ in range(2)]
    await scene.decide()
    return ids[1]


@case("throttle", "; 1 delivery is before it", waits_for="room in the throttle of its trigger", seconds=2.03125)
async def behind_others_of_its_trigger(scene: Scene) -> object:
    scene.idle(throttle="1/s")
    await scene.register()
    ids = [await scene.publish() for _ in range(3)]
    await scene.decide()
    return await scene.delivery_id(ids[2])


@case("throttle", "fulfil leaves at 2026-06-01 12:00:06 UTC unless launched before (max_wait); it waits until "
      "2026-06-01 12:00:08 UTC: over the throttle of 1/4s; 1 delivery is before it",
      waits_for="room in the throttle of its trigger", seconds=6)  # fmt: skip
async def leaves_before_its_turn(scene: Scene) -> object:
    scene.idle(throttle="1/4s", max_wait="6s")
    await scene.register()
    ids = [await scene.publish() for _ in range(3)]
    await scene.decide()
    return ids[2]


@case("throttle", "fulfil waits until 2026-06-01 12:00:04 UTC: over the throttle of 1/4s; it leaves at 2026-06-01 "
      "12:00:06 UTC unless launched before (max_wait)",
      waits_for="room in the throttle of its trigger", seconds=4.0625)  # fmt: skip
async def may_leave_after_its_turn(scene: Scene) -> object:
    scene.idle(throttle="1/4s", max_wait="6s")
    await scene.register()
    ids = [await scene.publish() for _ in range(2)]
    await scene.decide()
    return ids[1]


@case("trigger_paused", "fulfil leaves at 2026-06-01 12:00:06 UTC unless launched before (max_wait); it waits for its "
      "trigger to be resumed: paused by ann: audit",
      waits_for="its trigger to be resumed", seconds=6)  # fmt: skip
async def leaves_while_its_trigger_is_paused(scene: Scene) -> object:
    scene.idle(max_wait="6s")
    await scene.register()
    await control.pause_trigger(scene.database, await scene.trigger_id(), reason="audit", actor="ann")
    return await _decided(scene)


@case("concurrency", "fulfil waits for a free slot: 1 of 1 slots are in use; held by run ",
      "(pending since 2026-06-01 12:00:00 UTC)", "; 1 delivery is before it", waits_for="a free slot")  # fmt: skip
async def no_free_concurrency_slot(scene: Scene) -> object:
    scene.idle(max_concurrency=1)
    await scene.register()
    ids = [await scene.publish() for _ in range(3)]
    await scene.decide()
    return ids[2]


@case("concurrency", "slots of key ann are in use; held by run ", waits_for="a free slot")
async def no_free_slot_of_its_key(scene: Scene) -> object:
    scene.idle(max_concurrency=1, concurrency_key="{{ event.payload.who }}")
    await scene.register()
    ids = [await scene.publish(who=who) for who in ("bob", "ann", "ann")]
    await scene.decide()
    return ids[2]


@case("trigger_paused", "fulfil waits until 2026-06-01 12:01:00 UTC: paused by ann: audit",
      waits_for="the end of its trigger's pause", seconds=60)  # fmt: skip
async def trigger_paused_for_a_while(scene: Scene) -> object:
    scene.idle()
    await scene.register()
    await control.pause_trigger(
        scene.database, await scene.trigger_id(), duration_ms=60_000, reason="audit", actor="ann"
    )
    return await _decided(scene)


@case(
    "trigger_paused",
    "fulfil waits for its trigger to be resumed: paused by ann: audit",
    waits_for="its trigger to be resumed",
)
async def trigger_paused_until_resumed(scene: Scene) -> object:
    scene.idle()
    await scene.register()
    await control.pause_trigger(scene.database, await scene.trigger_id(), reason="audit", actor="ann")
    return await _decided(scene)


def _failing(scene: Scene, **options: object) -> None:
    @scene.workflow(**options)
    async def fulfil(ctx: Context) -> None:
        raise ValueError("the order is empty\nsee https://example.org")


@case("breaker_open", "fulfil waits until 2026-06-01 12:00:30 UTC: ", "breaker",
      waits_for="the breaker of its trigger to close", seconds=30)  # fmt: skip
async def trigger_breaker_open(scene: Scene) -> object:
    _failing(scene, breaker=Breaker(threshold=1, pause="30s"))
    await scene.register()
    await scene.publish()
    await scene.execute()
    event_id = await scene.publish()
    await scene.decide()
    return event_id


@case(
    "breaker_half_open",
    "fulfil waits for the probe to end: the breaker is half open: run ",
    waits_for="the probe to end",
)
async def trigger_breaker_half_open(scene: Scene) -> object:
    _failing(scene, breaker=Breaker(threshold=1, pause="30s"))
    await scene.register()
    await scene.publish()
    await scene.execute()
    await scene.clock.advance(31_000)
    for _ in range(2):
        event_id = await scene.publish()
        await scene.decide()
    return event_id


@case("skipped", "fulfil skipped: run ", "was launched with the same idempotency key")
async def same_idempotency_key(scene: Scene) -> object:
    scene.idle(idempotency_key="{{ event.payload.id }}")
    await scene.register()
    ids = [await scene.publish(id=7, n=n) for n in range(2)]
    await scene.decide()
    return ids[1]


@case("failed", "fulfil failed: ", "{{ event.payload.missing.deeper }} is not in the event", "tidegate dlq replay")
async def template_that_cannot_be_rendered(scene: Scene) -> object:
    scene.idle(params={"id": "{{ event.payload.missing.deeper }}"})
    return await _decided(scene)


@case("cancelled", "fulfil cancelled", "by ann")
async def waiting_delivery_cancelled(scene: Scene) -> object:
    event_id = str(await no_free_concurrency_slot(scene))
    delivery_id = DeliveryId(await scene.delivery_id(event_id))
    await control.change_retry(scene.database, "deliveries", delivery_id, "cancel", "ann")
    return delivery_id


@case("cancelled", "fulfil cancelled", "trigger disabled by ann")
async def trigger_disabled_while_it_waited(scene: Scene) -> object:
    event_id = await no_free_concurrency_slot(scene)
    await control.update_trigger(scene.database, await scene.trigger_id(), {"status": "disabled"}, "ann")
    return event_id


@case("exhausted", "fulfil exhausted: expired: its event's ttl_ms passed before it could be launched")
async def time_to_live_over_while_it_waited(scene: Scene) -> object:
    scene.idle(max_concurrency=1)
    await scene.register()
    await scene.publish()
    event_id = await scene.ask("select tidegate.publish('order.created', 'shop', '{}', ttl_ms => 5000)")
    await scene.decide()
    await scene.clock.advance(600_000)
    await scene.decide()
    return event_id


@case(
    "source_paused",
    "fulfil waits for its source to be resumed: source shop is paused by ann",
    waits_for="its source to be resumed",
)
async def source_paused_while_it_waited(scene: Scene) -> object:
    scene.idle(throttle="1/s")
    await scene.register()
    ids = [await scene.publish() for _ in range(2)]
    await scene.decide()
    await control.pause(scene.database, "shop", actor="ann")
    await scene.clock.advance(2000)
    await scene.decide()
    return ids[1]


@case("retry_after", "fulfil waits until 2026-06-01 12:10:00 UTC: ", "429",
      waits_for="the time that a step asked everyone to wait for", seconds=600)  # fmt: skip
async def everyone_was_asked_to_wait(scene: Scene) -> object:
    def refused() -> None:
        raise RetryAfter(600, "429", everyone="trigger")

    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        await ctx.step("call", refused)

    await scene.register()
    await scene.publish()
    await scene.execute()
    event_id = await scene.publish()
    await scene.decide()
    return event_id


# Runs ---------------------------------------------------------------------------------------------------------------


@case("no_worker", "fulfil waits for a worker: none is running; start one: tidegate worker APP", waits_for=NO_WORKER)
async def due_and_no_worker(scene: Scene) -> object:
    scene.idle()
    return await _decided(scene)


@case("workflow_unserved", "fulfil waits for a worker that has its code: the only living worker offers report",
      waits_for="a worker that has the code of fulfil")  # fmt: skip
async def no_worker_has_the_code(scene: Scene) -> object:
    scene.idle()
    scene.idle("report", on="day.ended")
    event_id = await _decided(scene)
    await scene.alive(workflows=["report"])
    return event_id


@case("left_out", "fulfil waits for a worker that takes fulfil: host:1 has its code and takes other workflows only "
      "(--only)", waits_for="a worker that takes fulfil")  # fmt: skip
async def every_worker_leaves_it_out(scene: Scene) -> object:
    scene.idle()
    scene.idle("report", on="day.ended")
    event_id = await _decided(scene)
    await scene.alive(workflows=["report"], left_out=["fulfil"])
    return event_id


@case("left_out", "fulfil waits for a worker that takes fulfil: host:1, host:2 have its code and take other workflows "
      "only (--only)", waits_for="a worker that takes fulfil")  # fmt: skip
async def several_workers_leave_it_out(scene: Scene) -> object:
    event_id = await every_worker_leaves_it_out(scene)
    await scene.alive("host:2", workflows=["report"], left_out=["fulfil"])
    return event_id


@case("slots_busy", "fulfil waits for a free worker slot: all 2 slots of worker host:1 are busy or reserved for other "
      "workflows (1): host:1 executes fulfil (run ", waits_for="a free worker slot")  # fmt: skip
async def the_other_slots_are_reserved(scene: Scene) -> object:
    scene.idle()
    scene.idle("report", on="day.ended")
    await scene.register()
    ids = [await scene.publish() for _ in range(2)]
    await scene.decide()
    await scene.alive(slots=2, reserved={"report": 1})
    await scene.claim(limit=1)
    return ids[-1]


@case("slots_busy", "fulfil waits for a free worker slot: the only slot of worker host:1 is busy: ",
      "host:1 executes fulfil (run ",
      "since 2026-06-01 12:00:00 UTC", "; 1 due run of its workflow is before it",
      waits_for="a free worker slot")  # fmt: skip
async def all_worker_slots_busy(scene: Scene) -> object:
    scene.idle()
    await scene.register()
    ids = [await scene.publish() for _ in range(3)]
    await scene.decide()
    await scene.alive(slots=1)
    await scene.claim()
    waiting = await scene.connection.fetch(
        "select event_id from tidegate.workflow_runs where status = 'pending' order by next_attempt_at, id"
    )
    assert {str(row[0]) for row in waiting} <= set(ids)
    return waiting[-1][0]


@case("due", "fulfil is due: a worker with a free slot claims it next", waits_for="a worker to claim it")
async def due_with_a_free_slot(scene: Scene) -> object:
    scene.idle()
    event_id = await _decided(scene)
    await scene.alive()
    return event_id


@case("due", "fulfil is due: a worker with a free slot claims it; 2 due runs of its workflow are before it",
      waits_for="a worker to claim it")  # fmt: skip
async def due_behind_others(scene: Scene) -> object:
    """Those of another workflow are not before it: each has its share."""
    scene.idle()
    scene.idle("report", on="day.ended")
    await scene.register()
    for _ in range(3):
        await scene.publish("day.ended")
        await scene.publish()
    await scene.decide()
    await scene.alive()
    return await scene.ask(
        "select r.id from tidegate.workflow_runs r join tidegate.workflow_definitions d "
        "on d.id = r.workflow_definition_id where d.slug = 'fulfil' "
        "order by r.next_attempt_at desc, r.id desc limit 1"
    )


async def test_due_runs_before_it_are_counted_up_to_a_ceiling(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (circumstances, why_run):
        monkeypatch.setattr(module, "MAX_AHEAD", 2)
    found = await scene.explain(await due_behind_others(scene))
    assert "claims it; at least 2 due runs of its workflow are before it" in found.summary


@case("executing", "fulfil is executing on worker host:1 since 2026-06-01 12:00:00 UTC")
async def executing_now(scene: Scene) -> object:
    scene.idle()
    event_id = await _decided(scene)
    await scene.alive()
    await scene.claim()
    return event_id


@case("worker_lost", "fulfil lost its worker host:1: its lease ended at 2026-06-01 12:01:00 UTC; another worker ",
      waits_for="another worker to take it over")  # fmt: skip
async def lease_ended(scene: Scene) -> object:
    event_id = await executing_now(scene)
    await scene.clock.advance(61_000)
    await scene.alive("host:2")
    return event_id


LAST = "no worker is alive; the last, host:1, was seen 27 s ago; start one: tidegate worker APP"


@case("worker_lost", f"fulfil lost its worker host:1: its lease ended at 2026-06-01 12:00:15 UTC; {LAST}",
      waits_for=NO_WORKER)  # fmt: skip
async def lease_of_the_only_worker_ended(scene: Scene) -> object:
    scene.idle()
    event_id = await _decided(scene)
    await scene.alive(every_ms=5000)
    await scene.claim(lease_ms=15_000)
    await scene.clock.advance(27_000)
    return event_id


@case("no_worker", f"fulfil waits for a worker: {LAST}", waits_for=NO_WORKER)
async def due_and_the_only_worker_was_killed(scene: Scene) -> object:
    scene.idle()
    event_id = await _decided(scene)
    await scene.alive(every_ms=5000)
    await scene.clock.advance(27_000)
    return event_id


@case("", f"waits in the inbox: {LAST}", waits_for=NO_WORKER)
async def undecided_and_the_only_worker_was_killed(scene: Scene) -> object:
    scene.idle()
    await scene.register()
    await scene.alive(every_ms=5000)
    await scene.clock.advance(27_000)
    return await scene.publish()


@case("worker_lost", "fulfil may have lost its worker host:1, which was last seen 120 s ago, ",
      "at 2026-06-01 12:00:00 UTC; "
      "its lease ends at 2026-06-01 13:00:00 UTC; no worker is alive; the last, host:1, was seen 120 s ago",
      waits_for="the lease of its worker to end", seconds=3600)  # fmt: skip
async def worker_not_seen(scene: Scene) -> object:
    scene.idle()
    event_id = await _decided(scene)
    await scene.alive()
    await scene.claim(lease_ms=3_600_000)
    await scene.clock.advance(120_000)
    return event_id


@case("worker_lost", "fulfil may have lost its worker host:1, which was last seen 7 s ago, ",
      "at 2026-06-01 12:00:00 UTC; ",
      "another worker takes it over when the lease ends at 2026-06-01 12:00:15 UTC",
      waits_for="the lease of its worker to end", seconds=15)  # fmt: skip
async def worker_missed_its_heartbeat(scene: Scene) -> object:
    scene.idle()
    event_id = await _decided(scene)
    await scene.alive(every_ms=5000)
    await scene.claim(lease_ms=15_000)
    await scene.clock.advance(7_000)
    await scene.alive("host:2")
    return event_id


@case("executing", "fulfil is executing on worker host:1 since 2026-06-01 12:00:01 UTC, attempt 2 of step 'charge'")
async def executing_a_step_again(scene: Scene) -> object:
    event_id = await step_to_be_retried(scene)
    await scene.clock.advance(1000)
    await scene.alive(every_ms=5000)
    await scene.claim()
    await scene.clock.advance(5000)
    return event_id


@case("executing", "since 2026-06-01 14:00:00 UTC, after its step 'reserve' (ended at 2026-06-01 12:00:00 UTC)")
async def executing_after_a_step(scene: Scene) -> object:
    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        await ctx.step("reserve", lambda: 1)
        await ctx.sleep("2h")

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    await scene.clock.advance(7_200_000)
    await scene.alive()
    await scene.claim()
    return event_id


@case(
    "suspect",
    "fulfil waits to be executed alone: its worker died 2 times in a row",
    waits_for="a worker that executes nothing else",
)
async def worker_died_twice(scene: Scene) -> object:
    scene.idle()
    event_id = await _decided(scene)
    reconcile = Reconcile(
        scene.database, batch_size=10, breaker=BREAKER, source_breaker=SourceBreakerPolicy(), worker=HOST
    )
    for _ in range(2):
        await scene.claim()
        await scene.clock.advance(61_000)
        await reconcile.run_once()
    await scene.alive()
    return event_id


@case("cancelling", "fulfil is being cancelled by ann since 2026-06-01 12:00:00 UTC; it stops at its next step",
      "or ends by itself if it has begun the last one",
      waits_for="its function to reach the next step")  # fmt: skip
async def being_cancelled(scene: Scene) -> object:
    event_id = await executing_now(scene)
    await control.cancel_run(scene.database, RunId(await scene.run_id()), "ann", BREAKER)
    return event_id


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancel_that_came_too_late_is_in_the_story(scene: Scene, fails: bool) -> None:
    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        async def last() -> None:
            assert await control.cancel_run(scene.database, RunId(ctx.run_id), "ann", BREAKER) == "cancelling"
            if fails:
                raise NonRetryable("no")

        await ctx.step("last", last)

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    told = await scene.explain(event_id)
    assert told.outcomes[0].state == ("failed" if fails else "succeeded")
    assert told.summary.endswith(
        "; a cancel was requested by ann at 2026-06-01 12:00:00 UTC, after its last step had begun: the run ended first"
    )
    assert (await scene.explain(await scene.run_id())).summary == told.summary


def _sleeping(scene: Scene) -> None:
    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        await ctx.sleep("2h")


@case(
    "sleeping",
    "fulfil sleeps until 2026-06-01 14:00:00 UTC (timer 'sleep-1')",
    waits_for="the timer 'sleep-1'",
    seconds=7200,
)
async def sleeping(scene: Scene) -> object:
    _sleeping(scene)
    await scene.register()
    await scene.publish()
    await scene.execute()
    return await scene.run_id()


def _flaky(scene: Scene, name: str = "charge") -> None:
    def away() -> None:
        raise ConnectionError("the bank is away\nfor details see https://example.org")

    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        await ctx.step(name, away)


@case("step_retry",
      "fulfil waits for attempt 2 of 3 of step 'charge' at 2026-06-01 12:00:01 UTC; "
      "it failed once: ConnectionError: the bank is away",
      waits_for="attempt 2 of 3 of step 'charge'", seconds=1)  # fmt: skip
async def step_to_be_retried(scene: Scene) -> object:
    _flaky(scene)
    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case(
    "step_retry",
    "it failed 2 times: ConnectionError: the bank is away",
    waits_for="attempt 3 of 3 of step 'charge'",
    seconds=3,
)
async def step_to_be_retried_again(scene: Scene) -> object:
    event_id = await step_to_be_retried(scene)
    await scene.clock.advance(1000)
    await scene.execute()
    return event_id


@case(
    "failed",
    "fulfil failed: NonRetryable: parameter 'amount' of workflow fulfil is missing in the event; dead letter ",
    ": publish the event again with a payload that fits; after a change of the code: tidegate dlq replay ",
)
async def payload_that_does_not_fit(scene: Scene) -> object:
    @scene.workflow()
    async def fulfil(ctx: Context, amount: int) -> None: ...

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case("sleeping", "; 1 other step waits too", waits_for="the timer 'short'", seconds=60)
async def several_timers(scene: Scene) -> object:
    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        import asyncio

        await asyncio.gather(ctx.sleep("1m", name="short"), ctx.sleep("1h", name="long"))

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case(
    "sleeping",
    "; 1 other step waits too: it waits until 2026-06-01 13:00:00 UTC for the approval 'boss' by ann",
    "; to decide: tidegate approvals approve ",
    waits_for="the timer 'short'",
    seconds=60,
)
async def timer_beside_an_approval(scene: Scene) -> object:
    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        import asyncio

        asked = await ctx.approval("boss", timeout="1h", to="ann")
        await asyncio.gather(ctx.sleep("1m", name="short"), asked.decision())

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case("run_retry", "fulfil waits until 2026-06-01 12:05:00 UTC to be called again: ", "the API rests",
      waits_for="its next attempt", seconds=300)  # fmt: skip
async def function_asked_to_be_called_later(scene: Scene) -> object:
    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        raise RetryAfter(300, "the API rests")

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case("sleeping",
      "fulfil sleeps until 2026-06-01 14:00:00 UTC (timer 'sleep-1'); it times out at 2026-06-01 13:00:00 UTC",
      waits_for="the timer 'sleep-1'", seconds=3600)  # fmt: skip
async def sleeps_longer_than_its_timeout(scene: Scene) -> object:
    @scene.workflow(timeout="1h")
    async def fulfil(ctx: Context) -> None:
        await ctx.sleep("2h")

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case("sleeping",
      "fulfil sleeps until 2026-06-01 12:30:00 UTC (timer 'sleep-1'); it times out at 2026-06-01 13:00:00 UTC",
      waits_for="the timer 'sleep-1'", seconds=1800)  # fmt: skip
async def sleeps_and_has_a_timeout(scene: Scene) -> object:
    @scene.workflow(timeout="1h")
    async def fulfil(ctx: Context) -> None:
        await ctx.sleep("30m")

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case("waiting_for_event",
      "fulfil waits until 2026-06-02 12:00:00 UTC for event order.paid with payload.id = 7; "
      "it times out at 2026-06-01 13:00:00 UTC; near miss: order.paid from shop",
      waits_for="event order.paid with payload.id = 7", seconds=3600)  # fmt: skip
async def waits_for_an_event_and_has_a_timeout(scene: Scene) -> object:
    @scene.workflow(timeout="1h")
    async def fulfil(ctx: Context) -> None:
        await ctx.wait_for("order.paid", match={"payload.id": 7}, timeout="1d")

    await scene.register()
    await scene.publish()
    await scene.execute()
    await scene.publish("order.paid", id="7")
    await scene.execute()
    return await scene.run_id()


async def test_an_event_is_told_as_fully_as_its_run(scene: Scene) -> None:
    run_id = await waits_for_an_event_and_has_a_timeout(scene)
    event_id = await scene.ask("select event_id from tidegate.workflow_runs where id = $1", run_id)
    by_run, by_event = await scene.explain(run_id), await scene.explain(event_id)
    assert (by_event.summary, by_event.until) == (by_run.summary, by_run.until)
    assert by_event.decisions == by_run.decisions
    told = [(one.stage, one.run_id) for one in by_event.decisions]
    assert ("step", run_id) in told and ("wait", run_id) in told


@case("waiting_for_approval",
      "waits until 2026-06-02 12:00:00 UTC for the approval 'refund'", "; to decide: tidegate approvals approve ",
      " (or reject); it times out at 2026-06-01 13:00:00 UTC",
      waits_for="the approval 'refund'", seconds=3600)  # fmt: skip
async def waits_for_an_approval_and_has_a_timeout(scene: Scene) -> object:
    @scene.workflow(timeout="1h")
    async def fulfil(ctx: Context) -> None:
        await (await ctx.approval("refund", timeout="1d")).decision()

    await scene.register()
    await scene.publish()
    await scene.execute()
    return await scene.run_id()


def _parent(scene: Scene, timeout: str) -> None:
    @scene.app.workflow(name="ship")
    async def ship(ctx: Context) -> None:
        await ctx.sleep("30m")

    @scene.workflow(timeout=timeout)
    async def fulfil(ctx: Context) -> None:
        await ctx.run("ship")


@pytest.mark.parametrize(("timeout", "seconds"), [("1h", 3600), ("3d", 259_200)])
async def test_a_run_with_a_timeout_names_its_child(scene: Scene, timeout: str, seconds: int) -> None:
    _parent(scene, timeout)
    await scene.register()
    began = scene.clock.now
    event_id = await scene.publish()
    for _ in range(2):  # the parent, then its child
        await scene.execute()
    found = await scene.explain(event_id)
    until = began + timedelta(seconds=seconds)
    child = await scene.ask("select id from tidegate.workflow_runs order by created_at desc, id desc limit 1")
    assert found.waits_for is not None and found.waits_for.startswith(f"its child ship {child} (step ")
    assert ", which sleeps until 2026-06-01 12:30:00 UTC" in found.summary
    assert f"; fulfil itself times out at {until:%Y-%m-%d %H:%M:%S} UTC" in found.summary
    assert (found.outcomes[0].state, found.until) == ("waiting_for_child", until)


@case("run_retry", "fulfil waits to be called again: ", "the API rests", "; it times out at 2026-06-01 12:01:00 UTC",
      waits_for="its next attempt", seconds=60)  # fmt: skip
async def function_asked_to_be_called_after_its_timeout(scene: Scene) -> object:
    @scene.workflow(timeout="1m")
    async def fulfil(ctx: Context) -> None:
        raise RetryAfter(300, "the API rests")

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case("sleeping",
      "fulfil sleeps until 2026-06-01 14:00:00 UTC (timer 'sleep-1'); no worker is alive; the last, host:1, "
      "was seen 600 s ago; start one: tidegate worker APP", waits_for="the timer 'sleep-1'", seconds=7200)  # fmt: skip
async def sleeps_and_its_worker_is_gone(scene: Scene) -> object:
    run_id = await sleeping(scene)
    await scene.alive()
    await scene.clock.advance(600_000)
    return run_id


@case("sleeping", "(timer 'sleep-1'); no living worker has the code of fulfil now", waits_for="the timer 'sleep-1'",
      seconds=7200)  # fmt: skip
async def sleeps_and_no_worker_has_its_code(scene: Scene) -> object:
    run_id = await sleeping(scene)
    await scene.alive(workflows=[])
    return run_id


@case("sleeping", "(timer 'sleep-1'); host:2 has the code of fulfil and takes other workflows only (--only)",
      waits_for="the timer 'sleep-1'", seconds=7200)  # fmt: skip
async def sleeps_and_every_worker_leaves_it_out(scene: Scene) -> object:
    event_id = await sleeps_and_no_worker_has_its_code(scene)
    await scene.alive("host:2", workflows=[], left_out=["fulfil"])
    return event_id


@case("cancelled", "fulfil cancelled by ann at 2026-06-01 12:00:00 UTC")
async def cancelled_by_an_operator(scene: Scene) -> object:
    run_id = await sleeping(scene)
    assert isinstance(run_id, uuid.UUID)
    await control.cancel_run(scene.database, RunId(run_id), "ann", BREAKER)
    return run_id


@case("failed", "fulfil failed: ValueError: the order is empty; dead letter ", ": tidegate dlq replay ")
async def failed_with_an_exception(scene: Scene) -> object:
    _failing(scene)
    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case("failed", "fulfil failed: step 'charge' failed: NonRetryable: no such card; dead letter ")
async def failed_by_its_step(scene: Scene) -> object:
    def declined() -> None:
        raise NonRetryable("no such card")

    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        await ctx.step("charge", declined)

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case(
    "failed",
    "is to be replayed by ann at 2026-06-01 12:00:00 UTC",
    waits_for="its dead letter to be replayed",
    seconds=0,
)
async def replay_scheduled(scene: Scene) -> object:
    event_id = await failed_with_an_exception(scene)
    await control.replay_letters(scene.database, DeadLetterFilters(), "ann", rate=1)
    return event_id


@case("no_worker", "fulfil waits for a worker: none is running", waits_for=NO_WORKER)
async def replayed(scene: Scene) -> object:
    event_id = await replay_scheduled(scene)
    await scene.replay_due()
    return event_id


@case("succeeded", "fulfil succeeded")
async def it_did_run(scene: Scene) -> object:
    scene.idle()
    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


@case(
    "sleeping",
    "audit succeeded; fulfil sleeps until 2026-06-01 14:00:00 UTC",
    waits_for="the timer 'sleep-1'",
    seconds=7200,
)
async def one_of_two_workflows_waits(scene: Scene) -> object:
    scene.idle("audit")
    _sleeping(scene)
    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    return event_id


# Requests that were refused, and ids --------------------------------------------------------------------------------


@case("", "refused with 422, nothing was stored: the event is not valid: type: is required")
async def refused_request(scene: Scene) -> object:
    row = NewRefusal(0, 422, "o-7", None, "shop", "the event is not valid: type: is required")
    await refusals.insert(scene.connection, [row])
    return "o-7"


@case("", "waits in the inbox: no worker is running", waits_for=NO_WORKER)
async def producers_id(scene: Scene) -> object:
    await scene.ask("select tidegate.publish('order.created', 'shop', '{}', id => 'o-7')")
    return "o-7"


async def test_an_id_of_several_sources_names_the_candidates(scene: Scene) -> None:
    for source in ("shop", "depot"):
        await scene.ask("select tidegate.publish('order.created', $1, '{}', id => 'o-7')", source)
    with pytest.raises(Conflict) as refused:
        await scene.explain("o-7")
    assert {re.sub(r".* is from ", "", error.message) for error in refused.value.errors} == {"shop", "depot"}


async def test_runs_of_other_sources_are_not_named(scene: Scene) -> None:
    scene.idle(max_concurrency=1)
    await scene.register()
    await scene.publish(source="secret")
    await scene.decide()
    event_id = await scene.publish()
    await scene.decide()
    run_id = str(await scene.run_id())
    for may_see, is_named in ((lambda _: True, True), (lambda source: source == "shop", False)):
        found = await explain_any(scene.connection, event_id, may_see)
        assert (run_id in found.summary, "held by a run of another source" in found.summary) == (
            is_named, not is_named)  # fmt: skip


async def test_what_workers_execute_for_other_sources_is_not_named(scene: Scene) -> None:
    scene.idle()
    scene.idle("hidden", on="secret.thing")
    await scene.register()
    await scene.publish("secret.thing", source="secret")
    await scene.decide()
    await scene.alive(slots=1)
    await scene.claim()
    event_id = await scene.publish()
    await scene.decide()
    for may_see, told in (
        (lambda _: True, f"host:1 executes hidden (run {await scene.run_id()}) since"),
        (lambda source: source == "shop", "host:1 executes a run of another source since"),
    ):
        found = await explain_any(scene.connection, event_id, may_see)
        assert told in found.summary
    assert "hidden" not in found.summary


async def test_an_unknown_id(scene: Scene) -> None:
    for given in (uuid.uuid4(), "o-8"):
        with pytest.raises(NotFound, match="no event, run or delivery"):
            await scene.explain(given)


async def test_the_story_tells_failures_before_a_retry_in_order(scene: Scene) -> None:
    world = scene.world
    said = iter(["the bank is away", "the bank is closed"])

    def pay() -> str:
        if (text := next(said, None)) is not None:
            raise NonRetryable(text)
        return "paid"

    @scene.workflow()
    async def fulfil(ctx: Context) -> None:
        await ctx.step("reserve", lambda: world.done.append("reserved"))
        await ctx.step("charge", pay)

    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    run_id = RunId(await scene.run_id())
    for _ in range(2):
        await scene.clock.advance(60_000)
        await control.retry_run(scene.database, run_id, "ann")
        await scene.clock.advance(60_000)
        await scene.execute()
    expected = [
        ("12:00", "ingest", "accepted", None), ("12:00", "deliver", "launched", None),
        ("12:00", "run", "failed", "step 'charge' failed: NonRetryable: the bank is away"),
        ("12:01", "run", "replayed", None),
        ("12:02", "run", "failed", "step 'charge' failed: NonRetryable: the bank is closed"),
        ("12:03", "run", "replayed", None), ("12:04", "run", "succeeded", None),
    ]  # fmt: skip
    steps = [("12:00", "step", "succeeded", "reserve"), ("12:04", "step", "succeeded", "charge")]
    of_run = _told(await scene.explain(run_id))
    assert [line for line in of_run if line[1] != "step"] == expected
    assert [line for line in of_run if line[1] == "step"] == steps
    assert of_run == sorted(of_run, key=lambda line: line[0])
    assert _told(await scene.explain(event_id)) == of_run, "of its only run the event tells the same"


async def test_the_story_of_a_rerun_that_failed_and_was_retried_is_its_own(scene: Scene) -> None:
    _failing(scene)
    await scene.register()
    event_id = await scene.publish()
    await scene.execute()
    first = RunId(await scene.run_id())
    await scene.clock.advance(60_000)
    again = await control.rerun_run(scene.database, first, "ann")
    await scene.clock.advance(60_000)
    await scene.execute()
    await scene.clock.advance(60_000)
    await control.retry_run(scene.database, again, "bob")
    empty = "ValueError: the order is empty"
    of_first = [("12:00", "run", "failed", empty), ("12:01", "run", "rerun", f"as run {again}")]
    of_second = [
        ("12:01", "run", "rerun", f"repeats run {first}"), ("12:02", "run", "failed", empty),
        ("12:03", "run", "replayed", None),
    ]  # fmt: skip
    begun = [("12:00", "ingest", "accepted", None), ("12:00", "deliver", "launched", None)]
    assert _told(await scene.explain(first)) == [*begun, *of_first]
    [*past, now] = _told(await scene.explain(again))
    assert past == [*begun, *of_second] and now[1:3] == ("run", "pending")
    told = _told(await scene.explain(event_id))[:-1]
    assert told == [*begun, *sorted([*of_first, *of_second], key=lambda line: line[0])]


def _told(found: Explanation) -> list[tuple[str, str, str, str | None]]:
    """The lines of a story that have a time; what names a dead letter without its id."""
    return [
        (f"{line.at:%H:%M}", line.stage, line.decision, None if line.decision == "replayed" else line.reason)
        for line in found.decisions
        if line.at is not None
    ]


async def test_the_story_of_a_run_has_its_steps(scene: Scene) -> None:
    await step_to_be_retried(scene)
    found = await scene.explain(await scene.run_id())
    assert (found.kind, found.id) == ("run", str(await scene.run_id()))
    assert [(line.stage, line.decision) for line in found.decisions] == [
        ("ingest", "accepted"), ("gate", "allowed"), ("deliver", "launched"), ("step", "pending"), ("run", "pending"),
    ]  # fmt: skip
    assert found.decisions[3].reason == "charge: ConnectionError: the bank is away"
