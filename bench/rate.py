"""A throughput, as every figure measures it."""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """Events per second; the CPU that all our processes, Postgres and the load generator included, took for each; and
    the cores that others used. The last two are None where /proc does not tell."""

    per_second: float
    cpu_us: float | None
    neighbours: float | None
