"""`tidegate publish`."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from tidegate.cli.output import Json, client, json_option, print_json, printable
from tidegate.cli.wording import written_as
from tidegate.client import Client
from tidegate.clock import monotonic
from tidegate.model.times import parse_time

# How often an event is asked for with --wait.
WAIT_SECONDS = 0.2

# The API's field names, and the arguments and options that set them.
_NAMES = {"type": "TYPE", "source": "--source", "payload": "--data", "id": "--id", "correlation_id": "--correlation-id",
          "deliver_at": "--at", "delay_ms": "--delay", "delay": "--delay"}  # fmt: skip


@click.command()
@click.argument("type")
@click.option("--source", required=True, help="The source of the event, e.g. shop.api.")
@click.option("--data", default=None, help="The payload: JSON, @FILE, or - for standard input.")
@click.option(
    "--id", "external_id", default=None, help="Your id for the event. Publishing it again stores no second event."
)
@click.option("--correlation-id", default=None, help="Correlation id, passed on to logs, runs and traces.")
@click.option("--at", "at", default=None, help="Decide it at this time, e.g. 2026-01-31T09:30:00Z, and not before.")
@click.option("--delay", default=None, help="Decide it after this long: 30s, 10m, 2h, 1d.")
@click.option("--wait", "is_waiting", is_flag=True, help="Wait for the runs that it launches, and print what they do.")
@click.option("--timeout", default=60.0, show_default=True, type=click.FloatRange(0.1), help="Seconds, with --wait.")
@json_option
def publish(
    type: str,
    source: str,
    data: str | None,
    external_id: str | None,
    correlation_id: str | None,
    at: str | None,
    delay: str | None,
    is_waiting: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Publish an event of TYPE. Returns after the event is committed; with --at or --delay it is decided later.

    With --wait it returns when what the event launched has ended; the exit status is 1 if a run did not succeed,
    nothing was launched, or not all ended in time.
    """
    payload = read_object(data)
    with client() as api, written_as(_NAMES):
        receipt = api.publish(
            type, source=source, payload=payload, id=external_id, correlation_id=correlation_id,
            deliver_at=None if at is None else _time(at), delay=delay,
        )  # fmt: skip
        if not as_json:
            click.echo(f"{receipt.status} {receipt.id}")
        story = _followed(api, str(receipt.id), timeout, is_quiet=as_json) if is_waiting else None
    if as_json:
        print_json(receipt if story is None else {"id": receipt.id, "status": receipt.status, "explanation": story})
    if story is not None:
        ends = {one["state"] for one in story["outcomes"]}
        if ends != {"succeeded"}:
            sys.exit(1)


def _followed(api: Client, event_id: str, timeout: float, *, is_quiet: bool) -> Json:
    """The explanation of an event once nothing of it waits or runs, or the time is over; each change is printed."""
    until, last = monotonic() + timeout, ""
    while True:
        story: Json = api.request("GET", f"/v1/explain/{event_id}")
        if story["summary"] != last and not is_quiet:
            click.echo(printable(story["summary"]))
        last = story["summary"]
        is_over = story["waits_for"] is None and all(one["state"] != "executing" for one in story["outcomes"])
        if is_over or monotonic() >= until:
            return story
        time.sleep(WAIT_SECONDS)


def _time(at: str) -> datetime:
    try:
        return parse_time(at)
    except ValueError as exc:
        raise click.UsageError(f"--at: {exc}") from exc


def read_object(data: str | None) -> Any:
    """The JSON object that an option gives: as text, @FILE, or - for standard input."""
    if data is None:
        return None
    try:
        if data == "-":
            text = sys.stdin.read()
        elif data.startswith("@"):
            text = Path(data[1:]).read_text(encoding="utf-8")
        else:
            text = data
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise click.UsageError(f"--data: {data[1:]} cannot be read: {reason}") from exc
    try:
        payload = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise click.UsageError(f"--data is not JSON: {exc}") from exc
    if not isinstance(payload, dict):
        raise click.UsageError("--data must be a JSON object, such as '{\"id\": 7}'")
    return payload
