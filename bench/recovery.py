"""Recovery: a worker is killed, and another one that was there already goes on with its runs."""

from __future__ import annotations

import asyncio
import time
from statistics import median

import asyncpg
import msgspec

from bench import gate, marks, neighbours
from bench.client import Job
from bench.stage import Stage, publish, without_triggers

RUNS = 5

_SUCCEEDED = "select count(*) from tidegate.workflow_runs where status = 'succeeded'"


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """From the kill until a run's function is called again, in seconds: of all runs of all rounds. A lease is renewed
    every third of `lease_ms`, so the ideal lies between two thirds of it and all of it."""

    lease_ms: int
    rounds: int
    runs: int
    p50_seconds: float
    max_seconds: float
    min_seconds: float
    neighbours: float | None


async def measure(stage: Stage, rounds: int, lease_ms: int) -> Recovery:
    """Each round kills at another place between two renewals. A round mostly waits, so all run at once."""
    with neighbours.watched() as others:
        waits = [lease_ms / 3000 * number / rounds for number in range(rounds)]
        found = await asyncio.gather(*(_round(stage, number, lease_ms, wait) for number, wait in enumerate(waits)))
    taken = [seconds for one in found for seconds in one]
    return Recovery(
        lease_ms=lease_ms,
        rounds=rounds,
        runs=len(taken),
        p50_seconds=round(median(taken), 2),
        max_seconds=round(max(taken), 2),
        min_seconds=round(min(taken), 2),
        neighbours=others.cores,
    )


def lines(found: Recovery) -> list[tuple[str, str]]:
    """The figure for people."""
    spread = f"p50 {found.p50_seconds:.1f} s, min {found.min_seconds:.1f} s, max {found.max_seconds:.1f} s"
    lease = f"with a lease of {found.lease_ms / 1000:g} s"
    return [
        ("kill -9 until a run goes on", f"{spread}, {lease}"),
        *neighbours.disturbed("recovery", [found.neighbours]),
    ]


async def _round(stage: Stage, number: int, lease_ms: int, wait_seconds: float) -> list[float]:
    """Seconds for each of the killed worker's runs."""
    path = stage.folder / f"recovery-{number}.marks"
    environment = {marks.MARKS: str(path), "TIDEGATE_LEASE_MS": str(lease_ms)}
    async with stage.database() as url, stage.api(url) as port:
        await without_triggers(url)
        with stage.worker(url, "outliving", f"victim-{number}", environment) as victim:
            watcher = await asyncpg.connect(url)
            try:
                await gate.until_listening(watcher, 1)
                publish(Job(port=port, first=0, events=RUNS, batch=RUNS, connections=1))
                await marks.until(path, RUNS)
                with stage.worker(url, "outliving", f"survivor-{number}", environment) as survivor:
                    await gate.until_listening(watcher, 2)
                    await asyncio.sleep(wait_seconds)
                    killed_at = time.monotonic()
                    victim.kill()
                    found = await marks.until(path, 2 * RUNS)
                    await gate.until(watcher, _SUCCEEDED, RUNS)
            finally:
                await watcher.close()
    again = [mark for mark in found if mark.pid == survivor.pid]
    if sorted(mark.number for mark in again) != list(range(RUNS)) or len(found) != 2 * RUNS:
        raise RuntimeError(f"every run is to be begun once by each worker, not {found}")
    return [mark.times[0] - killed_at for mark in again]
