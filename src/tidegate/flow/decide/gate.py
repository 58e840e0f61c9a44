"""Gate: may an event of this source pass now? If not, why, and when will it be admitted?

Per batch: lock the sources (one short row lock each), decide in memory, write back. Limits are exact because every
admission of a source is decided under its row lock and stamped with the database's time, read after the lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from tidegate.flow.decide.source_failures import SourceMove
from tidegate.flow.decide.waits import Meeting
from tidegate.model.event import Event
from tidegate.model.ingress_retry import IngressRetry
from tidegate.model.source import Gate, SourceBreakerPolicy
from tidegate.model.units import written_rate
from tidegate.store import ingress_retries, locks
from tidegate.store import sources as store
from tidegate.store.db import Connection
from tidegate.store.sources import LockedSource

# The slot of an event that arrives while its source is being replanned; the replan gives it its own soon after.
PROVISIONAL = timedelta(minutes=1)

EXPIRED = "expired"


class LockedGates(NamedTuple):
    """The sources of one batch under their locks, and the database's time at the decision.

    `overtaken` is filled by the decision: sources whose line already holds later events, with the ingress sequence of
    the first event that joined late. `registry_version` of the triggers stays current until the commit. `has_waits`:
    some run waits for an event; `meetings` are the runs that the batch has woken.
    """

    now: datetime
    sources: dict[str, LockedSource]
    overtaken: dict[str, int]
    registry_version: int
    has_waits: bool
    meetings: list[Meeting]

    def gate(self, source: str) -> Gate | None:
        locked = self.sources.get(source)
        return locked.gate if locked else None


class Verdict(NamedTuple):
    """What the gate decided about new events."""

    admitted: list[Event]
    held: list[IngressRetry]
    expired: list[IngressRetry]


async def lock_gates(connection: Connection, names: Iterable[str]) -> LockedGates:
    """Lock the sources for this transaction."""
    wanted = sorted(set(names))
    await locks.share(connection, wanted)
    return await lock_shared(connection, wanted)


async def lock_shared(connection: Connection, names: Iterable[str]) -> LockedGates:
    """`lock_gates` for a transaction that already shares the sources' advisory locks."""
    locked = await store.lock(connection, sorted(set(names)))
    return LockedGates(locked.now, locked.sources, {}, locked.registry_version, locked.has_waits, [])


async def save_gates(connection: Connection, gates: LockedGates) -> None:
    """Write back what the batch changed."""
    for source, sequence in sorted(gates.overtaken.items()):
        await ingress_retries.keep_order(connection, source, sequence)
    await store.save(connection, [locked.gate for locked in gates.sources.values()])


def decide(gates: LockedGates, newcomers: Sequence[Event]) -> Verdict:
    """Split new events, in arrival order, into admitted, held and expired."""
    verdict = Verdict([], [], [])
    by_source: dict[str, list[Event]] = {}
    for event in newcomers:
        if is_expired(event, gates.now):
            verdict.expired.append(_expired(event))
        elif event.source in gates.sources:
            by_source.setdefault(event.source, []).append(event)
        else:
            verdict.admitted.append(event)
    for source, group in by_source.items():
        locked = gates.sources[source]
        admitted, held = _decide(locked, gates.now, group)
        verdict.admitted.extend(admitted)
        verdict.held.extend(held)
        if held and locked.last_waiting is not None and held[0].ingress_sequence < locked.last_waiting:
            gates.overtaken[source] = held[0].ingress_sequence  # two workers decided at once, the later batch first
    return verdict


def has_room(gates: LockedGates, count: int) -> bool:
    """Whether so many more events of each source could pass now."""
    rooms = [one.gate.room(gates.now) for one in gates.sources.values() if one.gate.hold(gates.now) is None]
    return len(rooms) == len(gates.sources) and all(room is None or room >= count for room in rooms)


