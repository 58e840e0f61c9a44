"""The applications that are measured. Their runs may leave marks: lines in a file that the environment names."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench import marks
from tidegate import Context, Tidegate

MAX_CONCURRENCY = 4
RUN_SECONDS = 0.05
STEPS = 100
CHILDREN = 20

app = Tidegate()
nothing = Tidegate()  # its worker creates runs but executes none
few = Tidegate()
one_step = Tidegate()
many_steps = Tidegate()
outliving = Tidegate()
talking = Tidegate()
shared = Tidegate()

_PREDICATES: list[dict[str, Any]] = [
    {"path": "$.payload.amount", "operator": "gt", "value": 100},
    {"path": "$.payload.currency", "operator": "in", "values": ["EUR", "USD"]},
]


@app.workflow(on="order.created", predicates=_PREDICATES)
async def fulfil(ctx: Context, id: int, amount: float) -> int:
    """As little as a workflow can do."""
    return id


@few.workflow(on="order.created", max_concurrency=MAX_CONCURRENCY)
async def take_time(ctx: Context) -> None:
    """A run of known length."""
    await asyncio.sleep(RUN_SECONDS)


@one_step.workflow(on="order.created", predicates=_PREDICATES)
async def step_once(ctx: Context, id: int) -> int:
    """As little as a workflow with a step can do."""
    marks.write(id, time.monotonic())
    return await ctx.step("nothing", _same, id)


@many_steps.workflow(on="order.created", predicates=_PREDICATES)
async def step_often(ctx: Context, id: int) -> None:
    """Steps one after the other; the mark has the time at which each began."""
    began: list[float] = []

    async def note() -> None:
        began.append(time.monotonic())

    for number in range(STEPS):
        await ctx.step(f"step-{number}", note)
    marks.write(id, *began)


@outliving.workflow(on="order.created", predicates=_PREDICATES)
async def outlive(ctx: Context, id: int) -> None:
    """At first it runs until its worker is killed; whoever goes on with it ends it at once."""
    await ctx.step("nothing", _same, id)
    marks.write(id, time.monotonic())
    if ctx.attempt == 1:
        await asyncio.sleep(3600)


@talking.workflow(on="order.created", predicates=_PREDICATES)
async def parent(ctx: Context, id: int) -> None:
    """One child after the other. The function begins again after each of them: the first time that a line is reached
    counts."""
    began = _resumed.setdefault(id, [])
    for number in range(CHILDREN):
        await ctx.run(child, number=(id + 1) * CHILDREN + number)
        if len(began) == number:
            began.append(time.monotonic())
    marks.write(id, *began)


@talking.workflow()
async def child(ctx: Context, number: int) -> None:
    """As little as a child can do."""
    marks.write(number, time.monotonic())


@shared.workflow(on="order.created", predicates=_PREDICATES)
async def begin(ctx: Context, id: int) -> None:
    """The workflow that others are to delay as little as possible."""
    marks.write(id, time.monotonic())


@shared.workflow(on="flood.created")
async def soak_up(ctx: Context) -> None:
    """What a flood launches."""


@shared.workflow(on="slow.created")
async def be_slow(ctx: Context) -> None:
    """Keeps a slot for a second."""
    await asyncio.sleep(1)


_resumed: dict[int, list[float]] = {}


async def _same(id: int) -> int:
    return id
