"""`tidegate events` and `tidegate explain`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from tidegate.cli.output import client, json_option, print_json, print_table, printable, short_json, short_time


@click.group()
def events() -> None:
    """Show events."""


@events.command("list")
@click.option("--type", "event_type", default=None, help="Only events of this type.")
@click.option("--source", default=None, help="Only events of this source.")
@click.option("--correlation-id", default=None, help="Only events with this correlation id.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))
@json_option
def list_events(
    event_type: str | None, source: str | None, correlation_id: str | None, limit: int, as_json: bool
) -> None:
    """List events, newest first."""
    with client() as api:
        page = api.request(
            "GET", "/v1/events", type=event_type, source=source, correlation_id=correlation_id, limit=limit
        )
    if as_json:
        print_json(page)
        return
    rows = [
        (
            short_time(e["received_at"]),
            e["type"],
            e["source"],
            e["external_id"] or "",
            e["id"],
            short_json(e["payload"]),
        )
        for e in page["events"]
    ]
    print_table(("RECEIVED", "TYPE", "SOURCE", "EXTERNAL ID", "ID", "PAYLOAD"), rows, "No events yet.", page)


@events.command("show")
@click.argument("event_id")
@json_option
def show_event(event_id: str, as_json: bool) -> None:
    """Show one event, by its id or the producer's id."""
    with client() as api:
        found = api.request("GET", f"/v1/events/{quote(event_id, safe='')}")
    if as_json:
        print_json(found)
        return
    click.echo(printable(f"event {found['id']}: {found['type']} from {found['source']}"))
    for field in ("external_id", "correlation_id", "received_at", "occurred_at", "ttl_ms"):
        if found.get(field) is not None:
            click.echo(
                f"  {field:<16}{printable(short_time(found[field]) if field.endswith('_at') else str(found[field]))}"
            )
    for field in ("metadata", "payload"):
        if found.get(field):
            click.echo(f"  {field:<16}{printable(short_json(found[field], 2000))}")


@click.command()
@click.argument("event_id")
@json_option
def explain(event_id: str, as_json: bool) -> None:
    """Explain an event: every decision about it, in order, with the reason."""
    with client() as api:
        story = api.request("GET", f"/v1/events/{quote(event_id, safe='')}/explain")
    if as_json:
        print_json(story)
        return
    click.echo(printable(f"{story['type']} from {story['source']}, event {story['event_id']}"))
    rows = [(short_time(d.get("at")), d["stage"], d["decision"], _of(d), _why(d)) for d in story["decisions"]]
    print_table(("AT", "STAGE", "DECISION", "TRIGGER", "REASON"), rows, "No decisions yet.")
    click.echo(printable(f"=> {story['summary']}"))


def _of(decision: dict[str, Any]) -> str:
    return "/".join(filter(None, (decision.get("workflow"), decision.get("trigger"))))


def _why(decision: dict[str, Any]) -> str:
    parts = [decision.get("reason") or ""]
    if decision.get("until"):
        parts.append(f"(next attempt {short_time(decision['until'])})")
    if decision.get("actor") and not parts[0].endswith(f"by {decision['actor']}"):
        parts.append(f"by {decision['actor']}")
    return " ".join(filter(None, parts))
