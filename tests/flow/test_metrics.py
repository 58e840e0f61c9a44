"""Each metric moves with its cause: a scene for every name and every fixed label value, on a real database."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow import test_gate
from tests.flow.step_world import World
from tests.flow.test_dispatch import publish
from tests.flow.test_gate import limit
from tests.flow.test_schedules import application, stage
from tests.flow.trigger_worker import TriggerWorker, make_trigger
from tidegate import NonRetryable, Retry
from tidegate.flow import control
from tidegate.flow.keep.reconcile import Reconcile, Requeue
from tidegate.flow.look.health import Exposition
from tidegate.model.backlog import BacklogPolicy
from tidegate.model.budget import Budget
from tidegate.model.retention import Retention
from tidegate.model.retry import RetryPolicy
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.queue.port import Wakeup
from tidegate.queue.postgres import PostgresQueue
from tidegate.store import processes, workers
from tidegate.store.db import Connection, Database
from tidegate.telemetry import metrics

THREE = RetryPolicy(base_ms=1000, factor=2, max_ms=8000, jitter_ratio=0, max_attempts=3, max_age_ms=3_600_000)
CLAIMED = "claimed_by = 'gone', claim_expires_at = tidegate.now() - interval '1 s', next_attempt_at = null"


class Scene:
    """A database whose clock is moved by hand, and one worker's stages."""

    def __init__(self, database: Database, connection: Connection, clock: Clock, world: World) -> None:
        self.database, self.connection, self.clock, self.world = database, connection, clock, world
        self.worker = TriggerWorker(database, policy=THREE)

    async def ticks(self, count: int, source: str = "noisy", **payload: Any) -> list[str]:
        return [await publish(self.connection, "tick", source, n=n, **payload) for n in range(count)]

    async def due(self, table: str) -> None:
        """Whatever waits there is due now, and everyone looks."""
        await self.connection.execute(
            f"update tidegate.{table} set next_attempt_at = tidegate.now() where retry_state = 'scheduled'"
        )
        await self.worker.turn()

    async def run_all(self) -> None:
        """Decide what is new and run it, and what is due afterwards."""
        runner = await self.world.runner()
        for _ in range(4):
            await self.world.turn(runner)
            await self.clock.advance(10_000)

    async def claimed(self, table: str, state: str) -> None:
        """Claimed by a worker that is gone; reconcile looks."""
        await self.connection.execute(f"update tidegate.{table} set {state}, {CLAIMED}")
        await Reconcile(self.database, batch_size=10).run_once()

    async def lost(self, table: str) -> None:
        """The queue has lost the wake-ups of waiting rows that were written a while ago."""
        await self.connection.execute(
            f"update tidegate.{table} set next_attempt_at = tidegate.now() + interval '10 minutes', "
            "updated_at = tidegate.now() - interval '10 s' where retry_state = 'scheduled'"
        )
        await Requeue(self.database, LosingQueue(self.database), batch_size=10).run_once()


class LosingQueue(PostgresQueue):
    """A queue that should hold wake-ups and has none of them."""

    holds_wakeups = True

    async def missing(self, wakeups: Sequence[Wakeup]) -> list[Wakeup]:
        return list(wakeups)


SCENES: dict[Callable[[Scene], Awaitable[None]], list[str]] = {}


def moves(*samples: str) -> Callable[[Callable[[Scene], Awaitable[None]]], Callable[[Scene], Awaitable[None]]]:
    """The samples that are higher after the scene than before."""

    def note(scene: Callable[[Scene], Awaitable[None]]) -> Callable[[Scene], Awaitable[None]]:
        SCENES[scene] = list(samples)
        return scene

    return note


# Sources ------------------------------------------------------------------------------------------------------------


@moves(
    'tidegate_source_decisions_total{source="noisy",decision="allowed"}',
    'tidegate_source_decisions_total{source="noisy",decision="throttled"}',
    'tidegate_event_ingress_lag_seconds_count{source="noisy"}',
    'tidegate_event_retries_total{outcome="scheduled"}',
    'tidegate_deferred{kind="events",reason="rate_limit"}',
    'tidegate_queue_depth{queue="ingress",state="delayed"}',
    "tidegate_last_processed_event_timestamp_seconds",
)
async def a_limit(scene: Scene) -> None:
    await make_trigger(scene.database)
    await limit(scene.database, 1)
    await scene.ticks(3)
    await scene.worker.turn()


