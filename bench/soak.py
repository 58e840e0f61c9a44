"""`make soak`, or `python -m bench.soak [--minutes 30] [--rate 1000] [--batch 1] [--out FILE]`: days of steady load
in minutes, with retention; whether rates, latencies, sizes and memory stay as they are.

A day is made short by moving the clock: when the events of a day are published and handled, every clock that is read
to schedule or to make ids (`tidegate.now()`, the wall clock of the processes) goes to the next midnight at once. In
between it runs at its true speed. So leases, timeouts and waits are what they are for users, and nothing is in progress
when the clock moves. Of the worker, only the time between two passes over the days is shortened.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import signal
import subprocess
import sys
import time
from collections import defaultdict
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import asyncpg
import msgspec
import uvloop

from bench import flat, gate, marks, neighbours, pipeline, results, stage, watch, yardstick
from bench.client import Job
from bench.flat import Sample, Soak
from bench.latency import latency
from bench.stage import Stage, prepared, without_triggers
from tidegate.flow.keep.prune import DAYS_FROM_SECONDS
from tidegate.telemetry import logs

OUT = Path(__file__).parent / "results" / "soak.json"
CLOCK = Path(__file__).parent / "soak_clock"
CONNECTIONS = 32
# The shortest retention that goes by days: history is complete, and the first day dropped, after three of them.
RETENTION_SECONDS = DAYS_FROM_SECONDS
# So many days pass in a run that is long enough; a day is not shorter than this, nor the worker's passes over days.
DAYS, LEAST_DAY_SECONDS, LEAST_PASS_SECONDS = 24, 2.0, 0.5
# The worker's passes over the days in one of them.
PASSES = 6
MOST_SECONDS_BETWEEN_SAMPLES = 5.0

_NOW = """
create or replace function tidegate.now() returns timestamptz language sql stable parallel safe
as $$ select clock_timestamp() + interval '{seconds} s' $$
"""
_SUCCEEDED = """
select count(*) from tidegate.workflow_runs
 where status = 'succeeded' and id >= tidegate.first_of_day($1) and id < tidegate.first_of_day($1 + 1)
"""
_EVENTS = "select count(*) from tidegate.workflow_events"


class Plan(NamedTuple):
    """How long, and how much."""

    minutes: float
    rate: float
    batch: int

    @property
    def day_seconds(self) -> float:
        return max(self.minutes * 60 / DAYS, LEAST_DAY_SECONDS)

    @property
    def sample_seconds(self) -> float:
        return min(self.day_seconds / 2, MOST_SECONDS_BETWEEN_SAMPLES)

    @property
    def events_per_day(self) -> int:
        """Whole batches, and at least two."""
        return max(int(self.rate * self.day_seconds / self.batch), 2) * self.batch


class Clock:
    """The clock of the database and of the processes; midnight of the next day at each move."""

    def __init__(self, path: Path, connection: asyncpg.Connection) -> None:
        self.path = path
        self.day: date = datetime.now(UTC).date()
        self._connection = connection
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._ahead = mmap.mmap(file.fileno(), 8)

    async def next_day(self) -> date:
        """First the database's: an id may be older than it, as it is while an event waits for its commit."""
        self.day += timedelta(days=1)
        midnight = datetime(self.day.year, self.day.month, self.day.day, tzinfo=UTC)
        ahead = midnight - datetime.now(UTC) + timedelta(milliseconds=100)
        await self._connection.execute(_NOW.format(seconds=ahead.total_seconds()))
        self._ahead[:8] = (int(ahead.total_seconds() * 1e9)).to_bytes(8, "little")
        return self.day


class Pids(NamedTuple):
    """The processes that are watched."""

    api: int
    worker: int
    postmaster: int


class Watch:
    """Samples, taken beside the load; the latencies are added when a day's load has ended."""

    def __init__(self, connection: asyncpg.Connection, pids: Pids, every: float) -> None:
        self._connection = connection
        self._pids = pids
        self._every = every
        self.started_at = time.monotonic()
        self.day = date.min
        self.number = 0
        self.succeeded_before = 0
        self.samples: list[Sample] = []
        self._published: dict[int, list[float]] = defaultdict(list)
        self._started: dict[int, list[float]] = defaultdict(list)

    def new_day(self, day: date, succeeded: int) -> None:
        """Rows of earlier days that succeeded, all of them, are `succeeded`."""
        self.day, self.number, self.succeeded_before = day, self.number + 1, succeeded

    async def run(self) -> None:
        """Until cancelled, at even times."""
        while True:
            self.samples.append(await self._sample())
            passed = time.monotonic() - self.started_at
            await asyncio.sleep(self._every - passed % self._every)

    def note(self, sent_at: float, answered_ms: float, started_at: float) -> None:
        """A request of the load, and when the run of its first event started, by the monotonic clock."""
        place = int((sent_at - self.started_at) / self._every)
        self._published[place].append(answered_ms)
        self._started[place].append((started_at - sent_at) * 1000)

    def with_latencies(self) -> list[Sample]:
        """The samples, each with the latencies of what was sent since the one before."""
        found = []
        for sample in self.samples:
            place = round(sample.at / self._every) - 1
            published, started = self._published.get(place, []), self._started.get(place, [])
            found.append(
                msgspec.structs.replace(
                    sample,
                    publish=latency(published) if len(published) > 1 else None,
                    start=latency(started) if len(started) > 1 else None,
                )
            )
        return found

    async def _sample(self) -> Sample:
        connection, pids = self._connection, self._pids
        accepted, launched, succeeded = [
            await watch.written(connection, table)
            for table in ("event_inbox", "workflow_runs_live", f"workflow_runs_{self.day:%Y%m%d}")
        ]
        return Sample(
            at=round(time.monotonic() - self.started_at, 3),
            day=self.number,
            days_stored=await watch.days(connection),
            accepted=accepted,
            launched=launched,
            succeeded=self.succeeded_before + succeeded,
            sizes=await watch.sizes(connection),
            wal_bytes=await watch.wal_bytes(connection),
            processes={
                "api": watch.process(pids.api),
                "worker": watch.process(pids.worker),
                "postgres": watch.postgres(pids.postmaster),
            },
        )


