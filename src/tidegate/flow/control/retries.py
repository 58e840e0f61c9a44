"""Cancel or force what waits: one row, or everything that a filter selects.

`KINDS` has the verbs for each kind of row. Many rows are counted first, then changed in small batches. Each batch is a
transaction with its own audit row, so that locks are short and a crash leaves no row half changed. A call changes a
bounded number; its result says where the next call continues. Ids are visited in order, each once, even if a forced row
is refused by its gate again and waits once more.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.errors import Conflict, NotFound
from tidegate.flow.control.delivery_retries import DeliveryVerbs
from tidegate.flow.control.event_retries import EventVerbs
from tidegate.flow.control.retry_verbs import DONE, ChangedRetries, RetryOrder, RetryRow, RetryVerb, RetryVerbs
from tidegate.flow.control.step_retries import StepVerbs
from tidegate.flow.decide.reporting import log_trigger_moves
from tidegate.model.ids import EventId
from tidegate.model.source import TRIGGER_BREAKER, BreakerPolicy
from tidegate.store import audit, bulk_retries
from tidegate.store.bulk_retries import IdRange, RetryKind, WaitingMatch
from tidegate.store.db import Connection, Database
from tidegate.store.retry_rows import RetryFilters
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

BATCH = 100
MAX_PER_CALL = 1000
# A call returns after CALL_SECONDS, however few rows it has changed; the client continues from there.
CALL_SECONDS = 3.0

KINDS: Final[dict[RetryKind, RetryVerbs]] = {
    "events": EventVerbs(),
    "deliveries": DeliveryVerbs(),
    "steps": StepVerbs(),
}

RetryOutcome = Literal["cancelled", "cancelling", "forced"]

_log = logger("control")


class BulkDone(NamedTuple):
    """What one call did: how many rows it changed, how many were no longer waiting when they were visited, and how many
    remain in `rest`, which is None when none do."""

    done: int
    no_longer_waiting: int
    remaining: int
    rest: IdRange | None


async def change_retry(
    database: Database,
    kind: RetryKind,
    row_id: uuid.UUID,
    verb: RetryVerb,
    actor: str,
    breaker: BreakerPolicy = TRIGGER_BREAKER,
) -> RetryOutcome:
    """Cancel or force one waiting row. `cancelling`: a worker is executing other steps of the run, and stops it at the
    next. NotFound when there is no such row, Conflict when it is not waiting."""
    order = RetryOrder(verb, actor, breaker)
    done, row = await database.run(partial(_change_one, kind=kind, row_id=row_id, order=order))
    _report(kind, order, done._replace(logged=done.logged or [row.logged]))
    return "cancelling" if done.stopping else DONE[verb]


async def cancel_event(database: Database, event_id: EventId, actor: str) -> None:
    """Take back a stored event that has not been decided: it waits for its time, or its source holds it. Conflict when
    it has been decided, or is about to be."""
    try:
        await change_retry(database, "events", event_id, "cancel", actor)
    except NotFound as exc:
        raise Conflict(f"event {event_id} does not wait: it has been decided, or will be at once") from exc


async def preview_retries(database: Database, kind: RetryKind, filters: RetryFilters) -> int:
    """How many waiting rows the filters select."""
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
    """Cancel or force up to `limit` of the waiting rows that the filters select, continuing at the `rest` of the call
    before. Rows that begin to wait after the first call are not included."""
    began = monotonic()
    order = RetryOrder(verb, actor, breaker, filters.reason)
    async with database.connection() as connection:
        if span is None:
            span = IdRange(None, (await bulk_retries.count(connection, kind, filters, IdRange()))[1])
        found = await bulk_retries.match(connection, kind, filters, span, limit) if span.through else []
    done = visited = 0
    while visited < len(found) and (visited == 0 or monotonic() - began < CALL_SECONDS):
        batch = found[visited : visited + BATCH]
        changed = await database.run(partial(_change_batch, kind=kind, batch=batch, order=order, filters=filters))
        _report(kind, order, changed)
        done += len(changed.ids)
        visited += len(batch)
        failpoints.hit("bulk_retries.after_commit")
    if not found:
        return BulkDone(0, 0, 0, None)
    rest = IdRange(found[visited - 1].id, span.through)
    async with database.connection() as connection:
        remaining, _ = await bulk_retries.count(connection, kind, filters, rest)
    _log.info(f"{kind}.retries_{DONE[verb]}", count=done, remaining=remaining, actor=actor)
    return BulkDone(done, visited - done, remaining, rest if remaining else None)


async def _change_one(
    connection: Connection, *, kind: RetryKind, row_id: uuid.UUID, order: RetryOrder
) -> tuple[ChangedRetries, RetryRow]:
    verbs = KINDS[kind]
    before = await verbs.get(connection, row_id)
    done = await verbs.change(connection, [before.match], order)
    try:
        after = await verbs.get(connection, row_id)
    except NotFound as exc:
        text = "it no longer exists (a replayed run starts its steps again)"
        raise Conflict(f"{verbs.noun} {row_id} is no longer waiting: {text}") from exc
    if not done.ids:
        raise Conflict(f"{verbs.noun} {row_id} is no longer waiting: {after.status}")
    await audit.insert(
        connection, actor=order.actor, action=f"{verbs.noun}.{order.verb}", subject=str(row_id), before=before.audited,
        after=after.audited,
    )  # fmt: skip
    return done, after


async def _change_batch(
    connection: Connection, *, kind: RetryKind, batch: Sequence[WaitingMatch], order: RetryOrder, filters: RetryFilters
) -> ChangedRetries:
    changed = await KINDS[kind].change(connection, batch, order)
    if changed.ids:
        given = {name: value for name, value in filters._asdict().items() if value is not None}
        await audit.insert(
            connection, actor=order.actor, action=f"{kind}.{order.verb}", subject="*", before={"filter": given},
            after={"count": len(changed.ids), "ids": sorted(changed.ids)},
        )  # fmt: skip
    failpoints.hit("bulk_retries.before_commit")
    return changed


def _report(kind: RetryKind, order: RetryOrder, done: ChangedRetries) -> None:
    """Count and log, after the commit, what was done."""
    verbs = KINDS[kind]
    log_trigger_moves(done.moves)
    if order.verb == "cancel":
        verbs.count_cancelled(done.cancelled)
        for workflow in done.ended_runs:
            metrics.ran(workflow, "cancelled")
    for fields in done.logged:
        _log.info(f"{verbs.noun}.retry_{DONE[order.verb]}", **fields, actor=order.actor)
