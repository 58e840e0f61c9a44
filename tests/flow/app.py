"""The application that the process tests run: each call leaves a row behind, so that effects can be counted."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import asyncpg

from tidegate import Context, Tidegate

app = Tidegate()


async def _record(ctx: Context, what: str) -> None:
    connection = await asyncpg.connect(os.environ.get("EFFECTS_URL") or os.environ["TIDEGATE_DATABASE_URL"])
    try:
        await connection.execute("insert into effects (run_id, what) values ($1, $2)", ctx.run_id, what)
    finally:
        await connection.close()


@app.workflow(on="work.quick")
async def quick(ctx: Context, n: int = 0) -> dict[str, Any]:
    await _record(ctx, "quick")
    return {"n": n}


@app.workflow(on="work.slow")
async def slow(ctx: Context, seconds: float) -> str:
    await _record(ctx, "begun")
    await asyncio.sleep(seconds)
    await _record(ctx, "done")
    return "slept"


@app.workflow(on="work.endless")
async def endless(ctx: Context) -> None:
    name = os.environ["WORKER_NAME"]
    try:
        while True:
            await _record(ctx, f"{name} works")
            await asyncio.sleep(0.02)
    finally:
        await _record(ctx, f"{name} leaves")


@app.workflow(on="work.broken")
def broken(ctx: Context) -> None:
    raise RuntimeError("this one always fails")


@app.workflow(on="work.paced", throttle="2/200ms")
async def paced(ctx: Context, n: int = 0) -> None:
    await _record(ctx, "paced")


@app.workflow(on="work.narrow", max_concurrency=2)
async def narrow(ctx: Context, n: int = 0) -> None:
    await _record(ctx, "narrow")
    await asyncio.sleep(0.05)