@moves('tidegate_event_retries_total{outcome="due"}', 'tidegate_event_retries_total{outcome="completed"}')
async def the_limit_lets_it_through(scene: Scene) -> None:
    await a_limit(scene)
    await scene.clock.advance(3_600_000)
    await scene.worker.turn()


@moves('tidegate_event_retries_total{outcome="rescheduled"}')
async def it_finds_no_room(scene: Scene) -> None:
    await make_trigger(scene.database)
    await limit(scene.database, 1, interval_ms=60_000)
    await scene.ticks(2)
    await scene.worker.turn()
    await scene.due("event_ingress_retries")
    await scene.worker.turn()


@moves('tidegate_event_retries_total{outcome="exhausted"}', 'tidegate_dead_letters{kind="event"}')
async def it_is_given_up(scene: Scene) -> None:
    await it_finds_no_room(scene)
    for _ in range(3):
        await scene.due("event_ingress_retries")
        await scene.worker.turn()


@moves('tidegate_event_retries_total{outcome="cancelled"}')
async def it_is_cancelled(scene: Scene) -> None:
    await a_limit(scene)
    event_id = await scene.connection.fetchval("select event_id from tidegate.event_ingress_retries limit 1")
    await control.change_retry(scene.database, "events", event_id, "cancel", "ann")


@moves(
    "tidegate_paused_sources",
    'tidegate_source_decisions_total{source="noisy",decision="paused"}',
    'tidegate_deferred{kind="events",reason="paused"}',
)
async def a_pause(scene: Scene) -> None:
    await control.pause(scene.database, "noisy", actor="ann")
    await scene.ticks(1)
    await scene.worker.turn()


@moves(
    'tidegate_open_breakers{kind="source"}', 'tidegate_trigger_evaluations_total{trigger="bad/code",status="failed"}'
)
async def failures(scene: Scene) -> None:
    worker = await test_gate.worker.__wrapped__(scene.database, scene.clock)  # type: ignore[attr-defined]
    for _ in range(3):
        await publish(scene.connection, "bad", "noisy")
    await worker.turn()


# Triggers -----------------------------------------------------------------------------------------------------------


@moves(
    'tidegate_trigger_evaluations_total{trigger="tick/main",status="launched"}',
    'tidegate_trigger_evaluations_total{trigger="tick/main",status="throttled"}',
    'tidegate_delivery_retries_total{outcome="scheduled"}',
    'tidegate_deferred{kind="deliveries",reason="throttle"}',
    'tidegate_queue_depth{queue="triggers",state="delayed"}',
    'tidegate_queue_depth{queue="runs",state="ready"}',
)
async def a_throttle(scene: Scene) -> None:
    await make_trigger(scene.database, throttle_count=1, throttle_window_ms=60_000)
    await scene.ticks(2)
    await scene.worker.turn()


@moves('tidegate_delivery_retries_total{outcome="due"}', 'tidegate_delivery_retries_total{outcome="completed"}')
async def the_throttle_lets_it_through(scene: Scene) -> None:
    await a_throttle(scene)
    await scene.clock.advance(120_000)
    await scene.worker.turn()


@moves('tidegate_delivery_retries_total{outcome="rescheduled"}')
async def the_throttle_has_no_room(scene: Scene) -> None:
    await a_throttle(scene)
    await scene.due("workflow_trigger_deliveries")
    await scene.worker.turn()


@moves('tidegate_delivery_retries_total{outcome="exhausted"}', 'tidegate_dead_letters{kind="delivery"}')
async def the_delivery_is_given_up(scene: Scene) -> None:
    await a_throttle(scene)
    for _ in range(4):
        await scene.due("workflow_trigger_deliveries")
        await scene.worker.turn()


