"""Percentiles, as the results hold them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

import msgspec


class Latency(msgspec.Struct, frozen=True):
    """Percentiles of single operations, in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float


def latency(taken_ms: Sequence[float]) -> Latency:
    """The percentiles of at least two measurements."""
    cuts = quantiles(taken_ms, n=100, method="inclusive")
    return Latency(len(taken_ms), round(cuts[49], 3), round(cuts[98], 3))
