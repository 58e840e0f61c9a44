"""`python -m chaos.talk`: orders wait for approvals that come at once, later or never, have children, write rows in the
step's own commit and publish their end, while workers are killed.

The verdicts: no wait misses its event and none is met by two, no child is lost or made twice, the rows of the user's
own table are the results of the steps, and every published event is there once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import uvloop

from chaos.cluster import Cluster
from chaos.talk_app import CHILDREN
from tidegate.telemetry import logs

APP = Path(__file__).parent / "talk_app.py"
PATIENCE_SECONDS = 300.0
# An approval that was accepted this long before its order's wait ends is in time, however slow the machine.
IN_TIME_SECONDS = 4.0

_RUNS = """
select r.id::text, w.slug, r.status, r.error, r.output, (r.parameters ->> 'n')::int as n,
       r.parameters ->> 'part' as part
  from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
"""
_UNDONE = """
select (select count(*) from tidegate.event_inbox)
     + (select count(*) from tidegate.workflow_runs where status in ('pending', 'running'))
"""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """How many orders, by how many workers, and how often one of them is killed."""

    seed: int
    workers: int = 3
    orders: int = 300
    kill_seconds: float = 1.5
    kills: int = 15
    lease_ms: int = 2000


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """Every list must be empty."""

    missed: list[str]
    woken_twice: list[str]
    children_lost: list[str]
    children_twice: list[str]
    effects_not_results: list[str]
    published: list[str]
    unfinished: list[str]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    choice: Choice
    seconds: float
    kills: int
    approved: int
    timed_out: int
    verdicts: Verdicts

    @property
    def is_well(self) -> bool:
        return not any(getattr(self.verdicts, name) for name in self.verdicts.__struct_fields__)


async def run(choice: Choice, folder: Path) -> Found:
    """On a cluster of its own, whose workers are started again whenever they die."""
    chance = random.Random(choice.seed)
    settings = {"TIDEGATE_LEASE_MS": str(choice.lease_ms), "TIDEGATE_WORKER_CONCURRENCY": "20"}
    cluster = Cluster(folder, queue="postgres", apis=0, workers=choice.workers, app=APP, settings=settings)
    try:
        await cluster.start()
        connection = await asyncpg.connect(cluster.database_url)
        publisher = await asyncpg.connect(cluster.database_url)
        try:
            await connection.execute(
                "create table public.orders (id bigserial primary key, n int not null, run_id uuid not null)"
            )
            began_at = time.monotonic()
            publishing = asyncio.create_task(_publish(publisher, choice, chance))
            kills = await _until_ended(cluster, connection, choice, random.Random(choice.seed + 1), publishing)
            approvals = await publishing
            seconds = time.monotonic() - began_at
            return await _judge(connection, choice, folder, approvals, kills, seconds)
        finally:
            await connection.close()
            await publisher.close()
    finally:
        cluster.stop()


async def _publish(
    connection: asyncpg.Connection[asyncpg.Record], choice: Choice, chance: random.Random
) -> dict[int, float]:
    """Orders, and their approvals: right behind the order, soon, seconds later, or never. By order, when the
    approval was accepted, in seconds after its order."""
    approvals: dict[int, float] = {}
    tasks: list[tuple[float, int, str]] = []
    for n in range(choice.orders):
        at = n * 0.03
        tasks.append((at, n, "talk.order"))
        kind = chance.choice(("together", "together", "soon", "later", "later", "never"))
        if kind != "never":
            delay = {"together": 0.0, "soon": chance.uniform(0.001, 0.2), "later": chance.uniform(0.2, 3.0)}[kind]
            tasks.append((at + delay, n, "talk.approved"))
    began_at = time.monotonic()
    accepted: dict[int, float] = {}
    for at, n, event_type in sorted(tasks, key=lambda task: (task[0], task[2] != "talk.order")):
        await asyncio.sleep(max(0.0, began_at + at - time.monotonic()))
        await connection.execute(
            "select tidegate.publish($1, 'chaos', jsonb_build_object('n', $2::int), id => $3)",
            event_type, n, f"{event_type}-{n}",
        )  # fmt: skip
        if event_type == "talk.order":
            accepted[n] = time.monotonic()
        else:
            approvals[n] = time.monotonic() - accepted[n]
    return approvals


async def _until_ended(
    cluster: Cluster,
    connection: asyncpg.Connection[asyncpg.Record],
    choice: Choice,
    chance: random.Random,
    publishing: asyncio.Task[dict[int, float]],
) -> int:
    """Kill workers and start them again until everything has ended; how many were killed."""
    kills = 0
    killed_at = time.monotonic()
    deadline = killed_at + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        cluster.keep_up()
        await cluster.look()
        ready = [worker for worker in cluster.workers if worker.is_ready]
        if ready and kills < choice.kills and time.monotonic() - killed_at > choice.kill_seconds:
            chance.choice(ready).send(signal.SIGKILL)
            kills, killed_at = kills + 1, time.monotonic()
        if publishing.done() and kills >= choice.kills and await connection.fetchval(_UNDONE) == 0:
            break
        await asyncio.sleep(0.05)
    return kills


async def _judge(
    connection: asyncpg.Connection[asyncpg.Record],
    choice: Choice,
    folder: Path,
    approvals: dict[int, float],
    kills: int,
    seconds: float,
) -> Found:
    runs = [dict(row) for row in await connection.fetch(_RUNS)]
    orders = {row["n"]: row for row in runs if row["slug"] == "order"}
    rows = await connection.fetch("select id, n, run_id::text from public.orders")
    events = {
        str(row["id"]): row["n"]
        for row in await connection.fetch(
            "select id, (payload ->> 'n')::int as n from tidegate.workflow_events where type = 'talk.approved'"
        )
    }
    marks = [line.split() for file in (folder / "sink").glob("*.txt") for line in file.read_text().splitlines()]
    outputs = {n: msgspec.json.decode(row["output"]) for n, row in orders.items() if row["status"] == "succeeded"}
    verdicts = Verdicts(
        missed=list(_missed(outputs, approvals, events)),
        woken_twice=list(_woken_twice(outputs, marks)),
        children_lost=[
            f"order {n}: {out['parts']}" for n, out in outputs.items() if out["parts"] != [*range(CHILDREN)]
        ],
        children_twice=list(_children_twice(runs)),
        effects_not_results=list(_effects_not_results(outputs, rows, orders)),
        published=list(_published(outputs, runs)),
        unfinished=[f"{r['slug']} {r['n']} is {r['status']}: {r['error']}" for r in runs if r["status"] != "succeeded"]
        + [f"order {n} has no run" for n in range(choice.orders) if n not in orders],
    )
    approved = sum(out["approved"] is not None for out in outputs.values())
    return Found(
        choice=choice, seconds=round(seconds, 1), kills=kills, approved=approved, timed_out=len(outputs) - approved,
        verdicts=verdicts,
    )  # fmt: skip


def _missed(outputs: dict[int, Any], approvals: dict[int, float], events: dict[str, int]) -> list[str]:
    """Orders whose approval was in time and that did not get it, or got another's, or one that was never sent."""
    found = []
    for n, out in outputs.items():
        if out["approved"] is None:
            if n in approvals and approvals[n] < IN_TIME_SECONDS:
                found.append(f"order {n} timed out, its approval came {approvals[n]:.2f} s after it")
        elif events.get(out["approved"]) != n:
            found.append(f"order {n} was given the approval {out['approved']} of order {events.get(out['approved'])}")
    return found


