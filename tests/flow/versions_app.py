"""A workflow for tests that change a copy of this file: each effect leaves a row behind."""

from __future__ import annotations

import os
import uuid

import asyncpg

from tidegate import Context, Tidegate

app = Tidegate()


async def record(run_id: uuid.UUID, what: str) -> str:
    connection = await asyncpg.connect(os.environ["TIDEGATE_DATABASE_URL"])
    try:
        await connection.execute("insert into effects (run_id, what) values ($1, $2)", run_id, what)
    finally:
        await connection.close()
    return what


@app.workflow(on="order.created")
async def fulfil(ctx: Context, order: str, seconds: float = 1) -> list[str]:
    ctx.tag(order=order)
    first = await ctx.step("charge", record, ctx.run_id, "charge")
    await ctx.sleep(seconds)
    return [first, await ctx.step("ship", record, ctx.run_id, "ship")]
