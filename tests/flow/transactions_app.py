"""Workflows with transactions, for tests with processes. `ledger` has no unique key: a second row would be seen."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import Any

import sqlalchemy

from tidegate import Context, Tidegate

app = Tidegate()
_engines: list[Any] = []


def engine() -> Any:
    if not _engines:
        url = os.environ["TIDEGATE_DATABASE_URL"].replace("postgresql://", "postgresql+psycopg://")
        _engines.append(sqlalchemy.create_engine(url))
    return _engines[0]


async def by_asyncpg(connection: Any, run_id: uuid.UUID, step: str, seconds: float = 0) -> str:
    await connection.execute("insert into ledger (run_id, step) values ($1, $2)", run_id, step)
    await asyncio.sleep(seconds)
    return step


def by_psycopg(connection: Any, run_id: uuid.UUID, step: str) -> str:
    connection.execute("insert into ledger (run_id, step) values (%s, %s)", (run_id, step))
    return step


def by_sqlalchemy(connection: Any, run_id: uuid.UUID, step: str) -> str:
    statement = sqlalchemy.text("insert into ledger (run_id, step) values (:run_id, :step)")
    connection.execute(statement, {"run_id": run_id, "step": step})
    return step


@app.workflow(on="ledger.entries")
async def entries(ctx: Context) -> list[str]:
    """One transaction of each kind, then two side by side."""
    found = [
        await ctx.transaction(by_asyncpg, ctx.run_id, "a", name="a"),
        await ctx.transaction(by_psycopg, ctx.run_id, "b", name="b"),
        await ctx.transaction(by_sqlalchemy, ctx.run_id, "c", name="c", engine=engine()),
    ]
    found += await asyncio.gather(
        ctx.transaction(by_asyncpg, ctx.run_id, "d", name="d"), ctx.transaction(by_psycopg, ctx.run_id, "e", name="e")
    )
    return found


@app.workflow(on="ledger.slow")
async def slow(ctx: Context, seconds: float) -> str:
    return await ctx.transaction(by_asyncpg, ctx.run_id, "slow", seconds, name="slow")


@app.workflow(on="ledger.refused")
async def refused(ctx: Context) -> None:
    """Its transaction fails after it has written, each time."""

    async def fail(connection: Any) -> None:
        await by_asyncpg(connection, ctx.run_id, "never")
        raise ConnectionError("away")

    await ctx.transaction(fail)
