"""A histogram that is fast enough for every event: the library's takes a lock per bucket and observation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Distribution(Collector):
    """Seconds, with one label. One thread observes; a scrape in another thread reads consistent numbers."""

    def __init__(
        self, name: str, documentation: str, label: str, *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labelnames = (label,)
        self._bounds = list(buckets)
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        registry.register(self)

    def observe(self, label: str, values: Iterable[float]) -> None:
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self._bounds) + 1)
        total = 0.0
        for value in values:
            counts[bisect_left(self._bounds, value)] += 1
            total += value
        self._sums[label] = self._sums.get(label, 0.0) + total

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """The metric family without samples."""
        yield HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)

    def clear(self) -> None:
        self._counts.clear()
        self._sums.clear()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labelnames)
        for label, counts in list(self._counts.items()):
            found, buckets = 0, []
            for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
                found += count
                buckets.append(("+Inf" if bound == math.inf else str(float(bound)), found))
            family.add_metric([label], buckets, self._sums.get(label, 0.0))
        yield family
