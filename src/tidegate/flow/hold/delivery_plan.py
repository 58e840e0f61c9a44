"""The plan of a trigger: new times for its waiting deliveries (`replan` is the loop).

A delivery whose time had come and that the throttle refused has used an attempt. After the retry policy's last attempt,
or past its maximum age, the delivery is `exhausted` and becomes a dead letter. Waiting for a pause, a breaker or a
concurrency slot uses no attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

from tidegate import failpoints
from tidegate.flow.decide.budgets import BUDGET
from tidegate.flow.hold.replan import Replan
from tidegate.model.delivery import DeliveryStatus
from tidegate.model.ids import EventId, TriggerId
from tidegate.model.retry import TRIGGER_RETRY, RetryPolicy, why_exhausted
from tidegate.store import budgets, decisions, deliveries, held_deliveries, locks, trigger_gates, windows
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.store.deliveries import Moved, Stale
from tidegate.store.trigger_gates import LockedTrigger
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

# How many deliveries that waited for a paused source one call makes due once the source is resumed.
RELEASE_BATCH = 500

SLOT = "concurrency"

_log = logger("replan")


class PlannedDeliveries(NamedTuple):
    """What one batch wrote: every delivery, those whose time had come and was refused, and how many were woken for a
    free concurrency slot."""

    moved: Sequence[Moved]
    refused: Sequence[Moved]
    woken: int


class DeliveryPlans:
    """The plans of triggers. `after_move` is called after each commit with the deliveries that have a new time."""

    def __init__(
        self, policy: RetryPolicy = TRIGGER_RETRY, *, after_move: Callable[[Sequence[Moved]], None] = lambda _: None
    ) -> None:
        self._policy = policy
        self._after_move = after_move

    async def start(self, connection: Connection) -> tuple[list[TriggerId], int]:
        """Also makes deliveries due that waited for their source, once it is resumed."""
        subjects = await trigger_gates.list_replanning(connection)
        return subjects, await deliveries.release_sources(connection, RELEASE_BATCH)

    async def open(self, connection: Connection, subject: TriggerId) -> DeliveryPlan | None:
        await locks.share(connection, [])  # so that the trigger cannot be changed while we wait for its row
        locked = (await trigger_gates.lock(connection, always=[subject])).get(subject)
        if locked is None or not locked.is_replanning:
            return None
        return DeliveryPlan(connection, subject, locked, self._policy)

    def committed(self, subject: TriggerId, written: PlannedDeliveries) -> int:
        exhausted = [one for one in written.refused if one.retry_state == "exhausted"]
        metrics.DELIVERY_RETRIES.labels("rescheduled").inc(len(written.refused) - len(exhausted))
        metrics.DELIVERY_RETRIES.labels("exhausted").inc(len(exhausted))
        for one in exhausted:
            _log.error("delivery.exhausted", delivery_id=str(one.id), trigger_id=str(subject),
                       attempt=one.retry_attempts, reason=one.last_error)  # fmt: skip
        if waiting := [one for one in written.moved if one.retry_state == "scheduled"]:
            self._after_move(waiting)
        return len(written.moved) + written.woken

    def finished(self, subject: TriggerId, count: int) -> None:
        _log.info("trigger.replanned", trigger_id=str(subject), count=count)

    def failed(self, subject: TriggerId, error: Exception) -> None:
        _log.error("trigger.replan_failed", trigger_id=str(subject), error=error, exc_info=error)


class DeliveryPlan:
    """The plan of one trigger, locked by this transaction."""

    def __init__(
        self, connection: Connection, trigger_id: TriggerId, locked: LockedTrigger, policy: RetryPolicy
    ) -> None:
        self._connection = connection
        self._trigger_id = trigger_id
        self._locked = locked
        self._policy = locked.retry or policy

    @property
    def version(self) -> int:
        return self._locked.plan_version

    def position(self, row: Stale) -> int:
        return row.ingress_sequence

    async def take(self, *, after: int, limit: int) -> list[Stale]:
        connection, trigger_id, version = self._connection, self._trigger_id, self.version
        # The lines of budgets change under their locks, which come before those of deliveries.
        names = await deliveries.stale_budgets(connection, trigger_id, plan_version=version, after=after, limit=limit)
        await budgets.lock(connection, names)
        return await deliveries.take_stale(connection, trigger_id, plan_version=version, after=after, limit=limit)

    async def end(self) -> None:
        await trigger_gates.end_plan(self._connection, self._trigger_id, self._locked.gate.drain_at)

    async def write(self, rows: Sequence[Stale], *, overtook: bool) -> PlannedDeliveries:
        connection, trigger_id, gate = self._connection, self._trigger_id, self._locked.gate
        now = await locks.now(connection)
        in_line, for_slots = self._split(rows, is_held=gate.hold(now) is not None)
        moved = self._decide(in_line, now)
        await deliveries.move(connection, moved)
        await windows.follow(connection, [row.id for row in in_line], now)
        if overtook:
            await held_deliveries.keep_order(connection, {trigger_id: rows[0].ingress_sequence})
        await deliveries.keep_waiting(connection, [row.id for row in for_slots], self.version)
        if self._locked.refused_at is None:  # the trigger has changed: other budgets may hold them, or none
            waiting = [row.id for row in for_slots if row.reason == BUDGET]
            await budgets.decide_these_again(connection, waiting, self.version)
        # Those behind the ones that leave the line of a budget may be first now.
        left = {(row.budget, row.budget_key or "") for row in in_line if row.reason == BUDGET and row.budget}
        await budgets.nudge(connection, dict.fromkeys(left, now))
        slots = {(trigger_id, row.concurrency_key or "") for row in for_slots if row.reason == SLOT}
        woken = await trigger_gates.wake(connection, slots)
        event_of = {row.id: row.event_id for row in rows}
        await deliveries.dead_letter(
            connection,
            [
                (one.id, event_of[one.id], one.last_error or "", {"attempts": one.retry_attempts})
                for one in moved
                if one.retry_state == "exhausted"
            ],
        )
        was_due = {row.id for row in in_line if self._was_refused(row)}
        refused = [one for one in moved if one.id in was_due]
        await decisions.insert(connection, [_recorded(one, event_of[one.id], trigger_id, now) for one in refused])
        await trigger_gates.save(connection, [gate])
        failpoints.hit("delivery_replan.before_commit")
        return PlannedDeliveries(moved, refused, woken)

    def _decide(self, rows: Sequence[Stale], now: datetime) -> list[Moved]:
        gate = self._locked.gate
        hold = gate.hold(now)
        reason = hold.reason if hold else "throttle"
        message = hold.message if hold else "waiting in line for the throttle"
        exhausted: list[Moved] = []
        waiting: list[tuple[Stale, int]] = []
        for row in rows:
            was_refused = self._was_refused(row)
            is_again = hold is None and row.reason == reason  # waiting for something new uses no attempt
            why = why_exhausted(self._policy, row.retry_attempts if is_again else 0, now - row.received_at)
            if was_refused and why and reason != "paused":
                text = f"retries exhausted ({why}): {message}"
                exhausted.append(Moved(row.id, "exhausted", "exhausted", None, row.retry_attempts, reason, text,
                                       {"reason": reason}, self.version))  # fmt: skip
            else:
                waiting.append((row, row.retry_attempts + int(was_refused and is_again)))
        times = gate.slots(now, len(waiting), is_refusal=False)
        status: DeliveryStatus = "paused" if hold else "throttled"
        return exhausted + [
            Moved(row.id, status, "scheduled", at, attempts, reason, message,
                  {"reason": reason, "message": message, "until": at, "waits_for": {reason: {"until": at}}},
                  self.version)
            for (row, attempts), at in zip(waiting, times, strict=True)
        ]  # fmt: skip

    def _split(self, rows: Sequence[Stale], *, is_held: bool) -> tuple[list[Stale], list[Stale]]:
        """The rows in the trigger's line, and the rows that wait for a slot, a budget, or for their window to close.
        Those that wait for a slot or a budget keep their place, unless a pause or a breaker holds the trigger, or their
        time had come and the throttle refused them; those in a window in any case until their time has come. Whether
        one that is replayed may wait at all is decided with it, if the trigger has a backlog policy."""
        keeps = {
            r.id
            for r in rows
            if ((r.reason == "window" or (r.reason in (SLOT, BUDGET) and not is_held)) and not self._was_refused(r))
            or (r.reason == "replay" and self._locked.has_backlog)
        }
        return [row for row in rows if row.id not in keeps], [row for row in rows if row.id in keeps]

    def _was_refused(self, row: Stale) -> bool:
        """Whether the row's time had come and there was no room. A replan that an operator caused refuses no row."""
        refused_at = self._locked.refused_at
        return refused_at is not None and row.next_attempt_at <= refused_at


DeliveryReplan = Replan[TriggerId, Stale, PlannedDeliveries]


def _recorded(one: Moved, event_id: EventId, trigger_id: TriggerId, now: datetime) -> NewDecision:
    decision = "exhausted" if one.retry_state == "exhausted" else "rescheduled"
    return NewDecision(event_id, now, "deliver", decision, one.last_error, one.next_attempt_at, one.retry_attempts,
                    trigger_id=trigger_id)  # fmt: skip
