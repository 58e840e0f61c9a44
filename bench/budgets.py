"""Budgets: what one costs that is never reached, how exactly a scarce one is kept and used by many workers, and how a
backlog over many keys drains."""

from __future__ import annotations

import itertools
from collections import defaultdict
from datetime import datetime, timedelta
from functools import partial
from statistics import median

import asyncpg
import msgspec

from bench import gate, neighbours, pipeline, side
from bench.client import Job
from bench.gate import Accuracy, LimitCost
from bench.stage import Stage, execute, publish
from tidegate.flow import control
from tidegate.model.budget import Budget, BudgetSpec
from tidegate.store.db import Database

NAME = "shared"
# What a drain is compared with: so many launches a second, over all keys.
PER_SECOND = 1_000
_USE = "update tidegate.workflow_event_triggers set budgets = array[$1::text]"
_LAUNCHES = """
select d.launched_at, (e.payload ->> 'id')::int
  from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e on e.id = d.event_id
 where d.status = 'launched' order by d.launched_at, e.ingress_sequence
"""
_WAITING = (
    "select count(*) from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled' and reason = 'budget'"
)
_ATTEMPTS = "select coalesce(sum(attempts), 0) from tidegate.workflow_trigger_deliveries"


class KeysDrain(msgspec.Struct, frozen=True, kw_only=True):
    """Deliveries that wait over so many keys, from the end of a pause to the last launch, against 1,000 launches a
    second; each key has its share of that as its rate. `most_of_a_key` must not exceed it. `attempts_per_delivery`: how
    often each was decided; `out_of_order`: launches before an earlier one of the same key."""

    events: int
    keys: int
    rate_of_each: str
    most_of_a_key: int
    allowed_of_a_key: int
    took_seconds: float
    ideal_seconds: float
    ratio: float
    attempts_per_delivery: float
    out_of_order: int
    neighbours: float | None


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """`cost`: throughput with a budget that is never reached, against none. `use`: a scarce budget under a manifold
    backlog of several workers. `drains`: backlogs over many keys."""

    cost: LimitCost
    use: Accuracy
    attempts_per_delivery: float
    drains: list[KeysDrain]


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    events: int
    turns: int
    limit: int
    intervals: int
    workers: int
    held: int
    keys: tuple[int, ...]


async def measure(stage: Stage, amount: Amount) -> Budgets:
    """All of it."""
    cost = await _cost(stage, amount.events, amount.turns)
    use, attempts = await _use(stage, amount)
    drains = [await _drain(stage, amount.held, keys) for keys in amount.keys]
    return Budgets(cost=cost, use=use, attempts_per_delivery=attempts, drains=drains)


async def _prepare(url: str, spec: BudgetSpec) -> None:
    """The trigger that every database starts with uses the budget."""
    database = Database(url, "bench", size=1)
    try:
        await control.put_budget(database, spec, "bench")
    finally:
        await database.close()
    await execute(url, statement=_USE, arguments=(NAME,))


async def _cost(stage: Stage, events: int, turns: int) -> LimitCost:
    """The pipeline without a budget and with one that is never reached."""
    prepare = partial(_prepare, spec=Budget(NAME, "1000000000/s"))
    without: list[float] = []
    limited: list[float] = []
    for turn in range(turns):
        for has_budget in (False, True) if turn % 2 == 0 else (True, False):
            found = await pipeline.measure(stage, events, prepare if has_budget else None)
            (limited if has_budget else without).append(found.per_second)
    ratios = [round(b / a, 3) for a, b in zip(without, limited, strict=True)]
    return LimitCost(
        turns=ratios,
        without_per_second=round(median(without), 1),
        with_per_second=round(median(limited), 1),
        ratio=median(ratios),
    )


