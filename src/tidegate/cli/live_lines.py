"""Live lines: what `tidegate dev` prints, one short line for each event and run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime

import click

from tidegate.clock import utc_now
from tidegate.errors import TidegateError
from tidegate.model.masking import masked

# How often events that launched nothing are looked for.
EXPLAIN_SECONDS = 0.2
# What is printed for each log action; the fields are those of docs/operations/logs.md.
_LINES = {
    "event.accepted": "event {event_id} accepted: {type} from {source}",
    "batch.accepted": "events accepted: {count}",
    "event.held": "event {event_id} held until {next_attempt_at}: {reason}",
    "event.expired": "event {event_id} expired: {reason}",
    "event.dead_lettered": "event {event_id} failed: {reason}",
    "delivery.launched": "run   {run_id} launched: {trigger} by event {event_id}",
    "delivery.throttled": "run   of {trigger} waits until {next_attempt_at}: {reason}, event {event_id}",
    "delivery.paused": "run   of {trigger} waits until {next_attempt_at}: {reason}, event {event_id}",
    "delivery.skipped": "run   of {trigger} skipped: {reason}, event {event_id}",
    "delivery.failed": "run   of {trigger} not launched: {reason}, event {event_id}",
    "delivery.exhausted": "run   of {trigger} not launched: {reason}, event {event_id}",
    "run.woken": "run   {run_id} woken by event {event_id}: {step}",
    "run.cancelled_by_event": "run   {run_id} is to be cancelled by event {event_id}",
    "run.succeeded": "run   {run_id} finished: {workflow}",
    "run.failed": "run   {run_id} failed: {workflow}: {reason}",
    "run.cancelled": "run   {run_id} cancelled: {workflow}",
    "step.failed": "run   {run_id} step {step} failed, again at {next_attempt_at}: {workflow}: {reason}",
    "step.exhausted": "run   {run_id} step {step} failed for good: {workflow}: {reason}",
}
# Said by one of the lines above, or of no interest in a terminal.
_SILENT = {"run.started", "delivery.matched", "event.retry_completed", "schedule.published"}
# Events that launched nothing and are to be explained, the oldest first; where there are too many, the oldest are left
# out.
unexplained: deque[str] = deque(maxlen=100)


class _Fields(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return "-"


def line_of(action: str, fields: Mapping[str, object]) -> str | None:
    """The line for a log action; None when it has none."""
    text = _LINES.get(action)
    if text is None:
        return None
    shown = _Fields({name: _shown(value) for name, value in fields.items()})
    return masked(text.format_map(shown))


def show(action: str, fields: Mapping[str, object]) -> bool:
    """Print the line for a log action, if it has one; whether that is all that is to be said."""
    if action == "event.launched_nothing":  # why takes a look into the database
        unexplained.append(str(fields.get("event_id")))
        return True
    line = line_of(action, fields)
    if line is not None:
        _print(line)
    return line is not None or action in _SILENT


async def explain_nothing(explain: Callable[[str], Awaitable[str]]) -> None:
    """Print why events launched nothing, as they come; `explain` gives the summary of one."""
    while True:
        while unexplained:
            event_id = unexplained.popleft()
            try:
                _print(masked(f"event {event_id} {await explain(event_id)}"))
            except TidegateError as exc:
                _print(masked(f"event {event_id} launched nothing ({exc})"))
        await asyncio.sleep(EXPLAIN_SECONDS)


def _print(line: str) -> None:
    click.echo(f"{utc_now().astimezone():%H:%M:%S} {line}")


def _shown(value: object) -> object:
    """A time as the clock on the wall shows it; other values as they are."""
    if isinstance(value, datetime):
        local = value.astimezone()
        return f"{local:%H:%M:%S}" if abs((value - utc_now()).total_seconds()) < 43_200 else f"{local:%Y-%m-%d %H:%M}"
    return "-" if value is None else value
