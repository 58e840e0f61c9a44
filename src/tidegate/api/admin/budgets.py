"""Operator requests for budgets: create and change, pause and resume, what waits for them and who holds them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from starlette.requests import Request

from tidegate.api import bodies, pages
from tidegate.api.admin.sources import DRY_RUN_QUERY, PauseBody
from tidegate.api.pages import page_query
from tidegate.api.routes import Query, Route, Services, parameters
from tidegate.flow import control
from tidegate.flow.control.budgets import required
from tidegate.flow.look import budgets as look
from tidegate.flow.predict import budget_edit
from tidegate.flow.predict.budget_edit import BudgetCheck
from tidegate.model.budget import BudgetSpec
from tidegate.store import budgets, locks, troubled_budgets
from tidegate.store.budget_views import BudgetHolder, KeyLine
from tidegate.store.budgets import BudgetRecord
from tidegate.store.db import Connection
from tidegate.store.troubled_budgets import ClosedBudgetKey, ClosedBudgetKeys

LIST_QUERY = page_query()
SHOW_QUERY = (Query("key", "string", "Only the line and the holders of this key."),)


class BudgetAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A budget: a rate (`limit` per `interval_ms`), a `concurrency`, or both, for each key. `waiting` deliveries and
    steps (`waiting_steps`) wait for it, the oldest since `oldest_at`; `unread` of them because its key or cost cannot
    be evaluated for them. `in_use` of its slots are held by runs or steps, `resuming` runs wait for one to go on;
    `keys` were used within the interval. `closed` are keys that a run has closed for everyone, up to 20 of
    `closed_keys`."""

    name: str
    limit: int | None
    interval_ms: int | None
    concurrency: int | None
    key: str | None
    cost: str | None
    paused: bool
    paused_at: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None
    closed: list[ClosedBudgetKey]
    closed_keys: int
    waiting: int
    waiting_steps: int
    unread: int
    oldest_at: datetime | None
    next_attempt_at: datetime | None
    in_use: int
    resuming: int
    keys: int
    used_by: list[str]
    version: int
    created_by: str
    updated_by: str
    created_at: datetime
    updated_at: datetime


class BudgetPage(msgspec.Struct, frozen=True):
    """Budgets, by name; `next_cursor` is null on the last page."""

    budgets: list[BudgetAnswer]
    next_cursor: str | None


class BudgetShown(msgspec.Struct, frozen=True):
    """A budget, the keys for which most wait, and the runs that have held its slots longest; at most 20 of each."""

    budget: BudgetAnswer
    lines: list[KeyLine]
    holders: list[BudgetHolder]


class BudgetSet(BudgetAnswer, frozen=True, kw_only=True):
    """A budget as it is now, and whether its key and cost can be evaluated for what waited."""

    check: BudgetCheck


class BudgetBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A budget: `limit` per `interval_ms`, `concurrency`, or both. `key` is a template, `cost` a CEL expression."""

    limit: int | None = None
    interval_ms: int | None = None
    concurrency: int | None = None
    key: str | None = None
    cost: str | None = None


async def list_budgets(request: Request, services: Services) -> BudgetPage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        found = await budgets.list_page(connection, after=page.cursor, limit=page.fetch_limit)
        rows, next_cursor = page.cut(found, lambda record: record.name)
        return BudgetPage(await _answers(connection, rows), next_cursor)


async def show_budget(request: Request, services: Services) -> BudgetShown:
    page = pages.read(request, SHOW_QUERY)
    async with services.database.connection() as connection:
        found = await look.view(connection, await required(connection, _name(request)), page.get("key"))
        [answer] = await _answers(connection, [found.budget])
        return BudgetShown(answer, found.lines, found.holders)


async def put_budget(request: Request, services: Services) -> BudgetSet | BudgetCheck:
    is_dry_run: bool = parameters(request, DRY_RUN_QUERY).get("dry_run", False)
    given = await bodies.read(request, BudgetBody)
    spec = BudgetSpec(name=_name(request), **msgspec.structs.asdict(given))
    checked = await budget_edit.check(services.database, spec)
    if is_dry_run:
        return checked
    done = await _done(services, await control.put_budget(services.database, spec, bodies.actor(request)))
    return BudgetSet(check=checked, **{name: getattr(done, name) for name in BudgetAnswer.__struct_fields__})


async def delete_budget(request: Request, services: Services) -> BudgetAnswer:
    await bodies.read(request, bodies.Nothing)
    return await _done(
        services, await control.delete_budget(services.database, _name(request), bodies.actor(request))
    )  # fmt: skip


async def pause_budget(request: Request, services: Services) -> BudgetAnswer:
    given = await bodies.read(request, PauseBody)
    bodies.check_reason(given.reason)
    paused = await control.pause_budget(
        services.database,
        _name(request),
        until=given.until,
        duration_ms=given.duration_ms,
        reason=given.reason,
        actor=bodies.actor(request),
    )
    return await _done(services, paused)


async def resume_budget(request: Request, services: Services) -> BudgetAnswer:
    await bodies.read(request, bodies.Nothing)
    return await _done(
        services, await control.resume_budget(services.database, _name(request), bodies.actor(request))
    )  # fmt: skip


async def _done(services: Services, changed: BudgetRecord) -> BudgetAnswer:
    """The answer to a change; workers are notified to act on it at once."""
    services.queue.hint("deliveries")
    services.queue.hint("runs")
    async with services.database.connection() as connection:
        [answer] = await _answers(connection, [changed])
        return answer


def _name(request: Request) -> str:
    name: str = request.path_params["name"]
    return name


async def _answers(connection: Connection, records: Sequence[BudgetRecord]) -> list[BudgetAnswer]:
    now = await locks.now(connection)
    closed = await troubled_budgets.closed_keys(connection, [one.name for one in records], look.SHOWN)
    return [_answer(one, closed.get(one.name, ClosedBudgetKeys()), now) for one in records]


def _answer(record: BudgetRecord, closed: ClosedBudgetKeys, now: datetime) -> BudgetAnswer:
    paused = record.paused_at is not None and (record.paused_until is None or record.paused_until > now)
    fields = {name: getattr(record, name) for name in BudgetAnswer.__struct_fields__ if name not in _FOUND}
    if not paused:
        fields |= dict.fromkeys(("paused_at", "paused_until", "pause_reason", "paused_by"))
    return BudgetAnswer(paused=paused, closed=closed.keys, closed_keys=closed.total, **fields)


# What is not of the budget's row.
_FOUND = ("paused", "closed", "closed_keys")
_ONE = "/admin/budgets/{name}"
_REFUSALS = (400, 404, 408, 413, 415, 422)

ROUTES = (
    Route("GET", "/admin/budgets", list_budgets, "List budgets, with what waits for them and who uses them",
          (BudgetPage,), scope="read", query=LIST_QUERY, errors=(422,)),
    Route("GET", _ONE, show_budget, "Show a budget with its longest lines and the runs that hold its slots",
          (BudgetShown,), scope="read", query=SHOW_QUERY, errors=(404, 422)),
    Route("PUT", _ONE, put_budget, "Create a budget, or replace it; what waits for it is decided by it as it is then",
          (BudgetSet, BudgetCheck), scope="admin", query=DRY_RUN_QUERY, body=bodies.schema(BudgetBody),
          errors=_REFUSALS),
    Route("DELETE", _ONE, delete_budget, "Delete a budget that no trigger uses", (BudgetAnswer,), scope="admin",
          errors=(*_REFUSALS, 409)),
    Route("POST", f"{_ONE}/pause", pause_budget, "Pause a budget: nothing of it is spent", (BudgetAnswer,),
          scope="operate", body=bodies.schema(PauseBody), errors=_REFUSALS),
    Route("POST", f"{_ONE}/resume", resume_budget, "Resume a budget: the first in each line are due at once",
          (BudgetAnswer,), scope="operate", errors=_REFUSALS),
)  # fmt: skip
