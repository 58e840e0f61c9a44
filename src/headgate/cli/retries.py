"""`headgate retries`: what waits, and the verbs about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click

from headgate.cli.output import client, json_option, print_json, print_table, short_eta, short_time
from headgate.cli.triggers import find_trigger


@click.group()
def retries() -> None:
    """Look at what waits; cancel it or force it."""


def _kind_option(*kinds: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--kind", default="events", show_default=True, type=click.Choice(kinds))


@retries.command("list")
@_kind_option("events", "deliveries", "steps")
@click.option("--source", default=None, help="Only of this source.")
@click.option("--reason", default=None, help="Only what waits for this: rate_limit, throttle, concurrency, paused, …")
@click.option(
    "--trigger", default=None, metavar="ID", help="Only deliveries of this trigger: its id, or WORKFLOW/NAME."
)
@click.option("--workflow", default=None, help="Only deliveries of this workflow's triggers.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))
@json_option
def list_retries(
    kind: str,
    source: str | None,
    reason: str | None,
    trigger: str | None,
    workflow: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List what waits, in the order in which it will go on."""
    if kind != "deliveries" and (trigger is not None or workflow is not None):
        raise click.UsageError("--trigger and --workflow go with --kind deliveries")
    with client() as api:
        trigger_id = find_trigger(api, trigger)["id"] if trigger is not None else None
        page = api.request(
            "GET", "/admin/retries", kind=kind, source=source, reason=reason, trigger_id=trigger_id,
            workflow=workflow, limit=limit,
        )  # fmt: skip
    if as_json:
        print_json(page)
        return
    rows = [(*_what(r), r["reason"] or "", str(r["attempts"]), short_time(r["next_attempt_at"]), _eta(r))
            for r in page["retries"]]  # fmt: skip
    who = ("TRIGGER", "EVENT", "SOURCE") if kind == "deliveries" else ("EXTERNAL ID", "TYPE", "SOURCE")
    print_table(("ID", *who, "REASON", "ATTEMPTS", "NEXT ATTEMPT", "ETA"), rows, "Nothing waits.")


@retries.command("cancel")
@_kind_option("events", "deliveries")
@click.argument("row_id", metavar="ID")
@json_option
def cancel_retry(kind: str, row_id: str, as_json: bool) -> None:
    """Cancel an event or delivery that waits: it will not be launched. An event's ID is ours or the producer's."""
    _act(kind, row_id, "cancel", as_json)


@retries.command("force")
@_kind_option("events", "deliveries")
@click.argument("row_id", metavar="ID")
@json_option
def force_retry(kind: str, row_id: str, as_json: bool) -> None:
    """Make an event or delivery that waits due now; limits and pauses still count."""
    _act(kind, row_id, "force", as_json)


def _act(kind: str, row_id: str, verb: str, as_json: bool) -> None:
    with client() as api:
        changed = api.request("POST", f"/admin/retries/{kind}/{quote(row_id, safe='')}/{verb}")
    if as_json:
        print_json(changed)
    else:
        click.echo(f"{changed['status']} {changed['id']}")


def _what(retry: dict[str, Any]) -> tuple[str, ...]:
    if retry["kind"] == "deliveries":
        event = retry["external_id"] or retry["event_id"]
        return retry["id"], f"{retry['workflow']}/{retry['trigger']}", event, retry["source"]
    return retry["id"], retry["external_id"] or "", retry["type"] or "", retry["source"] or ""


def _eta(retry: dict[str, Any]) -> str:
    """How long it waits, or what it waits for when nobody can say how long."""
    if retry["eta_seconds"] is not None:
        return short_eta(retry["eta_seconds"])
    return {"concurrency": "when a slot is free", "breaker_open": "after the trial run"}.get(
        retry["reason"], "when resumed"
    )
