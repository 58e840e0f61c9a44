"""Single events: one to a request, 64 connections, each waiting for its answer. No worker runs beside."""

from __future__ import annotations

import msgspec

from bench.client import Job
from bench.latency import Latency, latency
from bench.stage import Stage, publish

CONNECTIONS = 64
WARM_UP = 640


class Single(msgspec.Struct, frozen=True):
    """How many a second were accepted, and how long each took to be."""

    accepted_per_second: float
    latency: Latency


async def measure(stage: Stage, events: int) -> Single:
    """Accepted events per second, with the latency of each request as its client sees it."""
    async with stage.database() as url, stage.api(url) as port:
        publish(Job(port=port, first=0, events=WARM_UP, batch=1, connections=CONNECTIONS))
        sent = publish(Job(port=port, first=WARM_UP, events=events, batch=1, connections=CONNECTIONS))
    return Single(round(events / (sent.ended_at - sent.started_at), 1), latency(sent.latencies_ms))


def lines(found: Single) -> list[tuple[str, str]]:
    """The figure for people."""
    rate, taken = found.accepted_per_second, found.latency
    text = f"{rate:,.0f}/s, p50 {taken.p50_ms:.1f} ms, p99 {taken.p99_ms:.1f} ms"
    return [(f"single POSTs, {CONNECTIONS} connections", text)]
