"""Source failures: failed runs that count for the breaker of their source, if its policy says so.

Their events were counted as successes when they were delivered; each failed run turns one of them into a failure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tidegate.model.ids import EventId, RunId, TriggerId
from tidegate.model.source import SourceBreakerPolicy
from tidegate.store import locks, sources
from tidegate.store.db import Connection
from tidegate.store.runs import EndedRun
from tidegate.store.sources import LockedSource


class SourceMove(NamedTuple):
    """A source's breaker that moved: `opened`, `closed`, `reopened` or `probe_failed`; and the event or run that moved
    it."""

    source: str
    move: str
    reason: str | None
    event_id: EventId | None = None
    correlation_id: str | None = None
    trigger_id: TriggerId | None = None
    run_id: RunId | None = None


class Blamed(NamedTuple):
    """The sources that count the failed runs, under their row locks."""

    source_of: dict[RunId, str]
    locked: dict[str, LockedSource]
    default: SourceBreakerPolicy


async def lock(connection: Connection, failed: Sequence[RunId], default: SourceBreakerPolicy) -> Blamed | None:
    """Lock the sources that count these runs; None when no source does. Call it before locking any trigger."""
    source_of = await sources.counting_runs(connection, failed, default)
    if not source_of:
        return None
    names = sorted(set(source_of.values()))
    locked = (await sources.lock(connection, names)).sources
    if unknown := [name for name in names if name not in locked]:
        locked |= await sources.create(connection, unknown)
    return Blamed(source_of, locked, default)


async def count_failed(
    connection: Connection, blamed: Blamed, ended: Sequence[EndedRun], non_retryable: Collection[RunId]
) -> list[SourceMove]:
    """Count the runs that ended as failed; the breakers that moved."""
    now = await locks.now(connection)
    moves = []
    for source, locked in blamed.locked.items():
        gate, policy = locked.gate, locked.breaker or blamed.default
        bad = [
            run
            for run in ended
            if blamed.source_of.get(run.id) == source and (policy.non_retryable or run.id not in non_retryable)
        ]
        if not bad or gate.breaker_state != "closed":
            continue
        await sources.gather_outcomes(connection, gate, now, policy)
        if move := gate.count(now, failed=len(bad), succeeded=-len(bad), policy=policy):
            by = bad[-1]
            cause = by.event_id, by.correlation_id, by.trigger_id, by.id
            moves.append(SourceMove(source, move, gate.breaker_reason, *cause))
    await sources.save(connection, [locked.gate for locked in blamed.locked.values()])
    for one in moves:  # waiting events get a slot after the breaker's pause
        await sources.begin_plan(connection, one.source, None)
    return moves
