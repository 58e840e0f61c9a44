"""How much of the machine others used while we measured. The floor keeps one core busy and the pipeline several, so
other work slows them unequally and their ratio does not cancel it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

# Other processes that used more of the machine than this made the turn a measurement of themselves.
QUIET_CORES = 0.15


class Neighbours:
    """Cores that processes other than ours kept busy, and cores the host withheld; the CPU seconds that ours took. None
    where /proc does not tell."""

    def __init__(self) -> None:
        self.cores: float | None = None
        self.stolen: float | None = None
        self.our_seconds: float | None = None

    def our_us(self, count: int) -> float | None:
        """Our CPU for each of so many things, in microseconds."""
        return None if self.our_seconds is None else round(self.our_seconds / count * 1_000_000, 1)


def disturbed(figure: str, cores: Sequence[float | None]) -> list[tuple[str, str]]:
    """A warning for the table when others used the machine in any of a figure's turns."""
    most = max((used or 0 for used in cores), default=0)
    return [("NOT COMPARABLE", f"{figure}: others used {most:.2f} cores")] if most > QUIET_CORES else []


@contextlib.contextmanager
def watched() -> Iterator[Neighbours]:
    """Watch the block; the numbers are there when it ends."""
    found = Neighbours()
    if sys.platform != "linux":
        yield found
        return
    busy, stolen, ours, started_at = *_machine(), _ours(), time.monotonic()
    yield found
    ticks = (time.monotonic() - started_at) * os.sysconf("SC_CLK_TCK")
    busy_after, stolen_after, ours_after = *_machine(), _ours()
    found.cores = round(max((busy_after - busy) - (ours_after - ours), 0) / ticks, 2)
    found.stolen = round((stolen_after - stolen) / ticks, 2)
    found.our_seconds = (ours_after - ours) / os.sysconf("SC_CLK_TCK")


def _machine() -> tuple[int, int]:
    """Ticks that all processes were busy, and ticks stolen, since boot."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    )
    return user + nice + system + irq + softirq, steal


def _ours() -> int:
    """Ticks of this process and everything below it, what has ended and been waited for included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))
    return sum(ticks[pid] for pid in ticks if _is_below(pid, os.getpid(), parents))


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid != root and pid in parents:
        pid = parents[pid]
    return pid == root