async def run(plan: Plan) -> Soak:
    """The whole soak, on a Postgres of its own with the server's defaults."""
    async with stage.opened(options={"max_connections": "100"}) as ground, ground.database() as url:
        await without_triggers(url)
        connections = [await asyncpg.connect(url) for _ in range(3)]
        try:
            return await _days(ground, plan, url, *connections)
        finally:
            for connection in connections:
                await connection.close()


async def _days(
    ground: Stage,
    plan: Plan,
    url: str,
    mover: asyncpg.Connection,
    watcher: asyncpg.Connection,
    sampler: asyncpg.Connection,
) -> Soak:
    clock = Clock(ground.folder / "clock", mover)
    await clock.next_day()
    about = results.machine(await ground.version())
    path = ground.folder / "soak.marks"
    environment = {"SOAK_CLOCK": str(clock.path), "PYTHONPATH": str(CLOCK)}
    passes = max(plan.day_seconds / PASSES, LEAST_PASS_SECONDS)
    own = {"TIDEGATE_RETENTION_EVENTS_SECONDS": str(RETENTION_SECONDS), "SOAK_PASS_SECONDS": str(passes)}
    postmaster = watch.parent(await watcher.fetchval("select pg_backend_pid()"))
    with ground.worker(
        url, pipeline.SUCCEEDED.application, environment=environment | own | {marks.MARKS: str(path)}
    ) as worker:
        async with ground.server(url, environment) as (port, api):
            await gate.until_listening(watcher, 1)
            watched = Watch(sampler, Pids(api.pid, worker.pid, postmaster), plan.sample_seconds)
            sampling = asyncio.create_task(watched.run())
            try:
                with neighbours.watched() as others:
                    published = await _load(plan, clock, watched, watcher, port, path)
                if sampling.done():
                    await sampling
            finally:
                sampling.cancel()
                await asyncio.gather(sampling, return_exceptions=True)
            stored = await watcher.fetchval(_EVENTS)
    samples = watched.with_latencies()
    return Soak(
        machine=about,
        minutes=plan.minutes,
        rate=plan.rate,
        batch=plan.batch,
        day_seconds=plan.day_seconds,
        retention_days=RETENTION_SECONDS // 86_400,
        sample_seconds=plan.sample_seconds,
        days=watched.number,
        events=published,
        cpu_us=others.our_us(published),
        cpu_us_of=flat.cpu_us_of(samples, published),
        neighbours=others.cores,
        bytes_per_event=flat.bytes_per_event(samples, published, stored),
        samples=samples,
        verdicts=flat.judge(samples),
    )


async def _load(plan: Plan, clock: Clock, watched: Watch, watcher: asyncpg.Connection, port: int, path: Path) -> int:
    """One day after the other until the time is over; how many events."""
    first = 0
    while time.monotonic() - watched.started_at < plan.minutes * 60:
        day = await clock.next_day()
        watched.new_day(day, first)
        job = Job(
            port=port,
            first=first,
            events=plan.events_per_day,
            batch=plan.batch,
            connections=CONNECTIONS,
            per_second=plan.rate / plan.batch,
        )
        with prepared(job) as go:
            sent = await asyncio.to_thread(go)
        await pipeline.reached(watcher, pipeline.SUCCEEDED.is_reached)
        succeeded = await watcher.fetchval(_SUCCEEDED, day)
        if succeeded != job.events:
            raise RuntimeError(f"{job.events} events were accepted on {day}, but {succeeded} runs succeeded")
        began_at = {mark.number: mark.times[0] for mark in await marks.until(path, job.events)}
        path.write_bytes(b"")  # the worker appends
        for request, (at, ms) in enumerate(zip(sent.sent_at, sent.latencies_ms, strict=True)):
            watched.note(at, ms, began_at[first + request * plan.batch])
        first += job.events
        left = plan.minutes * 60 - (time.monotonic() - watched.started_at)
        print(
            f"soak: day {watched.number}, {first:,} events, {max(left, 0) / 60:.1f} min left",
            file=sys.stderr,
            flush=True,
        )
    return first


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description="Days of steady load, with retention.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long [%(default)s]")
    parser.add_argument("--rate", type=float, default=1000.0, help="events published a second [%(default)s]")
    parser.add_argument("--batch", type=int, default=1, help="events in a request [%(default)s]")
    parser.add_argument("--out", type=Path, default=OUT, help="where the results go as JSON [%(default)s]")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything we started is taken down
    logs.configure("error", "console")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(Plan(arguments.minutes, arguments.rate, arguments.batch)))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if yardstick.OTHERS.exists():
        subprocess.run(
            [yardstick.OTHERS, "-m", "bench.soak_plots", arguments.out.resolve()], cwd=stage.ROOT, check=True
        )
    else:
        print("soak: no pictures; `make soak` installs what draws them", file=sys.stderr)
    rows = flat.lines(found)
    width = max(len(name) for name, _ in rows) + 2
    print("\n".join(f"{name:<{width}}{value}" for name, value in rows))
    sys.exit(0 if all(verdict.is_flat for verdict in found.verdicts) else 1)


if __name__ == "__main__":
    main()
