"""One way of doing something beside others, in turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median

import msgspec

from bench.rate import Rate

Way = Callable[[], Awaitable[Rate]]


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The median, and each turn. `cpu_us` is of all processes for one run; None where /proc does not tell."""

    per_second: float
    turns: list[float]
    cpu_us: list[float | None]
    neighbours: list[float | None]

    def text(self, what: str) -> str:
        """The side for people."""
        known = [used for used in self.cpu_us if used is not None]
        cpu = f", {median(known):,.0f} µs of CPU each" if known else ""
        return f"{self.per_second:,.0f} {what}/s (turns: {min(self.turns):,.0f} to {max(self.turns):,.0f}){cpu}"


async def in_turns(ways: Mapping[str, Way], turns: int, slow: Mapping[str, int] | None = None) -> dict[str, Side]:
    """Each way once a turn, a slow one in so many of the first turns; the next turn begins with the next way."""
    names = list(ways)
    found: dict[str, list[Rate]] = {name: [] for name in names}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn < (slow or {}).get(name, turns):
                found[name].append(await ways[name]())
    return {name: _side(rates) for name, rates in found.items()}


def ratios(ours: Side, theirs: Side) -> list[float]:
    """Of the rates, turn by turn, as far as both had their turn."""
    return [round(a / b, 3) for a, b in zip(ours.turns, theirs.turns, strict=False)]


def cpu_ratio(ours: Side, theirs: Side) -> float | None:
    """Of the CPU for one, the median of the turns."""
    found = [a / b for a, b in zip(ours.cpu_us, theirs.cpu_us, strict=True) if a and b]
    return round(median(found), 3) if found else None


def spread(ratios: Sequence[float]) -> str:
    """The ratios of the turns for people."""
    return f"{median(ratios):.2f} (turns: {min(ratios):.2f} to {max(ratios):.2f})"


def _side(rates: Sequence[Rate]) -> Side:
    return Side(
        per_second=round(median(rate.per_second for rate in rates), 1),
        turns=[rate.per_second for rate in rates],
        cpu_us=[rate.cpu_us for rate in rates],
        neighbours=[rate.neighbours for rate in rates],
    )
