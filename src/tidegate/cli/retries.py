"""`tidegate retries`: list, cancel and force waiting events, deliveries and steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click

from tidegate.cli.output import (
    client,
    confirm,
    json_option,
    print_json,
    print_table,
    require_answer,
    short_eta,
    short_time,
)
from tidegate.cli.triggers import find_trigger
from tidegate.client import Client
from tidegate.errors import NotFound, first_line

_Retry = dict[str, Any]
KINDS = ("events", "deliveries", "steps")
_SINGULAR = {"events": "event", "deliveries": "delivery", "steps": "step"}
# Reasons that use no attempt: it waits for something to end, not for a limit that may refuse it or after a failure.
_USING_NO_ATTEMPTS = (
    "scheduled",
    "concurrency",
    "paused",
    "source_paused",
    "breaker_open",
    "retry_after",
    "sleep",
    "event",
    "replay",
)
_DONE = {"cancel": "cancelled", "force": "forced"}


@click.group()
def retries() -> None:
    """List waiting events, deliveries and steps; cancel them, or make them due now."""


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--run", "run_id", default=None, metavar="ID", help="Only steps of this run."),
        click.option("--workflow", default=None, help="Only deliveries and steps of this workflow."),
        click.option("--trigger", default=None, metavar="ID",
                     help="Only deliveries and steps of this trigger: its id, or WORKFLOW/NAME."),
        click.option("--reason", default=None,
                     help="Only with this reason: rate_limit, throttle, concurrency, budget, paused, failed, …"),
        click.option("--source", default=None, help="Only items of this source's events."),
        click.option("--kind", default="events", show_default=True, type=click.Choice(KINDS)),
    ):  # fmt: skip
        command = option(command)
    return command


def _bulk_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.argument("row_id", metavar="[ID]", required=False),
        click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal."),
        click.option("--dry-run", is_flag=True, help="Only count them."),
        click.option("--all", "is_all", is_flag=True, help="All waiting items of the kind."),
    ):
        command = option(command)
    return _filters(json_option(command))


@retries.command("list")
@_filters
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))
@json_option
def list_retries(kind: str, limit: int, as_json: bool, **filters: str | None) -> None:
    """List waiting items, in the order of their next attempt."""
    with client() as api:
        page = api.request("GET", "/admin/retries", kind=kind, limit=limit, **_asked(api, kind, **filters))
    if as_json:
        print_json(page)
        return
    rows = [(*_what(r), r["reason"] or "", _attempts(r), _next(r), _eta(r),
             first_line(r["last_error"] or "")[:80]) for r in page["retries"]]  # fmt: skip
    who = {
        "events": ("EXTERNAL ID", "TYPE", "SOURCE"),
        "deliveries": ("TRIGGER", "EVENT", "SOURCE"),
        "steps": ("WORKFLOW", "STEP", "RUN"),
    }[kind]
    others = " and ".join(f"--kind {other}" for other in KINDS if other != kind)
    is_filtered = any(value is not None for value in filters.values())
    none = f"No waiting {kind} match" if is_filtered else f"No {kind} are waiting"
    print_table(
        ("ID", *who, "REASON", "ATTEMPTS", "NEXT ATTEMPT", "ETA", "WHY"),
        rows,
        f"{none}; use {others} for the others.",
        page,
    )


@retries.command("cancel")
@_bulk_options
def cancel_retry(**given: Any) -> None:
    """Cancel a waiting item by its ID, or all that match the options. A cancelled event or delivery launches nothing;
    with a step, its run is cancelled too. For an event, ID is its own or the producer's."""
    _act("cancel", **given)


@retries.command("force")
@_bulk_options
def force_retry(**given: Any) -> None:
    """Make a waiting item due now, by its ID, or all that match the options. Limits and pauses still apply."""
    _act("force", **given)


def _asked(api: Client, kind: str, trigger: str | None, run_id: str | None, **filters: str | None) -> dict[str, Any]:
    """The filters as query parameters of the API."""
    if kind == "events" and (trigger is not None or filters.get("workflow") is not None):
        raise click.UsageError("--trigger and --workflow need --kind deliveries or steps")
    if kind != "steps" and run_id is not None:
        raise click.UsageError("--run needs --kind steps")
    trigger_id = find_trigger(api, trigger)["id"] if trigger is not None else None
    asked = filters | {"trigger_id": trigger_id, "workflow_run_id": run_id}
    return {name: value for name, value in asked.items() if value is not None}


