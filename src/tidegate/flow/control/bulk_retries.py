"""The operator's verbs about everything that waits and fits a filter: counted first, then done in small batches.

Each batch is a transaction of its own with its audit row, so that locks are short and a crash leaves whole rows only. A
call does a bounded part; what it returns says where to go on. Ids are walked in order: each is met once, also when what
was forced is refused by its gate again and waits anew.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.flow.control import step_retries
from tidegate.flow.control.deliveries import change_deliveries
from tidegate.flow.control.events import change_events
from tidegate.flow.control.step_retries import StepsChanged
from tidegate.flow.control.verbs import DONE, RetryVerb
from tidegate.model.source import BreakerPolicy
from tidegate.store import audit, bulk_retries
from tidegate.store.bulk_retries import IdRange, RetryKind, WaitingMatch
from tidegate.store.db import Connection, Database
from tidegate.store.retry_rows import RetryFilters
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

BATCH = 100
MAX_PER_CALL = 1000
# A call answers after so long, however little it has done: whoever asked goes on from there.
CALL_SECONDS = 3.0

_log = logger("control")


class BulkDone(NamedTuple):
    """What one call did: so many changed, so many that waited no longer when their turn came, and so many left in
    `rest`, which is None when that is all."""

    done: int
    no_longer_waiting: int
    remaining: int
    rest: IdRange | None


class _Request(NamedTuple):
    kind: RetryKind
    verb: RetryVerb
    filters: RetryFilters
    actor: str
    breaker: BreakerPolicy


async def preview_retries(database: Database, kind: RetryKind, filters: RetryFilters) -> int:
    """How many wait that the filters describe."""
    async with database.connection() as connection:
        return (await bulk_retries.count(connection, kind, filters, IdRange()))[0]


async def change_retries(
    database: Database,
    kind: RetryKind,
    verb: RetryVerb,
    filters: RetryFilters,
    actor: str,
    breaker: BreakerPolicy,
    *,
    span: IdRange | None = None,
    limit: int = MAX_PER_CALL,
) -> BulkDone:
    """Cancel or force up to `limit` of those that wait and that the filters describe, from where the call before came
    to (its `rest`). Whoever begins to wait after the first call is not among them."""
    began = monotonic()
    asked = _Request(kind, verb, filters, actor, breaker)
    async with database.connection() as connection:
        if span is None:
            span = IdRange(None, (await bulk_retries.count(connection, kind, filters, IdRange()))[1])
        found = await bulk_retries.match(connection, kind, filters, span, limit) if span.through else []
    done = met = 0
    while met < len(found) and (met == 0 or monotonic() - began < CALL_SECONDS):
        batch = found[met : met + BATCH]
        done += await _change_batch(database, asked, batch)
        met += len(batch)
        failpoints.hit("bulk_retries.after_commit")
    if not found:
        return BulkDone(0, 0, 0, None)
    rest = IdRange(found[met - 1].id, span.through)
    async with database.connection() as connection:
        remaining, _ = await bulk_retries.count(connection, kind, filters, rest)
    _log.info(f"{kind}.retries_{DONE[verb]}", count=done, remaining=remaining, actor=actor)
    return BulkDone(done, met - done, remaining, rest if remaining else None)


async def _change_batch(database: Database, asked: _Request, batch: Sequence[WaitingMatch]) -> int:
    changed, steps = await database.run(partial(_change, asked=asked, batch=batch))
    if asked.kind == "steps":
        step_retries.told(steps, asked.verb, asked.actor)
    elif asked.verb == "cancel":
        counter = metrics.EVENT_RETRIES if asked.kind == "events" else metrics.DELIVERY_RETRIES
        counter.labels("cancelled").inc(len(changed))
    return len(changed)


async def _change(
    connection: Connection, asked: _Request, batch: Sequence[WaitingMatch]
) -> tuple[list[uuid.UUID], StepsChanged]:
    """One batch; the ids that were changed."""
    ids, verb, actor, reason = [row.id for row in batch], asked.verb, asked.actor, asked.filters.reason
    steps = StepsChanged()
    if asked.kind == "events":
        changed = await change_events(connection, ids, verb, actor, reason=reason)
    elif asked.kind == "deliveries":
        trigger_ids = {row.trigger_id for row in batch if row.trigger_id is not None}
        found = await change_deliveries(connection, ids, trigger_ids, verb, actor, reason=reason)
        changed = [one.id for one in found]
    else:
        steps = await step_retries.change_steps(connection, ids, verb, actor, asked.breaker, reason=reason)
        changed = [one.id for one in (*steps.changed, *steps.stopping)]
    if changed:
        filters = {name: value for name, value in asked.filters._asdict().items() if value is not None}
        await audit.insert(
            connection, actor=actor, action=f"{asked.kind}.{verb}", subject="*", before={"filter": filters},
            after={"count": len(changed), "ids": sorted(changed)},
        )  # fmt: skip
    failpoints.hit("bulk_retries.before_commit")
    return changed, steps
