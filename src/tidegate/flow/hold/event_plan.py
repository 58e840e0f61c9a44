"""The plan of a source: new slots for its waiting events (`replan` is the loop).

An event whose slot had come and was refused has used an attempt. After the retry policy's last attempt, or past its
maximum age, the event is `exhausted` and becomes a dead letter. Waiting for a pause or a breaker uses no attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tidegate import failpoints
from tidegate.flow.decide import batch, gate, reporting
from tidegate.flow.decide.gate import LockedGates
from tidegate.flow.hold.replan import Replan
from tidegate.model.ids import EventId
from tidegate.model.retry import RetryPolicy, next_attempt_at, why_exhausted
from tidegate.store import decisions, ingress_retries, sources
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.store.ingress_retries import Settled, StaleEvent
from tidegate.store.sources import LockedSource
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("replan")


class PlannedEvents(NamedTuple):
    """What one batch wrote: every event, and those whose slot had come and was refused."""

    settled: Sequence[Settled]
    refused: Sequence[Settled]
    correlation_ids: Mapping[EventId, str]


class EventPlans:
    """The plans of sources. `after_move` is called after each commit with the events that have a new slot."""

    def __init__(
        self, policy: RetryPolicy, *, after_move: Callable[[Sequence[Settled]], None] = lambda _: None
    ) -> None:
        self._policy = policy
        self._after_move = after_move

    async def start(self, connection: Connection) -> tuple[list[str], int]:
        return await sources.list_replanning(connection), 0

    async def open(self, connection: Connection, subject: str) -> EventPlan | None:
        gates = await gate.lock_gates(connection, [subject])
        locked = gates.sources.get(subject)
        if locked is None or not locked.is_replanning:
            return None
        return EventPlan(connection, subject, gates, locked, self._policy)

    def committed(self, subject: str, written: PlannedEvents) -> int:
        exhausted = sum(one.retry_state == "exhausted" for one in written.refused)
        metrics.EVENT_RETRIES.labels("rescheduled").inc(len(written.refused) - exhausted)
        metrics.EVENT_RETRIES.labels("exhausted").inc(exhausted)
        for one in written.refused:
            is_exhausted = one.retry_state == "exhausted"
            log = _log.error if is_exhausted else _log.info
            log(
                "event.retry_exhausted" if is_exhausted else "event.retry_rescheduled",
                event_id=one.event_id,
                correlation_id=written.correlation_ids.get(one.event_id),
                source=subject,
                attempt=one.attempts,
                next_attempt_at=one.next_attempt_at,
                reason=one.last_error,
            )
        if waiting := [one for one in written.settled if one.retry_state == "scheduled"]:
            self._after_move(waiting)
        return len(written.settled)

    def finished(self, subject: str, count: int) -> None:
        _log.info("source.replanned", source=subject, count=count)

    def failed(self, subject: str, error: Exception) -> None:
        _log.error("source.replan_failed", source=subject, error=error, exc_info=error)


class EventPlan:
    """The plan of one source, locked by this transaction."""

    def __init__(
        self, connection: Connection, source: str, gates: LockedGates, locked: LockedSource, policy: RetryPolicy
    ) -> None:
        self._connection = connection
        self._source = source
        self._gates = gates
        self._locked = locked
        self._policy = policy

    @property
    def version(self) -> int:
        return self._locked.plan_version

    def position(self, row: StaleEvent) -> int:
        return row.ingress_sequence

    async def take(self, *, after: int, limit: int) -> list[StaleEvent]:
        return await ingress_retries.take_stale(
            self._connection, self._source, plan_version=self.version, after=after, limit=limit
        )

    async def end(self) -> None:
        await sources.end_plan(self._connection, self._source, self._locked.gate.drain_at)

    async def write(self, rows: Sequence[StaleEvent], *, overtook: bool) -> PlannedEvents:
        connection, gates = self._connection, self._gates
        settled = self._decide(rows)
        await ingress_retries.settle(connection, settled)
        if overtook:
            gates.overtaken[self._source] = rows[0].ingress_sequence
        exhausted = [one for one in settled if one.retry_state == "exhausted"]
        correlation_ids = {row.event_id: row.correlation_id for row in rows if self._was_refused(row)}
        refused = [one for one in settled if one.event_id in correlation_ids]
        await ingress_retries.dead_letter(
            connection, [(one.event_id, one.last_error or "", {"attempts": one.attempts}) for one in exhausted]
        )
        await decisions.insert(connection, [_recorded(one) for one in refused])
        await gate.save_gates(connection, gates)
        dropped = Counter({self._source: len(exhausted)})
        seen = reporting.measure(gates.now, newcomers=[], lags={}, throttled=Counter(), dropped=dropped)
        await batch.count(connection, seen if exhausted else [])
        failpoints.hit("replan.before_commit")
        return PlannedEvents(settled, refused, correlation_ids)

    def _decide(self, rows: Sequence[StaleEvent]) -> list[Settled]:
        one, now = self._locked.gate, self._gates.now
        hold = one.hold(now)
        reason = hold.reason if hold else "rate_limit"
        message = hold.message if hold else "waiting in line for the rate limit"
        exhausted: list[Settled] = []
        waiting: list[tuple[StaleEvent, int]] = []
        for row in rows:
            was_refused = self._was_refused(row)
            used = row.attempts if hold is None else 0  # waiting for a pause or a breaker uses no attempt
            why = why_exhausted(self._policy, used, now - row.received_at)
            if was_refused and why and reason != "paused":
                text = f"retries exhausted ({why}): {message}"
                exhausted.append(Settled(row.event_id, "exhausted", row.attempts, None, reason, text,
                                         {"reason": reason}, self.version))  # fmt: skip
            else:
                waiting.append((row, row.attempts + int(was_refused and hold is None)))
        # One refused slot is ordinary jitter of a drain. Repeated refusals back off; events further back in the line
        # are delayed as well, so the order stays.
        refusals = max((attempts - 2 for row, attempts in waiting if self._was_refused(row)), default=0)
        if hold is None and refusals > 0:
            one.drain_at = max(one.drain_at or now, next_attempt_at(self._policy, refusals, now))
        slots = one.slots(now, len(waiting), is_refusal=False)
        return exhausted + [
            Settled(row.event_id, "scheduled", attempts, slot, reason, message,
                    {"reason": reason, "message": message, "until": slot}, self.version)
            for (row, attempts), slot in zip(waiting, slots, strict=True)
        ]  # fmt: skip

    def _was_refused(self, row: StaleEvent) -> bool:
        """Whether the row's slot had come and there was no room. A replan that an operator caused refuses no event."""
        refused_at = self._locked.refused_at
        return refused_at is not None and row.next_attempt_at <= refused_at


EventReplan = Replan[str, StaleEvent, PlannedEvents]


def _recorded(one: Settled) -> NewDecision:
    decision = "exhausted" if one.retry_state == "exhausted" else "rescheduled"
    return NewDecision(one.event_id, None, "gate", decision, one.last_error, one.next_attempt_at, one.attempts)
