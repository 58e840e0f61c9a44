"""Single events: one to a request, 64 connections, each waiting for its answer; at first as fast as they are answered,
then at even times, half as many a second. No worker runs beside. In turns with as many connections that do nothing but
insert a row and wait for the commit."""

from __future__ import annotations

from statistics import median

import msgspec

from bench import commit
from bench.client import Job, Report
from bench.latency import Latency, latency
from bench.stage import Stage, publish

CONNECTIONS = 64
WARM_UP = 640


class Single(msgspec.Struct, frozen=True):
    """How many a second were accepted, and how long each took to be; how long with half as many; and the same for plain
    inserts. The medians of the turns; of each turn the ratio of the p99 of POSTs to that of inserts."""

    accepted_per_second: float
    latency: Latency
    half_latency: Latency
    inserted_per_second: float
    insert_latency: Latency
    to_inserts: list[float]


async def measure(stage: Stage, events: int, turns: int) -> Single:
    """Accepted events per second, with the latency of each request as its client sees it."""
    accepted, inserted = [], []
    whole, half, inserts = [], [], []
    for _ in range(turns):
        rate, taken = await commit.measure_many(stage, events, CONNECTIONS)
        inserted.append(rate)
        inserts.append(taken)
        async with stage.database() as url, stage.api(url) as port:
            publish(Job(port=port, first=0, events=WARM_UP, batch=1, connections=CONNECTIONS))
            sent = publish(Job(port=port, first=WARM_UP, events=events, batch=1, connections=CONNECTIONS))
            accepted.append(rate := events / (sent.ended_at - sent.started_at))
            whole.append(_latency(sent))
            after, few = WARM_UP + events, events // 2
            paced = Job(port=port, first=after, events=few, batch=1, connections=CONNECTIONS, per_second=rate / 2)
            half.append(_latency(publish(paced)))
    return Single(
        round(median(accepted), 1),
        _median(whole),
        _median(half),
        round(median(inserted), 1),
        _median(inserts),
        [round(ours.p99_ms / theirs.p99_ms, 2) for ours, theirs in zip(whole, inserts, strict=True)],
    )


def lines(found: Single) -> list[tuple[str, str]]:
    """The figure for people."""
    turns = f"{median(found.to_inserts):.2f} (turns: {min(found.to_inserts):.2f} to {max(found.to_inserts):.2f})"
    return [
        (f"single POSTs, {CONNECTIONS} connections", f"{found.accepted_per_second:,.0f}/s, {_text(found.latency)}"),
        ("half as many, at even times", _text(found.half_latency)),
        ("plain inserts, as many connections", f"{found.inserted_per_second:,.0f}/s, {_text(found.insert_latency)}"),
        ("p99 of POSTs to that of plain inserts", turns),
    ]


def _latency(sent: Report) -> Latency:
    return latency(sent.latencies_ms)


def _median(turns: list[Latency]) -> Latency:
    """Of each percentile."""
    return Latency(
        sum(turn.count for turn in turns),
        round(median(turn.p50_ms for turn in turns), 3),
        round(median(turn.p99_ms for turn in turns), 3),
    )


def _text(taken: Latency) -> str:
    return f"p50 {taken.p50_ms:.1f} ms, p99 {taken.p99_ms:.1f} ms"