def _woken_twice(outputs: dict[int, Any], marks: list[list[str]]) -> list[str]:
    """Orders whose function saw two different results of its wait, in whatever attempt."""
    seen: dict[int, set[str]] = defaultdict(set)
    for words in marks:
        if words[0] == "woken":
            seen[int(words[1])].add(words[2])
    found = [f"order {n} saw {sorted(results)}" for n, results in seen.items() if len(results) > 1]
    given = Counter(out["approved"] for out in outputs.values() if out["approved"] is not None)
    return found + [f"approval {event} was given {count} times" for event, count in given.items() if count > 1]


def _children_twice(runs: list[dict[str, Any]]) -> list[str]:
    made = Counter((row["n"], row["part"]) for row in runs if row["slug"] == "part")
    return [f"part {part} of order {n} was made {count} times" for (n, part), count in made.items() if count > 1]


def _effects_not_results(
    outputs: dict[int, Any], rows: list[asyncpg.Record], orders: dict[int, dict[str, Any]]
) -> list[str]:
    """Rows of the user's table without a result, results without a row, and second rows."""
    found = []
    of_run = defaultdict(list)
    for row in rows:
        of_run[row["run_id"]].append(row["id"])
    for n, out in outputs.items():
        mine = of_run.pop(orders[n]["id"], [])
        if mine != [out["row"]]:
            found.append(f"order {n}: the step's result is {out['row']}, its rows are {mine}")
    unfinished = {row["id"] for row in orders.values() if row["status"] != "succeeded"}
    return found + [f"rows {ids} of run {run}" for run, ids in of_run.items() if run not in unfinished]


def _published(outputs: dict[int, Any], runs: list[dict[str, Any]]) -> list[str]:
    """Orders that ended and whose event is not there once."""
    got = Counter(row["n"] for row in runs if row["slug"] == "done")
    return [f"the end of order {n} was published {got[n]} times" for n in outputs if got[n] != 1]


def table(found: Found) -> str:
    """For people."""
    lines = [
        f"{'workers, orders, kills':<28} {found.choice.workers}, {found.choice.orders}, {found.kills}",
        f"{'approved, timed out':<28} {found.approved}, {found.timed_out}",
        f"{'took':<28} {found.seconds} s",
    ]
    for name in found.verdicts.__struct_fields__:
        wrong = getattr(found.verdicts, name)
        lines.append(f"{name.replace('_', ' '):<28} {len(wrong)}")
        lines += [f"    {one}" for one in wrong[:10]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.talk", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; its number is printed [random]")
    parser.add_argument("--orders", type=int, default=300, help="how many [%(default)s]")
    parser.add_argument("--kills", type=int, default=15, help="how many [%(default)s]")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything we started is taken down
    logs.configure("warning", "console")
    seed = random.randrange(1, 1_000_000) if arguments.seed is None else arguments.seed
    print(f"chaos: talk, seed {seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-talk-", ignore_cleanup_errors=True) as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(run(Choice(seed=seed, orders=arguments.orders, kills=arguments.kills), Path(folder)))
    print(table(found), flush=True)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    sys.exit(0 if found.is_well else 1)


if __name__ == "__main__":
    main()
