"""Requests with a token that is bound to sources: it may read and change what belongs to them, and nothing global.

RULES lists every route that such a token may use; all others answer 403. Lists are filtered to its own rows, so a page
may be shorter than its limit. What belongs to another source answers 404.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec
from starlette.requests import Request

from tidegate.api import bodies
from tidegate.api.routes import (
    Route,
    Services,
    path_approval_id,
    path_dead_letter_id,
    path_delivery_id,
    path_run_id,
    path_step_id,
)
from tidegate.errors import Forbidden, NotFound
from tidegate.flow.accept.access import Principal
from tidegate.flow.look import explain
from tidegate.flow.look.health import Snapshot, SourceHealth, status_of
from tidegate.flow.look.verdict import Cause
from tidegate.model.ids import RunId
from tidegate.model.start import source_of_starts
from tidegate.store import approvals, dead_letters, events, held_deliveries, held_steps, runs
from tidegate.store.db import Connection
from tidegate.store.health import LimitHealth, PausedSource, SourceBreaker

Check = Callable[[Request, Services, Principal], Awaitable[None]]


class SourceRule(NamedTuple):
    """How a route is restricted: `check` tests the one resource requested, `rows` names the list to filter."""

    check: Check | None = None
    rows: str | None = None


class OwnHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Health for a token that is bound to sources: the parts of the snapshot about these sources."""

    status: Literal["ok", "degraded", "critical"]
    causes: list[Cause]
    generated_at: datetime
    sources: list[SourceHealth]
    rate_limits: list[LimitHealth]
    paused_sources: list[PausedSource]
    source_breakers: list[SourceBreaker]


async def answer(route: Route, request: Request, services: Services, principal: Principal) -> Any:
    """The answer to a token that is bound to sources. Forbidden where a route is not limited to single sources."""
    own = RULES.get((route.method, route.path))
    if own is None or route.scope == "public":
        text = f"the token {principal.name} is bound to sources, and this request is not about single sources"
        raise Forbidden(text, str(route.scope))
    if own.check is not None:
        await own.check(request, services, principal)
    result = await route.handler(request, services)
    if own.rows is None:
        return result
    rows: list[Any] = getattr(result, own.rows)
    async with services.database.connection() as connection:
        found = await _sources(connection, rows)
    shown = [row for row, source in zip(rows, found, strict=True) if source is not None and principal.may_use(source)]
    return msgspec.structs.replace(result, **{own.rows: shown})


def narrowed(found: Snapshot, principal: Principal) -> OwnHealth:
    """The parts of a snapshot that are about the token's own sources."""
    causes = [c for c in found.causes if c.code.startswith("source_") and principal.may_use(c.subject)]

    def own(rows: Sequence[Any]) -> list[Any]:
        return [row for row in rows if principal.may_use(row.source)]

    return OwnHealth(
        status=status_of(causes),
        causes=causes,
        generated_at=found.generated_at,
        sources=own(found.sources),
        rate_limits=own(found.rate_limits),
        paused_sources=own(found.paused_sources),
        source_breakers=own(found.source_breakers),
    )


async def _sources(connection: Connection, rows: Sequence[Any]) -> list[str | None]:
    """The source of each row: its own, or that of its event."""
    ids = {row.event_id for row in rows if not hasattr(row, "source") and row.event_id is not None}
    known = await events.get_many(connection, ids) if ids else {}
    of_events = {event_id: event.source for event_id, event in known.items()}
    return [row.source if hasattr(row, "source") else of_events.get(row.event_id) for row in rows]


async def _event(request: Request, services: Services, principal: Principal) -> None:
    """Replaces the id in the path by ours: a producer's id may belong to an event of another source too."""
    given = request.path_params["id"]
    async with services.database.connection() as connection:
        found = [event for event in await events.find(connection, given) if principal.may_use(event.source)]
    request.path_params["id"] = str(explain.only_one(given, found).id)


async def _run(request: Request, services: Services, principal: Principal) -> None:
    run_id = path_run_id(request)
    async with services.database.connection() as connection:
        is_own = await _is_own_run(connection, run_id, principal)
    if not is_own:
        raise NotFound(f"no run {run_id}")


async def _delivery(request: Request, services: Services, principal: Principal) -> None:
    delivery_id = path_delivery_id(request)
    async with services.database.connection() as connection:
        found = await held_deliveries.get(connection, delivery_id)
    if found is None or not principal.may_use(found.source):
        raise NotFound(f"no delivery {delivery_id}")


async def _step(request: Request, services: Services, principal: Principal) -> None:
    step_id = path_step_id(request)
    async with services.database.connection() as connection:
        found = await held_steps.get(connection, [step_id])
        is_own = bool(found) and await _is_own_run(connection, found[0].workflow_run_id, principal)
    if not is_own:
        raise NotFound(f"no step {step_id}")


async def _approval(request: Request, services: Services, principal: Principal) -> None:
    approval_id = path_approval_id(request)
    async with services.database.connection() as connection:
        found = await approvals.get(connection, approval_id)
        is_own = found is not None and await _is_own_run(connection, found.run_id, principal)
    if not is_own:
        raise NotFound(f"no approval {approval_id}")


