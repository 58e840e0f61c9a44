"""Cancel, retry or rerun all runs that filters describe.

They are counted first, then changed one by one, each in its own transaction with its audit row. A call changes a
bounded number; its result says where the next call continues. Ids are visited in order, each once; runs that were
created after the first call are not included, so that a rerun is not repeated. Nor is it when the database goes down in
the middle: the result then says how far the call came, and the run whose commit was not answered is visited again. The
id of its rerun is derived from `call_id`, which the calls that continue have in common, so that it is found.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Final, Literal, NamedTuple

from tidegate.clock import monotonic
from tidegate.errors import Conflict, NotFound, Unavailable
from tidegate.flow.control.retries import CALL_SECONDS, MAX_PER_CALL
from tidegate.flow.control.runs import cancel_run, rerun_run, retry_run
from tidegate.model.ids import RunId
from tidegate.model.run import FINAL_RUN_STATUSES, RunStatus
from tidegate.model.source import BreakerPolicy
from tidegate.store import run_search
from tidegate.store.db import Database
from tidegate.store.run_search import RunFilters
from tidegate.telemetry.logs import logger

RunVerb = Literal["cancel", "retry", "rerun"]
# The runs that each verb applies to.
RUN_VERBS: Final[dict[RunVerb, tuple[RunStatus, ...]]] = {
    "cancel": ("pending", "running"),
    "retry": ("failed", "cancelled"),
    "rerun": FINAL_RUN_STATUSES,
}
# Runs are counted up to this many.
MOST_COUNTED = 100_000
# How many different reasons of refusals are told.
_MOST_REASONS = 5
# Before all runs.
_FIRST = uuid.UUID(int=0)

_log = logger("control")


class RunsChanged(NamedTuple):
    """What one call did: how many runs it changed, how many refused and why, how many remain, and after which run,
    before which time and as which call the next one continues (`after_id` is None when none remain)."""

    done: int
    refused: int
    reasons: dict[str, int]
    remaining: int
    after_id: uuid.UUID | None
    before: datetime
    call_id: uuid.UUID


async def preview_runs(database: Database, verb: RunVerb, filters: RunFilters) -> RunsChanged:
    """How many runs the verb would be applied to (`remaining`), counted up to MOST_COUNTED, and where to begin: a call
    that begins there can be repeated if its answer is lost."""
    async with database.connection() as connection:
        count, now = await run_search.count(connection, applicable(verb, filters), most=MOST_COUNTED)
    return RunsChanged(0, 0, {}, count, _FIRST if count else None, now, uuid.uuid4())


async def change_runs(
    database: Database,
    verb: RunVerb,
    filters: RunFilters,
    actor: str,
    breaker: BreakerPolicy,
    *,
    after_id: uuid.UUID | None = None,
    before: datetime | None = None,
    call_id: uuid.UUID | None = None,
    limit: int = MAX_PER_CALL,
) -> RunsChanged:
    """Apply a verb to up to `limit` of the runs that the filters describe, continuing where the call before ended."""
    began = monotonic()
    is_first, call_id = call_id is None, call_id or uuid.uuid4()
    asked = applicable(verb, filters)
    async with database.connection() as connection:
        now = before or (await run_search.count(connection, asked, most=1))[1]
        until = now if asked.created_to is None else min(now, asked.created_to)
        if before is not None:
            asked = asked._replace(created_to=until)
        found = await run_search.list_ids(connection, asked, after_id=after_id, limit=limit)
    change = _changes(database, verb, actor, breaker, call_id)
    reasons: Counter[str] = Counter()
    done = visited = 0
    is_down = False
    while visited < len(found) and (visited == 0 or monotonic() - began < CALL_SECONDS):
        try:
            await change(found[visited])
            done += 1
        except (Conflict, NotFound) as exc:
            reasons[str(exc.args[0]).replace(str(found[visited]), "…")] += 1
        except Unavailable:
            if visited == 0 and not is_first:  # whoever asked can ask again: with the place where this call began
                raise
            is_down = True
            break
        visited += 1
    if not found:
        return RunsChanged(0, 0, {}, 0, None, now, call_id)
    remaining = max(1, len(found) - visited)  # at least, while the database is down
    if not is_down:
        with suppress(Unavailable):
            async with database.connection() as connection:
                rest = asked._replace(created_to=until)
                remaining, _ = await run_search.count(connection, rest, after_id=found[visited - 1], most=MOST_COUNTED)
    _log.info("runs.changed", verb=verb, count=done, refused=visited - done, remaining=remaining, actor=actor)
    last = (found[visited - 1] if visited else after_id or _FIRST) if remaining else None
    told = dict(reasons.most_common(_MOST_REASONS))
    return RunsChanged(done, visited - done, told, remaining, last, until, call_id)


def applicable(verb: RunVerb, filters: RunFilters) -> RunFilters:
    """The filters, and only runs in a status that the verb applies to."""
    wanted = filters.statuses or RUN_VERBS[verb]
    return filters._replace(statuses=[one for one in wanted if one in RUN_VERBS[verb]])


def _changes(
    database: Database, verb: RunVerb, actor: str, breaker: BreakerPolicy, call_id: uuid.UUID
) -> Callable[[RunId], Awaitable[object]]:
    if verb == "cancel":
        return lambda run_id: cancel_run(database, run_id, actor, breaker)
    if verb == "retry":
        return lambda run_id: retry_run(database, run_id, actor)
    return lambda run_id: rerun_run(database, run_id, actor, call_id)
