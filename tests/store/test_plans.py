"""The statements that every turn runs keep to their indexes, however much waits and however the plan is made.

Plans are judged without statistics (a fresh installation that fills up) and with them, for the given values and as the
generic plan that a long-lived connection settles on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncpg
import msgspec
import pytest

from headgate.embedded import EmbeddedPostgres
from headgate.store.sql import load

ROWS = 50_000
_events, _retries, _sources = load("events"), load("ingress_retries"), load("sources")

# The statement, its arguments, and the tables of which it may not read every row.
STATEMENTS: dict[str, tuple[str, tuple[Any, ...], set[str]]] = {
    "claim_inbox": (_events["claim_inbox"], (500,), {"event_inbox", "workflow_events"}),
    "due_sources": (_retries["due_sources"], (50,), {"event_ingress_retries"}),
    "take_due": (_retries["take_due"], ("s0", "now", 500), {"event_ingress_retries"}),
    "take_stale": (_retries["take_stale"], ("s0", 9, 0, 500), {"event_ingress_retries", "workflow_events"}),
    "claim_due": (_retries["claim_due"], (500, "w", 1000), {"event_ingress_retries"}),
    "release_expired": (_retries["release_expired"], (500,), {"event_ingress_retries"}),
    "next_due": (_retries["next_due"], (), {"event_ingress_retries"}),
    "keep_order": (_retries["keep_order"], ("s0", ROWS - 100, 2000), {"event_ingress_retries"}),
    "backlogs": (_sources["backlogs"], (["s0", "s1"],), {"event_ingress_retries"}),
}
TABLES = ("workflow_events", "event_inbox", "event_ingress_retries")
MOST_ROWS = 5_000


class Undone(Exception):
    """Ends a transaction without a trace: neither rows nor statistics."""


FILL = """
with stored as (
  insert into headgate.workflow_events
    (id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id, metadata)
  select headgate.uuid7(), 'tick', 's' || n % $1, now(), now(), n, '{}', 'c', '{}' from generate_series(1, $2::int) n
  returning id, source, ingress_sequence
), inboxed as (
  insert into headgate.event_inbox (ingress_sequence, event_id) select ingress_sequence, id from stored
)
insert into headgate.event_ingress_retries
  (event_id, source, ingress_sequence, retry_state, attempts, next_attempt_at, reason)
select id, source, ingress_sequence, 'scheduled', 1, now() + (ingress_sequence - 1000) * interval '1 minute',
       'rate_limit'
  from stored
"""


@pytest.fixture(scope="module", params=[1, 10_000], ids=["one source", "10000 sources"])
def filled_url(request: pytest.FixtureRequest, postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A database with 50,000 events that wait, in the inbox and in line at once, and without statistics."""
    name = f"plans_{request.param}"

    async def admin(statement: str) -> None:
        connection = await asyncpg.connect(postgres.url())
        await connection.execute(statement)
        await connection.close()

    async def make() -> None:
        await admin(f"create database {name} template {template}")
        connection = await asyncpg.connect(postgres.url(name))
        for table in TABLES:
            await connection.execute(f"alter table headgate.{table} set (autovacuum_enabled = false)")
        await connection.execute(FILL, request.param, ROWS)
        await connection.close()

    asyncio.run(make())
    yield postgres.url(name)
    asyncio.run(admin(f"drop database {name} with (force)"))


def rows_read(node: dict[str, Any], tables: set[str]) -> Iterator[tuple[str, float]]:
    """For each scan of one of the tables, the rows that it read, kept or not."""
    if node.get("Relation Name") in tables:
        kept = (
            node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        )
        yield f"{node['Node Type']} on {node['Relation Name']}", kept * node["Actual Loops"]
    for child in node.get("Plans", []):
        yield from rows_read(child, tables)


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("has_statistics", [False, True], ids=["without statistics", "with statistics"])
async def test_no_turn_reads_the_whole_backlog(filled_url: str, mode: str, has_statistics: bool) -> None:
    connection = await asyncpg.connect(filled_url)
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute(f"analyze {', '.join(f'headgate.{table}' for table in TABLES)}")
            await connection.execute(f"set local plan_cache_mode = {mode}")
            for name, (text, given, tables) in STATEMENTS.items():
                arguments = [await connection.fetchval("select now()") if value == "now" else value for value in given]
                attempt = connection.transaction()
                await attempt.start()
                found = await connection.fetchval(f"explain (analyze, format json) {text}", *arguments)
                await attempt.rollback()
                for scan, rows in rows_read(msgspec.json.decode(found)[0]["Plan"], tables):
                    assert rows <= MOST_ROWS, f"{name} reads {rows:.0f} rows: {scan}"
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()
