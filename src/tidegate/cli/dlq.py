"""`tidegate dlq`: list, show and replay dead letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from tidegate.cli.output import (
    client,
    confirm,
    json_option,
    none_found,
    print_json,
    print_table,
    printable,
    require_answer,
    short_json,
    short_time,
)
from tidegate.cli.triggers import find_trigger
from tidegate.cli.wording import written_as
from tidegate.client import Client
from tidegate.errors import first_line

# The API's field names, and the options that set them.
_NAMES = {name: f"--{name}" for name in ("kind", "source", "workflow", "reason", "since", "until", "rate", "limit")}


@click.group()
def dlq() -> None:
    """Show and replay dead letters: events, deliveries, runs and steps that are no longer retried."""


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--until",
            default=None,
            metavar="TIME",
            help="Only dead-lettered before this time, e.g. 2026-01-31T09:30:00Z.",
        ),
        click.option("--since", default=None, metavar="TIME", help="Only dead-lettered at this time or later."),
        click.option("--reason", default=None, help="Only with this text in the reason."),
        click.option("--workflow", default=None, help="Only deliveries and runs of this workflow."),
        click.option(
            "--trigger",
            default=None,
            metavar="ID",
            help="Only deliveries and runs of this trigger: its id, or WORKFLOW/NAME.",
        ),
        click.option("--source", default=None, help="Only dead letters of this source's events."),
        click.option("--kind", default=None, type=click.Choice(("event", "delivery", "run", "step"))),
    ):
        command = option(command)
    return command


def _asked(api: Client, trigger: str | None, **filters: str | None) -> dict[str, Any]:
    trigger_id = find_trigger(api, trigger)["id"] if trigger is not None else None
    return {name: value for name, value in (filters | {"trigger_id": trigger_id}).items() if value is not None}


@dlq.command("list")
@_filters
@click.option("--state", default="open", show_default=True, type=click.Choice(("open", "scheduled", "replayed", "all")))
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))
@json_option
def list_letters(as_json: bool, limit: int, state: str, trigger: str | None, **filters: str | None) -> None:
    """List dead letters, newest first."""
    with client() as api, written_as(_NAMES):
        asked = _asked(api, trigger, **filters)
        page = api.request("GET", "/admin/dead-letters", state=state, limit=limit, **asked)
    if as_json:
        print_json(page)
        return
    rows = [
        (one["id"], one["kind"], _of(one), short_time(one["created_at"]), _state(one),
         first_line(one["reason"])[:80])
        for one in page["dead_letters"]
    ]  # fmt: skip
    is_filtered = asked or state != "open"
    none = none_found("dead letters", True) if is_filtered else "No open dead letters."
    print_table(("ID", "KIND", "OF", "DEAD-LETTERED", "REPLAY", "REASON"), rows, none, page)


@dlq.command("show")
@click.argument("letter_id", metavar="ID")
@json_option
def show_letter(letter_id: str, as_json: bool) -> None:
    """Show one dead letter."""
    with client() as api:
        found = api.request("GET", f"/admin/dead-letters/{letter_id}")
    if as_json:
        print_json(found)
        return
    for field, value in found.items():
        if value is not None and value != {}:
            text = value if isinstance(value, str) else short_json(value, 2000)
            click.echo(f"{field:<20}{printable(short_time(text) if field.endswith('_at') else text)}")


@dlq.command("replay")
@click.argument("letter_id", metavar="[ID]", required=False)
@_filters
@click.option("--all", "all_letters", is_flag=True, help="All open dead letters.")
@click.option("--rate", default=10.0, show_default=True, type=float, help="Dead letters replayed per second.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
@click.option("--force", is_flag=True, help="Replay it even if it was replayed before; with an ID only.")
@json_option
def replay(
    letter_id: str | None,
    all_letters: bool,
    rate: float,
    dry_run: bool,
    yes: bool,
    force: bool,
    as_json: bool,
    trigger: str | None,
    **filters: str | None,
) -> None:
    """Replay the dead letter ID at once; or those that match the options, or --all, one after the other at --rate."""
    is_filtered = trigger is not None or any(filters.values())
    if [letter_id is not None, is_filtered, all_letters].count(True) != 1:
        raise click.UsageError("say which dead letters: give an ID, options such as --kind and --source, or --all")
    if letter_id is not None and dry_run:
        raise click.UsageError("--dry-run works with options such as --kind, not with an ID")
    if letter_id is None and force:
        raise click.UsageError("--force needs an ID")
    if letter_id is None:
        require_answer(yes=yes, dry_run=dry_run)
    with client() as api, written_as(_NAMES):
        if letter_id is not None:
            done = api.request("POST", f"/admin/dead-letters/{letter_id}/replay", {"force": force})
        else:
            asked = _asked(api, trigger, **filters) | {"rate": rate} | ({"all": True} if all_letters else {})
            if not (dry_run or yes):
                _confirm(api, asked)
            done = api.request("POST", "/admin/dead-letters/replay", asked | {"dry_run": dry_run})
    if as_json:
        print_json(done)
    elif letter_id is not None and done["status"] == "replayed":
        click.echo(f"replayed {done['id']} as {done['replayed_into']}")
    elif letter_id is not None:
        click.echo(f"{done['id']} waits for a free slot of its trigger")
    elif dry_run:
        click.echo(f"{done['count']} would be replayed")
    else:
        last = f", the last at {short_time(done['last_at'])}" if done["last_at"] else ""
        click.echo(f"{done['count']} will be replayed, {rate:g} per second{last}")


def _confirm(api: Client, asked: dict[str, Any]) -> None:
    count = api.request("POST", "/admin/dead-letters/replay", asked | {"dry_run": True})["count"]
    letters = "1 dead letter" if count == 1 else f"{count} dead letters"
    confirm(f"Replay {letters}, {asked['rate']:g} per second?")


@dlq.command("stop")
@json_option
def stop(as_json: bool) -> None:
    """Cancel the scheduled replays that have not started; their dead letters stay open."""
    with client() as api:
        done = api.request("POST", "/admin/dead-letters/stop")
    if as_json:
        print_json(done)
    else:
        click.echo(f"{done['count']} replays cancelled")


def _of(letter: dict[str, Any]) -> str:
    """The trigger of a dead letter; for an event, its source."""
    return "/".join(filter(None, (letter["workflow"], letter["trigger"]))) or letter["source"] or ""


def _state(letter: dict[str, Any]) -> str:
    if letter["replay_at"]:
        return f"at {short_time(letter['replay_at'])}"
    if letter["replayed_at"]:
        return f"{short_time(letter['replayed_at'])} by {letter['replayed_by']}"
    return f"refused: {letter['replay_error']}" if letter["replay_error"] else ""
