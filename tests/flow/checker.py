"""Checkers over histories of admissions; pure, so that every gate test judges by the same rules."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from bench.neighbours import QUIET_CORES, Neighbours
from chaos.judge import most_in_any_interval as most_in_any_interval  # noqa: PLC0414 - judged alike everywhere


class Epoch(NamedTuple):
    """From `since` on, until the next epoch: at most `limit` within `interval_ms`; None: no bound."""

    since: float
    limit: int | None
    interval_ms: int


def limit_breaches(admissions: Sequence[tuple[int, float]], epochs: Sequence[Epoch]) -> list[str]:
    """Sliding intervals over their limit; only those that lie wholly under one limit are judged.

    An admission is `(number of the epoch it happened in, milliseconds)`: when the clock stands still while a limit
    changes, the time alone does not say which of the two was in force.
    """
    found = []
    for number, epoch in enumerate(epochs):
        if epoch.limit is not None:
            times = [at for which, at in admissions if which == number]
            most = most_in_any_interval(times, epoch.interval_ms)
            if most > epoch.limit:
                found.append(f"{most} within {epoch.interval_ms} ms where {epoch.limit} are allowed (epoch {number})")
    return found


def carry_breaches(admissions: Sequence[tuple[int, float]], epochs: Sequence[Epoch]) -> list[str]:
    """Changes of a limit that forgot what had passed under the one before.

    What passed under the limits before still counts, as far back as the shortest of the intervals since reaches.
    """
    found = []
    for index, (number, at) in enumerate(admissions):
        limit, window = epochs[number].limit, float("inf")
        if limit is None:
            continue
        recent, earlier = 1, index - 1
        for past in range(number, -1, -1):
            if epochs[past].limit is None:
                break
            window = min(window, epochs[past].interval_ms)
            while earlier >= 0 and admissions[earlier][0] == past and admissions[earlier][1] > at - window:
                recent, earlier = recent + 1, earlier - 1
        if recent > limit:
            found.append(f"{recent} within {window} ms where {limit} are allowed (into epoch {number})")
    return found


def milliseconds(times: Sequence[datetime]) -> list[float]:
    """Times as milliseconds since the first of them."""
    return [(at - min(times)) / timedelta(milliseconds=1) for at in times]


def least_share(others: Neighbours) -> float:
    """How much of an allowance a backlog must use: 95 % where other programs leave the machine alone. Beside other load
    the workers get a part of the processors, and are late by as much."""
    return 0.95 if (others.cores or 0) + (others.stolen or 0) <= QUIET_CORES else 0.6


def share_used(times_ms: Sequence[float], limit: int, interval_ms: float, *, since: float, until: float) -> float:
    """The part of the allowance that was used between two times: 1 means all of it."""
    times = sorted(times_ms)
    used = bisect.bisect_right(times, until) - bisect.bisect_right(times, since)
    return used / (limit * (until - since) / interval_ms)


def inversions(sequence: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours in the wrong order."""
    return [(a, b) for a, b in itertools.pairwise(sequence) if a > b]
