"""`python -m chaos.skew`: two versions of Tidegate on one database, under load, forwards and back, with kills.

The old version works; the new one migrates beside it; the processes are changed one by one, by SIGTERM and by kill -9;
some go back to the old version on the new schema, and forward again; at last the contraction is applied, and the old
version is refused. Meanwhile every API stays ready and answers no 5xx. Then all verdicts of `chaos.judge` apply.

Old is the last release and new is this code; and old is this code and new is the release after it (`chaos.releases`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import asyncpg
import msgspec
import uvloop

from chaos import database, releases
from chaos.cluster import READY_SECONDS, TIDEGATE, Cluster, Member
from chaos.http import request
from chaos.judge import Verdict, judge
from chaos.publisher import Job
from chaos.records import Evidence, Fault, Writer, evidence
from chaos.releases import NoRelease, Release
from chaos.run import STILL_SECONDS, drain
from tidegate.store import processes
from tidegate.telemetry import logs

APIS, WORKERS = 2, 2
PROBE_SECONDS = 0.3
_DONE = "select count(*) from tidegate.workflow_runs where status = 'succeeded'"
_FITS = "select max(compatible_from) <= $1 from tidegate.schema_migrations"
# What a dead process did not delete itself: as if so much time had passed.
_AGE = "update tidegate.processes set seen_at = seen_at - interval '1 h' where name like any ($1)"

How = Literal["restart", "kill"]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What is run; `waits`: for as long as a dead process counts as alive, instead of changing the time."""

    seed: int
    rounds: int = 3
    per_second: float = 100.0
    waits: bool = True
    progress: int = 60


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one pair of versions."""

    old: str
    new: str
    choice: Choice
    acknowledged: int
    unanswered: int
    effects: int
    effects_by: dict[str, int]
    changes: dict[str, int]
    applied: list[str]
    waited: list[str]
    seconds: float
    verdicts: list[Verdict]

    @property
    def is_clean(self) -> bool:
        return all(verdict.count == 0 for verdict in self.verdicts)


class Skew:
    """A cluster whose members change their version."""

    def __init__(self, cluster: Cluster, old: Release, new: Release, choice: Choice) -> None:
        self.complaints: list[str] = []
        self.side_of: dict[int, str] = {}  # of each process that was started: "old" or "new"
        self.changes: Counter[str] = Counter()
        self.applied: list[str] = []
        self.waited: list[str] = []
        self._cluster = cluster
        self._old, self._new, self._choice = old, new, choice
        self._chance = random.Random(choice.seed)
        self._log = Writer(cluster.folder / "faults.jsonl")
        self._changing: set[str] = set()
        self._old_knows = 0

    async def run(self) -> None:
        """From the old version alone to the new version alone."""
        await self._progress()
        self._old_knows = int(await self._value("select max(schema_version) from tidegate.processes"))
        await self._migrate(self._new)
        await self._progress()
        await self._change(self._chance.choice(self._cluster.members), self._old, "kill")
        for _ in range(self._choice.rounds):
            for n, member in enumerate(self._shuffled()):
                await self._change(member, self._new, "kill" if n % 2 else "restart")
            await self._change(self._chance.choice(self._cluster.apis), self._old, "restart")
            await self._change(self._chance.choice(self._cluster.workers), self._old, "kill")
            await self._migrate(self._old)
            await self._progress()
        for member in self._shuffled():
            if self.side_of[member.pid] != "new":
                await self._change(member, self._new, "restart")
        await self._contract()
        await self._progress()

    def close(self) -> None:
        self._log.write(Fault(at=time.monotonic(), fault="mended"))
        self._log.close()

    def started(self, release: Release) -> None:
        """Every member has this version from its start."""
        self.side_of |= dict.fromkeys(self._pids(), self._side(release))

    async def watch(self) -> None:
        """Every API that is at work is ready, all the time; and nobody ends by himself."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            for api, url in zip(self._cluster.apis, self._cluster.urls, strict=True):
                pid = api.pid
                if api.is_ready and api.name not in self._changing:
                    answer = await request(url, "GET", "/readyz")
                    is_same = api.is_ready and api.pid == pid and api.name not in self._changing
                    if answer.status not in (0, 200) and is_same:
                        why = answer.body.decode()[:500]
                        self.complaints.append(f"{api.name} ({self.side_of[pid]}) is not ready: {why}")
            for member in self._cluster.members:
                if not member.is_alive and member.name not in self._changing:
                    self.complaints.append(f"{member.name} ({self.side_of[member.pid]}) ended by itself")
                    member.start()
                    self.side_of[member.pid] = "unknown"

    def _side(self, release: Release) -> str:
        return "old" if release is self._old else "new"

    def _shuffled(self) -> list[Member]:
        return self._chance.sample(self._cluster.members, len(self._cluster.members))

    async def _change(self, member: Member, release: Release, how: How) -> None:
        """End a process and start that version in its place; returns when it is at work."""
        self._changing.add(member.name)
        try:
            pid, at = member.pid, time.monotonic()
            member.send(signal.SIGKILL if how == "kill" else signal.SIGTERM)
            if await member.ended() is None:
                self.complaints.append(f"{member.name} does not stop")
                member.kill()
            self._log.write(Fault(at=at, fault=how, target=member.name, pid=pid, until=time.monotonic()))
            self.changes[f"{self.side_of[pid]} to {self._side(release)}, {how}"] += 1
            start(self._cluster, member, release)
            self.side_of[member.pid] = self._side(release)
            await self._at_work(member, release)
        finally:
            self._changing.discard(member.name)
        await self._progress()

    async def _at_work(self, member: Member, release: Release) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not member.is_ready:
            if not member.is_alive or time.monotonic() > deadline:
                raise RuntimeError(f"{member.name} ({release.version}) does not start; see {self._cluster.folder}/logs")
            await self._cluster.look()
            await asyncio.sleep(0.05)

    async def _migrate(self, release: Release) -> None:
        """`tidegate migrate` of a version, while everything works."""
        done = await asyncio.to_thread(tidegate, self._cluster, release, "migrate")
        if done.returncode != 0:
            self.complaints.append(f"migrate of {release.version} failed: {done.stderr}")
        lines = done.stdout.splitlines()
        applied = [line.split()[1] for line in lines if line.startswith("applied")]
        if release is self._old and applied:
            self.complaints.append(f"migrate of {release.version} changed the newer schema: {applied}")
        self.applied += applied
        self.waited += [line.split(":")[0].split()[1] for line in lines if line.startswith("waiting")]

    async def _contract(self) -> None:
        """What waits for the old version is applied once nobody of it is alive; then it is refused."""
        deadline = time.monotonic() + 2 * processes.ALIVE_MS / 1000 + READY_SECONDS
        if not self._choice.waits:
            await self._value(_AGE, [f"%:{pid}" for pid in self.side_of if pid not in self._pids()])
        while True:
            before = len(self.waited)
            await self._migrate(self._new)
            if len(self.waited) == before:
                break
            if time.monotonic() > deadline:
                self.complaints.append(f"{self.waited[-1]} still waits")
                return
            await asyncio.sleep(2)
        if await self._value(_FITS, self._old_knows):
            return
        for command in (("serve", "--port", "0"), worker_command(self._old)):
            done = await asyncio.to_thread(tidegate, self._cluster, self._old, *command)
            if done.returncode != 2 or "upgrade this process" not in done.stderr:
                self.complaints.append(f"{command} of {self._old.version} was not refused: {done.stderr[-500:]}")

    def _pids(self) -> set[int]:
        return {member.pid for member in self._cluster.members}

    async def _progress(self) -> None:
        """Wait until a number of further runs has ended."""
        deadline, wanted = time.monotonic() + STILL_SECONDS, await self._value(_DONE) + self._choice.progress
        while await self._value(_DONE) < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no progress in {STILL_SECONDS:g} s; see {self._cluster.folder / 'logs'}")
            await asyncio.sleep(0.1)

    async def _value(self, query: str, *arguments: object) -> Any:
        connection = await asyncpg.connect(self._cluster.database_url)
        try:
            return await connection.fetchval(query, *arguments)
        finally:
            await connection.close()


