"""Predictions in words: what an edited trigger or another limit would have done."""

from __future__ import annotations

from datetime import timedelta

import click

from tidegate.cli.output import Json, print_table, printable, short_eta, short_time
from tidegate.clock import utc_now
from tidegate.model import units
from tidegate.model.units import written_rate


def since(given: str) -> str:
    """The time that `--since` means: a duration before now, or a time as it is."""
    try:
        ms = units.duration_ms(given)
    except ValueError:
        return given
    return (utc_now() - timedelta(milliseconds=ms)).isoformat()


def print_forecast(name: str, found: Json) -> None:
    """What a trigger would have done with past events."""
    asked = f"{name}, edited" if found["is_edited"] else name
    cut = {"limit": "; the oldest of them are left out (--limit)", "time": "; the rest would take too long", None: ""}
    span = f"{short_time(found['from'])} to {short_time(found['to'])}"
    click.echo(f"{asked}: {found['events']} events, {span}{cut[found['cut']]}")
    rows = [("would launch", found["would_launch"], "")]
    rows += [("would skip", found["would_skip"], "same idempotency key as an earlier one")] * bool(found["would_skip"])
    rows += [("would fail", one["count"], f"{one['reason']} (event {one['event_id']})") for one in found["errors"]]
    rows += [
        ("filtered", one["count"], f"{one['check']}: {one['reason']} (event {one['event_id']})")
        for one in found["filters"]
    ]
    print_table(("RESULT", "EVENTS", "WHY"), [(what, str(count), why) for what, count, why in rows], "")
    other = "the current version" if found["is_edited"] else "what was delivered"
    click.echo(f"compared with {other}:")
    for what, field in (("newly matched", "newly_matched"), ("no longer matched", "no_longer_matched")):
        examples = found[field]
        ids = f": {', '.join(examples['event_ids'])}" if examples["event_ids"] else ""
        more = " …" if examples["count"] > len(examples["event_ids"]) else ""
        click.echo(f"  {what}: {examples['count']}{ids}{more}")
    done = ", ".join(f"{count} {status}" for status, count in found["deliveries"].items()) or "none"
    click.echo(f"deliveries of these events so far: {done}")
    if found["throttle"] is not None:
        click.echo(f"throttle: {_waits(found['throttle'])}")
    _print_not_predicted(found)


def print_limit(found: Json) -> None:
    """What another limit of a source would have done."""
    limit = "no limit" if found["limit"] is None else written_rate(found["limit"], found["interval_ms"])
    cut = "; the oldest are left out" if found["is_cut"] else ""
    span = f"{short_time(found['from'])} to {short_time(found['to'])}"
    click.echo(printable(f"{found['source']}, {limit}: {found['events']} events, {span}{cut}"))
    click.echo(f"  with this limit all that time:  {_waits(found['predicted'])}")
    click.echo(f"  with the current limit all that time:  {_waits(found['current'])}")
    if found["waiting"]:
        end = short_time(found["drained_at"]) if found["drained_at"] else "not before the source is resumed"
        click.echo(f"  waiting now: {found['waiting']}; the last would pass: {end}")
    else:
        click.echo("  waiting now: 0")
    _print_not_predicted(found)


def _waits(waits: Json) -> str:
    if not waits["held"]:
        return "0 held"
    longest = short_eta(waits["longest_wait_ms"] / 1000)
    return (
        f"{waits['held']} held, the longest for {longest} (event {waits['longest_wait_event_id']}), "
        f"at most {waits['most_waiting']} at once"
    )


def _print_not_predicted(found: Json) -> None:
    click.echo(f"not predicted: {'; '.join(found['not_predicted'])}")