@moves('tidegate_delivery_retries_total{outcome="cancelled"}')
async def the_delivery_is_cancelled(scene: Scene) -> None:
    await a_throttle(scene)
    delivery_id = await scene.connection.fetchval(
        "select id from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled'"
    )
    await control.change_retry(scene.database, "deliveries", delivery_id, "cancel", "ann")


@moves('tidegate_trigger_evaluations_total{trigger="tick/main",status="skipped"}')
async def a_key_is_taken(scene: Scene) -> None:
    await make_trigger(scene.database, idempotency_key="{{ event.payload.k }}", idempotency_window_ms=60_000)
    await scene.ticks(2, k="same")
    await scene.worker.turn()


@moves('tidegate_trigger_evaluations_total{trigger="tick/main",status="filtered"}')
async def a_filter(scene: Scene) -> None:
    await make_trigger(scene.database, where="event.payload.n > 5")
    await scene.ticks(1)
    await scene.worker.turn()


@moves(
    "tidegate_paused_triggers",
    'tidegate_trigger_evaluations_total{trigger="tick/main",status="paused"}',
    'tidegate_deferred{kind="deliveries",reason="paused"}',
)
async def a_paused_trigger(scene: Scene) -> None:
    trigger_id = await make_trigger(scene.database)
    await control.pause_trigger(scene.database, trigger_id, actor="ann")
    await scene.ticks(1)
    await scene.worker.turn()


@moves('tidegate_open_breakers{kind="trigger"}', 'tidegate_deferred{kind="deliveries",reason="breaker_open"}')
async def failed_runs(scene: Scene) -> None:
    await make_trigger(scene.database)
    await scene.ticks(3)
    await scene.worker.turn()
    await scene.worker.end_runs(3, "failed")
    await scene.ticks(1)
    await scene.worker.turn()


@moves(
    "tidegate_paused_budgets",
    'tidegate_budget_held_total{budget="openai",why="paused"}',
    'tidegate_deferred{kind="deliveries",reason="budget"}',
)
async def a_paused_budget(scene: Scene) -> None:
    await control.put_budget(scene.database, Budget("openai", "5/s"), "ann")
    await make_trigger(scene.database, budgets=["openai"])
    await control.pause_budget(scene.database, "openai", actor="ann")
    await scene.ticks(1)
    await scene.worker.turn()


@moves(
    'tidegate_backlog_left_total{kind="trigger",name="tick/main",outcome="skipped"}',
    'tidegate_filling_backlogs{kind="trigger"}',
)
async def a_full_backlog(scene: Scene) -> None:
    trigger_id = await make_trigger(scene.database, backlog=BacklogPolicy(max_waiting=1))
    await control.pause_trigger(scene.database, trigger_id, actor="ann")
    await scene.ticks(2)
    await scene.worker.turn()


@moves(
    'tidegate_deferred{kind="deliveries",reason="concurrency"}',
    'tidegate_trigger_evaluations_total{trigger="tick/main",status="matched"}',
)
async def no_slot(scene: Scene) -> None:
    await make_trigger(scene.database, max_concurrency=1)
    await scene.ticks(2)
    await scene.worker.turn()


# Runs and steps -----------------------------------------------------------------------------------------------------


@moves(
    'tidegate_runs_total{workflow="fine",status="succeeded"}',
    'tidegate_run_duration_seconds_count{workflow="fine"}',
    'tidegate_step_retries_total{outcome="scheduled"}',
    'tidegate_step_retries_total{outcome="due"}',
    'tidegate_step_retries_total{outcome="completed"}',
)
async def a_step_that_fails_once(scene: Scene) -> None:
    tries: list[int] = []

    @scene.world.app.workflow(on="tick")
    async def fine(ctx: Any) -> None:
        async def flaky() -> None:
            tries.append(1)
            if len(tries) == 1:
                raise OSError("not yet")

        await ctx.step("flaky", flaky)

    await scene.ticks(1)
    await scene.run_all()


