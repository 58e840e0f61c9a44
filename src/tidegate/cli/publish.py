"""`tidegate publish`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
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
# Of the runs that an event woke, at most this many are followed.
MAX_FOLLOWED = 10
# The states of a run that a worker executes, or will as soon as it can.
_IN_HAND = {"due", "slots_busy", "no_worker", "workflow_unserved", "left_out", "suspect", "executing", "cancelling",
            "worker_lost"}  # fmt: skip

# The API's field names, and the arguments and options that set them.
_NAMES = {"type": "TYPE", "source": "--source", "payload": "--data", "id": "--id", "correlation_id": "--correlation-id",
          "deliver_at": "--at", "delay_ms": "--delay", "delay": "--delay", "priority": "--priority"}  # fmt: skip


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
@click.option("--priority", type=int, default=None, help="1 to 10: its share among the waiting events of its source.")
@click.option(
    "--wait", "is_waiting", is_flag=True, help="Wait for the runs that it launches or wakes, and print what they do."
)
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
    priority: int | None,
    is_waiting: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Publish an event of TYPE. Returns after the event is committed; with --at or --delay it is decided later.

    With --wait it returns when what the event launched has ended, and each waiting run that it woke has ended or waits
    again; the exit status is 1 if a run failed, nothing was launched or woken, or it took longer than --timeout.
    """
    if at is not None and delay is not None:
        raise click.UsageError("--delay cannot be combined with --at: give one of them")
    payload = read_object(data)
    with client() as api, written_as(_NAMES):
        receipt = api.publish(
            type, source=source, payload=payload, id=external_id, correlation_id=correlation_id,
            deliver_at=None if at is None else _time(at), delay=delay, priority=priority,
        )  # fmt: skip
        if not as_json:
            click.echo(f"{receipt.status} {receipt.id}")
        if not is_waiting:
            if as_json:
                print_json(receipt)
            return
        until = monotonic() + timeout
        story = _followed(api, str(receipt.id), until, _has_ended, is_quiet=as_json)
        met = [run_id for line in story["decisions"] if line["stage"] == "wait" for run_id in line.get("run_ids", ())]
        woken = [_followed(api, run_id, until, _has_ended_or_waits, is_quiet=as_json) for run_id in met[:MAX_FOLLOWED]]
    if as_json:
        shown = {"id": receipt.id, "status": receipt.status, "explanation": story}
        print_json(shown | ({"woken": woken} if woken else {}))
    if not (_has_ended(story) and all(map(_has_ended_or_waits, woken))):
        text = f"not everything has ended within {timeout:g}s; tidegate explain {receipt.id} says what it waits for"
        click.echo(text, err=True)
    if not _is_well(story, woken):
        sys.exit(1)


def _is_well(story: Json, woken: Sequence[Json]) -> bool:
    """Whether an event has launched or met runs, those launched have succeeded, and those met are well."""
    launched = {one["state"] for one in story["outcomes"]}
    is_over = all(map(_has_ended_or_waits, woken)) and "failed" not in _states(woken)
    return bool(launched or woken) and launched <= {"succeeded"} and is_over


def _states(stories: Sequence[Json]) -> set[str]:
    return {one["state"] for story in stories for one in story["outcomes"]}


def _has_ended(story: Json) -> bool:
    return story["waits_for"] is None and "executing" not in _states([story])


def _has_ended_or_waits(story: Json) -> bool:
    """Whether no worker has to do anything about a run now."""
    return not _states([story]) & _IN_HAND


def _followed(api: Client, given: str, until: float, is_over: Callable[[Json], bool], *, is_quiet: bool) -> Json:
    """The explanation of an event or a run once it is over, or the time is; each change is printed."""
    last = ""
    while True:
        story: Json = api.request("GET", f"/v1/explain/{given}")
        if story["summary"] != last and not is_quiet:
            click.echo(printable(story["summary"]))
        last = story["summary"]
        if is_over(story) or monotonic() >= until:
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
