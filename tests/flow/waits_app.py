"""The application of the process tests of waits: what a run is told leaves a row, so that effects can be counted."""

from __future__ import annotations

import os
from typing import Any

import asyncpg

from tidegate import Context, On, SyncContext, Tidegate

app = Tidegate()


async def record(run_id: Any, what: str) -> None:
    connection = await asyncpg.connect(os.environ["TIDEGATE_DATABASE_URL"])
    try:
        await connection.execute("insert into effects (run_id, what) values ($1, $2)", run_id, what)
    finally:
        await connection.close()


@app.workflow(on="wait.async")
async def wait_async(ctx: Context, id: int, timeout: str) -> Any:
    event = await ctx.wait_for("answer", match={"id": id}, timeout=timeout)
    told = event.payload["word"] if event else "nobody"
    await ctx.step("tell", record, ctx.run_id, told)
    return told


@app.workflow(on="wait.sync")
def wait_sync(ctx: SyncContext, id: int, timeout: str) -> Any:
    event = ctx.wait_for("answer", where="event.payload.id == run.parameters.id", timeout=timeout)
    told = event.payload["word"] if event else "nobody"
    ctx.step("tell", record, ctx.run_id, told)
    return told


@app.workflow(on="wait.cancelled", cancel_on=On("stop", where="event.payload.id == run.parameters.id"))
async def wait_cancelled(ctx: Context, id: int) -> None:
    await ctx.step("begin", record, ctx.run_id, "begun")
    await ctx.sleep("1h")
    await ctx.step("end", record, ctx.run_id, "ended")


@app.workflow(on="approve.async")
async def approve_async(ctx: Context, id: int) -> str:
    approval = await ctx.approval("manager", timeout="1h")
    await ctx.step("mail", record, ctx.run_id, approval.link)
    decision = await approval.decision()
    told = "nobody" if decision is None else f"{decision.approved} {decision.comment}"
    await ctx.step("tell", record, ctx.run_id, told)
    return told


@app.workflow(on="approve.sync")
def approve_sync(ctx: SyncContext, id: int) -> str:
    approval = ctx.approval("manager", timeout="1h")
    ctx.step("mail", record, ctx.run_id, approval.link)
    decision = approval.decision()
    told = "nobody" if decision is None else f"{decision.approved} {decision.comment}"
    ctx.step("tell", record, ctx.run_id, told)
    return told


@app.workflow(on="count")
async def count(ctx: Context, key: int, number: int) -> list[int]:
    found = []
    for _ in range(number):
        event = await ctx.wait_for("tick", match={"key": key}, timeout="1h")
        found.append(event.payload["n"] if event else -1)
    return found
