"""Removing a day costs what the day has, however much the tables have."""

from __future__ import annotations

from bench import history

from tidegate.store import retention
from tidegate.store.db import Connection


async def test_a_batch_of_producers_ids_is_found_without_reading_all_of_them(connection: Connection) -> None:
    await history.load(connection, events=6_000, retries=0, days=4)
    await connection.execute(f"analyze {history.NAMES}")
    day = (await retention.list_days(connection, older_seconds=2 * 86_400, most_needed=10))[0]

    plan = await connection.fetch(f"explain {retention._sql['delete_external_ids_of_day']}", day.day, 1_000, 2 * 86_400)
    deleted = await retention.delete_external_ids(connection, day.day, older_seconds=2 * 86_400, limit=1_000)

    assert not [row[0] for row in plan if "Seq Scan on event_external_ids" in row[0]]
    assert (day.needed, deleted) == (0, 1_000)
    assert await connection.fetchval("select count(*) from tidegate.event_external_ids") == 5_000


async def test_what_must_be_kept_is_counted_no_further_than_asked(connection: Connection) -> None:
    await history.load(connection, events=6_000, retries=0, days=4)
    await connection.execute("update tidegate.workflow_runs set finished_at = tidegate.now()")

    days = await retention.list_days(connection, older_seconds=2 * 86_400, most_needed=10)

    assert [day.needed for day in days] == [11, 11]
