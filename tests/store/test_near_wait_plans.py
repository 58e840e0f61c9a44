"""`explain` looks up near misses of waits by indexes: however many runs wait for events of the same type with other
values, and however many such events came, few are read."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import asyncpg
import pytest

from tidegate.embedded import EmbeddedPostgres
from tidegate.model.ids import RunId
from tidegate.store import near_waits

from .plans import MODES, STATISTICS, Recorder, Undone, explain, filled, rows_read

ROWS = 20_000
TABLES = ("workflow_events", "event_inbox", "event_waits", "workflow_runs", "workflow_run_steps")
FILL_EVENTS = """
with stored as (
  insert into tidegate.workflow_events
    (id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id, metadata)
  select tidegate.uuid7(), case when n % 1000 = 0 then 'type.' || n else 'order.approved' end, 'shop', now(), now(), n,
         jsonb_build_object('id', n), 'c', '{}'
    from generate_series(1, $1::int) n
  returning id, source, ingress_sequence
)
insert into tidegate.event_inbox (ingress_sequence, event_id, source) select ingress_sequence, id, source from stored
"""
FILL_WAITS = """
insert into tidegate.event_waits
  (id, workflow_run_id, step_id, number, mode, event_type, source, paths, key, contained, after_sequence, until)
select gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 0, 'event',
       case when n % 1000 = 0 then 'type.' || n else 'order.approved' end, '*', '["id"]', '[' || n || ']',
       '{}', 0, now()
  from generate_series(1, $1::int) n
"""


@pytest.fixture(scope="module")
def near_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    yield from filled("plans_of_near", postgres, template, TABLES, [(FILL_EVENTS, (ROWS,)), (FILL_WAITS, (ROWS,))])


@MODES
@STATISTICS
async def test_near_misses_are_found_by_indexes(near_url: str, mode: str, has_statistics: bool) -> None:
    recorder, least = Recorder(), uuid.UUID(int=0)
    keys = [("order.approved", '["id"]', key) for key in ("[10]", '["10"]')]
    await near_waits.awaited_types(recorder)
    await near_waits.by_key(recorder, keys)
    await near_waits.by_fields(recorder, [("order.approved", '["id"]')])
    await near_waits.of_run(recorder, RunId(uuid.uuid4()))
    await near_waits.event_types(recorder, least)
    await near_waits.recent_events(recorder, ["order.approved", "type.1000"], ["{}"], ["id"], least)
    assert len(recorder.asked) == 6
    connection = await asyncpg.connect(near_url)
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute(f"analyze {', '.join(f'tidegate.{table}' for table in TABLES)}")
            await connection.execute(f"set local plan_cache_mode = {mode}")
            for text, arguments in recorder.asked:
                plan = await explain(connection, text, arguments)
                most = near_waits.MAX_READ * 2 if "payload @>" in text else 100
                for scan, rows in rows_read(plan, set(TABLES)):
                    assert rows <= most, f"{scan} reads {rows:.0f} rows in: {text}"
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()