async def _letter(request: Request, services: Services, principal: Principal) -> None:
    letter_id = path_dead_letter_id(request)
    async with services.database.connection() as connection:
        found = await dead_letters.get(connection, letter_id)
    if found is None or found.source is None or not principal.may_use(found.source):
        raise NotFound(f"no dead letter {letter_id}")


async def _start(request: Request, _: Services, principal: Principal) -> None:
    source = source_of_starts(request.path_params["slug"])
    if not principal.may_use(source):
        raise Forbidden(f"the token {principal.name} may not start this workflow: its source is {source}", "publish")


async def _source(request: Request, _: Services, principal: Principal) -> None:
    _require(principal, request.path_params["source"])


async def _named_source(request: Request, _: Services, principal: Principal) -> None:
    """A bulk request must filter by one of the token's sources, so that it does not reach other sources."""
    given = await bodies.read_json(request)
    _require(principal, given.get("source") if isinstance(given, dict) else None)


def _require(principal: Principal, source: object) -> None:
    if not isinstance(source, str) or not principal.may_use(source):
        bound = ", ".join(principal.sources or ())
        raise Forbidden(f"the token {principal.name} is bound to the sources {bound}: name one of them", "operate")


async def _is_own_run(connection: Connection, run_id: RunId, principal: Principal) -> bool:
    run = await runs.get(connection, run_id)
    if run is None:
        return False
    [source] = await _sources(connection, [run])
    return source is not None and principal.may_use(source)


RULES: dict[tuple[str, str], SourceRule] = {
    ("POST", "/v1/events"): SourceRule(),  # its handler checks each event
    ("GET", "/admin/event-health"): SourceRule(),  # its handler filters the snapshot
    ("GET", "/v1/events"): SourceRule(rows="events"),
    ("GET", "/v1/events/{id:path}"): SourceRule(_event),
    ("POST", "/v1/events/{id:path}/cancel"): SourceRule(_event),
    ("GET", "/v1/events/{id:path}/explain"): SourceRule(_event),
    ("GET", "/v1/explain/{id:path}"): SourceRule(),  # its handler checks the source
    ("POST", "/v1/events/{id:path}/replay"): SourceRule(_event),
    ("POST", "/admin/event-replays"): SourceRule(_named_source),
    ("POST", "/v1/workflows/{slug}/runs"): SourceRule(_start),
    ("GET", "/v1/runs"): SourceRule(rows="runs"),
    ("GET", "/v1/runs/{run_id}"): SourceRule(_run),
    ("POST", "/v1/runs/{run_id}/cancel"): SourceRule(_run),
    ("POST", "/v1/runs/{run_id}/retry"): SourceRule(_run),
    ("POST", "/v1/runs/{run_id}/rerun"): SourceRule(_run),
    ("POST", "/v1/runs/{run_id}/resume"): SourceRule(_run),
    ("GET", "/v1/deliveries"): SourceRule(rows="deliveries"),
    ("GET", "/admin/decisions"): SourceRule(rows="decisions"),
    ("GET", "/admin/retries"): SourceRule(rows="retries"),
    ("POST", "/admin/retries/{kind}/cancel"): SourceRule(_named_source),
    ("POST", "/admin/retries/{kind}/force"): SourceRule(_named_source),
    ("POST", "/admin/retries/events/{id:path}/cancel"): SourceRule(_event),
    ("POST", "/admin/retries/events/{id:path}/force"): SourceRule(_event),
    ("POST", "/admin/retries/deliveries/{delivery_id}/cancel"): SourceRule(_delivery),
    ("POST", "/admin/retries/deliveries/{delivery_id}/force"): SourceRule(_delivery),
    ("POST", "/admin/retries/steps/{step_id}/cancel"): SourceRule(_step),
    ("POST", "/admin/retries/steps/{step_id}/force"): SourceRule(_step),
    ("GET", "/admin/approvals"): SourceRule(rows="approvals"),
    ("POST", "/admin/approvals/{approval_id}/approve"): SourceRule(_approval),
    ("POST", "/admin/approvals/{approval_id}/reject"): SourceRule(_approval),
    ("GET", "/admin/dead-letters"): SourceRule(rows="dead_letters"),
    ("GET", "/admin/dead-letters/{dead_letter_id}"): SourceRule(_letter),
    ("POST", "/admin/dead-letters/{dead_letter_id}/replay"): SourceRule(_letter),
    ("POST", "/admin/dead-letters/replay"): SourceRule(_named_source),
    ("GET", "/admin/sources"): SourceRule(rows="sources"),
    ("POST", "/admin/sources/{source:path}/pause"): SourceRule(_source),
    ("POST", "/admin/sources/{source:path}/resume"): SourceRule(_source),
    ("GET", "/admin/webhooks"): SourceRule(rows="webhooks"),
    ("GET", "/admin/sources/{source:path}/webhook"): SourceRule(_source),
}