@moves(
    'tidegate_step_retries_total{outcome="rescheduled"}',
    'tidegate_step_retries_total{outcome="exhausted"}',
    'tidegate_runs_total{workflow="never",status="failed"}',
    'tidegate_dead_letters{kind="step"}',
)
async def a_step_that_always_fails(scene: Scene) -> None:
    @scene.world.app.workflow(on="tick")
    async def never(ctx: Any) -> None:
        async def broken() -> None:
            raise OSError("no")

        await ctx.step("broken", broken, retry=Retry(max_attempts=3, base="1s"))

    await scene.ticks(1)
    await scene.run_all()


@moves('tidegate_dead_letters{kind="run"}')
async def a_function_that_fails(scene: Scene) -> None:
    @scene.world.app.workflow(on="tick")
    async def refuses(ctx: Any) -> None:
        raise NonRetryable("never")

    await scene.ticks(1)
    await scene.run_all()


async def waiting_step(scene: Scene) -> None:
    @scene.world.app.workflow(on="tick")
    async def waits(ctx: Any) -> None:
        async def broken() -> None:
            raise OSError("no")

        await ctx.step("broken", broken, retry=Retry(max_attempts=3, base="1h", cap="1h"))

    await scene.ticks(1)
    await scene.world.turn(await scene.world.runner())


@moves(
    'tidegate_runs_total{workflow="waits",status="cancelled"}', 'tidegate_step_retries_total{outcome="cancelled"}',
)  # fmt: skip
async def a_cancelled_run(scene: Scene) -> None:
    await waiting_step(scene)
    run_id = await scene.connection.fetchval("select id from tidegate.workflow_runs")
    await control.cancel_run(scene.database, run_id, "ann", TRIGGER_BREAKER)


@moves('tidegate_queue_depth{queue="runs",state="delayed"}')
async def a_waiting_step(scene: Scene) -> None:
    await waiting_step(scene)


# What does not move, and who takes it back --------------------------------------------------------------------------


@moves(
    'tidegate_queue_depth{queue="ingress",state="ready"}', 'tidegate_oldest_due_age_seconds{queue="ingress"}',
)  # fmt: skip
async def nobody_decides(scene: Scene) -> None:
    await scene.ticks(1)
    await scene.clock.advance(5000)


@moves('tidegate_oldest_due_age_seconds{queue="runs"}', "tidegate_unserved_workflows")
async def nobody_runs(scene: Scene) -> None:
    await make_trigger(scene.database)
    await scene.ticks(1)
    await scene.worker.turn()
    await scene.clock.advance(10_000)


@moves(
    'tidegate_overdue_retries{kind="deliveries"}',
    'tidegate_oldest_due_age_seconds{queue="triggers"}',
    'tidegate_queue_depth{queue="triggers",state="ready"}',
)
async def nobody_looks_at_deliveries(scene: Scene) -> None:
    await a_throttle(scene)
    await scene.clock.advance(120_000)


@moves('tidegate_overdue_retries{kind="events"}')
async def nobody_looks_at_events(scene: Scene) -> None:
    await a_limit(scene)
    await scene.clock.advance(120_000)


@moves('tidegate_overdue_retries{kind="steps"}')
async def nobody_looks_at_steps(scene: Scene) -> None:
    await waiting_step(scene)
    await scene.clock.advance(timedelta(hours=2) / timedelta(milliseconds=1))


@moves("tidegate_workers_alive")
async def a_worker(scene: Scene) -> None:
    await workers.heartbeat(scene.connection, "w", [], 1, 10_000)


@moves('tidegate_schedule_ticks_total{outcome="published"}', 'tidegate_schedule_ticks_total{outcome="missed"}')
async def ticks_of_a_schedule(scene: Scene) -> None:
    schedule = await stage(scene.database, application(hourly={"every": "1h"}))
    await scene.clock.advance(timedelta(hours=3) / timedelta(milliseconds=1))
    await schedule.run_once()


@moves("tidegate_overdue_schedules")
async def a_schedule_that_nobody_serves(scene: Scene) -> None:
    await stage(scene.database, application(hourly={"every": "1h"}))
    await scene.clock.advance(timedelta(hours=2) / timedelta(milliseconds=1))


