"""Replan: give the waiting events of a source new slots, in order of arrival, in small batches.

Begun (durably, by raising the source's plan) when a pause begins or ends, a limit changes, a breaker opens, or slots
did not hold. An event whose slot had come and was refused has used an attempt; too many, or too old, and it is given
up: `exhausted`, a dead letter. Waiting for a pause or a breaker to end uses no attempt.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.decide import batch, gate
from tidegate.flow.decide.gate import OpenGates
from tidegate.model.retry import RetryPolicy, next_attempt_at, why_given_up
from tidegate.store import decisions, ingress_retries, sources
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.store.ingress_retries import Settled, StaleEvent
from tidegate.store.sources import LockedSource
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

BATCH = 500

_log = logger("replan")


class Cursor(NamedTuple):
    """How far a plan has come. With a newer plan, everyone is to be looked at again, from the first."""

    plan_version: int = 0
    after: int = 0


class Planned(NamedTuple):
    """What one batch of new slots did."""

    moved: int = 0
    rescheduled: int = 0
    exhausted: int = 0
    cursor: Cursor = Cursor()
    is_done: bool = False
    waiting: Sequence[Settled] = ()
    refused: Sequence[Settled] = ()
    correlation_ids: Mapping[uuid.UUID, str] = {}


class Replan:
    """Gives new slots to the waiting events of sources whose plan has changed. `after_move` hears, after the commit, of
    the events that have one."""

    def __init__(
        self,
        database: Database,
        *,
        policy: RetryPolicy,
        after_move: Callable[[Sequence[Settled]], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._after_move = after_move
        self._policy = policy

    async def run_once(self) -> int:
        """Plan every source that asks for it, to its end; how many events got a new slot.

        The sources take turns, batch by batch: a short line does not wait for a long one. A source that cannot be
        planned is left for the next look; the others go on.
        """
        async with self._database.connection() as connection:
            cursors = {name: Cursor() for name in await sources.list_replanning(connection)}
        moved: Counter[str] = Counter()
        while cursors:
            for name, cursor in list(cursors.items()):
                try:
                    planned = await self._database.run(partial(self._batch, name=name, cursor=cursor))
                except Unavailable:
                    raise
                except Exception as exc:  # noqa: BLE001 - one source that cannot be planned must not stop the others
                    _log.error("source.replan_failed", source=name, error=exc, exc_info=exc)
                    del cursors[name]
                    continue
                cursors[name] = planned.cursor
                moved[name] += planned.moved
                if planned.waiting:
                    self._after_move(planned.waiting)
                _tell(name, planned)
                if planned.is_done:
                    del cursors[name]
                    _log.info("source.replanned", source=name, count=moved[name])
        return moved.total()

    async def _batch(self, connection: Connection, name: str, cursor: Cursor) -> Planned:
        gates = await gate.open_gates(connection, [name])
        locked = gates.sources.get(name)
        if locked is None or not locked.is_replanning:
            return Planned(is_done=True)
        after = cursor.after if cursor.plan_version == locked.plan_version else 0
        take = partial(ingress_retries.take_stale, connection, name, plan_version=locked.plan_version, limit=BATCH)
        rows = await take(after=after)
        is_behind = not rows and after > 0
        if is_behind:
            rows = await take(after=0)  # one may have come in behind us; none at all: every one has its slot
        if not rows:
            await sources.end_plan(connection, name, locked.gate.drain_at)
            return Planned(is_done=True)
        settled = self._plan(gates, locked, rows)
        await ingress_retries.settle(connection, settled)
        if is_behind:
            gates.overtaken[name] = rows[0].ingress_sequence
        given_up = [s for s in settled if s.retry_state == "exhausted"]
        had_come = {row.event_id for row in rows if _was_refused(row, locked)}
        refused = [s for s in settled if s.event_id in had_come]
        await ingress_retries.bury(
            connection, [(s.event_id, s.last_error or "", {"attempts": s.attempts}) for s in given_up]
        )
        await decisions.insert(connection, [_recorded(s) for s in refused])
        await gate.close_gates(connection, gates)
        seen = batch.measure(
            gates.now, newcomers=[], lags={}, throttled=Counter(), dropped=Counter({name: len(given_up)})
        )
        await batch.count(connection, seen if given_up else [])
        failpoints.hit("replan.before_commit")
        rescheduled = len(refused) - len(given_up)
        waiting = [s for s in settled if s.retry_state == "scheduled"]
        cursor = Cursor(locked.plan_version, max(after, rows[-1].ingress_sequence))
        told = {row.event_id: row.correlation_id for row in rows if row.event_id in had_come}
        return Planned(len(rows), rescheduled, len(given_up), cursor, False, waiting, refused, told)

    def _plan(self, gates: OpenGates, locked: LockedSource, rows: list[StaleEvent]) -> list[Settled]:
        one, plan_version = locked.gate, locked.plan_version
        hold = one.hold(gates.now)
        reason = hold.reason if hold else "rate_limit"
        message = hold.message if hold else "waits for its turn"
        given_up, waiting = [], []
        for row in rows:
            was_refused = _was_refused(row, locked)
            used = row.attempts if hold is None else 0  # waiting for a pause or a breaker uses no attempt
            why = why_given_up(self._policy, used, gates.now - row.received_at)
            if was_refused and why and reason != "paused":
                text = f"given up after {why}: {message}"
                given_up.append(
                    Settled(
                        row.event_id, "exhausted", row.attempts, None, reason, text, {"reason": reason}, plan_version
                    )
                )
            else:
                waiting.append((row, row.attempts + int(was_refused and hold is None)))
        # A slot that does not hold once is the ordinary unevenness of a drain. One that does not hold again and again
        # is backed off from, and with it those that stand behind: they keep their order.
        refusals = max((attempts - 2 for row, attempts in waiting if _was_refused(row, locked)), default=0)
        if hold is None and refusals > 0:
            one.drain_at = max(one.drain_at or gates.now, next_attempt_at(self._policy, refusals, gates.now))
        slots = one.slots(gates.now, len(waiting), is_refusal=False)
        return given_up + [
            Settled(row.event_id, "scheduled", attempts, slot, reason, message,
                    {"reason": reason, "message": message, "until": slot}, plan_version)
            for (row, attempts), slot in zip(waiting, slots, strict=True)
        ]  # fmt: skip


def _recorded(settled: Settled) -> NewDecision:
    decision = "exhausted" if settled.retry_state == "exhausted" else "rescheduled"
    return NewDecision(
        settled.event_id, None, "gate", decision, settled.last_error, settled.next_attempt_at, settled.attempts
    )


def _tell(source: str, planned: Planned) -> None:
    """Count and log, after the commit, the events whose slot had come and was refused."""
    metrics.EVENT_RETRIES.labels("rescheduled").inc(planned.rescheduled)
    metrics.EVENT_RETRIES.labels("exhausted").inc(planned.exhausted)
    for settled in planned.refused:
        given_up = settled.retry_state == "exhausted"
        log = _log.error if given_up else _log.info
        log(
            "event.retry_exhausted" if given_up else "event.retry_rescheduled",
            event_id=settled.event_id,
            correlation_id=planned.correlation_ids.get(settled.event_id),
            source=source,
            attempt=settled.attempts,
            next_attempt_at=settled.next_attempt_at,
            reason=settled.last_error,
        )


def _was_refused(row: StaleEvent, locked: LockedSource) -> bool:
    """Whether the row's slot had come and there was no room; a plan that an operator began refuses nobody."""
    return locked.refused_at is not None and row.next_attempt_at <= locked.refused_at
