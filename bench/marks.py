"""The marks that runs leave in a file that the environment names: when their code ran, and in which process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import NamedTuple

STALLED_SECONDS = 300
# The environment variable with the path of the file.
MARKS = "BENCH_MARKS"

_file = os.open(os.environ[MARKS], os.O_WRONLY | os.O_APPEND | os.O_CREAT) if MARKS in os.environ else None


class Mark(NamedTuple):
    """The number of a run's event, the process, and times of the system-wide monotonic clock."""

    number: int
    pid: int
    times: list[float]


def write(number: int, *times: float) -> None:
    """The event's number, this process and times of the monotonic clock; one write, as processes share the file."""
    if _file is not None:
        os.write(_file, f"{number} {os.getpid()} {' '.join(map(str, times))}\n".encode())


def read(path: Path) -> list[Mark]:
    """All marks so far; none when nothing has run yet."""
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return [Mark(int(number), int(pid), [float(at) for at in times]) for number, pid, *times in lines]


async def until(path: Path, count: int) -> list[Mark]:
    """The marks, once there are so many."""
    async with asyncio.timeout(STALLED_SECONDS):
        while len(found := read(path)) < count:  # noqa: ASYNC110 - other processes write it
            await asyncio.sleep(0.02)
    return found
