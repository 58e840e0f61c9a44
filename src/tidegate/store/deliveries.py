"""`workflow_trigger_deliveries`: one row for each trigger and event. Batch-first, compare-and-set, fenced."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tidegate.model.delivery import Delivery, DeliveryStatus
from tidegate.model.ids import DefinitionId, DeliveryId, EventId, RunId, TriggerId
from tidegate.model.retry import RetryState
from tidegate.store.columns import column, same
from tidegate.store.db import Connection, Row
from tidegate.store.retry_rows import json_texts
from tidegate.store.sql import load
from tidegate.store.totals import BatchTotals

_sql = load("deliveries")


class Decided(NamedTuple):
    """A delivery that was decided: launched with its run, skipped with the run that its key had launched before, failed
    with the error, exhausted, or kept waiting until a time for a reason."""

    id: DeliveryId
    trigger_id: TriggerId
    event_id: EventId
    trigger_version: int
    status: DeliveryStatus
    last_error: str | None
    run_id: RunId | None
    workflow_definition_id: DefinitionId
    correlation_id: str
    parameters: str
    dedupe_key: str | None = None
    concurrency_key: str | None = None
    is_probe: bool = False
    retry_state: RetryState = "none"
    next_attempt_at: datetime | None = None
    retry_attempts: int = 0
    reason: str | None = None
    plan_version: int = 0
    metadata: Mapping[str, Any] = MappingProxyType({})
    source: str = ""
    ingress_sequence: int = 0
    window_id: DeliveryId | None = None


class DueDelivery(NamedTuple):
    """A waiting delivery that is due, not locked."""

    id: DeliveryId
    trigger_id: TriggerId
    source: str | None
    reason: str | None
    budget: str | None = None
    budget_key: str | None = None


class Taken(NamedTuple):
    """A due delivery that this transaction has locked."""

    id: DeliveryId
    trigger_id: TriggerId
    event_id: EventId
    status: DeliveryStatus
    reason: str | None
    retry_attempts: int
    next_attempt_at: datetime
    source: str | None
    concurrency_key: str | None
    trigger_version: int
    window_id: DeliveryId | None = None
    budget: str | None = None
    stale_at: datetime | None = None
    created_at: datetime | None = None


class Stale(NamedTuple):
    """A waiting delivery, locked, whose time belongs to an older plan."""

    id: DeliveryId
    event_id: EventId
    retry_attempts: int
    next_attempt_at: datetime
    ingress_sequence: int
    reason: str | None
    concurrency_key: str | None
    received_at: datetime
    budget: str | None = None
    budget_key: str | None = None


class Moved(NamedTuple):
    """The new time of a waiting delivery, or that it is exhausted."""

    id: DeliveryId
    status: DeliveryStatus
    retry_state: RetryState
    next_attempt_at: datetime | None
    retry_attempts: int
    reason: str | None
    last_error: str | None
    metadata: dict[str, Any]
    plan_version: int


_LAUNCH = Decided._fields[: Decided._fields.index("retry_state")]
_ID, _RUN_ID = _LAUNCH.index("id"), _LAUNCH.index("run_id")
_LAUNCH_DEFAULTS = {
    _LAUNCH.index(field): default
    for field, default in (
        ("status", "launched"), ("last_error", None), ("dedupe_key", None), ("concurrency_key", None),
        ("is_probe", False),
    )
}  # fmt: skip
_SETTLE = Decided._fields[: Decided._fields.index("metadata")]
_HOLD = ("id", "trigger_id", "event_id", "trigger_version", "status", "dedupe_key", "last_error", "next_attempt_at",
         "retry_attempts", "reason", "source", "concurrency_key", "ingress_sequence", "plan_version")  # fmt: skip


class EventDelivery(NamedTuple):
    """A delivery as `explain` shows it."""

    delivery: Delivery
    trigger_name: str
    workflow: str


class Claim(NamedTuple):
    """A worker that claims the runs of these definitions in the transaction that creates them."""

    worker: str | None
    lease_ms: int
    definitions: Sequence[DefinitionId]
    most: int

    def parameters(self, now: datetime) -> tuple[object, ...]:
        """The first parameters of the statements that launch."""
        return now, self.worker, self.lease_ms, self.definitions

    def wanted(self, decided: Sequence[Decided]) -> list[bool]:
        """Which of the launches it claims: the first that it can run."""
        if self.most == 0:
            return [False] * len(decided)
        if self.most >= len(decided) and all(one.status == "launched" for one in decided):
            return [one.workflow_definition_id in self.definitions for one in decided]
        left, found = self.most, []
        for one in decided:
            is_wanted = left > 0 and one.status == "launched" and one.workflow_definition_id in self.definitions
            left -= is_wanted
            found.append(is_wanted)
        return found


NOBODY = Claim(None, 0, (), 0)

# The deliveries that have created a run, and no other that names it, as one that was skipped names the run of its key.
# Of runs that are claimed, the parameters as the database keeps them: the order of keys may differ from what was
# written, and must not between one attempt and the next.
Created = dict[DeliveryId, dict[str, Any] | None]


async def launch(connection: Connection, decided: Sequence[Decided], now: datetime, claim: Claim = NOBODY) -> Created:
    """Record the deliveries and create the runs of those that launch, stamped with `now`."""
    if not decided:
        return {}
    rows = await connection.fetch(
        _sql["launch"], *claim.parameters(now), *_launch_columns(decided), claim.wanted(decided),
        column([d.reason for d in decided]),
    )  # fmt: skip
    return {row[0]: row[1] for row in rows}


async def launch_unrestricted(
    connection: Connection,
    decided: Sequence[Decided],
    now: datetime,
    claim: Claim,
    totals: BatchTotals,
    registry_version: int,
    stateless: Sequence[str],
    unawaited: Sequence[str] = (),
) -> Created | None:
    """Launch deliveries that are all new and that nothing limits, and count them, when there is nothing else to write.
    Returns those alone whose runs are claimed; None, and nothing is written, when the triggers are not of that version
    or any of them, or of the sources that are expected to be `stateless`, has a state that must be locked first, or a
    run waits for events of one of the types that are expected to be `unawaited`."""
    rows = await connection.fetch(
        _sql["launch_unrestricted"],
        *claim.parameters(now),
        [d.id for d in decided],
        same([d.trigger_id for d in decided]),
        [d.event_id for d in decided],
        same([d.trigger_version for d in decided]),
        same([d.workflow_definition_id for d in decided]),
        [d.correlation_id for d in decided],
        [d.parameters for d in decided],
        same(claim.wanted(decided)),
        registry_version,
        stateless,
        *totals.parameters(),
        unawaited,
        _concurrency_keys(decided),
    )
    if not all(row[0] for row in rows):
        return None
    return {row[1]: row[2] for row in rows if row[1] is not None}


async def hold(connection: Connection, held: Sequence[Decided], now: datetime) -> None:
    """Record deliveries that must wait."""
    if held:
        await connection.execute(_sql["hold"], *_columns(held, _HOLD), json_texts(dict(d.metadata) for d in held), now)


async def due_triggers(connection: Connection, limit: int) -> list[TriggerId]:
    """Triggers with due deliveries, the longest due first."""
    return [row[0] for row in await connection.fetch(_sql["due_triggers"], limit)]


async def list_due(
    connection: Connection, trigger_ids: Sequence[TriggerId], of_each: int, at: datetime | None = None
) -> list[DueDelivery]:
    """Deliveries of the triggers that are due at a time, by default now, in the order of arrival; not locked."""
    return [DueDelivery(*row) for row in await connection.fetch(_sql["list_due"], trigger_ids, of_each, at)]


async def take(connection: Connection, ids: Sequence[DeliveryId], at: datetime) -> list[Taken]:
    """Lock those of the deliveries that are still due at the time by which they are decided, oldest event first."""
    return [Taken(*row) for row in await connection.fetch(_sql["take"], ids, at)] if ids else []


async def settle(connection: Connection, decided: Sequence[Decided], now: datetime, claim: Claim = NOBODY) -> Created:
    """Write what became of deliveries that this transaction has locked, and create the runs of those that launch."""
    if not decided:
        return {}
    rows = await connection.fetch(
        _sql["settle"], *claim.parameters(now), *_columns(decided, _SETTLE),
        json_texts(dict(d.metadata) for d in decided), claim.wanted(decided),
    )  # fmt: skip
    return {row[0]: row[1] for row in rows}


async def stale_budgets(
    connection: Connection, trigger_id: TriggerId, *, plan_version: int, after: int, limit: int
) -> list[str]:
    """The budgets that those wait for which `take_stale` locks."""
    rows = await connection.fetch(_sql["stale_budgets"], trigger_id, plan_version, after, limit)
    return [row[0] for row in rows]


async def take_stale(
    connection: Connection, trigger_id: TriggerId, *, plan_version: int, after: int, limit: int
) -> list[Stale]:
    """Lock waiting deliveries whose time belongs to an older plan, in the order of arrival."""
    rows = await connection.fetch(_sql["take_stale"], trigger_id, plan_version, after, limit)
    return [Stale(*row) for row in rows]


async def move(connection: Connection, moved: Sequence[Moved]) -> None:
    """Give waiting deliveries that this transaction has locked a new time, or mark them as exhausted."""
    if moved:
        columns = _columns(moved, Moved._fields)
        columns[7] = json_texts(m.metadata for m in moved)
        await connection.execute(_sql["move"], *columns)


async def keep_waiting(connection: Connection, ids: Sequence[DeliveryId], plan_version: int) -> None:
    """Deliveries that keep their place and time in a new plan."""
    if ids:
        await connection.execute(_sql["keep_waiting"], ids, plan_version)


async def release_sources(connection: Connection, limit: int) -> int:
    """Make deliveries due that waited for their source to be resumed, once it is; how many."""
    return len(await connection.fetch(_sql["release_sources"], limit))


async def next_due_seconds(connection: Connection) -> float | None:
    """Seconds until the next waiting delivery that is not due yet."""
    found: float | None = await connection.fetchval(_sql["next_due"])
    return found


async def dead_letter(
    connection: Connection, letters: Sequence[tuple[DeliveryId, EventId, str, dict[str, Any]]]
) -> None:
    """Dead letters (delivery, event, reason, detail) for deliveries that are exhausted or failed for good."""
    if letters:
        ids, event_ids, reasons, details = zip(*letters, strict=True)
        await connection.execute(_sql["dead_letter"], list(ids), list(event_ids), list(reasons), json_texts(details))


async def list_scheduled(
    connection: Connection,
    *,
    after: tuple[datetime, uuid.UUID] | None = None,
    limit: int = 500,
) -> list[Delivery]:
    """Waiting rows in due order, after `(next_attempt_at, id)`."""
    at, last = after or (None, None)
    return [_delivery(row) for row in await connection.fetch(_sql["list_scheduled"], at, last, limit)]


async def list_of_event(connection: Connection, event_id: EventId) -> list[EventDelivery]:
    """The deliveries of one event, in order."""
    rows = await connection.fetch(_sql["list_of_event"], event_id)
    return [EventDelivery(_delivery(row), row["trigger_name"], row["workflow"]) for row in rows]


def _concurrency_keys(decided: Sequence[Decided]) -> Sequence[str | None]:
    """None at all when no run holds a slot, one when all have the same key."""
    keys = [one.concurrency_key for one in decided]
    if not keys or keys.count(keys[0]) != len(keys):
        return keys
    return [] if keys[0] is None else keys[:1]


def _launch_columns(decided: Sequence[Decided]) -> list[Sequence[object]]:
    columns: list[Sequence[object]] = list(zip(*decided, strict=True))[: len(_LAUNCH)] or [()] * len(_LAUNCH)
    for place, default in _LAUNCH_DEFAULTS.items():
        columns[place] = column(columns[place], default)
    if columns[_RUN_ID] == columns[_ID]:
        columns[_RUN_ID] = ()  # every one of them is launched
    return columns


def _columns(rows: Sequence[Any], fields: Sequence[str]) -> list[list[object]]:
    return [[getattr(row, field) for row in rows] for field in fields]


def _delivery(row: Row) -> Delivery:
    return msgspec.convert(dict(row), Delivery)
