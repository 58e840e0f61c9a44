"""A workflow's triggers: list, create, show, update, delete; their versions and deliveries."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Query, Route, Services, json_response, path_trigger_id
from tidegate.api.v1.workflows import show_workflow
from tidegate.flow import control
from tidegate.flow.control.triggers import find_trigger
from tidegate.model.backlog import BacklogPolicy
from tidegate.model.delivery import DELIVERY_STATUSES
from tidegate.model.ids import RunId, TriggerId
from tidegate.model.predicate import Predicate
from tidegate.model.retry import RetryPolicy
from tidegate.model.source import BreakerPolicy, BreakerState
from tidegate.model.trigger import Trigger, TriggerHolds, TriggerOverlap, TriggerStatus
from tidegate.model.trigger_change import TriggerBody, TriggerPatch
from tidegate.model.window import CollectPolicy
from tidegate.store import held_deliveries, locks, triggers
from tidegate.store.db import Connection
from tidegate.store.held_deliveries import HeldDelivery
from tidegate.store.trigger_gates import TriggerState
from tidegate.store.triggers import TriggerVersion

JsonObject = dict[str, Any]

LIST_QUERY = page_query("uuid")
DELIVERIES_QUERY = (
    Query("status", "string", "Only deliveries in this status.", DELIVERY_STATUSES),
    *page_query("uuid"),
)
VERSIONS_QUERY = page_query()


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger's pause and breaker, how many of its deliveries are waiting, and how many runs wait for a slot to go on
    (`resuming`)."""

    paused: bool
    paused_at: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None
    breaker_state: BreakerState
    breaker_until: datetime | None
    breaker_reason: str | None
    probe_run_id: RunId | None
    waiting: int
    next_attempt_at: datetime | None
    resuming: int


class TriggerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger: which events launch its workflow, and its limits."""

    id: TriggerId
    workflow: str
    name: str
    event_type: str
    event_source: str
    predicates: list[Predicate]
    where: str | None
    parameter_template: JsonObject | None
    idempotency_key: str | None
    idempotency_window_ms: int
    concurrency_key: str | None
    throttle_count: int | None
    throttle_window_ms: int | None
    max_concurrency: int | None
    retry: RetryPolicy | None
    breaker: BreakerPolicy | None
    key: str | None
    collect: CollectPolicy | None
    priority: int
    skip_over_count: int | None
    skip_over_window_ms: int | None
    overlap: TriggerOverlap
    cancel_running: bool
    budgets: list[str]
    backlog: BacklogPolicy | None
    holds: TriggerHolds
    status: TriggerStatus
    version: int
    created_by: str
    updated_by: str
    created_at: datetime | None
    updated_at: datetime | None
    state: State


class TriggerPage(msgspec.Struct, frozen=True):
    """Triggers: those of one workflow oldest first, all of them by workflow and name. `next_cursor` is null on the last
    page."""

    triggers: list[TriggerAnswer]
    next_cursor: str | None


class TriggerDeleted(msgspec.Struct, frozen=True):
    """The deleted trigger, and how many waiting deliveries were cancelled with it."""

    id: TriggerId
    workflow: str
    name: str
    cancelled: int


class DeliveryPage(msgspec.Struct, frozen=True):
    """Deliveries, newest first; `next_cursor` is null on the last page."""

    deliveries: list[HeldDelivery]
    next_cursor: str | None


class VersionPage(msgspec.Struct, frozen=True):
    """The versions of a trigger, newest first; `next_cursor` is null on the last page."""

    versions: list[TriggerVersion]
    next_cursor: str | None


async def list_triggers(request: Request, services: Services) -> TriggerPage:
    page = pages.read(request, LIST_QUERY)
    workflow = await show_workflow(request, services)
    async with services.database.connection() as connection:
        found = await triggers.list_of_workflow(connection, workflow.slug, after=page.cursor, limit=page.fetch_limit)
        rows, next_cursor = page.cut(found, lambda trigger: trigger.id)
        return TriggerPage(await answers(connection, rows), next_cursor)


async def create_trigger(request: Request, services: Services) -> Response:
    given = await bodies.read_json(request)
    created = await control.create_trigger(
        services.database, request.path_params["slug"], given, actor=bodies.actor(request)
    )
    return json_response(await changed(services, created), 201)


async def show_trigger(request: Request, services: Services) -> TriggerAnswer:
    async with services.database.connection() as connection:
        return (await answers(connection, [await path_trigger(connection, request)]))[0]


async def update_trigger(request: Request, services: Services) -> TriggerAnswer:
    given = await bodies.read_json(request)
    trigger_id, slug = path_trigger_id(request), request.path_params["slug"]
    actor = bodies.actor(request)
    return await changed(
        services, await control.update_trigger(services.database, trigger_id, given, actor=actor, workflow=slug)
    )


async def delete_trigger(request: Request, services: Services) -> TriggerDeleted:
    await bodies.read(request, bodies.Nothing)
    trigger_id, slug = path_trigger_id(request), request.path_params["slug"]
    deleted, cancelled = await control.delete_trigger(
        services.database, trigger_id, actor=bodies.actor(request), workflow=slug
    )
    hint(services)
    return TriggerDeleted(deleted.id, deleted.workflow, deleted.name, cancelled)


async def list_trigger_deliveries(request: Request, services: Services) -> DeliveryPage:
    page = pages.read(request, DELIVERIES_QUERY)
    async with services.database.connection() as connection:
        trigger = await path_trigger(connection, request)
        found = await held_deliveries.list_of_trigger(
            connection, trigger.id, status=page.get("status"), before_id=page.cursor, limit=page.fetch_limit
        )
    return DeliveryPage(*page.cut(found, lambda delivery: delivery.id))


async def list_deliveries(request: Request, services: Services) -> DeliveryPage:
    page = pages.read(request, DELIVERIES_QUERY)
    async with services.database.connection() as connection:
        found = await held_deliveries.list_recent(
            connection, status=page.get("status"), before_id=page.cursor, limit=page.fetch_limit
        )
    return DeliveryPage(*page.cut(found, lambda delivery: delivery.id))


async def list_versions(request: Request, services: Services) -> VersionPage:
    page = pages.read(request, VERSIONS_QUERY)
    before = page.number_cursor()
    async with services.database.connection() as connection:
        trigger = await path_trigger(connection, request)
        found = await triggers.list_versions(connection, trigger.id, before_version=before, limit=page.fetch_limit)
    return VersionPage(*page.cut(found, lambda version: version.version))


async def answers(connection: Connection, found: list[Trigger]) -> list[TriggerAnswer]:
    """Triggers with their current state, as answers."""
    states = await triggers.states(connection, [trigger.id for trigger in found])
    now = await locks.now(connection)
    shared = [name for name in TriggerAnswer.__struct_fields__ if name != "state"]
    return [
        TriggerAnswer(state=_state(states[t.id], now), **{name: getattr(t, name) for name in shared}) for t in found
    ]


async def changed(services: Services, trigger: Trigger) -> TriggerAnswer:
    """The answer to a change; workers are notified to act on it at once."""
    hint(services)
    async with services.database.connection() as connection:
        return (await answers(connection, [trigger]))[0]


def hint(services: Services) -> None:
    """Notify workers: waiting deliveries may be launched now, or need new slots."""
    services.queue.hint("plans")
    services.queue.hint("deliveries")
    services.queue.hint("runs")  # those that waited for a slot


async def path_trigger(connection: Connection, request: Request) -> Trigger:
    return await find_trigger(connection, path_trigger_id(request), request.path_params["slug"])


def _state(state: TriggerState, now: datetime) -> State:
    paused = state.paused_at is not None and (state.paused_until is None or state.paused_until > now)
    return State(
        paused=paused,
        paused_at=state.paused_at if paused else None,
        paused_until=state.paused_until if paused else None,
        pause_reason=state.pause_reason if paused else None,
        paused_by=state.paused_by if paused else None,
        breaker_state=state.breaker_state,
        breaker_until=state.breaker_until,
        breaker_reason=state.breaker_reason,
        probe_run_id=state.probe_run_id,
        waiting=state.waiting,
        next_attempt_at=state.next_attempt_at,
        resuming=state.resuming,
    )


_ALL = "/v1/workflows/{slug}/triggers"
_ONE = f"{_ALL}/{{trigger_id}}"
_REFUSALS = (400, 404, 408, 413, 415, 422)

ROUTES = (
    Route("GET", _ALL, list_triggers, "List a workflow's triggers", (TriggerPage,), scope="read", query=LIST_QUERY,
          errors=(404, 422)),
    Route("POST", _ALL, create_trigger, "Create a trigger", (TriggerAnswer,), scope="admin", status=201,
          body=bodies.schema(TriggerBody, ("name", "event_type")), errors=(*_REFUSALS, 409)),
    Route("GET", _ONE, show_trigger, "Show one trigger", (TriggerAnswer,), scope="read", errors=(404,)),
    Route("PATCH", _ONE, update_trigger,
          "Update the given fields (null clears one); waiting deliveries are evaluated again", (TriggerAnswer,),
          scope="admin", body=bodies.schema(TriggerPatch), errors=(*_REFUSALS, 409)),
    Route("DELETE", _ONE, delete_trigger, "Delete a trigger and cancel its waiting deliveries", (TriggerDeleted,),
          scope="admin", errors=_REFUSALS),
    Route("GET", f"{_ONE}/deliveries", list_trigger_deliveries, "List the deliveries of a trigger, newest first",
          (DeliveryPage,), scope="read", query=DELIVERIES_QUERY, errors=(404, 422)),
    Route("GET", f"{_ONE}/versions", list_versions, "List the versions of a trigger, newest first", (VersionPage,),
          scope="read", query=VERSIONS_QUERY, errors=(404, 422)),
    Route("GET", "/v1/deliveries", list_deliveries, "List the deliveries of all triggers, newest first",
          (DeliveryPage,), scope="read", query=DELIVERIES_QUERY, errors=(422,)),
)  # fmt: skip
