"""Workflows with steps for the process tests: each effect leaves a row behind, so that it can be counted."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid

import asyncpg

from tidegate import Context, SyncContext, Tidegate

app = Tidegate()


async def record(run_id: uuid.UUID, what: str) -> str:
    connection = await asyncpg.connect(os.environ["TIDEGATE_DATABASE_URL"])
    try:
        await connection.execute("insert into effects (run_id, what) values ($1, $2)", run_id, what)
    finally:
        await connection.close()
    return what


async def count(run_id: uuid.UUID, what: str) -> int:
    connection = await asyncpg.connect(os.environ["TIDEGATE_DATABASE_URL"])
    try:
        return int(
            await connection.fetchval("select count(*) from effects where run_id = $1 and what = $2", run_id, what)
        )
    finally:
        await connection.close()


@app.workflow(on="steps.three")
async def three(ctx: Context, seconds: float = 0.0) -> list[str]:
    """Three effects, the second slow."""

    async def second() -> str:
        await record(ctx.run_id, "second begun")
        await asyncio.sleep(seconds)
        return await record(ctx.run_id, "second")

    return [
        await ctx.step("first", record, ctx.run_id, "first"),
        await ctx.step("second", second),
        await ctx.step("third", record, ctx.run_id, "third"),
    ]


@app.workflow(on="steps.flaky")
async def flaky(ctx: Context) -> str:
    async def call() -> str:
        await record(ctx.run_id, "try")
        if await count(ctx.run_id, "try") < 3:
            raise ConnectionError("again")
        return "ok"

    return await ctx.step("call", call)


@app.workflow(on="steps.nap")
async def nap(ctx: Context, duration: str = "1s") -> str:
    await ctx.step("before", record, ctx.run_id, "before")
    await ctx.sleep(duration)
    return await ctx.step("after", record, ctx.run_id, "after")


@app.workflow(on="steps.busy")
async def busy(ctx: Context, seconds: float) -> str:
    """Keeps the event loop of its worker busy, which it should not; it must not lose its run for it."""
    await record(ctx.run_id, "busy")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return "done"


@app.workflow(on="steps.plain")
def plain(ctx: SyncContext, n: int) -> int:
    doubled = ctx.step("double", lambda: n * 2)
    ctx.sleep("100ms")
    return ctx.step("again", lambda: doubled * 2)


@app.workflow(on="steps.exit")
async def leave(ctx: Context) -> None:
    sys.exit(3)


@app.workflow(on="steps.thread")
async def thread(ctx: Context) -> None:
    await ctx.step("long", time.sleep, 3600)


@app.workflow(on="steps.plain_thread")
def plain_thread(ctx: SyncContext) -> None:
    ctx.step("long", time.sleep, 3600)


@app.workflow(on="steps.tell")
async def tell(ctx: Context) -> None:
    """Publishes between two effects."""
    await ctx.step("first", record, ctx.run_id, "first")
    await ctx.publish("steps.told", {"run": str(ctx.run_id)})
    await ctx.step("second", record, ctx.run_id, "second")


@app.workflow(on="steps.told")
async def told(ctx: Context, run: str) -> None:
    await ctx.step("told", record, uuid.UUID(run), "told")


@app.workflow(on="tidegate.run.succeeded", where="event.payload.workflow == 'tell'")
async def tell_ended(ctx: Context, run_id: str) -> None:
    await ctx.step("ended", record, uuid.UUID(run_id), "ended")


@app.workflow()
async def fulfil(ctx: Context, n: int, seconds: float = 0.0, fails: bool = False) -> dict[str, int]:
    """No event launches it: it is started by name."""
    await ctx.step("effect", record, ctx.run_id, f"fulfil {n}")
    if seconds:
        await ctx.sleep(seconds)
    if fails:
        raise ValueError("no such order")
    return {"n": n}


@app.workflow()
async def leaf(ctx: Context, n: int) -> int:
    await ctx.step("leaf", record, ctx.run_id, f"leaf {n}")
    return n


@app.workflow(on="steps.tree")
async def tree(ctx: Context) -> list[int]:
    """One child, then a map of five, two at a time, then an effect."""
    first = await ctx.run(leaf, n=100)
    rest = await ctx.map(leaf, range(5), at_once=2)
    await ctx.step("after", record, ctx.run_id, "after")
    return [first, *rest]


@app.workflow(on="steps.stop")
async def stop(ctx: Context) -> None:
    """Its children sleep until they are cancelled with it."""
    await ctx.map("sleeper", [{"n": n} for n in range(6)], at_once=4)


@app.workflow()
async def sleeper(ctx: Context, n: int) -> None:
    await ctx.step("begun", record, ctx.run_id, f"sleeper {n}")
    await ctx.sleep("1h")
