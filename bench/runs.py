"""Runs: from publish until every run of a one-step workflow has succeeded, with each of Tidegate's queues; beside the
floor of the same rows, and beside other queues."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import msgspec

from bench import floor, neighbours, pipeline, redis_server, side, yardstick
from bench.rate import Rate
from bench.side import Side, Way
from bench.stage import Stage, without_triggers

# Slow queues get fewer jobs, so that a turn ends; a shorter line is no disadvantage to them. What is far from Tidegate,
# or compared with nothing, has fewer turns: the others are so close that a few would tell of the machine.
PROCRASTINATE_PART = 10
BULLMQ_PART = 4
FEW_TURNS = 3


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Tidegate, other queues (enqueue until handled) and plain SQL in turns, the order changing; each turn's ratios of
    Tidegate on Postgres to the others. What needs Redis is None where there is none."""

    runs: int
    versions: dict[str, str]
    tidegate: Side
    tidegate_bullmq: Side | None
    floor: Side
    pgqueuer: Side
    procrastinate: Side
    bullmq: Side | None
    to_floor: list[float]
    to_pgqueuer: list[float]
    to_procrastinate: list[float]
    to_bullmq: list[float] | None


async def measure(stage: Stage, runs: int, turns: int) -> Runs:
    """Each side once a turn, some in a few turns only."""
    versions = {yard.package: yardstick.version(yard.package) for yard in (yardstick.PGQUEUER, yardstick.PROCRASTINATE)}
    ways: dict[str, Way] = {
        "floor": partial(floor.measure, stage, runs, floor.succeeded),
        "pgqueuer": partial(_other, stage, yardstick.PGQUEUER, runs),
        "tidegate": partial(_tidegate, stage, runs),
        "procrastinate": partial(_other, stage, yardstick.PROCRASTINATE, _part(runs, PROCRASTINATE_PART)),
    }
    if redis_server.is_there():
        jobs = _part(runs, BULLMQ_PART)
        versions |= {"bullmq": yardstick.version("bullmq", Path(sys.executable)), "redis": redis_server.version()}
        ways["tidegate_bullmq"] = partial(_tidegate_bullmq, stage, runs)
        ways["bullmq"] = partial(yardstick.measure_bullmq, stage, jobs, _warm_up(jobs))
    found = await side.in_turns(ways, turns, dict.fromkeys(("procrastinate", "tidegate_bullmq", "bullmq"), FEW_TURNS))
    ours, bullmq = found["tidegate"], found.get("bullmq")
    return Runs(
        runs=runs,
        versions=versions,
        tidegate=ours,
        tidegate_bullmq=found.get("tidegate_bullmq"),
        floor=found["floor"],
        pgqueuer=found["pgqueuer"],
        procrastinate=found["procrastinate"],
        bullmq=bullmq,
        to_floor=side.ratios(ours, found["floor"]),
        to_pgqueuer=side.ratios(ours, found["pgqueuer"]),
        to_procrastinate=side.ratios(ours, found["procrastinate"]),
        to_bullmq=side.ratios(ours, bullmq) if bullmq else None,
    )


def lines(found: Runs) -> list[tuple[str, str]]:
    """The figure for people."""
    texts = [
        ("publish until the run succeeded", found.tidegate, "runs"),
        ("  with TIDEGATE_QUEUE=bullmq", found.tidegate_bullmq, "runs"),
        ("floor of succeeded runs: plain SQL", found.floor, "runs"),
        (_name(found, "pgqueuer"), found.pgqueuer, "jobs"),
        (_name(found, "procrastinate"), found.procrastinate, "jobs"),
        (_name(found, "bullmq"), found.bullmq, "jobs"),
    ]
    against = [
        ("ratio to the floor of succeeded", found.to_floor),
        ("ratio to pgqueuer", found.to_pgqueuer),
        ("ratio to procrastinate", found.to_procrastinate),
        ("ratio to bullmq", found.to_bullmq),
    ]
    missing = [] if found.bullmq else [("bullmq", "there is no redis-server on this machine")]
    return [
        *((name, one.text(what)) for name, one, what in texts if one),
        *missing,
        *((name, side.spread(ratios)) for name, ratios in against if ratios),
        *neighbours.disturbed("runs", [cores for _, one, _ in texts if one for cores in one.neighbours]),
    ]


async def _tidegate(stage: Stage, runs: int, environment: dict[str, str] | None = None) -> Rate:
    return await pipeline.measure(
        stage, runs, without_triggers, warm_up=_warm_up(runs), goal=pipeline.SUCCEEDED, environment=environment
    )


async def _tidegate_bullmq(stage: Stage, runs: int) -> Rate:
    with redis_server.started(stage) as url:
        return await _tidegate(stage, runs, {"TIDEGATE_QUEUE": "bullmq", "TIDEGATE_REDIS_URL": url})


async def _other(stage: Stage, yard: yardstick.Yardstick, jobs: int) -> Rate:
    return await yardstick.measure(stage, yard, jobs, _warm_up(jobs))


def _part(runs: int, part: int) -> int:
    """At least one batch."""
    return max(runs // part, pipeline.BATCH)


def _warm_up(runs: int) -> int:
    return min(pipeline.WARM_UP, runs)


def _name(found: Runs, package: str) -> str:
    return f"{package} {found.versions.get(package, '')}: until handled"
