"""`python -m chaos.shared`: workflows share budgets and collect events in windows, while workers and APIs are killed,
workers are stopped for longer than their lease, and Postgres crashes.

The verdicts: no budget is exceeded, by launches in any sliding interval and by executions at once; what waits for one
can say why; every event is in exactly one run, in order, and no window is larger or longer than it may be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import uvloop

from chaos.cluster import Cluster
from chaos.faults import Breaker, plan
from chaos.http import request
from chaos.shared_app import marks
from chaos.shared_judge import Arrival, Evidence, Launch, Told, Verdicts, counts, judge
from tidegate.telemetry import logs

APP = Path(__file__).parent / "shared_app.py"
FAULTS = ("kill", "freeze", "postgres")
PATIENCE_SECONDS = 300.0
TENANTS = ("acme", "acme", "acme", "zeta", "zeta", "beta", "iota")
TYPES = ("ask", "ask", "draw", "serve", "row", "row", "change", "change")
AT_ONCE = 40

# A run that ends moves to another partition, which is an insert there: its first one counts.
_NOTED = """
create schema chaos;
create table chaos.launches (run_id uuid primary key, not_before timestamptz, not_after timestamptz);
create function chaos.note_launch() returns trigger language plpgsql as $$
begin
  insert into chaos.launches values (new.id, now(), clock_timestamp()) on conflict do nothing;
  return null;
end $$;
create trigger chaos_note_launch after insert on tidegate.workflow_runs
  for each row execute function chaos.note_launch();
"""
_LAUNCHES = """
select r.id::text, w.slug, r.status, r.error::text, e.payload ->> 'tenant',
       (e.payload ->> 'tokens')::int, extract(epoch from d.launched_at)::float8,
       extract(epoch from l.not_before)::float8, extract(epoch from l.not_after)::float8
  from tidegate.workflow_runs r
  join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
  join tidegate.workflow_events e on e.id = r.event_id
  join tidegate.workflow_trigger_deliveries d on d.id = r.id
  join chaos.launches l on l.run_id = r.id
"""
_ARRIVALS = """
select e.id::text,
       case e.type when 'shared.row' then 'store' when 'shared.change' then 'digest' else substr(e.type, 8) end,
       e.ingress_sequence, case when d.window_id is not null then extract(epoch from d.created_at)::float8 end
  from tidegate.workflow_events e left join tidegate.workflow_trigger_deliveries d on d.event_id = e.id
