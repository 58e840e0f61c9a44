"""One run, from an empty folder to its verdicts: start, publish, break, mend, drain, judge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from chaos import database, faults
from chaos.cluster import Cluster, fake_time
from chaos.figures import Figures, figures
from chaos.judge import Verdict, judge
from chaos.publisher import Job
from chaos.records import evidence

# Draining is given whatever it needs while something moves; without any movement for so long, it is stuck.
STILL_SECONDS = 120.0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. With the same choice the same events are published and the same faults happen at the same times."""

    seed: int
    seconds: float = 120.0
    per_second: float = 120.0
    queue: str = "postgres"
    faults: list[str] = []
    apis: int = 2
    workers: int = 3
    drain_seconds: float | None = None  # no longer, even while something moves
    without: list[str] = []  # fences that are taken out, to see whether anyone notices (`chaos.fences`)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    choice: Choice
    clock_by: str
    verdicts: list[Verdict]
    figures: Figures
    drain_seconds: float

    @property
    def is_clean(self) -> bool:
        return all(verdict.count == 0 for verdict in self.verdicts)


async def run(choice: Choice, folder: Path, say: Callable[[str], None]) -> Result:
    """The whole run; everything it leaves is in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "choice.json").write_bytes(msgspec.json.encode(choice))
    cluster = Cluster(folder, queue=choice.queue, apis=choice.apis, workers=choice.workers, without=choice.without)
    clock = database.Clock()
    try:
        say(f"starting {choice.apis} APIs and {choice.workers} workers on {choice.queue}, seed {choice.seed}")
        await cluster.start()
        await database.watch(cluster.database_url, clock)
        cluster.publish(_job(choice, cluster))
        plan = faults.plan(choice.seed, choice.seconds, choice.faults)
        say(f"breaking for {choice.seconds:g} s: {len(plan)} actions ({', '.join(choice.faults) or 'none'})")
        hands = faults.Breaker(cluster, choice.seed, choice.faults)
        await hands.run(plan, choice.seconds)
        hands.mend()
        say("mended; waiting for the last answers")
        await cluster.until_ready()
        await cluster.stop_publishing(STILL_SECONDS)
        drained_in = await drain(cluster, say, choice.drain_seconds)
        dump = await database.dump(cluster.database_url, clock)
        (folder / "database.json").write_bytes(msgspec.json.encode(dump))
    finally:
        cluster.stop()
    result = judged(choice, folder, drained_in)
    (folder / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))
    return result


def judged(choice: Choice, folder: Path, drained_in: float) -> Result:
    """The verdicts on what lies in a folder."""
    found = evidence(folder)
    return Result(
        choice=choice,
        clock_by="libfaketime" if fake_time() else "the process",
        verdicts=judge(found),
        figures=figures(found),
        drain_seconds=round(drained_in, 1),
    )


async def drain(cluster: Cluster, say: Callable[[str], None], at_most: float | None = None) -> float:
    """Wait until nothing is left to do, or until nothing has moved for a long time; how long that took."""
    began_at = moved_at = time.monotonic()
    last: dict[str, int] = {}
    while True:
        cluster.keep_up()
        left = await database.unfinished(cluster.database_url)
        now = time.monotonic()
        if left != last:
            last, moved_at = left, now
        if not any(left.values()) or (at_most is not None and now - began_at > at_most):
            return now - began_at
        if now - moved_at > STILL_SECONDS:
            say(f"nothing has moved for {STILL_SECONDS:g} s: {left}")
            return now - began_at
        await asyncio.sleep(0.25)


def _job(choice: Choice, cluster: Cluster) -> Job:
    return Job(urls=cluster.urls, folder=str(cluster.folder), seed=choice.seed, per_second=choice.per_second)


def table(result: Result) -> str:
    """For people."""
    lines = [f"{'OK    ' if v.count == 0 else 'BROKEN'} {v.name:<36} {v.count:>5}" for v in result.verdicts]
    for verdict in result.verdicts:
        lines += [f"  {verdict.name}: {one}" for one in verdict.found[:5]]
    found = result.figures
    lines.append("")
    shown: Sequence[tuple[str, object]] = (
        ("events published / acknowledged", f"{found.published} / {found.acknowledged}"),
        ("requests, refused, unanswered", f"{found.requests}, {found.refused}, {found.unanswered}"),
        ("stored without an answer (allowed)", found.recovered),
        ("answers while Postgres was down", _counts(found.answered_without_postgres)),
        ("runs launched / succeeded", f"{found.launched} / {found.succeeded}"),
        ("failed as planned, given up by the rule", f"{found.failed_as_planned}, {found.given_up}"),
        ("effects, repeated (at least once)", f"{found.effects}, {found.effects_repeated}"),
        ("marks of zombies (allowed)", found.effects_of_zombies),
        ("faults", _counts(found.faults)),
        ("a killed worker's run is released after", _spread(found.released_seconds)),
        ("  and claimed, behind what is due, after", _spread(found.takeover_seconds)),
        ("first 202 after Postgres is ready", _spread(found.first_202_after_postgres_seconds)),
        ("SIGTERM to restarted", _spread(found.stop_seconds)),
        ("drained in", f"{result.drain_seconds} s"),
        ("wrong clocks by", result.clock_by),
    )
    return "\n".join([*lines, *(f"{name:<43} {value}" for name, value in shown)])


def _counts(found: Mapping[Any, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "-"


def _spread(found: object) -> str:
    p50, longest, count = (getattr(found, name, None) for name in ("p50", "max", "count"))
    return "-" if count is None else f"p50 {p50:.2f} s, max {longest:.2f} s ({count})"
