"""Answers stay small however many sources, triggers, tokens and webhooks there are; pages have each of them once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncpg
import httpx
import pytest

from tests.processes import run

MANY = 4_002
FILLS = (
    """
insert into tidegate.event_scheduler_source_metrics (source, total, last_event_at, updated_at)
select 's' || n, n, now(), now() + n * interval '1 ms' from generate_series(1, $1::int) n
""",
    """
insert into tidegate.event_scheduler_sources
  (source, rate_limit, interval_ms, pause_ms, limit_set_by, paused_at, paused_by, breaker_state, breaker_until,
   breaker_reason, updated_by)
select 's' || n, 10, 1000, 0, 'operator', case when n % 2 = 0 then now() - n * interval '1 s' end,
       case when n % 2 = 0 then 'ops' end, case when n % 3 = 0 then 'open' else 'closed' end,
       case when n % 3 = 0 then now() + n * interval '1 s' end, case when n % 3 = 0 then '5 failures' end, 'test'
  from generate_series(1, $1::int) n
""",
    """
with definition as (
  insert into tidegate.workflow_definitions (id, slug, kind, created_by, updated_by)
  values (tidegate.uuid7(), 'fulfil', 'python', 'test', 'test') returning id
), made as (
  insert into tidegate.workflow_event_triggers
    (id, workflow_definition_id, name, event_type, created_by, updated_by)
  select tidegate.uuid7(), definition.id, 't' || n, 'order.created', 'test', 'test'
    from definition, generate_series(1, $1::int) n
  returning id
), metrics as (
  insert into tidegate.event_scheduler_trigger_metrics (trigger_id, launched) select id, 1 from made
)
insert into tidegate.event_scheduler_triggers (trigger_id, paused_at, breaker_state, breaker_until)
select id, now(), 'open', now() + interval '1 h' from made
""",
    """
insert into tidegate.workflow_definitions (id, slug, kind, created_by, updated_by)
select tidegate.uuid7(), 'w' || n, 'python', 'test', 'test' from generate_series(1, $1::int) n
""",
    """
insert into tidegate.schedules (workflow_definition_id, every_ms, next_at)
select id, 60000, now() + interval '1 day' from tidegate.workflow_definitions where $1::int > 0
""",
    """
insert into tidegate.api_tokens (id, name, secret_hash, scopes, created_by)
select tidegate.uuid7(), 'token-' || n, decode(md5(n::text) || md5('x' || n), 'hex'), array['read'], 'test'
  from generate_series(1, $1::int) n
""",
    """
insert into tidegate.webhooks (source, scheme, secrets, created_by, updated_by)
select 's' || n, 'github', '[{"secret": "0123456789abcdef", "added_at": "2026-06-01T12:00:00Z"}]', 'test', 'test'
  from generate_series(1, $1::int) n
""",
)
LISTS = {
    "/admin/sources": ("sources", "source", MANY),
    "/admin/triggers": ("triggers", "id", MANY),
    "/v1/workflows/fulfil/triggers": ("triggers", "id", MANY),
    "/admin/tokens": ("tokens", "id", MANY + 1),
    "/admin/webhooks": ("webhooks", "source", MANY),
    "/v1/workflows": ("workflows", "slug", MANY + 1),
    "/v1/schedules": ("schedules", "workflow", MANY + 1),
}


@pytest.fixture(scope="module")
def http(shared_url: str, address: str) -> Iterator[httpx.Client]:
    async def fill() -> None:
        connection = await asyncpg.connect(shared_url)
        for statement in FILLS:
            await connection.execute(statement, MANY)
        await connection.close()

    made = run("token", "create", "ops", "--scope", "admin", env={"TIDEGATE_DATABASE_URL": shared_url})
    asyncio.run(fill())
    headers = {"authorization": f"Bearer {made.stdout.strip()}"}
    with httpx.Client(base_url=address, timeout=60, trust_env=False, headers=headers) as client:
        yield client


def answer(http: httpx.Client, path: str, **query: Any) -> tuple[dict[str, Any], int]:
    response = http.get(path, params=query)
    assert response.status_code == 200, response.text
    return response.json(), len(response.content)


@pytest.mark.parametrize("path", LISTS)
def test_a_list_comes_in_pages(http: httpx.Client, path: str) -> None:
    name, key, many = LISTS[path]
    page, size = answer(http, path)
    assert len(page[name]) == 50
    assert page["next_cursor"] is not None
    assert size < 100_000
    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page, size = answer(http, path, limit=500, **cursor)
        assert size < 1_000_000
        seen += [row[key] for row in page[name]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert len(seen) == len(set(seen)) == many


@pytest.mark.parametrize("path", LISTS)
def test_a_page_is_refused_by_name(http: httpx.Client, path: str) -> None:
    for query, field in (("limit=501", "limit"), ("limit=0", "limit"), ("offset=1", "offset")):
        refused = http.get(f"{path}?{query}")
        assert refused.status_code == 422
        assert [error["field"] for error in refused.json()["errors"]] == [field]


def test_health_has_a_part_of_each_list_and_says_how_many_there_are(http: httpx.Client) -> None:
    found, size = answer(http, "/admin/event-health")
    assert size < 500_000
    expected = {
        "sources": MANY, "triggers": MANY, "rate_limits": MANY, "paused_sources": MANY // 2, "paused_triggers": MANY,
        "source_breakers": MANY // 3, "trigger_breakers": MANY,
    }  # fmt: skip
    for name, many in expected.items():
        assert len(found[name]) == 100, name
        assert found[f"{name}_total"] == many, name
    assert found["sources"][0]["source"] == f"s{MANY}", "the last that was seen is the first"
    assert found["paused_sources"][0]["source"] == f"s{MANY}", "the longest paused is the first"
    assert all(limit["updated_at"] for limit in found["rate_limits"])


def test_gauges_count_all_of_them(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    assert f"tidegate_paused_sources {MANY // 2}.0" in text
    assert f'tidegate_open_breakers{{kind="source"}} {MANY // 3}.0' in text


def test_a_command_lists_all_pages(http: httpx.Client) -> None:
    token = http.headers["authorization"].removeprefix("Bearer ")
    done = run("sources", "list", env={"TIDEGATE_URL": str(http.base_url).rstrip("/"), "TIDEGATE_TOKEN": token})
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == MANY + 1
