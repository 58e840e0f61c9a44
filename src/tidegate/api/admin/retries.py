"""List what waits, why, and until when."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import Any

import msgspec
from starlette.requests import Request

from tidegate.api import pages
from tidegate.api.routes import Query, Route, Services
from tidegate.clock import has_utc
from tidegate.errors import FieldError, InvalidInput
from tidegate.model.ids import EventId, RunId, TriggerId
from tidegate.model.retry import RETRY_STATES, RetryState
from tidegate.store import held_deliveries, held_steps, ingress_retries
from tidegate.store.bulk_retries import FILTERS_OF, RetryKind
from tidegate.store.db import Connection
from tidegate.store.held_deliveries import DeliveryFilters, HeldDelivery
from tidegate.store.held_steps import HeldStep
from tidegate.store.ingress_retries import HeldEvent
from tidegate.store.retry_rows import RetryFilters

# Checked query parameters by name.
_Given = dict[str, Any]
# A row's place in the list: when it is due (None for rows that do not wait), and its id.
_Place = tuple[datetime | None, uuid.UUID]

LIST_QUERY = (
    Query("kind", "string", "kind of waiting rows (default events)", tuple(FILTERS_OF)),
    Query("source", "string", "only rows of this source"),
    Query("reason", "string", "only rows that wait for this reason: rate_limit (events), throttle, concurrency, "
          "source_paused (deliveries), paused, breaker_open, budget (deliveries, steps), failed, sleep (steps)"),
    Query("state", "string", "only rows in this retry state (default scheduled)", RETRY_STATES),
    Query("trigger_id", "uuid", "only deliveries and steps of this trigger"),
    Query("workflow", "string", "only deliveries and steps of this workflow"),
    Query("workflow_run_id", "uuid", "only steps of this run"),
    *pages.page_query(),
)  # fmt: skip


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting row. `eta_seconds` is null when it is no longer waiting, or when the time cannot be known: it waits for
    an operator to resume a source, trigger or budget, for a slot, or for a probe to end. A delivery is
    expected later than its next attempt (`expected_at`) while its budget is paused or closed. `budget` and
    `budget_key`: the line in which a delivery or step with the reason `budget` stands; without a key, in none."""

    kind: RetryKind
    id: uuid.UUID
    event_id: EventId | None = None
    external_id: str | None = None
    type: str | None = None
    source: str | None = None
    correlation_id: str | None = None
    trigger_id: TriggerId | None = None
    trigger: str | None = None
    workflow: str | None = None
    workflow_run_id: RunId | None = None
    step: str | None = None
    budget: str | None = None
    budget_key: str | None = None
    retry_state: RetryState
    reason: str | None
    attempts: int
    next_attempt_at: datetime | None
    expected_at: datetime | None = None
    eta_seconds: float | None
    last_error: str | None
    created_at: datetime | None
    updated_at: datetime | None


_DELIVERY_FIELDS = [n for n in Retry.__struct_fields__ if n in HeldDelivery.__struct_fields__ and n != "attempts"]


class RetryPage(msgspec.Struct, frozen=True):
    """Waiting rows in due order, others newest first; `next_cursor` is null on the last page."""

    retries: list[Retry]
    next_cursor: str | None


async def list_retries(request: Request, services: Services) -> RetryPage:
    page = pages.read(request, LIST_QUERY)
    kind: RetryKind = page.given.get("kind", "events")
    check_filters(kind, page.given, "a query parameter is not valid")
    after = _from_cursor(page.cursor)
    async with services.database.connection() as connection:
        found = await _LISTS[kind](connection, page.given, after, page.fetch_limit)
    return RetryPage(*page.cut(found, _to_cursor))


def check_filters(kind: RetryKind, given: Collection[str], message: str) -> None:
    """Raises InvalidInput naming the filters that the kind does not have."""
    wrong = [name for name in RetryFilters._fields if name in given and name not in FILTERS_OF[kind]]
    if wrong:
        raise InvalidInput(message, [FieldError(name, f"is not a filter of kind {kind}") for name in wrong])


async def _events(connection: Connection, given: _Given, after: _Place | None, limit: int) -> list[Retry]:
    state: RetryState = given.get("state", "scheduled")
    source, reason = given.get("source"), given.get("reason")
    if state != "scheduled":
        before = after[1] if after else None
        held = await ingress_retries.list_settled(
            connection, state, source=source, reason=reason, before_id=before, limit=limit
        )
    else:
        held = await ingress_retries.list_waiting(
            connection, source=source, reason=reason, after=_due_place(after), limit=limit
        )
    return [_held(event) for event in held]


async def _deliveries(connection: Connection, given: _Given, after: _Place | None, limit: int) -> list[Retry]:
    state: RetryState = given.get("state", "scheduled")
    filters = DeliveryFilters(*(given.get(name) for name in DeliveryFilters._fields))
    if state != "scheduled":
        before = after[1] if after else None
        found = await held_deliveries.list_settled(connection, state, filters, before_id=before, limit=limit)
    else:
        found = await held_deliveries.list_waiting(connection, filters, after=_due_place(after), limit=limit)
    return [_held_delivery(delivery) for delivery in found]


async def _steps(connection: Connection, given: _Given, after: _Place | None, limit: int) -> list[Retry]:
    state: RetryState = given.get("state", "scheduled")
    filters = RetryFilters(*(given.get(name) for name in RetryFilters._fields))
    if state != "scheduled":
        before = after[1] if after else None
        found = await held_steps.list_settled(connection, state, filters, before_id=before, limit=limit)
    else:
        found = await held_steps.list_waiting(connection, filters, after=_due_place(after), limit=limit)
    return [Retry(kind="steps", **{name: getattr(row, name) for name in HeldStep.__struct_fields__}) for row in found]


_LISTS: dict[RetryKind, Callable[[Connection, _Given, _Place | None, int], Awaitable[list[Retry]]]] = {
    "events": _events,
    "deliveries": _deliveries,
    "steps": _steps,
}


def _held(event: HeldEvent) -> Retry:
    shared = {name: getattr(event, name) for name in HeldEvent.__struct_fields__ if name != "metadata"}
    return Retry(kind="events", id=event.event_id, **shared)


def _held_delivery(delivery: HeldDelivery) -> Retry:
    shared = {name: getattr(delivery, name) for name in _DELIVERY_FIELDS}
    return Retry(kind="deliveries", attempts=delivery.retry_attempts, **shared)


def _to_cursor(row: Retry) -> str:
    return pages.encode(msgspec.json.encode((row.next_attempt_at, row.id)))


def _from_cursor(cursor: str | None) -> _Place | None:
    if cursor is None:
        return None
    try:
        at, row_id = msgspec.json.decode(pages.decode(cursor), type=tuple[datetime | None, uuid.UUID])
    except (ValueError, msgspec.MsgspecError) as exc:
        raise pages.invalid_cursor() from exc
    if at is not None and (at.tzinfo is None or not has_utc(at)):
        raise pages.invalid_cursor()
    return at, row_id


def _due_place(after: _Place | None) -> tuple[datetime, uuid.UUID] | None:
    if after is None:
        return None
    if after[0] is None:
        raise InvalidInput("a query parameter is not valid", [FieldError("cursor", "belongs to another list")])
    return after[0], after[1]


ROUTES = (
    Route("GET", "/admin/retries", list_retries, "List what waits, why, and until when", (RetryPage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
)  # fmt: skip
