"""`python -m chaos.edits`: limits of a source and a trigger are edited at random while four workers drain a backlog.

Windows go from a day to a fraction of a second and back. No limit in force is exceeded, what waits keeps its order,
every effect happens once, and the last limit of each trial drains the backlog at its rate: none stalls.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import NamedTuple

from chaos.judge import most_in_any_interval
from chaos.line import Found, Launch, Line, main, out_of_order, running
from tidegate.flow import control
from tidegate.model.ids import TriggerId
from tidegate.model.source import RateLimit
from tidegate.store.db import Connection

BACKLOG = 120
LIMITS = [(1000, 86_400_000), (5, 86_400_000), (40, 60_000), (10, 1000), (25, 1000), (20, 200)]
LAST = [(100, 1000), (60, 500)]
# The rate must be there within one window; the machine is shared, and other stages take their time. A stall is minutes.
SLACK, SLACK_SECONDS = 3.0, 15.0


class Epoch(NamedTuple):
    """A limit, and from when until when it was surely in force, in milliseconds by the database's clock."""

    limit: int
    window_ms: int
    since: float
    until: float


async def run(folder: Path, trials: int, seed: int) -> Found:
    """On a cluster of its own."""
    dice, complaints = random.Random(seed), []
    async with running(folder) as line:
        for trial in range(1, trials + 1):
            for side in ("trigger", "source"):
                complaints += [f"trial {trial}: {text}" for text in await _trial(line, side, dice)]
        for side in ("trigger", "source"):
            complaints += line.complaints(side)
    return Found(seed=seed, trials=trials, complaints=complaints)


async def _trial(line: Line, side: str, dice: random.Random) -> list[str]:
    """Edits midway in a backlog; then the last limit, which all that waits goes on by."""
    before = len(await line.launched(side))
    last = dice.choice(LAST)
    epochs: list[Epoch] = []
    began = await _edit(line, side, dice.choice(LIMITS), epochs, None)
    await line.burst(side, BACKLOG)
    for _ in range(dice.randint(1, 5)):
        await asyncio.sleep(dice.choice([0, 0.02, 0.3, 1.0]))
        began = await _edit(line, side, dice.choice(LIMITS), epochs, began)
    began = await _edit(line, side, last, epochs, began)
    bound = SLACK * (1 + BACKLOG / last[0]) * last[1] / 1000 + SLACK_SECONDS
    took = await line.until_done(side, bound)
    epochs.append(Epoch(*began, float("inf")))
    launches = (await line.launched(side))[before:]
    found = [] if took < bound else [f"{side}: stalls at {last[0]} in {last[1]} ms: {len(launches)} of {BACKLOG}"]
    return found + out_of_order(side, [one.n for one in launches], "launches") + _exceeded(side, launches, epochs)


async def _edit(
    line: Line, side: str, limit: tuple[int, int], epochs: list[Epoch], began: tuple[int, int, float] | None
) -> tuple[int, int, float]:
    """Change the limit; the one before was surely in force until now, this one is from the answer on."""
    if began is not None:
        epochs.append(Epoch(*began, await _now(line)))
    if side == "source":
        await control.set_limit(line.database, side, RateLimit(limit=limit[0], interval_ms=limit[1]), "chaos")
    else:
        fields = {"throttle_count": limit[0], "throttle_window_ms": limit[1]}
        await control.update_trigger(line.database, await line.database.run(_trigger_id), fields, "chaos")
    return (*limit, await _now(line))


def _exceeded(side: str, launches: list[Launch], epochs: list[Epoch]) -> list[str]:
    found = []
    for epoch in epochs:
        most = most_in_any_interval(
            [one.at for one in launches if epoch.since <= one.at < epoch.until], epoch.window_ms
        )
        if most > epoch.limit:
            found.append(f"{side}: {most} within {epoch.window_ms} ms where {epoch.limit} are allowed")
    return found


async def _now(line: Line) -> float:
    async with line.database.connection() as connection:
        now: float = await connection.fetchval("select extract(epoch from tidegate.now())::float8 * 1000")
        return now


async def _trigger_id(connection: Connection) -> TriggerId:
    found: TriggerId = await connection.fetchval(
        "select id from tidegate.workflow_event_triggers where event_type = 'line.trigger'"
    )
    return found


if __name__ == "__main__":
    main("edits", __doc__, run, trials=10)
