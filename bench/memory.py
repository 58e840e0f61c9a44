"""Memory: the most that a worker and the API take while a long line is published and worked off."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import msgspec

from bench import gate, pipeline, workload
from bench.client import Job
from bench.stage import Stage, publish, without_triggers
from tidegate.flow import control
from tidegate.store.db import Database

# Nothing is left to decide, and as much is held as was published.
_ALL_HELD = """
select not exists (select from tidegate.event_inbox)
   and (select count(*) from tidegate.event_ingress_retries where retry_state = 'scheduled') >= {events}
"""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of so many events, and whether each had its run in the end. The most memory is of the process's whole life
    (VmHWM), in MB of 1,000,000 bytes; None where /proc does not tell."""

    events: int
    worker_mb: float | None
    api_mb: float | None
    is_worked_off: bool
    seconds: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """`inbox`: published before the worker starts, then executed. `held`: published to a worker while the source is
    paused, then resumed, and launched."""

    inbox: Line
    held: Line


async def measure(stage: Stage, events: int) -> Memory:
    """One line after the other, each with processes of its own."""
    return Memory(inbox=await _inbox(stage, events), held=await _held(stage, events))


def lines(found: Memory) -> list[tuple[str, str]]:
    """The figure for people."""
    return [
        (f"memory with {found.inbox.events:,} in the inbox", _text(found.inbox)),
        (f"memory with {found.held.events:,} held", _text(found.held)),
    ]


async def _inbox(stage: Stage, events: int) -> Line:
    async with stage.database() as url, stage.server(url) as (port, api):
        await without_triggers(url)
        _publish(port, events)
        began_at = time.monotonic()
        with stage.worker(url, pipeline.SUCCEEDED.application) as worker:
            is_worked_off = await _worked_off(url, pipeline.SUCCEEDED, events)
            return _line(events, worker.pid, api.pid, is_worked_off, time.monotonic() - began_at)


async def _held(stage: Stage, events: int) -> Line:
    async with stage.database() as url, stage.server(url) as (port, api):
        await _with(url, lambda database: control.pause(database, workload.SOURCE, actor="bench"))
        with stage.worker(url, pipeline.LAUNCHED.application) as worker:
            watcher = await asyncpg.connect(url)
            try:
                await gate.until_listening(watcher, 1)
                _publish(port, events)
                await pipeline.reached(watcher, _ALL_HELD.format(events=events))
            finally:
                await watcher.close()
            began_at = time.monotonic()
            await _with(url, lambda database: control.resume(database, workload.SOURCE, "bench"))
            is_worked_off = await _worked_off(url, pipeline.LAUNCHED, events)
            return _line(events, worker.pid, api.pid, is_worked_off, time.monotonic() - began_at)


def _publish(port: int, events: int) -> None:
    publish(Job(port=port, first=0, events=events, batch=pipeline.BATCH, connections=pipeline.CONNECTIONS))


async def _worked_off(url: str, goal: pipeline.Goal, events: int) -> bool:
    """Wait for every run; False when the worker stalls on the way."""
    watcher = await asyncpg.connect(url)
    try:
        await gate.until(watcher, goal.runs, events)
    except TimeoutError:
        return False
    finally:
        await watcher.close()
    return True


async def _with(url: str, work: Callable[[Database], Awaitable[object]]) -> None:
    database = Database(url, "bench", size=1)
    try:
        await work(database)
    finally:
        await database.close()


def _line(events: int, worker: int, api: int, is_worked_off: bool, seconds: float) -> Line:
    return Line(
        events=events,
        worker_mb=peak_mb(worker),
        api_mb=peak_mb(api),
        is_worked_off=is_worked_off,
        seconds=round(seconds, 1),
    )


def peak_mb(process: int) -> float | None:
    """The most memory that a process has had; None where /proc does not tell."""
    try:
        text = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = [line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:")]
    return round(int(found[0]) * 1024 / 1_000_000, 1) if found else None


def _text(line: Line) -> str:
    def mb(value: float | None) -> str:
        return "not known" if value is None else f"{value:.0f} MB"

    end = f"worked off in {line.seconds:.0f} s" if line.is_worked_off else "NOT worked off"
    return f"worker at most {mb(line.worker_mb)}, API {mb(line.api_mb)}; {end}"
