"""`python -m chaos.poison`: some runs of a batch kill the process that executes them, an operator kills others.

Whoever kills its process is given up, and nobody else is: every other run takes effect, and no breaker opens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import asyncpg
import msgspec
import uvloop

from chaos.cluster import Cluster
from tidegate.telemetry import logs

APP = Path(__file__).parent / "poison_app.py"
WAIT_SECONDS = 600.0
# Longer than the first trial of a suspect is alone.
LATE_SECONDS = 6.0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A batch: how many runs, which of them kill and how, and how often an operator does (0: never)."""

    seed: int
    workers: int
    runs: int = 50
    poison: tuple[str, ...] = ("at once",)
    kill_seconds: float = 0.0
    kills: int = 0
    lease_ms: int = 3000


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. `given_up` and `without_effect` are numbers of runs."""

    choice: Choice
    seconds: float
    deaths: int
    kills: int
    poison: list[int]
    given_up: list[int]
    without_effect: list[int]
    effects: int
    statuses: dict[str, int]
    remembered_crashes: int
    breakers: int
    errors: list[str]

    @property
    def complaints(self) -> list[str]:
        """What must not be; none when all is well."""
        made = []
        if innocent := sorted(set(self.given_up) - set(self.poison)):
            made.append(f"given up without having killed: {innocent}")
        if guilty := sorted(set(self.poison) - set(self.given_up)):
            made.append(f"killed and was not given up: {guilty}")
        if self.without_effect:
            made.append(f"took no effect: {self.without_effect}")
        if self.remembered_crashes:
            made.append(f"{self.remembered_crashes} runs that ended well are still counted as crashed")
        if self.breakers:
            made.append(f"{self.breakers} breakers opened")
        if wrong := [error for error in self.errors if "while this run was the only one executing there" not in error]:
            made.append(f"unclear: {wrong}")
        return made


async def run(choice: Choice, folder: Path) -> Found:
    """On a cluster of its own, whose workers are started again whenever they die."""
    chance = random.Random(choice.seed)
    settings = {"TIDEGATE_LEASE_MS": str(choice.lease_ms), "TIDEGATE_WORKER_CONCURRENCY": "20"}
    cluster = Cluster(folder, queue="postgres", apis=0, workers=choice.workers, app=APP, settings=settings)
    poison = dict(zip(chance.sample(range(choice.runs), len(choice.poison)), choice.poison, strict=True))
    try:
        await cluster.start()
        connection = await asyncpg.connect(cluster.database_url)
        try:
            began_at = time.monotonic()
            await _publish(connection, choice, poison, chance)
            deaths, kills = await _until_ended(cluster, connection, choice, chance)
            seconds = time.monotonic() - began_at
            return await _judge(connection, choice, folder, sorted(poison), deaths, kills, seconds)
        finally:
            await connection.close()
    finally:
        cluster.stop()


async def _publish(
    connection: asyncpg.Connection[asyncpg.Record], choice: Choice, poison: dict[int, str], chance: random.Random
) -> None:
    """All in one transaction, so that they are decided and claimed together."""
    async with connection.transaction():
        for n in range(choice.runs):
            kind = poison.get(n, "harmless")
            seconds = LATE_SECONDS if kind == "late" else round(chance.uniform(0.0, 1.0), 3)
            payload = msgspec.json.encode({"n": n, "seconds": seconds, "kind": kind}).decode()
            await connection.execute("select tidegate.publish('poison.work', 'chaos', $1::jsonb)", payload)


async def _until_ended(
    cluster: Cluster, connection: asyncpg.Connection[asyncpg.Record], choice: Choice, chance: random.Random
) -> tuple[int, int]:
    """Start dead workers again, kill some, until every run has ended; how many died by themselves and were killed."""
    deaths = kills = 0
    killed: set[int] = set()
    killed_at = time.monotonic()
    deadline = killed_at + WAIT_SECONDS
    while time.monotonic() < deadline:
        deaths += sum(not worker.is_alive and worker.pid not in killed for worker in cluster.workers)
        cluster.keep_up()
        await cluster.look()
        ready = [worker for worker in cluster.workers if worker.is_ready]
        if ready and kills < choice.kills and time.monotonic() - killed_at > choice.kill_seconds:
            victim = chance.choice(ready)
            killed.add(victim.pid)
            victim.send(signal.SIGKILL)
            kills, killed_at = kills + 1, time.monotonic()
        ended = await connection.fetchval(
            "select count(*) from tidegate.workflow_runs where status in ('succeeded', 'failed', 'cancelled')"
        )
        if ended == choice.runs:
            break
        await asyncio.sleep(0.05)
    return deaths, kills


async def _judge(
    connection: asyncpg.Connection[asyncpg.Record], choice: Choice, folder: Path, poison: list[int], deaths: int,
    kills: int, seconds: float,
) -> Found:  # fmt: skip
    rows = await connection.fetch(
        "select (parameters ->> 'n')::int as n, status, error, crashes from tidegate.workflow_runs"
    )
    marks = [line for file in (folder / "sink").glob("*.txt") for line in file.read_text().splitlines()]
    ended = Counter(int(line.split()[0]) for line in marks if line.endswith(" ended"))
    told = "".join(file.read_text() for file in (folder / "logs").glob("worker-*.log"))
    return Found(
        choice=choice,
        seconds=round(seconds, 1),
        deaths=deaths,
        kills=kills,
        poison=poison,
        given_up=sorted(row["n"] for row in rows if row["status"] == "failed"),
        without_effect=sorted(set(range(choice.runs)) - set(poison) - ended.keys()),
        effects=ended.total(),
        statuses=dict(sorted(Counter(row["status"] for row in rows).items())),
        remembered_crashes=sum(row["status"] == "succeeded" and row["crashes"] > 0 for row in rows),
        breakers=told.count("trigger.breaker_opened"),
        errors=sorted({row["error"] for row in rows if row["error"]}),
    )


def table(found: Found) -> str:
    """For people."""
    choice = found.choice
    rows = {
        "workers, runs, of them poison": f"{choice.workers}, {choice.runs}, {found.poison}: {', '.join(choice.poison)}",
        "processes that died, kills by an operator": f"{found.deaths}, {found.kills}",
        "given up": str(found.given_up),
        "ended": ", ".join(f"{status} {count}" for status, count in found.statuses.items()),
        "effects (at least one for each that succeeded)": str(found.effects),
        "took": f"{found.seconds} s",
    }
    return "\n".join([*(f"{name:<46} {value}" for name, value in rows.items()), *found.complaints])


def choices(seed: int) -> list[Choice]:
    """What `make chaos` runs."""
    every = ("at once", "late", "in a step")
    return [
        Choice(seed=seed, workers=1),
        Choice(seed=seed, workers=3, poison=every, kill_seconds=3.0, kills=8),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.poison", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; its number is printed [random]")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything we started is taken down
    logs.configure("warning", "console")
    seed = random.randrange(1, 1_000_000) if arguments.seed is None else arguments.seed
    print(f"chaos: poison, seed {seed}", flush=True)
    results = []
    for choice in choices(seed):
        with (
            tempfile.TemporaryDirectory(prefix="tidegate-poison-", ignore_cleanup_errors=True) as folder,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            results.append(runner.run(run(choice, Path(folder))))
        print(table(results[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    sys.exit(any(found.complaints for found in results))


if __name__ == "__main__":
    main()
