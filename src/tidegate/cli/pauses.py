"""The options of pauses, the same for sources and triggers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
import msgspec

from tidegate.cli.wording import parsed
from tidegate.model import units

# The options, by the names that the API has for them.
PAUSE_NAMES = {"duration_ms": "--for", "until": "--until", "reason": "--reason"}


def pause_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--for`, `--until`, `--reason`."""
    for option in (
        click.option("--reason", default=None, help="Shown to whoever asks why something waits."),
        click.option("--until", default=None, metavar="TIME", help="Until a time: 2026-01-31T09:30:00Z."),
        click.option("--for", "duration", default=None, metavar="DURATION", help="For so long: 30s, 10m, 2h."),
    ):
        command = option(command)
    return command


def pause_body(duration: str | None, until: str | None, reason: str | None) -> dict[str, Any]:
    """What the options say, as the API takes it."""
    if duration is not None and until is not None:
        raise click.UsageError("give --for or --until, not both")
    body: dict[str, Any] = {"reason": reason}
    if duration is not None:
        body["duration_ms"] = parsed(units.duration_ms, duration, "--for")
    if until is not None:
        body["until"] = _time(until)
    return {name: value for name, value in body.items() if value is not None}


def _time(text: str) -> str:
    try:
        at = msgspec.convert(text, datetime)
    except msgspec.ValidationError as exc:
        raise click.UsageError(f"a time is written like 2026-01-31T09:30:00Z, not {text!r}") from exc
    if at.tzinfo is None:
        raise click.UsageError(f"a time needs its zone, as in {text}Z or {text}+02:00")
    return text