def _act(
    verb: str, kind: str, row_id: str | None, is_all: bool, dry_run: bool, yes: bool, as_json: bool,
    **filters: str | None,
) -> None:  # fmt: skip
    is_filtered = any(value is not None for value in filters.values())
    if (row_id is not None) + is_filtered + is_all != 1:
        raise click.UsageError("say which items: give an ID, options such as --source and --reason, or --all")
    if row_id is not None and dry_run:
        raise click.UsageError("--dry-run works with options such as --source, not with an ID")
    if row_id is None:
        require_answer(yes=yes, dry_run=dry_run)
    with client() as api:
        if row_id is not None:
            _act_on_one(api, verb, kind, row_id, as_json)
        else:
            asked = _asked(api, kind, **filters) | ({"all": True} if is_all else {})
            _act_on_many(api, verb, kind, asked, dry_run=dry_run, yes=yes, as_json=as_json)


def _act_on_one(api: Client, verb: str, kind: str, row_id: str, as_json: bool) -> None:
    try:
        changed = api.request("POST", f"/admin/retries/{kind}/{quote(row_id, safe='')}/{verb}")
    except NotFound as exc:
        others = " or ".join(f"--kind {other}" for other in KINDS if other != kind)
        raise NotFound(f"{exc}; if the id is not one of --kind {kind}, give {others}") from exc
    if as_json:
        print_json(changed)
    elif changed["status"] == "cancelling":
        click.echo(f"{changed['id']}: its run is in progress; it stops at its next step")
    else:
        click.echo(f"{changed['status']} {changed['id']}")


def _act_on_many(
    api: Client, verb: str, kind: str, asked: dict[str, Any], *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    path = f"/admin/retries/{kind}/{verb}"
    preview = api.request("POST", path, asked | {"dry_run": True})
    count = preview["remaining"]
    if dry_run and as_json:
        print_json(preview)
    elif dry_run:
        click.echo(f"{_counted(count, kind)} would be {_DONE[verb]}")
    elif count == 0 and not as_json:
        click.echo("Nothing that matches is waiting.")
    else:
        if not yes:
            with_runs = ", and with them their runs" if (verb, kind) == ("cancel", "steps") else ""
            confirm(f"{verb.capitalize()} {_counted(count, kind)}{with_runs}?")
        _print_done(_change_all(api, path, asked, count, _DONE[verb]), kind, as_json)


def _change_all(api: Client, path: str, asked: dict[str, Any], count: int, done_word: str) -> dict[str, Any]:
    """Call the API until nothing remains. Each call commits one part, so it can be interrupted at any time."""
    done = lost = 0
    cursor: str | None = None
    answer: dict[str, Any] = {}
    is_complete = False
    try:
        while not is_complete:
            answer = api.request("POST", path, asked | ({"cursor": cursor} if cursor else {}))
            done, lost = done + answer["done"], lost + answer["no_longer_waiting"]
            cursor = answer["cursor"]
            is_complete = cursor is None
            _progress(f"{done_word} {done} of {max(count, done + lost + answer['remaining'])}", is_complete)
    finally:
        if not is_complete:
            click.echo(f"\nstopped: {done} of {count} are {done_word}; run it again to continue", err=True)
    return answer | {"done": done, "no_longer_waiting": lost}


def _progress(text: str, is_last: bool) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{text}" + ("\n" if is_last else ""), nl=False, err=True)
    elif not is_last:
        click.echo(text, err=True)


def _print_done(answer: dict[str, Any], kind: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    lost = f"; {answer['no_longer_waiting']} were no longer waiting" if answer["no_longer_waiting"] else ""
    click.echo(f"{answer['status']} {_counted(answer['done'], kind)}{lost}")


def _counted(count: int, kind: str) -> str:
    return f"{count} {_SINGULAR[kind] if count == 1 else kind}"


def _what(retry: _Retry) -> tuple[str, ...]:
    if retry["kind"] == "deliveries":
        event = retry["external_id"] or retry["event_id"]
        return retry["id"], f"{retry['workflow']}/{retry['trigger']}", event, retry["source"]
    if retry["kind"] == "steps":
        return retry["id"], retry["workflow"], retry["step"], retry["workflow_run_id"]
    return retry["id"], retry["external_id"] or "", retry["type"] or "", retry["source"] or ""


def _attempts(retry: _Retry) -> str:
    """How many attempts it has used; `-` while it waits for a reason that uses none (the first check counts as one)."""
    is_unused = retry["attempts"] <= 1 and retry["reason"] in _USING_NO_ATTEMPTS
    return "-" if is_unused else str(retry["attempts"])


def _next(retry: _Retry) -> str:
    """The time of the next attempt; empty when it is unknown: the stored one is only the next check."""
    return short_time(retry["expected_at"] or retry["next_attempt_at"]) if retry["eta_seconds"] is not None else ""


def _eta(retry: _Retry) -> str:
    """The time until the next attempt, or what it waits for when that time is unknown."""
    if retry["eta_seconds"] is not None:
        return short_eta(retry["eta_seconds"])
    return {"concurrency": "when a slot is free", "breaker_open": "after the probe"}.get(
        retry["reason"], "when resumed"
    )
