"""Tags of runs: stored with what the run writes next, and found by them."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import pytest

from tests.conftest import Clock
from tests.flow.step_world import World, the_run
from tests.flow.test_dispatch import publish
from tidegate import Context, SyncContext
from tidegate.store import run_search
from tidegate.store.db import Connection
from tidegate.store.run_search import RunFilters


async def test_tags_are_stored_with_the_next_write(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context, n: int) -> None:
        ctx.tag(customer=f"c-{n}", attempt=1)
        await ctx.step("a", str)
        await ctx.sleep("1h")
        ctx.tag(attempt=2, by=uuid.UUID(int=7))

    @world.app.workflow(on="plain")
    def plain(ctx: SyncContext) -> None:
        ctx.tag(customer="c-9")

    runner = await world.runner()
    await publish(connection, "go", n=7)
    await world.turn(runner)
    assert (await the_run(connection))["tags"] == {"customer": "c-7", "attempt": "1"}
    await clock.advance(3_600_000)
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "succeeded"
    assert run["tags"] == {"customer": "c-7", "attempt": "2", "by": str(uuid.UUID(int=7))}
    await publish(connection, "plain")
    await world.turn(runner)
    for tags, expected in (({"customer": "c-7"}, ["work"]), ({"customer": "c-9"}, ["plain"]), ({"customer": "c"}, [])):
        filters = RunFilters(tags=msgspec.json.encode(tags).decode())
        assert [one.workflow for one in await run_search.list_page(connection, filters, limit=10)] == expected


async def test_tags_are_stored_beside_an_event_that_was_published_before(connection: Connection, world: World) -> None:
    """The id of the event is known: the write is repeated with another result of that step, and the tags."""

    @world.app.workflow(on="go")
    async def work(ctx: Context, n: int) -> None:
        ctx.tag(customer=f"c-{n}")
        await ctx.publish("order.paid", id="one")

    runner = await world.runner()
    for n in (7, 8):
        await publish(connection, "go", n=n)
        await world.turn(runner)
    found = await connection.fetch("select tags from tidegate.workflow_runs order by id")
    assert [row["tags"] for row in found] == [{"customer": "c-7"}, {"customer": "c-8"}]


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ({"a": 1.5}, "tag 'a': must be text, an integer or a UUID"),
        ({"a": ""}, "tag 'a': must be text"),
        ({"a": "x" * 201}, "of 1 to 200 characters"),
        ({"a": "\x00"}, "tag 'a': must be text"),
        ({"a" * 51: "x"}, "its name must be an identifier of at most 50 characters"),
        ({f"t{n}": "x" for n in range(21)}, "at most 20 tags"),
    ],
)
async def test_tags_are_bounded(
    connection: Connection, clock: Clock, world: World, tags: dict[str, Any], reason: str
) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        ctx.tag(**tags)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed" and reason in run["error"] and run["tags"] is None
