"""Delivery replan: give the waiting deliveries of a trigger new times, in order of arrival, in small batches.

Begun (durably, by raising the trigger's plan) when a pause begins or ends, the trigger is edited, its breaker moves, or
times did not hold. A delivery whose time had come and that the throttle refused has used an attempt; too many, or too
old, and it is given up: `exhausted`, a dead letter. Waiting for a pause, a breaker or a slot uses no attempt.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.model.delivery import DeliveryStatus
from tidegate.model.retry import TRIGGER_RETRY, RetryPolicy, why_given_up
from tidegate.store import decisions, deliveries, held_deliveries, locks, trigger_gates
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.store.deliveries import Moved, Stale
from tidegate.store.trigger_gates import LockedTrigger
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

BATCH = 500

_log = logger("replan")


class Cursor(NamedTuple):
    """How far a plan has come. With a newer plan, everyone is to be looked at again, from the first."""

    plan_version: int = 0
    after: int = 0


class Planned(NamedTuple):
    """What one batch of new times did."""

    moved: Sequence[Moved] = ()
    woken: int = 0
    refused: int = 0
    exhausted: int = 0
    cursor: Cursor = Cursor()
    is_done: bool = False


class DeliveryReplan:
    """Gives new times to the waiting deliveries of triggers whose plan has changed. `after_move` hears, after the
    commit, of the deliveries that have one."""

    def __init__(
        self,
        database: Database,
        *,
        policy: RetryPolicy = TRIGGER_RETRY,
        after_move: Callable[[Sequence[Moved]], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._policy = policy
        self._after_move = after_move

    async def run_once(self) -> int:
        """Plan every trigger that asks for it, to its end, batch by batch in turns; how many deliveries got a new time.

        Deliveries that waited for their source to be resumed are made due, too, once it is.
        """
        async with self._database.connection() as connection:
            cursors = dict.fromkeys(await trigger_gates.list_replanning(connection), Cursor())
            total = await deliveries.release_sources(connection, BATCH)
        while cursors:
            for trigger_id, cursor in list(cursors.items()):
                try:
                    planned = await self._database.run(partial(self._batch, trigger_id=trigger_id, cursor=cursor))
                except Unavailable:
                    raise
                except Exception as exc:  # noqa: BLE001 - one trigger that cannot be planned must not stop the others
                    _log.error("trigger.replan_failed", trigger_id=str(trigger_id), error=exc, exc_info=exc)
                    del cursors[trigger_id]
                    continue
                total += len(planned.moved) + planned.woken
                cursors[trigger_id] = planned.cursor
                self._committed(planned)
                if planned.is_done:
                    del cursors[trigger_id]
        return total

    def _committed(self, planned: Planned) -> None:
        metrics.DELIVERY_RETRIES.labels("rescheduled").inc(planned.refused)
        metrics.DELIVERY_RETRIES.labels("exhausted").inc(planned.exhausted)
        for one in planned.moved:
            if one.retry_state == "exhausted":
                _log.error("delivery.exhausted", delivery_id=str(one.id), attempt=one.retry_attempts,
                           reason=one.last_error)  # fmt: skip
        if waiting := [one for one in planned.moved if one.retry_state == "scheduled"]:
            self._after_move(waiting)

    async def _batch(self, connection: Connection, trigger_id: uuid.UUID, cursor: Cursor) -> Planned:
        await locks.share(connection, [])  # so that the trigger cannot be changed while we wait for its row
        locked = (await trigger_gates.lock(connection, always=[trigger_id])).get(trigger_id)
        if locked is None or not locked.is_replanning:
            return Planned(is_done=True)
        after = cursor.after if cursor.plan_version == locked.plan_version else 0
        take = partial(deliveries.take_stale, connection, trigger_id, plan_version=locked.plan_version, limit=BATCH)
        rows = await take(after=after)
        is_behind = not rows and after > 0
        if is_behind:
            rows = await take(after=0)  # one may have come in behind us; none at all: every one has its time
        if not rows:
            await trigger_gates.end_plan(connection, trigger_id, locked.gate.drain_at)
            return Planned(is_done=True)
        now = await locks.now(connection)
        in_line, for_slots = _split(rows, locked, is_held=locked.gate.hold(now) is not None)
        moved = self._plan(locked, in_line, now)
        await deliveries.move(connection, moved)
        if is_behind:
            await held_deliveries.keep_order(connection, {trigger_id: rows[0].ingress_sequence})
        await deliveries.keep_waiting(connection, [row.id for row in for_slots], locked.plan_version)
        woken = await trigger_gates.wake(connection, {(trigger_id, row.concurrency_key or "") for row in for_slots})
        event_of = {row.id: row.event_id for row in rows}
        lost = [one for one in moved if one.retry_state == "exhausted"]
        await deliveries.bury(
            connection,
            [(one.id, event_of[one.id], one.last_error or "", {"attempts": one.retry_attempts}) for one in lost],
        )
        had_come = {row.id for row in in_line if _was_refused(row, locked)}
        lines = [_line(one, event_of[one.id], trigger_id, now) for one in moved if one.id in had_come]
        await decisions.insert(connection, lines)
        await trigger_gates.save(connection, [locked.gate])
        failpoints.hit("delivery_replan.before_commit")
        refused = len(had_come) - len(lost)
        cursor = Cursor(locked.plan_version, max(after, rows[-1].ingress_sequence))
        return Planned(moved, woken, refused, len(lost), cursor)

    def _plan(self, locked: LockedTrigger, rows: Sequence[Stale], now: datetime) -> list[Moved]:
        gate, version = locked.gate, locked.plan_version
        policy = locked.retry or self._policy
        hold = gate.hold(now)
        reason = hold.reason if hold else "throttle"
        message = hold.message if hold else "waits for its turn"
        given_up: list[Moved] = []
        waiting: list[tuple[Stale, int]] = []
        for row in rows:
            was_refused = _was_refused(row, locked)
            is_again = hold is None and row.reason == reason  # waiting for something new uses no attempt
            why = why_given_up(policy, row.retry_attempts if is_again else 0, now - row.received_at)
            if was_refused and why and reason != "paused":
                text = f"given up after {why}: {message}"
                given_up.append(Moved(row.id, "exhausted", "exhausted", None, row.retry_attempts, reason, text,
                                      {"reason": reason}, version))  # fmt: skip
            else:
                waiting.append((row, row.retry_attempts + int(was_refused and is_again)))
        times = gate.slots(now, len(waiting), is_refusal=False)
        status: DeliveryStatus = "paused" if hold else "throttled"
        return given_up + [
            Moved(row.id, status, "scheduled", at, attempts, reason, message,
                  {"reason": reason, "message": message, "until": at, "waits_for": {reason: {"until": at}}}, version)
            for (row, attempts), at in zip(waiting, times, strict=True)
        ]  # fmt: skip


def _split(rows: Sequence[Stale], locked: LockedTrigger, *, is_held: bool) -> tuple[list[Stale], list[Stale]]:
    """Who stands in the trigger's line, and who waits for a slot of a key: those keep their place, unless a pause or a
    breaker holds everyone, or their time had come and the throttle refused them."""
    keeps = {r.id for r in rows if not is_held and r.reason == "concurrency" and not _was_refused(r, locked)}
    return [row for row in rows if row.id not in keeps], [row for row in rows if row.id in keeps]


def _was_refused(row: Stale, locked: LockedTrigger) -> bool:
    """Whether the row's time had come and there was no room; a plan that an operator began refuses nobody."""
    return locked.refused_at is not None and row.next_attempt_at <= locked.refused_at


def _line(one: Moved, event_id: uuid.UUID, trigger_id: uuid.UUID, now: datetime) -> NewDecision:
    decision = "exhausted" if one.retry_state == "exhausted" else "rescheduled"
    return NewDecision(event_id, now, "deliver", decision, one.last_error, one.next_attempt_at, one.retry_attempts,
                    trigger_id=trigger_id)  # fmt: skip
