"""Health and retention keep to what waits and to what they delete, however long the history is.

Every statement that a snapshot, a scrape or a batch of pruning sends is explained as it is sent: with rows as written
and after a vacuum, without statistics and with them, for the given values and as a generic plan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from bench import history

from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.flow.keep.prune import BATCH
from tidegate.flow.look import health
from tidegate.model.health import HEALTH
from tidegate.store import retention
from tidegate.store.events import ReceiptPlace

from .plans import MODES, STATISTICS, Undone, explain, rows_read

FINISHED, WAITING, DEAD, UNDECIDED = 20_000, 1_000, 5_000, 2_000
LARGE = {*history.TABLES, "dead_letters", "event_inbox"}
# Letters that were replayed, and events that are undecided: they are old, but alive.
OTHERS = """
with replayed as (
  insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason, replayed_at, replayed_by)
  select gen_random_uuid(), 'event', gen_random_uuid(), e.id, 'x', now(), 'ann'
    from tidegate.workflow_events e where e.ingress_sequence between $1::bigint - $2::bigint + 1 and $1::bigint
)
insert into tidegate.event_inbox (ingress_sequence, event_id, source)
select e.ingress_sequence, e.id, e.source from tidegate.workflow_events e
 where e.ingress_sequence between $1::bigint - $2::bigint - $3::bigint + 1 and $1::bigint - $2::bigint
"""

# The oldest day has no partition any more, and all of it was kept.
KEEP_A_DAY = """
select tidegate.drop_day(t.name, d.day, '-infinity')
  from (select min(day) as day from tidegate.days() as d (day)) d, tidegate.day_tables() t
"""


class Explained:
    """A connection that explains, and undoes, every statement before it runs it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.plans: list[tuple[str, dict[str, Any]]] = []

    async def _explain(self, query: str, args: tuple[Any, ...]) -> None:
        self.plans.append((query, await explain(self._connection, query, args)))

    async def fetch(self, query: str, *args: Any) -> Any:
        await self._explain(query, args)
        return await self._connection.fetch(query, *args)

    async def fetchrow(self, query: str, *args: Any) -> Any:
        await self._explain(query, args)
        return await self._connection.fetchrow(query, *args)

    async def fetchval(self, query: str, *args: Any) -> Any:
        await self._explain(query, args)
        return await self._connection.fetchval(query, *args)

    async def execute(self, query: str, *args: Any) -> Any:
        await self._explain(query, args)
        return await self._connection.execute(query, *args)


@pytest.fixture(scope="module", params=["as_written", "vacuumed"])
def history_url(request: pytest.FixtureRequest, postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A database with a long history of which little waits."""
    name = f"history_{request.param}"

    async def make() -> None:
        admin = await asyncpg.connect(postgres.admin_url())
        await admin.execute(f"create database {name} template {template} owner {ROLE}")
        await admin.close()
        connection = await asyncpg.connect(postgres.url(name))
        await history.add_days(connection, history.DAYS)
        await history.set_autovacuum(connection, is_on=False, tables=list(LARGE))
        await history.load(connection, events=FINISHED, retries=WAITING)
        await connection.execute(OTHERS, FINISHED, DEAD, UNDECIDED)
        await connection.execute(KEEP_A_DAY)
        if request.param == "vacuumed":
            await connection.execute(f"vacuum {', '.join(f'tidegate.{table}' for table in LARGE)}")
        await connection.close()

    async def drop() -> None:
        admin = await asyncpg.connect(postgres.admin_url())
        await admin.execute(f"drop database {name} with (force)")
        await admin.close()

    asyncio.run(make())
    yield postgres.url(name)
    asyncio.run(drop())


async def explained(
    url: str, mode: str, has_statistics: bool, work: Any, *, seqscan: str = "on"
) -> list[tuple[str, dict[str, Any]]]:
    """The plans of everything that the work sent, which is undone."""
    connection = await asyncpg.connect(url)
    watched = Explained(connection)
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute(f"analyze {', '.join(f'tidegate.{table}' for table in LARGE)}")
            await connection.execute(f"set local plan_cache_mode = {mode}; set local jit = off")
            await connection.execute(f"set local enable_seqscan = {seqscan}")
            await work(watched)
            raise Undone
    except Undone:
        return watched.plans
    finally:
        await connection.close()


def check(plans: list[tuple[str, dict[str, Any]]], most: int, tables: set[str] = LARGE) -> None:
    """No statement read more rows of any large table than this, by whatever scan."""
    found = [
        f"{scan} reads {rows:.0f} rows in: {' '.join(query.split())[:100]}"
        for query, plan in plans
        for scan, rows in rows_read(plan, tables)
        if rows > most
    ]
    assert not found, "\n".join(found)


@MODES
@STATISTICS
async def test_health_reads_nothing_that_is_finished(history_url: str, mode: str, has_statistics: bool) -> None:
    async def work(connection: Any) -> None:
        seen = await health.snapshot(connection, HEALTH)
        assert (seen.retries["events"].total, seen.retries["deliveries"].total) == (600, 300)
        assert (seen.retries["steps"].total, seen.queues["ingress"].ready >= UNDECIDED) == (100, True)
        assert seen.dead_letters.total == 0
        await health.shared_state(connection, HEALTH)

    plans = await explained(history_url, mode, has_statistics, work)
    assert len(plans) > 20
    check(plans, WAITING, LARGE - {"event_inbox"})
    check(plans, UNDECIDED, {"event_inbox"})
    read = {table for _, plan in plans for table in history.TABLES for _ in rows_read(plan, {table})}
    assert {"event_ingress_retries", "workflow_trigger_deliveries", "workflow_runs", "workflow_run_steps"} <= read


@MODES
@STATISTICS
@pytest.mark.parametrize("is_default_only", [False, True], ids=["of all", "of the default partition"])
async def test_a_batch_of_pruning_reads_what_it_deletes(
    history_url: str, mode: str, has_statistics: bool, is_default_only: bool
) -> None:
    async def work(connection: Any) -> None:
        page = await retention.page(
            connection, after=ReceiptPlace(), limit=BATCH, older_seconds=600, is_default_only=is_default_only
        )
        ids = await retention.lock_finished_events(connection, page.ids, older_seconds=600)
        assert len(ids) == BATCH
        if not has_statistics:  # rows that are old enough to go have been counted long ago
            return
        deleted = await retention.delete_events(connection, ids)
        tables = ("events", "deliveries", "runs", "external_ids")
        assert {table: deleted[table] for table in tables} == dict.fromkeys(tables, BATCH)

    plans = await explained(history_url, mode, has_statistics, work, seqscan="off")  # as in sessions that prune
    check(plans, 2 * BATCH)


async def test_no_constraint_refers_to_what_goes_by_days(history_url: str) -> None:
    """It would be checked for every row of a day that is dropped, and would refuse a day of which something is kept."""
    connection = await asyncpg.connect(history_url)
    try:
        constraints = await connection.fetch(
            "select conname from pg_constraint where contype = 'f' and confrelid = any ($1::text[]::regclass[])",
            [f"tidegate.{table}" for table in history.TABLES],
        )
        assert {row[0] for row in await connection.fetch("select name from tidegate.day_tables()")} == {
            *history.TABLES
        } - {"event_external_ids"} | {"run_children"}
    finally:
        await connection.close()
    assert constraints == []
