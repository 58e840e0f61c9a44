"""What a soak found, and whether it stayed as it was: the last third of the time against the middle third."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean

import msgspec

from bench import neighbours
from bench.latency import Latency
from bench.results import Machine
from bench.watch import Process, Size

# Flat is what changes by no more than this.
TOLERANCE = 0.10


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A look `at` so many seconds after the beginning, on the soak's day of that number. Counts are since the
    beginning; the latencies are of the events that were sent since the sample before (`publish`: until the answer,
    `start`: until the workflow's first line)."""

    at: float
    day: int
    days_stored: int
    accepted: int
    launched: int
    succeeded: int
    sizes: dict[str, Size]
    wal_bytes: int
    processes: dict[str, Process]
    publish: Latency | None = None
    start: Latency | None = None

    @property
    def total_bytes(self) -> int:
        return sum(size.table_bytes + size.index_bytes for size in self.sizes.values())


class BytesPerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What an event leaves with all that comes of it: rows and indexes in the days of history, the producer's id with
    its indexes, and what was written to the server's log, full pages after checkpoints included."""

    rows: float
    indexes: float
    external_ids: float
    wal: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The means of the middle and of the last third; `is_flat` when the second is within the tolerance of the first."""

    name: str
    middle: float
    last: float
    ratio: float
    is_flat: bool


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """`days` passed, of `day_seconds` each, with `batch` events in a request. `cpu_us` is of all processes for one
    event; of it, `cpu_us_of` is that of each, and the rest is of the load generator and the sampling."""

    machine: Machine
    minutes: float
    rate: float
    batch: int
    day_seconds: float
    retention_days: int
    sample_seconds: float
    days: int
    events: int
    cpu_us: float | None
    cpu_us_of: dict[str, float]
    neighbours: float | None
    bytes_per_event: BytesPerEvent
    samples: list[Sample]
    verdicts: list[Verdict]


def judge(samples: Sequence[Sample]) -> list[Verdict]:
    """Each number that is to be flat, as far as it was measured."""
    end = samples[-1].at
    middle = [sample for sample in samples if end / 3 <= sample.at < end * 2 / 3]
    last = [sample for sample in samples if sample.at >= end * 2 / 3]
    return [
        *_one("succeeded per second", middle, last, _per_second),
        *_one("publish p50, ms", middle, last, lambda part: _p50([s.publish for s in part])),
        *_one("publish to start p50, ms", middle, last, lambda part: _p50([s.start for s in part])),
        *_one("size of all tables, MB", middle, last, lambda part: _mean([s.total_bytes / 1e6 for s in part])),
        *_one("days that have partitions", middle, last, lambda part: _mean([s.days_stored for s in part])),
        *(
            verdict
            for name in samples[-1].processes
            for verdict in _one(f"memory of {name}, MB", middle, last, partial(_memory, name=name))
        ),
    ]


def bytes_per_event(samples: Sequence[Sample], published: int, stored: int) -> BytesPerEvent:
    """By the last sample, when so many were published and so many of them are still stored."""
    last = samples[-1]
    days, ids = last.sizes["days"], last.sizes["external_ids"]
    return BytesPerEvent(
        rows=round(days.table_bytes / stored, 1),
        indexes=round(days.index_bytes / stored, 1),
        external_ids=round((ids.table_bytes + ids.index_bytes) / stored, 1),
        wal=round((last.wal_bytes - samples[0].wal_bytes) / published, 1),
    )


def cpu_us_of(samples: Sequence[Sample], published: int) -> dict[str, float]:
    """The CPU of each process for one event, in microseconds."""
    found = {}
    for name, last in samples[-1].processes.items():
        first = samples[0].processes[name]
        if last.cpu_seconds is not None and first.cpu_seconds is not None:
            found[name] = round((last.cpu_seconds - first.cpu_seconds) / published * 1_000_000, 1)
    return found


def lines(found: Soak) -> list[tuple[str, str]]:
    """The soak for people."""
    last, each = found.samples[-1], found.bytes_per_event
    return [
        (
            f"{found.days} days of {found.day_seconds:g} s",
            f"{found.events:,} events at {found.rate:,.0f}/s; {last.days_stored} days have partitions",
        ),
        ("CPU for an event", f"{_us(found.cpu_us)}: {', '.join(f'{n} {_us(u)}' for n, u in found.cpu_us_of.items())}"),
        (
            "bytes for an event",
            f"rows {each.rows:,.0f}, indexes {each.indexes:,.0f}, producer's id {each.external_ids:,.0f}, "
            f"log {each.wal:,.0f}",
        ),
        *((verdict.name, _text(verdict)) for verdict in found.verdicts),
        *neighbours.disturbed("soak", [found.neighbours]),
    ]


def _us(found: float | None) -> str:
    return "not known" if found is None else f"{found:,.0f} µs"


def _text(verdict: Verdict) -> str:
    word = "flat" if verdict.is_flat else "NOT FLAT"
    return f"{word}: {verdict.ratio:.2f} ({verdict.middle:,.1f} in the middle third, {verdict.last:,.1f} in the last)"


def _one(
    name: str, middle: list[Sample], last: list[Sample], measure: Callable[[list[Sample]], float | None]
) -> list[Verdict]:
    before, after = measure(middle), measure(last)
    if not before or after is None:
        return []
    ratio = after / before
    is_flat = abs(ratio - 1) <= TOLERANCE
    return [Verdict(name=name, middle=round(before, 2), last=round(after, 2), ratio=round(ratio, 3), is_flat=is_flat)]


def _per_second(part: list[Sample]) -> float | None:
    if len(part) < 2:
        return None
    return (part[-1].succeeded - part[0].succeeded) / (part[-1].at - part[0].at)


def _memory(part: list[Sample], name: str) -> float | None:
    return _mean([sample.processes[name].memory_mb for sample in part])


def _p50(taken: Sequence[Latency | None]) -> float | None:
    return _mean([latency.p50_ms for latency in taken if latency])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def rates(samples: Sequence[Sample], count: Callable[[Sample], int]) -> list[tuple[float, float]]:
    """How many a second between each two samples, with the time of the second."""
    return [(b.at, (count(b) - count(a)) / (b.at - a.at)) for a, b in pairwise(samples)]
