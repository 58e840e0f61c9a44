"""Single events: one to a request, 64 connections, each waiting for its answer; at first as fast as they are answered,
then at even times, half as many a second. No worker runs beside."""

from __future__ import annotations

import msgspec

from bench.client import Job
from bench.latency import Latency, latency
from bench.stage import Stage, publish

CONNECTIONS = 64
WARM_UP = 640


class Single(msgspec.Struct, frozen=True):
    """How many a second were accepted, and how long each took to be; how long with half as many."""

    accepted_per_second: float
    latency: Latency
    half_latency: Latency


async def measure(stage: Stage, events: int) -> Single:
    """Accepted events per second, with the latency of each request as its client sees it."""
    async with stage.database() as url, stage.api(url) as port:
        publish(Job(port=port, first=0, events=WARM_UP, batch=1, connections=CONNECTIONS))
        sent = publish(Job(port=port, first=WARM_UP, events=events, batch=1, connections=CONNECTIONS))
        rate = events / (sent.ended_at - sent.started_at)
        after = WARM_UP + events
        half = Job(port=port, first=after, events=events // 2, batch=1, connections=CONNECTIONS, per_second=rate / 2)
        paced = publish(half)
    return Single(round(rate, 1), latency(sent.latencies_ms), latency(paced.latencies_ms))


def lines(found: Single) -> list[tuple[str, str]]:
    """The figure for people."""
    rate, taken = found.accepted_per_second, found.latency
    text, half = f"{rate:,.0f}/s, p50 {taken.p50_ms:.1f} ms, p99 {taken.p99_ms:.1f} ms", found.half_latency
    return [
        (f"single POSTs, {CONNECTIONS} connections", text),
        ("half as many, at even times", f"p50 {half.p50_ms:.1f} ms, p99 {half.p99_ms:.1f} ms"),
    ]
