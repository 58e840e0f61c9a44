"""The workflows of `chaos.talk`: an order waits for its approval, has children, writes a row, and publishes its end.

What a run did is written to plain files, apart from what the database says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tidegate import Context, On, Tidegate

app = Tidegate()

SINK = Path(os.environ.get("CHAOS_SINK", "."))
CHILDREN = 3
WAIT = "8s"


def mark(*words: object) -> None:
    """One line, in one write, in this process's own file."""
    fd = os.open(SINK / f"{os.getpid()}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


async def write_row(connection: Any, n: int, run: str) -> int:
    """A row of the user's own table; its id is the step's result."""
    found: int = await connection.fetchval(
        "insert into public.orders (n, run_id) values ($1, $2::uuid) returning id", n, run
    )
    return found


@app.workflow(on="talk.order", cancel_on=On("talk.cancelled", where="event.payload.n == run.parameters.n"))
async def order(ctx: Context, n: int) -> dict[str, Any]:
    approved = await ctx.wait_for("talk.approved", match={"n": n}, timeout=WAIT)
    mark("woken", n, approved.id if approved else "-")
    parts = await ctx.map(part, [{"n": n, "part": i} for i in range(CHILDREN)], at_once=2)
    row = await ctx.transaction(write_row, n, str(ctx.run_id))
    await ctx.publish("talk.done", {"n": n})
    return {"approved": str(approved.id) if approved else None, "parts": parts, "row": row}


@app.workflow()
async def part(ctx: Context, n: int, part: int) -> int:
    await ctx.step("work", lambda: mark("part", n, part, ctx.run_id))
    return part


@app.workflow(on="talk.done")
async def done(ctx: Context, n: int) -> None:
    mark("done", n, ctx.run_id)