async def _use(stage: Stage, amount: Amount) -> tuple[Accuracy, float]:
    """Several workers, one budget, `intervals` times its rate published at once."""
    limit, events = amount.limit, amount.limit * amount.intervals
    prepare = partial(_prepare, spec=Budget(NAME, f"{limit}/s"))
    found = await gate.launches(stage, events, prepare, amount.workers)
    exact = gate.judged(found, limit, 1000, amount.workers)
    return exact, round(found.attempts / events, 3)


async def _drain(stage: Stage, events: int, keys: int) -> KeysDrain:
    """One worker launches what waited for a paused budget, over so many keys."""
    each = events // keys
    per_key, interval = (PER_SECOND // keys, 1) if keys <= PER_SECOND else (1, keys // PER_SECOND)
    rate = f"{per_key}/{interval}s"
    spec = Budget(NAME, rate, key=f"{{{{ event.payload.id | modulo: {keys} }}}}")
    with neighbours.watched() as others:
        resumed_at, rows, attempts = await _resumed(stage, events, spec)
    took, ideal = (rows[-1][0] - resumed_at).total_seconds(), events / PER_SECOND
    of_key: dict[int, list[tuple[datetime, int]]] = defaultdict(list)
    for at, number in rows:
        of_key[number % keys].append((at, number))
    most = max(gate.most_in_any([at for at, _ in mine], timedelta(seconds=interval)) for mine in of_key.values())
    behind = sum(a > b for mine in of_key.values() for (_, a), (_, b) in itertools.pairwise(mine))
    return KeysDrain(
        events=events,
        keys=keys,
        rate_of_each=rate,
        most_of_a_key=most,
        allowed_of_a_key=min(per_key, each),
        took_seconds=round(took, 2),
        ideal_seconds=ideal,
        ratio=round(took / ideal, 3),
        attempts_per_delivery=round(attempts / events, 3),
        out_of_order=behind,
        neighbours=others.cores,
    )


async def _resumed(stage: Stage, events: int, spec: BudgetSpec) -> tuple[datetime, list[tuple[datetime, int]], int]:
    """Publish to a paused budget, resume it when all of them wait: when, the launches, and how often deliveries were
    decided."""
    async with stage.database() as url:
        await _prepare(url, spec)
        database = Database(url, "bench", size=1)
        try:
            await control.pause_budget(database, NAME, actor="bench")
            async with stage.running(url, "nothing", 1) as port:
                watcher = await asyncpg.connect(url)
                try:
                    await gate.until_listening(watcher, 1)
                    publish(Job(port=port, first=0, events=events, batch=100, connections=1))
                    await gate.until(watcher, _WAITING, events)
                    resumed_at: datetime = await watcher.fetchval("select tidegate.now()")
                    await control.resume_budget(database, NAME, "bench")
                    await gate.until(watcher, gate.RUNS, events)
                    rows = [(row[0], row[1]) for row in await watcher.fetch(_LAUNCHES)]
                    return resumed_at, rows, int(await watcher.fetchval(_ATTEMPTS))
                finally:
                    await watcher.close()
        finally:
            await database.close()


def lines(found: Budgets) -> list[tuple[str, str]]:
    """The figure for people."""
    use = found.use
    most = f"at most {use.most_in_any_interval} of {use.limit} in any interval, {use.use:.1%} of it used"
    return [
        ("throughput with an idle budget", f"{side.spread(found.cost.turns)} of that without"),
        (f"budget kept by {use.workers} workers", f"{most}, {found.attempts_per_delivery:.2f} attempts per delivery"),
        *(_drain_line(one) for one in found.drains),
        *neighbours.disturbed("budgets", [one.neighbours for one in found.drains]),
    ]


def _drain_line(one: KeysDrain) -> tuple[str, str]:
    most = f"at most {one.most_of_a_key} of {one.allowed_of_a_key} of a key at {one.rate_of_each}"
    rest = f"{one.attempts_per_delivery:.2f} attempts per delivery, {one.out_of_order} out of order"
    return f"drain of {one.events:,} over {one.keys:,} keys", f"{one.ratio:.3f} x ideal, {most}, {rest}"