def worker_command(release: Release) -> tuple[str, ...]:
    return "worker", f"{release.folder / 'chaos' / 'app.py'}:app"


def start(cluster: Cluster, member: Member, release: Release) -> None:
    """Start a member with that version."""
    url = dict(zip([api.name for api in cluster.apis], cluster.urls, strict=True)).get(member.name)
    command = ("serve", "--port", url.rpartition(":")[2]) if url else worker_command(release)
    member.use([TIDEGATE, *command], release.environment(cluster.environment()))
    member.start()


def tidegate(cluster: Cluster, release: Release, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of that version, to its end."""
    environment = release.environment(cluster.environment())
    return subprocess.run(
        [TIDEGATE, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=READY_SECONDS
    )


@asynccontextmanager
async def running(folder: Path, release: Release) -> AsyncIterator[Cluster]:
    """A cluster of that version, at work."""
    cluster = Cluster(folder, queue="postgres", apis=APIS, workers=WORKERS)
    try:
        await cluster.start_with(lambda: tidegate(cluster, release, "migrate"), lambda m: start(cluster, m, release))
        await cluster.until_at_work()
        yield cluster
    finally:
        cluster.stop()


async def run(folder: Path, old: Release, new: Release, choice: Choice, say: Callable[[str], None]) -> Found:
    """One pair of versions, to its verdicts; everything it leaves is in `folder`."""
    began_at, clock = time.monotonic(), database.Clock()
    say(f"{old.version} and {new.version} side by side, seed {choice.seed}")
    async with running(folder, old) as cluster:
        skew = Skew(cluster, old, new, choice)
        skew.started(old)
        await database.watch(cluster.database_url, clock)
        job = Job(urls=cluster.urls, folder=str(folder), seed=choice.seed, per_second=choice.per_second)
        cluster.publish(job)
        watching = asyncio.create_task(skew.watch())
        try:
            await skew.run()
            await cluster.stop_publishing(STILL_SECONDS)
            watching.cancel()
            await drain(cluster, say)
        finally:
            watching.cancel()
            skew.close()
        dump = await database.dump(cluster.database_url, clock)
        (folder / "database.json").write_bytes(msgspec.json.encode(dump))
    found = evidence(folder)
    done = Counter(skew.side_of.get(mark.pid, "unknown") for mark in found.marks if mark.what == "ended")
    return Found(
        old=old.version,
        new=new.version,
        choice=choice,
        acknowledged=len({answer.key for answer in found.answers if answer.status == 202}),
        unanswered=sum(answer.status == 0 for answer in found.answers),
        effects=done.total(),
        effects_by=dict(done),
        changes=dict(skew.changes),
        applied=skew.applied,
        waited=sorted(set(skew.waited)),
        seconds=round(time.monotonic() - began_at, 1),
        verdicts=[*judge(found), _verdict("requests refused", _refused(found)), _verdict("skew", skew.complaints)],
    )


def _refused(found: Evidence) -> list[str]:
    """Requests of producers that were answered, but not accepted; and those of the operator that failed."""
    published = [f"{one.key}: {one.status}" for one in found.answers if one.status not in (0, 202)]
    return published + [f"{one.verb} {one.subject}: {one.status}" for one in found.verbs if one.status >= 500]


def _verdict(name: str, found: list[str]) -> Verdict:
    return Verdict(name=name, count=len(found), found=found[:50])


def pairs(folder: Path, say: Callable[[str], None]) -> list[tuple[Release, Release]]:
    """The versions that are run side by side."""
    found = [(releases.current(), releases.next_release(folder / "next"))]
    try:
        found.insert(0, (releases.last_release(folder / "last"), releases.current()))
    except NoRelease as exc:
        say(f"without the last release: {exc}")
    return found


def table(found: Found) -> str:
    """For people."""
    lines = [f"{'OK    ' if v.count == 0 else 'BROKEN'} {v.name:<36} {v.count:>5}" for v in found.verdicts]
    for verdict in found.verdicts:
        lines += [f"  {verdict.name}: {one}" for one in verdict.found[:5]]
    lines.append(f"{found.acknowledged} events accepted, {found.effects} effects {found.effects_by}")
    lines.append(f"{sum(found.changes.values())} changes {found.changes}; applied {found.applied}; {found.seconds} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.skew", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often forwards and back [%(default)s]")
    parser.add_argument("--rate", type=float, default=100.0, help="events a second [%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="[%(default)s]")
    parser.add_argument("--folder", type=Path, help="where the run leaves its evidence; kept [a temporary one]")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything we started is taken down
    logs.configure("warning", "console")
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="tidegate-skew-"))
    choice = Choice(seed=arguments.seed, rounds=arguments.rounds, per_second=arguments.rate)
    results = []
    for n, (old, new) in enumerate(pairs(folder, _say)):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results.append(runner.run(run(folder / str(n), old, new, choice, _say)))
        print(table(results[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    if all(result.is_clean for result in results) and arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"skew: all that it left is in {folder}")
    sys.exit(not all(result.is_clean for result in results))


def _say(text: str) -> None:
    print(f"skew: {text}", flush=True)


if __name__ == "__main__":
    main()
