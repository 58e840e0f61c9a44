"""`headgate retries`: what waits, and the verbs about it."""

from __future__ import annotations

from urllib.parse import quote

import click

from headgate.cli.output import client, json_option, print_json, print_table, short_eta, short_time


@click.group()
def retries() -> None:
    """Look at what waits; cancel it or force it."""


@retries.command("list")
@click.option("--kind", default="events", show_default=True, type=click.Choice(["events", "deliveries", "steps"]))
@click.option("--source", default=None, help="Only of this source.")
@click.option("--reason", default=None, help="Only what waits for this: rate_limit, paused, breaker_open.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))
@json_option
def list_retries(kind: str, source: str | None, reason: str | None, limit: int, as_json: bool) -> None:
    """List what waits, in the order in which it will go on."""
    with client() as api:
        page = api.request("GET", "/admin/retries", kind=kind, source=source, reason=reason, limit=limit)
    if as_json:
        print_json(page)
        return
    rows = [
        (
            r["id"],
            r["external_id"] or "",
            r["type"] or "",
            r["source"] or "",
            r["reason"] or "",
            str(r["attempts"]),
            short_time(r["next_attempt_at"]),
            "when resumed" if r["eta_seconds"] is None else short_eta(r["eta_seconds"]),
        )
        for r in page["retries"]
    ]
    columns = ("ID", "EXTERNAL ID", "TYPE", "SOURCE", "REASON", "ATTEMPTS", "NEXT ATTEMPT", "ETA")
    print_table(columns, rows, "Nothing waits.")


@retries.command("cancel")
@click.argument("event_id", metavar="ID")
@json_option
def cancel_retry(event_id: str, as_json: bool) -> None:
    """Cancel an event that waits: it will not be launched. ID is ours or the producer's."""
    _act(event_id, "cancel", as_json)


@retries.command("force")
@click.argument("event_id", metavar="ID")
@json_option
def force_retry(event_id: str, as_json: bool) -> None:
    """Make an event that waits due now; limits and pauses still count. ID is ours or the producer's."""
    _act(event_id, "force", as_json)


def _act(event_id: str, verb: str, as_json: bool) -> None:
    with client() as api:
        changed = api.request("POST", f"/admin/retries/events/{quote(event_id, safe='')}/{verb}")
    if as_json:
        print_json(changed)
    else:
        click.echo(f"{changed['status']} {changed['id']}")
