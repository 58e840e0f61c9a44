"""The options of `pause`, the same for sources and triggers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tidegate.cli.wording import parsed
from tidegate.model import units
from tidegate.model.times import parse_time

# The API's field names, and the options that set them.
PAUSE_NAMES = {"duration_ms": "--for", "until": "--until", "reason": "--reason"}


def pause_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--for`, `--until`, `--reason`."""
    for option in (
        click.option("--reason", default=None, help="Why it is paused; shown by explain, health and the console."),
        click.option("--until", default=None, metavar="TIME", help="When the pause ends, e.g. 2026-01-31T09:30:00Z."),
        click.option(
            "--for", "duration", default=None, metavar="DURATION", help="How long to pause, e.g. 30s, 10m, 2h."
        ),
    ):
        command = option(command)
    return command


def pause_body(duration: str | None, until: str | None, reason: str | None) -> dict[str, Any]:
    """The request body for the given options."""
    if duration is not None and until is not None:
        raise click.UsageError("give --for or --until, not both")
    body: dict[str, Any] = {"reason": reason}
    if duration is not None:
        body["duration_ms"] = parsed(units.duration_ms, duration, "--for")
    if until is not None:
        body["until"] = _time(until)
    return {name: value for name, value in body.items() if value is not None}


def _time(text: str) -> str:
    parsed(parse_time, text, "--until")
    return text
