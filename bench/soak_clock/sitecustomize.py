"""Python reads this before a process of `bench.soak` does anything: its wall clock is ahead by the nanoseconds in a
file, and a worker's passes over the days of history come more often, as the days are shorter.

The monotonic clock, and with it every wait, lease and timeout, stays as it is.
"""

import mmap
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

if "SOAK_CLOCK" in os.environ:
    from tidegate import clock

    with Path(os.environ["SOAK_CLOCK"]).open("rb") as file:
        _ahead = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    _true_ns = time.time_ns

    def _ahead_ns() -> int:
        return int.from_bytes(_ahead[:8], "little")

    def _time_ns() -> int:
        return _true_ns() + _ahead_ns()

    def _utc_now() -> datetime:
        return datetime.now(UTC) + timedelta(microseconds=_ahead_ns() // 1000)

    time.time_ns = _time_ns
    clock.utc_now = _utc_now

if "SOAK_PASS_SECONDS" in os.environ:
    from tidegate.worker import supervisor

    supervisor.DAYS_SECONDS = supervisor.PRUNE_PASS_SECONDS = float(os.environ["SOAK_PASS_SECONDS"])
