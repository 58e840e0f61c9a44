"""What is broken, and when: a plan made from a seed (pure), and the hands that carry it out and write it down."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from chaos.cluster import LEASE_MS, Cluster, Member, skewed
from chaos.records import Fault, Writer

FAULTS = ("kill", "freeze", "postgres", "flush", "redis", "clocks", "rolling")
NEED_REDIS = {"flush", "redis"}
KILL_SECONDS, FREEZE_SECONDS, POSTGRES_SECONDS, FLUSH_SECONDS, ROLLING_SECONDS = 2.0, 7.0, 20.0, 3.0, 30.0
SKEWS = (-600, 0, 600)
RESTART_SECONDS = 0.3
SETTLE_SECONDS = 60.0


class Action(NamedTuple):
    """At `at` seconds after the start: a fault, whom it hits (a number among those it may hit), and for how long."""

    at: float
    fault: str
    target: int = 0
    seconds: float = 0.0


def plan(seed: int, seconds: float, faults: Sequence[str]) -> list[Action]:
    """Every action of a run. The same seed, length and faults make the same plan."""
    made: list[Action] = []
    makers: dict[str, Callable[[random.Random], list[Action]]] = {
        "kill": lambda chance: [
            Action(at, "kill", chance.randrange(10_000)) for at in _times(seconds, KILL_SECONDS, KILL_SECONDS)
        ],
        "freeze": lambda chance: [
            Action(at, "freeze", chance.randrange(10_000), LEASE_MS / 1000 + chance.uniform(0.5, 2.5))
            for at in _times(seconds, FREEZE_SECONDS, FREEZE_SECONDS / 2)
        ],
        "postgres": lambda chance: [
            Action(at, "postgres", 0, chance.uniform(0.3, 2.0))
            for at in _times(
                seconds, POSTGRES_SECONDS, min(POSTGRES_SECONDS, seconds) / 2 + 0.7
            )  # not as one is killed
        ],
        "flush": lambda _: [Action(at, "flush") for at in _times(seconds, FLUSH_SECONDS, FLUSH_SECONDS)],
        "redis": lambda _: [Action(seconds / 3, "redis", 0, min(30.0, seconds / 3))],
        "rolling": lambda _: [
            Action(at, "rolling") for at in _times(seconds, ROLLING_SECONDS, min(ROLLING_SECONDS, seconds) / 3)
        ],
    }
    for fault in FAULTS:  # in a fixed order, whatever order was asked for
        if fault in faults and fault in makers:
            made += makers[fault](random.Random(f"{seed}:{fault}"))
    return sorted(made)


def _times(seconds: float, every: float, first: float) -> list[float]:
    return [first + n * every for n in range(int(max(0.0, seconds - first) / every) + 1) if first + n * every < seconds]


class Breaker:
    """Carries a plan out on a cluster, and mends everything afterwards."""

    def __init__(self, cluster: Cluster, seed: int, faults: Sequence[str]) -> None:
        self._cluster = cluster
        self._log = Writer(cluster.folder / "faults.jsonl")
        self._chance = random.Random(f"{seed}:hands")
        self._has_clocks = "clocks" in faults
        self._leaving: set[str] = set()
        self._is_over = False
        self._is_rolling = False

    async def run(self, actions: Sequence[Action], seconds: float) -> None:
        """All of it; returns when the time is over and what lasts has ended."""
        began_at = time.monotonic()
        hands = {
            "kill": self._kill,
            "freeze": self._freeze,
            "postgres": self._postgres,
            "flush": self._flush,
            "redis": self._redis,
            "rolling": self._rolling,
        }
        async with asyncio.TaskGroup() as group:  # a deed that fails fails the run
            keeper = group.create_task(self._keep_up())
            deeds = []
            for action in actions:
                await asyncio.sleep(max(0.0, began_at + action.at - time.monotonic()))
                deeds.append(group.create_task(hands[action.fault](action)))
            await asyncio.sleep(max(0.0, began_at + seconds - time.monotonic()))
            self._is_over = True
            await asyncio.gather(*deeds)
            keeper.cancel()

    def mend(self) -> None:
        """Whoever is not there is started, with a right clock."""
        self._cluster.keep_up()
        self._wrote("mended")
        self._log.close()

    def start(self, member: Member) -> None:
        skew = self._chance.choice(SKEWS) if self._has_clocks and member in self._cluster.workers else 0
        if skew:
            member.start(**skewed(skew))
            self._wrote("clock", f"{member.name} {skew:+d} s", member.pid)
        else:
            member.start()

    def _wrote(
        self, fault: str, target: str = "", pid: int = 0, *, at: float | None = None, until: float = 0.0
    ) -> None:
        self._log.write(Fault(at=at or time.monotonic(), fault=fault, target=target, pid=pid, until=until))

    async def _keep_up(self) -> None:
        """Start again whoever has ended: killed by us, or because there was no Postgres when it started."""
        while True:
            await asyncio.sleep(RESTART_SECONDS)
            for member in self._cluster.members:
                if not member.is_alive and member.name not in self._leaving:
                    self.start(member)
            await self._cluster.look()

    async def _kill(self, action: Action) -> None:
        """One of those at work: who is only starting holds nothing that could be lost."""
        if members := [member for member in self._cluster.members if member.is_ready]:
            member = members[action.target % len(members)]
            self._wrote("kill", member.name, member.pid)
            member.send(signal.SIGKILL)

    async def _freeze(self, action: Action) -> None:
        workers = [worker for worker in self._cluster.workers if worker.is_ready]
        if not workers:
            return
        member = workers[action.target % len(workers)]
        pid, at = member.pid, time.monotonic()
        member.send(signal.SIGSTOP)
        await asyncio.sleep(action.seconds)
        if member.pid == pid:  # not killed and started again meanwhile
            member.send(signal.SIGCONT)
        self._wrote("freeze", member.name, pid, at=at, until=time.monotonic())

    async def _postgres(self, action: Action) -> None:
        postgres = self._cluster.postgres
        self._wrote("postgres-stop")
        postgres.stop(immediate=True)
        at = time.monotonic()
        await asyncio.sleep(action.seconds)
        self._wrote("postgres", at=at, until=time.monotonic())
        postgres.start()
        await postgres.answers()
        self._wrote("postgres-ready")

    async def _flush(self, _: Action) -> None:
        try:
            if self._cluster.redis is not None:
                self._cluster.redis.flush()
                self._wrote("flush")
        except OSError:  # it is dead just now
            pass

    async def _redis(self, action: Action) -> None:
        redis, at = self._cluster.redis, time.monotonic()
        if redis is not None:
            redis.stop()
            await asyncio.sleep(action.seconds)
            redis.start()
            self._wrote("redis", at=at, until=time.monotonic())

    async def _rolling(self, action: Action) -> None:
        """Ask each in turn to stop and start the next version in its place, which is at work before the next's turn."""
        if self._is_rolling:
            return
        self._is_rolling = True
        for member in self._cluster.members:
            if not member.is_ready:  # killed just now: it is the next version already
                continue
            self._leaving.add(member.name)
            try:
                pid, at = member.pid, time.monotonic()
                member.send(signal.SIGTERM)
                status = await member.ended(SETTLE_SECONDS)
                if status is None:
                    self._wrote("stuck", member.name, pid)
                    member.kill()
                self.start(member)
                self._wrote("restart", f"{member.name} {status}", pid, at=at, until=time.monotonic())
            finally:
                self._leaving.discard(member.name)
            for _ in range(int(SETTLE_SECONDS / RESTART_SECONDS)):
                if member.is_ready or self._is_over:
                    break
                await asyncio.sleep(RESTART_SECONDS)
            if self._is_over:
                break
        self._is_rolling = False
