"""The end of a run has a fast path (one statement for runs that simply succeeded) and a general one: the same rows from
both, whatever the run did."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.test_dispatch import publish
from tidegate import Context
from tidegate.flow.run import outcomes
from tidegate.store.db import Connection

ROWS = """
select r.status, r.output, r.error, r.attempts, r.retry_attempts, r.claim_generation, r.claimed_by, r.next_attempt_at,
       r.started_at, r.finished_at, r.warning, r.crashes, r.cancel_requested_at,
       d.status as delivery_status, d.retry_state as delivery_retry_state,
       (select json_agg(json_build_object('name', s.name, 'kind', s.kind, 'status', s.status, 'result', s.result,
                                          'error', s.error, 'retry_state', s.retry_state,
                                          'retry_attempts', s.retry_attempts) order by s.name)
          from tidegate.workflow_run_steps s where s.workflow_run_id = r.id) as steps,
       (select count(*) from tidegate.dead_letters) as dead_letters
  from tidegate.workflow_runs r join tidegate.workflow_trigger_deliveries d on d.id = r.delivery_id
 order by r.created_at, r.id
"""


async def nothing(_: Context) -> None: ...


async def a_result(_: Context) -> dict[str, Any]:
    return {"a": [1, None, "ä\u2028"], "b": {"c": 1.5}}


async def one_step(ctx: Context) -> int:
    return await ctx.step("one", lambda: 1)


async def steps_in_order(ctx: Context) -> list[Any]:
    return [await ctx.step(f"step-{i}", lambda i=i: {"i": i}) for i in range(5)]


async def steps_side_by_side(ctx: Context) -> list[Any]:
    return list(await asyncio.gather(*(ctx.step(f"step-{i}", lambda i=i: i) for i in range(5))))


async def a_step_without_a_result(ctx: Context) -> None:
    await ctx.step("none", lambda: None)


async def large_results(ctx: Context) -> str:
    return str(await ctx.step("large", lambda: "x" * 200_000))


CASES: list[Callable[[Context], Awaitable[Any]]] = [
    nothing, a_result, one_step, steps_in_order, steps_side_by_side, a_step_without_a_result, large_results,
]  # fmt: skip


@pytest.mark.parametrize("function", CASES, ids=lambda one: one.__name__)
async def test_the_same_rows_from_both_paths(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch,
    function: Callable[[Context], Awaitable[Any]],
) -> None:  # fmt: skip
    world.app.workflow(on="go")(function)
    runner = await world.runner()
    fast: list[bool] = []
    is_simple = outcomes._is_simple

    def watched(item: Any) -> bool:
        fast.append(is_simple(item))
        return fast[-1]

    monkeypatch.setattr(outcomes, "_is_simple", watched)
    await publish(connection, "go")
    await world.turn(runner)
    assert any(fast), "the fast path is not taken"
    monkeypatch.setattr(outcomes, "_is_simple", lambda _: False)
    await publish(connection, "go")
    await world.turn(runner)
    by_fast, by_general = [dict(row) for row in await connection.fetch(ROWS)]
    assert by_fast["status"] == "succeeded"
    assert by_fast == by_general