@moves("tidegate_history_overdue_seconds")
async def a_day_that_nobody_removes(scene: Scene) -> None:
    await scene.connection.execute("select tidegate.add_day($1)", (scene.clock.now - timedelta(days=40)).date())
    worker = processes.this_process("worker", 1, Retention(events_seconds=30 * 86_400))
    await processes.beat(scene.connection, worker)


@moves('tidegate_queue_depth{queue="runs",state="active"}', 'tidegate_expired_claims{kind="runs"}')
async def a_dead_worker(scene: Scene) -> None:
    await make_trigger(scene.database)
    await scene.ticks(1)
    await scene.worker.turn()
    await scene.connection.execute(f"update tidegate.workflow_runs set status = 'running', {CLAIMED}")


@moves('tidegate_reconcile_requeued_total{kind="runs"}')
async def its_run(scene: Scene) -> None:
    await make_trigger(scene.database)
    await scene.ticks(1)
    await scene.worker.turn()
    await scene.claimed("workflow_runs", "status = 'running'")


@moves('tidegate_reconcile_requeued_total{kind="events"}')
async def wakeups_of_events_are_lost(scene: Scene) -> None:
    await a_limit(scene)
    await scene.lost("event_ingress_retries")


@moves('tidegate_reconcile_requeued_total{kind="deliveries"}')
async def wakeups_of_deliveries_are_lost(scene: Scene) -> None:
    await a_throttle(scene)
    await scene.lost("workflow_trigger_deliveries")


@moves('tidegate_reconcile_requeued_total{kind="steps"}')
async def wakeups_of_steps_are_lost(scene: Scene) -> None:
    await waiting_step(scene)
    await scene.lost("workflow_run_steps")


# ----------------------------------------------------------------------------------------------------------------------


def parts(sample: str) -> tuple[str, dict[str, str]]:
    name, _, labels = sample.partition("{")
    return name, dict(re.findall(r'(\w+)="([^"]*)"', labels))


async def read(database: Database, sample: str) -> float:
    await Exposition(database).text()
    name, labels = parts(sample)
    found = metrics.REGISTRY.get_sample_value(name, labels)
    return found if found is not None and not math.isnan(found) else 0.0  # NaN: nobody knows yet


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
async def test_it_moves(
    scene: Callable[[Scene], Awaitable[None]], database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    before = {sample: await read(database, sample) for sample in SCENES[scene]}
    await scene(Scene(database, connection, clock, world))
    after = {sample: await read(database, sample) for sample in SCENES[scene]}
    assert [sample for sample in before if after[sample] <= before[sample]] == []


def test_every_metric_has_a_scene() -> None:
    """Requests, received events, failing loops and the database's absence are seen on real processes and elsewhere."""
    elsewhere = {"tidegate_http_requests", "tidegate_events_received", "tidegate_loop_failures", "tidegate_database_up"}
    elsewhere |= {"tidegate_webhooks", "tidegate_executions_refused"}
    seen = {
        parts(sample)[0].removesuffix("_total").removesuffix("_count")
        for samples in SCENES.values()
        for sample in samples
    }
    every = {family.name for family in metrics.REGISTRY.collect()}
    assert every - elsewhere == seen


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        (f"tidegate_{kind}_retries_total", "outcome", "scheduled due completed rescheduled cancelled exhausted")
        for kind in ("event", "delivery", "step")
    ]
    + [
        ("tidegate_source_decisions_total", "decision", "allowed throttled paused"),
        ("tidegate_trigger_evaluations_total", "status", "filtered matched launched throttled skipped failed paused"),
        ("tidegate_dead_letters", "kind", "event delivery step run"),
        ("tidegate_queue_depth", "state", "ready delayed active"),
        ("tidegate_reconcile_requeued_total", "kind", "events deliveries steps runs"),
        ("tidegate_runs_total", "status", "succeeded failed cancelled"),
    ],
)
def test_every_value_has_a_scene(name: str, label: str, values: str) -> None:
    samples = [parts(sample) for every in SCENES.values() for sample in every]
    assert {labels[label] for found, labels in samples if found == name} == set(values.split())
