"""A worker process, from start to stop, in the order of execution."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Literal, NamedTuple

from tidegate import __version__
from tidegate.errors import SchemaError
from tidegate.flow.code.http import HttpWorkflows, outgoing
from tidegate.flow.code.workflow import Workflow
from tidegate.flow.control.budgets import declare_from_run
from tidegate.flow.decide.batch import Batch
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.flow.decide.match import Matcher
from tidegate.flow.hold.delivery_plan import DeliveryPlans, DeliveryReplan
from tidegate.flow.hold.delivery_retry import DeliveryRetry, DeliveryTurn
from tidegate.flow.hold.event_plan import EventPlans, EventReplan
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.flow.hold.stale import StaleDeliveries
from tidegate.flow.hold.step_lines import LineRetry
from tidegate.flow.keep import secrets
from tidegate.flow.keep.days import Days
from tidegate.flow.keep.event_replay import Replays
from tidegate.flow.keep.prune import Prune
from tidegate.flow.keep.reconcile import Reconcile, Requeue
from tidegate.flow.keep.replay import TOPICS as REPLAY_TOPICS
from tidegate.flow.keep.schedule import Scheduler
from tidegate.flow.presence import Presence
from tidegate.flow.run.finish import Freed
from tidegate.flow.run.runner import Runner
from tidegate.model.ids import DefinitionId
from tidegate.model.secrets import SecretKeys
from tidegate.model.worker_share import WorkerShare
from tidegate.queue.choose import open_queue
from tidegate.queue.wakeups import delivery_wakeups, event_wakeups, step_wakeups
from tidegate.settings import Settings
from tidegate.store import durability
from tidegate.store.db import Database
from tidegate.telemetry import metrics, traces
from tidegate.telemetry.logs import logger
from tidegate.worker.dispatching import Dispatching
from tidegate.worker.loop import Loop

_log = logger("worker")

RetryTopic = Literal["retries", "deliveries"]

# While a backlog drains, due items are collected for this long, so that each iteration handles a batch.
DRAIN_SECONDS = 0.02
# The wait between pages of a pass over the waiting rows, so that a large backlog costs little; and between passes.
REQUEUE_PAGE_SECONDS, REQUEUE_PASS_SECONDS = 0.25, 3.0
# The wait between small batches of deletions, so that other work is not affected; and between passes.
PRUNE_BATCH_SECONDS, PRUNE_PASS_SECONDS = 0.05, 60.0
# The next days of history are added long before they begin.
DAYS_SECONDS = 600.0


class LoopTurn(NamedTuple):
    """How much was done, and when the next work is due."""

    done: int
    next_at: datetime | None


class Worker:
    """Decides events and executes the workflows of one application until `stop` is called."""

    def __init__(self, settings: Settings, workflows: Mapping[str, Workflow], definitions: list[DefinitionId]) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.settings = settings
        # One connection renews leases, one listens for hints, and one serves the metrics port.
        others = 2 + bool(settings.metrics_port)
        size, keys = settings.worker_connections - others, SecretKeys(settings.secrets_key)
        url, direct = settings.require_database_url(), settings.database_direct_url
        self._database = Database(url, "worker", size=size, keys=keys, direct_url=direct)
        self._queue = open_queue(settings, self._database)
        matcher = Matcher()  # shared by all stages, so that each trigger is compiled once
        self._delivery_retry, self._delivery_replan = self._delivery_stages(matcher)
        self._stale = StaleDeliveries(self._database, after_leave=lambda: self._queue.hint("deliveries"))
        self._waits = {"retries": 0.0, "deliveries": 0.0, "runs": 0.0, "schedules": 0.0, "replays": 0.0, "prune": 0.0}
        self._served = dict(workflows)  # http workflows are added as they are created
        self._presence = Presence("worker", on_unfit=self._unfit, retention=settings.retention)
        share = WorkerShare.of(settings.worker_only, settings.worker_reserve)
        self._http_workflows = HttpWorkflows(self._database, outgoing(settings), share)
        self._runner = Runner(
            self._database,
            self._served,
            worker=self.name,
            concurrency=settings.worker_concurrency,
            lease_ms=settings.lease_ms,
            transaction_connections=settings.transaction_connections,
            policy=settings.step_retry,
            breaker=settings.trigger_error,
            source_breaker=settings.source_error,
            fill=self._delivery_retry.fill,
            after_free=self._after_free,
            after_wait=lambda waiting: self._queue.schedule(step_wakeups(waiting)),
            limits=settings.limits,
            link_base=settings.link_base,
            share=share,
            after_slot=lambda: self._queue.wake("runs").set(),
            declare=partial(declare_from_run, self._database),
            beside_leases=self._presence.keep,  # a workflow that blocks the event loop must not make it look dead
        )
        # In the order of the definitions, without those that it leaves out.
        taken = [(one, slug) for one, slug in zip(definitions, sorted(workflows), strict=True) if share.takes(slug)]
        self._definitions, self._versions = [one for one, _ in taken], [workflows[slug].version for _, slug in taken]
        self._runner.serve(self._definitions, self._versions)
        self._dispatching, self._retry, self._replan = self._event_stages(matcher)
        self._reconcile = Reconcile(
            self._database, batch_size=settings.batch_size, breaker=settings.trigger_error,
            source_breaker=settings.source_error, worker=self.name,
        )  # fmt: skip
        self._requeue = Requeue(self._database, self._queue, batch_size=settings.batch_size)
        self._schedule = Scheduler(
            self._database, definitions, batch_size=settings.batch_size,
            after_publish=lambda: self._queue.hint("inbox"),
        )  # fmt: skip
        self._replay = Replays(self._database, batch_size=settings.batch_size, after_replay=self._after_replay)
        self._prune = Prune(self._database, settings.retention, is_agreed=True)
        self._days = Days(self._database)
        self._workflows = sorted(workflows)
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._why_unfit: SchemaError | None = None

    def _event_stages(self, matcher: Matcher) -> tuple[Dispatching, EventRetry, EventReplan]:
        settings, queue = self.settings, self._queue
        new_batch = partial(
            Batch, settings.source_error, matcher=matcher, trigger_breaker=settings.trigger_error,
            trigger_retry=settings.trigger_retry, after_wake=lambda: queue.hint("runs"),
            after_hold=lambda held: queue.schedule(delivery_wakeups(held)),
            after_full=lambda: queue.hint("deliveries"),
        )  # fmt: skip
        new_dispatch = partial(
            Dispatch, self._database, batch_size=settings.batch_size, after_launch=self._after_launch,
            after_hold=lambda held: queue.schedule(event_wakeups(held)),
        )  # fmt: skip
        batch = new_batch(claim=self._runner.claim, after_claim=self._runner.start)
        dispatching = Dispatching(new_dispatch, new_batch, batch, self._runner, queue.wake("inbox"))
        retry = EventRetry(
            self._database, batch_size=settings.batch_size, after_launch=lambda: queue.hint("runs"), batch=batch,
            after_plan=lambda: queue.hint("plans"), after_hold=lambda held: queue.schedule(event_wakeups(held)),
        )  # fmt: skip
        plans = EventPlans(settings.event_retry, after_move=lambda moved: queue.schedule(event_wakeups(moved)))
        return dispatching, retry, EventReplan(self._database, plans)

    def _delivery_stages(self, matcher: Matcher) -> tuple[DeliveryRetry, DeliveryReplan]:
        settings, queue = self.settings, self._queue
        retry = LineRetry(
            self._database,
            batch_size=settings.batch_size,
            after_launch=lambda: queue.hint("runs"),
            after_hold=lambda held: queue.schedule(delivery_wakeups(held)),
            after_plan=lambda: queue.hint("plans"),
            after_wake=lambda: queue.hint("deliveries"),
            matcher=matcher,
            breaker=settings.trigger_error,
            policy=settings.trigger_retry,
        )
        plans = DeliveryPlans(settings.trigger_retry, after_move=lambda moved: queue.schedule(delivery_wakeups(moved)))
        return retry, DeliveryReplan(self._database, plans)

    def stop(self) -> None:
        """Start the shutdown; `run` returns when all runs are finished or released."""
        self._stopping.set()

    def _unfit(self, exc: SchemaError) -> None:
        """Called in the thread that renews leases."""
        self._why_unfit = exc
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.stop)

    async def log_secret_warnings(self) -> None:
        """Log warnings about how secrets are stored."""
        await secrets.log_notices(self._database)

    async def run(self) -> None:
        """Work until stopped. A loop that fails stops the worker with its error, and so does a schema that no longer
        fits."""
        self._loop = asyncio.get_running_loop()
        await self._database.open()
        await self._presence.join(self._database)
        await durability.require_safe(self._database, allow_unsafe=self.settings.allow_unsafe_durability)
        await self._runner.announce()
        self._queue.start_listening()
        poll, lease = self.settings.poll_ms / 1000, self.settings.lease_ms / 1000
        claiming = [
            *self._dispatching.loops(poll),
            self._retry_loop("retries", self._retry),
            self._retry_loop("deliveries", self._delivery_retry),
            Loop("stale", self._stale.run_once, wait_seconds=poll),
            Loop("replan", self._replan_once, wait_seconds=poll, wake=self._queue.wake("plans")),
            Loop("definitions", self._definitions_once, wait_seconds=poll),
            Loop("run", self._run_once, wait_seconds=lambda: self._waits["runs"], wake=self._queue.wake("runs")),
            Loop("schedule", self._schedule_once, wait_seconds=lambda: self._waits["schedules"]),
            Loop("replay", self._replay_once, wait_seconds=lambda: self._waits["replays"]),
            Loop("days", self._days_once, wait_seconds=DAYS_SECONDS),
            Loop("prune", self._prune_once, wait_seconds=lambda: self._waits["prune"], is_vital=False),
            Loop("reconcile", self._reconcile_once, wait_seconds=min(lease / 3, 1.0)),
            Loop("requeue", self._requeue_once, wait_seconds=self._requeue_wait),
        ]
        _log.info(
            "worker.started", worker=self.name, workflows=self._workflows, version=__version__,
            retention_seconds=self.settings.retention._asdict(),
        )  # fmt: skip
        claims = [asyncio.create_task(loop.run(), name=loop.name) for loop in claiming]
        self._runner.keep_leases()
        stopped = asyncio.create_task(self._stopping.wait(), name="stop")
        try:
            done, _ = await asyncio.wait([*claims, stopped], return_when=asyncio.FIRST_COMPLETED)
            for loop in claiming:  # claim nothing more; leases are still renewed while runs finish
                loop.stop()
            self._runner.stop_claiming()
            await asyncio.gather(*claims, return_exceptions=True)
            await self._runner.stop(self.settings.shutdown_ms / 1000)
            for task in done - {stopped}:
                task.result()
            if self._why_unfit is not None:
                raise self._why_unfit
        finally:
            stopped.cancel()
            await asyncio.gather(stopped, return_exceptions=True)
            await self._presence.leave(self._database)
            await self._queue.close()
            await self._database.close()
            await traces.flush()
            _log.info("worker.stopped", worker=self.name)

    async def turn(self, now: datetime) -> LoopTurn:
        """Run every stage once and wait until no run executes: for tests that drive a worker instead of `run`."""
        await self._runner.announce()
        ticks = await self._schedule.run_once()
        done = await self._replay.run_once() + ticks.published + (await self._dispatching.first.run_once()).events
        events, deliveries = await self._retry.run_once(), await self._delivery_retry.run_once()
        done += events.due + len(events.replanned) + deliveries.due + len(deliveries.replanned)
        done += await self._stale.run_once()
        done += await self._replan.run_once() + await self._delivery_replan.run_once()
        done += sum((await self._release()).values())
        done += await self._runner.run_once()
        await self._runner.idle()
        waits = [
            await self._runner.next_due_seconds(),
            await self._retry.next_due_seconds(),
            await self._delivery_retry.next_due_seconds(),
            await self._stale.next_due_seconds(),
            await self._replay.next_due_seconds(),
            ticks.next_seconds,
        ]
        # When a limit has room again for due items that found none, and when the next item or tick is due.
        times = [at for at in (events.room_at, deliveries.room_at) if at is not None]
        times += [now + timedelta(seconds=seconds) for seconds in waits if seconds is not None]
        return LoopTurn(done, min((at for at in times if at > now), default=None))

    async def close(self) -> None:
        """Stop a worker that was driven by `turn`; runs that still execute are released."""
        self._runner.stop_claiming()
        await self._runner.stop(0)
        await self._queue.close()
        await self._database.close()

    def _retry_loop(self, topic: RetryTopic, retry: EventRetry | DeliveryRetry) -> Loop:
        """Handles due items, and waits until the next slot."""

        async def once() -> int:
            turn = await retry.run_once()
            if turn.due == 0 and not turn.replanned:
                self._waits[topic] = await self._until_next_slot(retry, turn.room_at, turn.now)
            else:
                # Slots of a draining backlog are close together: wait for several, so that each iteration is a batch.
                self._waits[topic] = 0 if turn.due >= self.settings.batch_size else DRAIN_SECONDS
            return 0

        return Loop(topic, once, wait_seconds=lambda: self._waits[topic], wake=self._queue.wake(topic))

    async def _until_next_slot(
        self, retry: EventRetry | DeliveryRetry, room_at: datetime | None, now: datetime | None
    ) -> float:
        poll = self.settings.poll_ms / 1000
        if room_at is not None and now is not None:
            return min(poll, max(DRAIN_SECONDS, (room_at - now).total_seconds()))
        seconds = await retry.next_due_seconds()
        return poll if seconds is None else min(poll, max(DRAIN_SECONDS, seconds))

    async def _replan_once(self) -> int:
        moved, deliveries_moved = await self._replan.run_once(), await self._delivery_replan.run_once()
        if moved:
            self._queue.hint("retries")
        if deliveries_moved:
            self._queue.hint("deliveries")
        return moved + deliveries_moved

    def _after_launch(self) -> None:
        self._runner.expect()
        self._queue.hint("runs")

    def _after_free(self, freed: Freed) -> None:
        if isinstance(freed.filled, DeliveryTurn):
            self._delivery_retry.committed(freed.filled)
        if freed.woken:
            self._queue.hint("deliveries")
        if freed.woken_runs:
            self._queue.hint("runs")
        if freed.moves:
            self._queue.hint("plans")
        if freed.published:
            self._queue.hint("inbox")
            metrics.received(Counter(freed.published))

    async def _definitions_once(self) -> int:
        found = await self._http_workflows.refresh(self._served)
        if found is not None:
            self._runner.serve([*self._definitions, *found], self._versions)
            self._queue.wake("runs").set()  # they may already have runs
        return 0

    async def _run_once(self) -> int:
        started = await self._runner.run_once()
        if started == 0 and self._runner.room == 0:
            # Wait for free capacity, not for a hint: there may already be due runs.
            await self._runner.wait_for_room()
            return 1
        if started == 0:
            seconds = await self._runner.next_due_seconds()
            poll = self.settings.poll_ms / 1000
            self._waits["runs"] = poll if seconds is None else min(poll, max(0.005, seconds))
        return started

    async def _schedule_once(self) -> int:
        turn = await self._schedule.run_once()
        poll = self.settings.poll_ms / 1000
        next_tick = poll if turn.next_seconds is None else max(DRAIN_SECONDS, turn.next_seconds)
        self._waits["schedules"] = min(poll, next_tick)
        return turn.published

    async def _replay_once(self) -> int:
        done = await self._replay.run_once()
        if done == 0:
            seconds = await self._replay.next_due_seconds()
            poll = self.settings.poll_ms / 1000
            self._waits["replays"] = poll if seconds is None else min(poll, max(DRAIN_SECONDS, seconds))
        return done

    def _after_replay(self, kinds: set[str]) -> None:
        for kind, topic in REPLAY_TOPICS.items():
            if kind in kinds:
                self._queue.hint(topic)

    async def _days_once(self) -> int:
        await self._days.run_once()
        return 0

    async def _prune_once(self) -> int:
        self._waits["prune"] = PRUNE_PASS_SECONDS
        if self._prune.is_on:
            pruned = await self._prune.run_once()
            if pruned.deleted:
                _log.info("prune.deleted", **pruned.deleted)
            if not pruned.is_done:
                self._waits["prune"] = PRUNE_BATCH_SECONDS
        return 0

    async def _reconcile_once(self) -> int:
        released = await self._release()
        if released["runs"] or released["children"]:
            self._queue.hint("runs")
        return 0

    async def _release(self) -> dict[str, int]:
        released = await self._reconcile.run_once()
        if released["runs"]:
            self._runner.check_for_suspects()
        return released

    async def _requeue_once(self) -> int:
        await self._requeue.run_once()
        return 0

    def _requeue_wait(self) -> float:
        return REQUEUE_PAGE_SECONDS if self._requeue.is_between_pages else REQUEUE_PASS_SECONDS
