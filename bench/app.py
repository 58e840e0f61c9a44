"""The application that is measured, one without workflows, whose worker creates runs but executes none, and one whose
runs take their time under a concurrency limit."""

from __future__ import annotations

import asyncio

from headgate import Context, Headgate

MAX_CONCURRENCY = 4
RUN_SECONDS = 0.05

hg = Headgate()
nothing = Headgate()
few = Headgate()


@hg.workflow(
    on="order.created",
    predicates=[
        {"path": "$.payload.amount", "operator": "gt", "value": 100},
        {"path": "$.payload.currency", "operator": "in", "values": ["EUR", "USD"]},
    ],
)
async def fulfil(ctx: Context, id: int, amount: float) -> int:
    """As little as a workflow can do."""
    return id


@few.workflow(on="order.created", max_concurrency=MAX_CONCURRENCY)
async def take_time(ctx: Context) -> None:
    """A run of known length."""
    await asyncio.sleep(RUN_SECONDS)
