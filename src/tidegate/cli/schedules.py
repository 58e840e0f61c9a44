"""`tidegate schedules`."""

from __future__ import annotations

from functools import partial
from typing import Any
from uuid import uuid4

import click

from tidegate.cli.output import (
    Json,
    all_pages,
    client,
    confirm,
    json_option,
    print_json,
    print_table,
    printable,
    require_answer,
    short_time,
    zoned_time,
)
from tidegate.cli.patience import patiently
from tidegate.cli.pauses import PAUSE_NAMES, pause_body, pause_options
from tidegate.cli.wording import parsed, written_as
from tidegate.model.times import parse_time
from tidegate.model.units import written_duration

# The API's field names, and the arguments and options that set them.
_NAMES = PAUSE_NAMES | {"from": "FROM", "to": "TO", "rate": "--rate"}


@click.group()
def schedules() -> None:
    """Show and change the schedules of workflows."""


@schedules.command("list")
@json_option
def list_schedules(as_json: bool) -> None:
    """List schedules with their last and next ticks (UTC), pauses and missed ticks."""
    with client() as api:
        found = all_pages(api, "/admin/schedules", "schedules")
    if as_json:
        print_json({"schedules": found})
        return
    rows = [
        (
            s["workflow"],
            _when(s),
            s["timezone"] or "",
            short_time(s["next_at"]),
            short_time(s["last_at"]),
            str(s["missed_total"]),
            _state(s),
        )
        for s in found
    ]
    print_table(("WORKFLOW", "WHEN", "TIMEZONE", "NEXT", "LAST", "MISSED", "STATE"), rows, "No schedules yet.")


@schedules.command("show")
@click.argument("workflow")
@json_option
def show_schedule(workflow: str, as_json: bool) -> None:
    """Show the schedule of WORKFLOW: its next ticks, its pause, and the ticks that were not published."""
    with client() as api:
        found = api.request("GET", f"/admin/schedules/{workflow}")
    if as_json:
        print_json(found)
        return
    _print_schedule(found)


@schedules.command("pause")
@click.argument("workflow")
@pause_options
@json_option
def pause_schedule(workflow: str, duration: str | None, until: str | None, reason: str | None, as_json: bool) -> None:
    """Pause the schedule of WORKFLOW for a duration, until a time, or until it is resumed. Its ticks are not made up
    for."""
    _act(workflow, "pause", pause_body(duration, until, reason), as_json)


@schedules.command("resume")
@click.argument("workflow")
@json_option
def resume_schedule(workflow: str, as_json: bool) -> None:
    """Resume the schedule of WORKFLOW, from its next tick on."""
    _act(workflow, "resume", None, as_json)


@schedules.command("run-now")
@click.argument("workflow")
@json_option
def run_now(workflow: str, as_json: bool) -> None:
    """Publish an event of the schedule of WORKFLOW now. Its next tick stays."""
    with client() as api:
        done = patiently(partial(api.request, "POST", f"/admin/schedules/{workflow}/run-now", {"id": str(uuid4())}))
    if as_json:
        print_json(done)
    else:
        click.echo(
            f"published {done['event_id']}; whether it is launched, or skipped: tidegate explain {done['event_id']}"
        )


@schedules.command("backfill")
@click.argument("workflow")
@click.argument("since", metavar="FROM")
@click.argument("before", metavar="TO")
@click.option("--rate", default="1/s", show_default=True, help="How fast: 1/s, 20/min, 500/h.")
@click.option("--dry-run", is_flag=True, help="Only show what would be published.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def backfill(workflow: str, since: str, before: str, rate: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Publish the ticks of WORKFLOW from FROM on and before TO (2026-01-31T00:00:00Z) that have no event yet."""
    for name, text in (("FROM", since), ("TO", before)):
        parsed(parse_time, text, name)
    require_answer(yes=yes, dry_run=dry_run)
    path, body = f"/admin/schedules/{workflow}/backfill", {"from": since, "to": before, "rate": rate}
    with client() as api, written_as(_NAMES):
        found = api.request("POST", path, body | {"dry_run": True})
        if dry_run and as_json:
            print_json(found)
            return
        if not as_json:
            click.echo(_preview(found))
        if dry_run or (not found["new"] and not as_json):
            return
        if not yes:
            confirm(f"Publish {found['new']} ticks of {workflow}?")
        done = api.request("POST", path, body)
    if as_json:
        print_json(done)
    else:
        click.echo(f"published {done['new']} ticks; the last is decided at {zoned_time(done['ends_at'])}")


def _act(workflow: str, verb: str, body: dict[str, Any] | None, as_json: bool) -> None:
    with client() as api, written_as(_NAMES):
        found = api.request("POST", f"/admin/schedules/{workflow}/{verb}", body)
    if as_json:
        print_json(found)
    else:
        _print_schedule(found)


def _next(schedule: Json) -> str:
    is_open = schedule["is_paused"] and schedule["paused_until"] is None
    return "none until it is resumed" if is_open else short_time(schedule["next_at"])


def _print_schedule(found: dict[str, Any]) -> None:
    s = found["schedule"]
    click.echo(f"schedule of {s['workflow']}: {_when(s)}{' ' + s['timezone'] if s['timezone'] else ''}, {_state(s)}")
    missed = f"{s['missed_total']}"
    if s["missed_to"]:
        missed += f", last from {short_time(s['missed_from'])} to {short_time(s['missed_to'])}"
    for name, text in (
        ("next", ", ".join(short_time(at) for at in found["upcoming"]) or _next(s)),
        ("last", short_time(s["last_at"]) or "never"),
        ("overlap", s["overlap"]),
        ("missed", missed),
        ("in pauses", str(s["paused_total"])),
        ("skipped", str(s["skipped_total"])),
        ("workers", str(s["workers"])),
    ):
        click.echo(f"  {name:<12}{text}")


def _preview(found: dict[str, Any]) -> str:
    have = f"{found['known']} of {found['ticks']} ticks in the range have an event already"
    if not found["new"]:
        return f"{have}; nothing to publish."
    first, last = short_time(found["first_at"]), short_time(found["last_at"])
    return f"{have}; {found['new']} would be published, {first} to {last}, until {zoned_time(found['ends_at'])}."


def _when(s: dict[str, Any]) -> str:
    return s["cron"] or f"every {written_duration(s['every_ms'])}"


def _state(s: dict[str, Any]) -> str:
    if s["is_paused"]:
        until = f" until {short_time(s['paused_until'])}" if s["paused_until"] else ""
        return printable(f"paused by {s['paused_by']}{until}" + (f": {s['pause_reason']}" if s["pause_reason"] else ""))
    if s["overdue_seconds"] >= 30:
        return f"overdue by {written_duration(round(s['overdue_seconds']) * 1000)}"
    return "active"