"""
_UNDONE = """
select (select count(*) from tidegate.event_inbox)
     + (select count(*) from tidegate.event_ingress_retries where retry_state = 'scheduled')
     + (select count(*) from tidegate.workflow_runs where status in ('pending', 'running'))
     + (select count(*) from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled')
"""
_WAITING = """
select d.id::text, d.claim_generation, clock_timestamp() from tidegate.workflow_trigger_deliveries d
 where d.retry_state = 'scheduled' and d.reason = 'budget' and ($1::uuid is null or d.id = $1) limit 200
"""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """For how long, how many events a second, by how many processes, and what is broken."""

    seed: int
    seconds: float = 60.0
    per_second: float = 45.0
    apis: int = 2
    workers: int = 3
    faults: Sequence[str] = FAULTS
    without: Sequence[str] = ()
    patience_seconds: float = PATIENCE_SECONDS


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    choice: Choice
    seconds: float
    events: int
    launches: dict[str, int]
    explained: int
    executions: int
    verdicts: Verdicts

    @property
    def is_well(self) -> bool:
        return not any(getattr(self.verdicts, name) for name in self.verdicts.__struct_fields__)


async def run(choice: Choice, folder: Path) -> Found:
    """On a cluster of its own, which is mended at the end and drains."""
    cluster = Cluster(
        folder, queue="postgres", apis=choice.apis, workers=choice.workers, app=APP, without=choice.without,
        settings={"TIDEGATE_WORKER_CONCURRENCY": "20"},
    )  # fmt: skip
    began_at = time.monotonic()
    try:
        await cluster.start()
        await cluster.until_at_work()
        await _execute(cluster, _NOTED)
        breaker = Breaker(cluster, choice.seed, choice.faults)
        told: list[Told] = []
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_ask(cluster, random.Random(f"{choice.seed}:ask"), told, is_over))
            publishing = group.create_task(_publish(cluster, choice))
            await breaker.run(plan(choice.seed, choice.seconds, choice.faults), choice.seconds)
            breaker.mend()
            keeping = group.create_task(_keep_up(cluster))
            await publishing
            await _until_done(cluster, choice.patience_seconds)
            is_over.set()
            await asking
            keeping.cancel()
        evidence = await _evidence(cluster, folder, told)
    finally:
        cluster.stop()
    return Found(
        choice=choice, seconds=round(time.monotonic() - began_at, 1), events=len(evidence.arrivals),
        launches=counts(evidence), explained=len(told), executions=sum(m.what == "begin" for m in evidence.marks),
        verdicts=judge(evidence),
    )  # fmt: skip


async def _publish(cluster: Cluster, choice: Choice) -> None:
    """Numbered events, each until it is accepted, whoever is dead meanwhile."""
    chance, room = random.Random(choice.seed), asyncio.Semaphore(AT_ONCE)

    async def publish(n: int, body: bytes) -> None:
        async with room:
            tries = random.Random(f"{choice.seed}:{n}")
            while (await request(tries.choice(cluster.urls), "POST", "/v1/events", body)).status != 202:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    began_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for n in range(int(choice.seconds * choice.per_second)):
            payload = {"tenant": chance.choice(TENANTS), "tokens": chance.randint(1, 3), "ms": chance.randint(5, 60)}
            event = {"type": f"shared.{chance.choice(TYPES)}", "source": "chaos", "id": f"s-{n}", "payload": payload}
            await asyncio.sleep(max(0.0, began_at + n / choice.per_second - time.monotonic()))
            group.create_task(publish(n, msgspec.json.encode(event)))


async def _ask(cluster: Cluster, chance: random.Random, told: list[Told], is_over: asyncio.Event) -> None:
    """Ask why deliveries wait for budgets. An answer counts if nothing became of its delivery meanwhile."""
    while not is_over.is_set():
        with contextlib.suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            connection = await asyncpg.connect(cluster.database_url, timeout=2)
            try:
                waiting = await connection.fetch(_WAITING, None)
                for delivery_id, generation, at in chance.sample(waiting, min(3, len(waiting))):
                    answer = await request(chance.choice(cluster.urls), "GET", f"/v1/explain/{delivery_id}")
                    after = await connection.fetch(_WAITING, delivery_id)
                    if answer.status == 200 and [row[1] for row in after] == [generation]:
                        told.append(Told(delivery_id, at, answer.json()))
            finally:
                await connection.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), 0.2)


async def _keep_up(cluster: Cluster) -> None:
    while True:
        cluster.keep_up()
        await asyncio.sleep(0.3)


async def _until_done(cluster: Cluster, seconds: float) -> None:
    """Nothing waits and nothing runs, or that lasts for too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, TimeoutError, asyncpg.PostgresError):
            connection = await asyncpg.connect(cluster.database_url, timeout=5)
            try:
                if await connection.fetchval(_UNDONE) == 0:
                    return
            finally:
                await connection.close()
        await asyncio.sleep(0.2)


async def _execute(cluster: Cluster, statement: str) -> None:
    connection = await asyncpg.connect(cluster.database_url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def _evidence(cluster: Cluster, folder: Path, told: Sequence[Told]) -> Evidence:
    connection = await asyncpg.connect(cluster.database_url)
    try:
        launches = [Launch(*row) for row in await connection.fetch(_LAUNCHES)]
        arrivals = [Arrival(*row) for row in await connection.fetch(_ARRIVALS)]
        waiting = [f"delivery {row[0]} waits" for row in await connection.fetch(_WAITING, None)]
    finally:
        await connection.close()
    return Evidence(launches, arrivals, marks(folder / "sink"), told, waiting)


def table(found: Found) -> str:
    """For people."""
    choice = found.choice
    lines = [
        f"{'workers, APIs, faults':<28} {choice.workers}, {choice.apis}, {' '.join(choice.faults)}",
        f"{'events, executions':<28} {found.events}, {found.executions}",
        f"{'launches':<28} {', '.join(f'{name} {count}' for name, count in found.launches.items())}",
        f"{'waits explained':<28} {found.explained}",
        f"{'took':<28} {found.seconds} s",
    ]
    for name in found.verdicts.__struct_fields__:
        wrong = getattr(found.verdicts, name)
        lines.append(f"{name.replace('_', ' '):<28} {len(wrong)}")
        lines += [f"    {one}" for one in wrong[:10]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.shared", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; its number is printed [random]")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults last [%(default)s]")
    parser.add_argument("--rate", type=float, default=45.0, help="events a second [%(default)s]")
    parser.add_argument("--only", action="append", choices=FAULTS, help="these faults [all]")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything we started is taken down
    logs.configure("warning", "console")
    seed = random.randrange(1, 1_000_000) if arguments.seed is None else arguments.seed
    print(f"chaos: shared, seed {seed}", flush=True)
    choice: dict[str, Any] = {"seed": seed, "seconds": arguments.seconds, "per_second": arguments.rate}
    if arguments.only:
        choice["faults"] = arguments.only
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-shared-", ignore_cleanup_errors=True) as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(run(Choice(**choice), Path(folder)))
    print(table(found), flush=True)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    sys.exit(0 if found.is_well else 1)


if __name__ == "__main__":
    main()