def is_expired(event: Event, now: datetime) -> bool:
    """Whether the event's time to live is over."""
    return event.ttl_ms is not None and now > event.counted_from + timedelta(milliseconds=event.ttl_ms)


def launched_later(gates: LockedGates, admitted: Counter[str], now: datetime) -> None:
    """The admitted events had to wait for a trigger's lock and launch at `now`: count them against the limit then."""
    for source, count in admitted.items():
        gate = gates.gate(source)
        if gate is not None:
            gate.spend_later(now, count)


async def record(
    connection: Connection,
    gates: LockedGates,
    *,
    admitted: Counter[str],
    failures: Counter[str],
    policy: SourceBreakerPolicy,
) -> list[SourceMove]:
    """Count successes and failures of admitted events by source; the breakers that moved."""
    unknown = sorted(source for source in failures if source not in gates.sources)
    if unknown:  # a source without limit or pause gets a row with its first failure
        gates.sources.update(await store.create(connection, unknown))
    moves = []
    for source, count in admitted.items():
        locked = gates.sources.get(source)
        if locked is None:
            continue
        gate, own, failed = locked.gate, locked.breaker or policy, failures[source]
        if failed and gate.breaker_state == "closed" and gate.has_no_failures(gates.now, own):
            await store.gather_outcomes(connection, gate, gates.now, own)
            move = gate.count(gates.now, failed=failed, succeeded=0, policy=own)  # the rest of the batch is gathered
        else:
            move = gate.record(gates.now, failures=failed, admitted=count, policy=own)
        if move:
            moves.append(SourceMove(source, move, gate.breaker_reason))
            if move != "closed":  # waiting events get a slot after the breaker's pause
                await begin_plan(connection, gates, source, is_refusal=False)
    return moves


async def begin_plan(connection: Connection, gates: LockedGates, source: str, *, is_refusal: bool) -> None:
    """Request a replan: every waiting event of the source gets a new slot."""
    await store.begin_plan(connection, source, gates.now if is_refusal else None)
    locked = gates.sources.get(source)
    if locked is not None:
        locked.gate.forget_plan()


def _decide(locked: LockedSource, now: datetime, group: list[Event]) -> tuple[list[Event], list[IngressRetry]]:
    gate = locked.gate
    hold = gate.hold(now)
    if not locked.has_backlog:
        gate.forget_backlog()
    room = 0 if locked.has_backlog or hold is not None else gate.room(now)
    passing = group if room is None else group[:room]
    gate.spend(now, len(passing))
    waiting = group[len(passing) :]
    if not waiting:
        return passing, []
    if locked.is_replanning:
        slots, plan_version = [now + PROVISIONAL] * len(waiting), locked.plan_version - 1
    else:
        slots, plan_version = gate.slots(now, len(waiting)), locked.plan_version
    reason = hold.reason if hold else "breaker_open" if gate.is_probing(now) else "rate_limit"
    message = hold.message if hold else _limit_message(gate)
    held = [
        IngressRetry(
            event_id=event.id,
            source=event.source,
            ingress_sequence=event.ingress_sequence,
            retry_state="scheduled",
            attempts=1,
            next_attempt_at=slot,
            reason=reason,
            last_error=message,
            metadata={"reason": reason, "message": message, "until": slot},
            plan_version=plan_version,
        )
        for event, slot in zip(waiting, slots, strict=True)
    ]
    return passing, held


def _limit_message(gate: Gate) -> str:
    if gate.limit is None:
        return "waiting behind earlier events of the same source"
    return f"over the limit of {written_rate(gate.limit.limit, gate.limit.interval_ms)}"


def _expired(event: Event) -> IngressRetry:
    message = f"expired: its ttl_ms of {event.ttl_ms} passed before it could be decided"
    return IngressRetry(
        event_id=event.id,
        source=event.source,
        ingress_sequence=event.ingress_sequence,
        retry_state="exhausted",
        reason=EXPIRED,
        last_error=message,
        metadata={"reason": EXPIRED, "message": message},
    )
