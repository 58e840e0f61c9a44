"""`tidegate events` and `tidegate explain`."""

from __future__ import annotations

import time
from urllib.parse import quote

import click
import msgspec

from tidegate.cli.output import (
    Json,
    client,
    confirm,
    json_option,
    local_text,
    none_found,
    page_options,
    print_json,
    print_table,
    printable,
    require_answer,
    short_json,
    short_time,
)
from tidegate.cli.wording import written_as
from tidegate.model.run import ENDING_KINDS

# The API's field names, and the options that set them.
# Of an event that launched more runs, this many are named above its story.
MAX_RUNS_NAMED = 5
_REPLAY_NAMES = {name: f"--{name}" for name in ("type", "source", "from", "to", "rate", "limit", "all")}


@click.group()
def events() -> None:
    """Show and replay events, and take back those that wait."""


@events.command("list")
@click.option("--type", "event_type", default=None, help="Only events of this type.")
@click.option("--source", default=None, help="Only events of this source.")
@click.option("--correlation-id", default=None, help="Only events with this correlation id.")
@click.option("--from", "since", default=None, metavar="TIME", help="Only events received at this time or later.")
@click.option("--to", "until", default=None, metavar="TIME", help="Only events received before this time.")
@page_options
@json_option
def list_events(
    event_type: str | None,
    source: str | None,
    correlation_id: str | None,
    since: str | None,
    until: str | None,
    limit: int,
    cursor: str | None,
    as_json: bool,
) -> None:
    """List events, newest first."""
    times = {"from": since, "to": until}
    with client() as api:
        page = api.request(
            "GET", "/v1/events", type=event_type, source=source, correlation_id=correlation_id, limit=limit,
            cursor=cursor, **times,
        )  # fmt: skip
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
    none = none_found("events", event_type, source, correlation_id, since, until, cursor)
    print_table(("RECEIVED", "TYPE", "SOURCE", "EXTERNAL ID", "ID", "PAYLOAD"), rows, none, page)


@events.command("tail")
@click.option("--type", "event_type", default=None, help="Only events of this type.")
@click.option("--source", default=None, help="Only events of this source.")
@click.option(
    "--interval", default=1.0, show_default=True, type=click.FloatRange(0.1, 60), help="Seconds between looks."
)
@click.option("--once", is_flag=True, help="Print the newest events and stop.")
@json_option
def tail_events(event_type: str | None, source: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Print events as they arrive, with what became of each so far. Ctrl-C stops it."""
    seen: set[str] = set()
    with client() as api:
        while True:
            page = api.request("GET", "/v1/events", type=event_type, source=source, limit=50)
            fresh = [event for event in reversed(page["events"]) if event["id"] not in seen]
            for event in fresh:
                story = api.request("GET", f"/v1/events/{event['id']}/explain")
                _print_tail(event, story, as_json)
            seen = {event["id"] for event in page["events"]} | ({*seen} if len(seen) < 10_000 else set())
            if once:
                return
            time.sleep(interval)


def _print_tail(event: Json, story: Json, as_json: bool) -> None:
    if as_json:  # one line for each, for programs
        click.echo(msgspec.json.encode({"event": event, "summary": story["summary"]}).decode())
        return
    named = event["external_id"] or event["id"]
    line = f"{short_time(event['received_at'])}  {event['type']}  {event['source']}  {named}  {story['summary']}"
    click.echo(printable(local_text(line)))


@events.command("replay")
@click.argument("event_id", metavar="[ID]", required=False)
@click.option("--type", "event_type", default=None, help="Only events of this type.")
@click.option("--source", default=None, help="Only events of this source.")
@click.option("--from", "since", default=None, metavar="TIME", help="Only events received at this time or later.")
@click.option("--to", "until", default=None, metavar="TIME", help="Only events received before this time.")
@click.option("--all", "all_events", is_flag=True, help="All events.")
@click.option("--rate", default=10.0, show_default=True, type=float, help="Events replayed per second.")
@click.option("--limit", default=10_000, show_default=True, type=click.IntRange(1, 10_000), help="At most this many.")
@click.option("--dry-run", is_flag=True, help="Only predict what each trigger would do.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
@json_option
def replay_events(
    event_id: str | None,
    event_type: str | None,
    source: str | None,
    since: str | None,
    until: str | None,
    all_events: bool,
    rate: float,
    limit: int,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Decide the event ID again, or those that match the options, one after the other at --rate.

    The triggers as they are now decide; one that has already decided about an event does not decide again. To repeat a
    run: `tidegate runs rerun`.
    """
    filters = {"type": event_type, "source": source, "from": since, "to": until}
    asked: Json = {name: value for name, value in filters.items() if value is not None}
    if [event_id is not None, bool(asked), all_events].count(True) != 1:
        raise click.UsageError("say which events: give an ID, options such as --source and --from, or --all")
    if event_id is None:
        require_answer(yes=yes, dry_run=dry_run)
    with client() as api, written_as(_REPLAY_NAMES):
        if event_id is not None:
            done = api.request("POST", f"/v1/events/{quote(event_id, safe='')}/replay", {"dry_run": dry_run})
        else:
            asked |= {"rate": rate, "limit": limit} | ({"all": True} if all_events else {})
            if not (dry_run or yes):
                plan = api.request("POST", "/admin/event-replays", asked | {"dry_run": True})
                _print_plan(plan)
                confirm(f"Replay {plan['count']} events, {rate:g} per second?")
            done = api.request("POST", "/admin/event-replays", asked | {"dry_run": dry_run})
    if as_json:
        print_json(done)
    elif done["status"] == "preview":
        _print_plan(done)
    elif done["status"] == "replayed":
        before = ", although it was taken back" if done.get("was_taken_back") else ""
        click.echo(f"event {done['event_id']} is decided again{before}: tidegate explain {done['event_id']}")
    else:
        last = f", the last at {short_time(done['last_at'])}" if done["last_at"] else ""
        click.echo(f"{done['count']} events will be replayed, {rate:g} per second{last}")
        _print_left_out(done)
        if done["is_cut"]:
            click.echo(f"… more than these {done['count']} match: repeat the command after them", err=True)


def _print_left_out(plan: Json) -> None:
    if plan.get("taken_back"):
        are = "was taken back and is" if plan["taken_back"] == 1 else "were taken back and are"
        click.echo(f"{plan['taken_back']} {are} left out: tidegate events replay ID decides one of these")


def _print_plan(plan: Json) -> None:
    if "count" in plan:
        cut = "more than " if plan["is_cut"] else ""
        click.echo(f"{cut}{plan['count']} events would be replayed; triggers evaluated on {plan['evaluated']}:")
        _print_left_out(plan)
    elif plan.get("was_taken_back"):
        click.echo("the event was taken back: its replay decides it although it was")
    rows = [
        (f"{one['workflow']}/{one['trigger']}", str(one["would_launch"]), str(one["already_decided"]),
         str(one["filtered"]), str(one["would_fail"]), one["error"] or one["reason"] or "")
        for one in plan["triggers"]
    ]  # fmt: skip
    columns = ("TRIGGER", "WOULD LAUNCH", "ALREADY DECIDED", "FILTERED", "WOULD FAIL", "REASON")
    print_table(columns, rows, "No trigger takes such events.")


@events.command("stop")
@json_option
def stop_replays(as_json: bool) -> None:
    """Cancel the scheduled replays of events that have not started."""
    with client() as api:
        done = api.request("POST", "/admin/event-replays/stop")
    if as_json:
        print_json(done)
    else:
        click.echo(f"{done['count']} replays cancelled")


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
    for field in ("external_id", "correlation_id", "received_at", "occurred_at", "deliver_at", "ttl_ms", "priority"):
        if found.get(field) is not None:
            click.echo(
                f"  {field:<16}{printable(short_time(found[field]) if field.endswith('_at') else str(found[field]))}"
            )
    for field, value in (found.get("origin") or {}).items():
        if field.endswith("_id"):
            click.echo(f"  {'caused by':<16}{field.removesuffix('_id')} {value}")
    for field in ("metadata", "payload"):
        if found.get(field):
            click.echo(f"  {field:<16}{printable(short_json(found[field], 2000))}")


@events.command("cancel")
@click.argument("event_id")
@json_option
def cancel_event(event_id: str, as_json: bool) -> None:
    """Take back an event that waits for its time, or that its source holds, by its id or the producer's id."""
    with client() as api:
        done = api.request("POST", f"/v1/events/{quote(event_id, safe='')}/cancel")
    if as_json:
        print_json(done)
    else:
        click.echo(f"{done['status']} {done['id']}")


@click.command()
@click.argument("given", metavar="ID")
@json_option
def explain(given: str, as_json: bool) -> None:
    """Explain why an event, a run or a delivery is where it is.

    ID is the id of an event, a run or a delivery, or the id that a producer gave its event.
    """
    with client() as api:
        story = api.request("GET", f"/v1/explain/{quote(given, safe='')}")
    if as_json:
        print_json(story)
        return
    click.echo(click.style(printable(local_text(story["summary"])), bold=True))
    if story["waits_for"]:
        click.echo(printable(f"waits for: {story['waits_for']}"))
    if story["until"]:
        click.echo(f"until:     {short_time(story['until'])}")
    if story["event_id"]:
        named = f" ({story['external_id']})" if story["external_id"] else ""
        click.echo(printable(f"event:     {story['type']} from {story['source']}, {story['event_id']}{named}"))
    runs = [one for one in story["outcomes"] if one["run_id"] and story["kind"] != "run"]
    for one in runs[:MAX_RUNS_NAMED]:
        click.echo(printable(f"run:       {one['run_id']} of {one['workflow']}"))
    if len(runs) > MAX_RUNS_NAMED:
        click.echo(f"           and {len(runs) - MAX_RUNS_NAMED} more: tidegate runs list --event {story['event_id']}")
    click.echo("")
    rows = [(short_time(d.get("at")), d["stage"], d["decision"], _of(d), _why(d)) for d in story["decisions"]]
    print_table(("AT", "STAGE", "DECISION", "TRIGGER", "REASON"), rows, "No decisions yet.")
    if len(runs) > 1:
        click.echo("\ntidegate explain RUN_ID says more about one of the runs")


def _of(decision: Json) -> str:
    return "/".join(filter(None, (decision.get("workflow"), decision.get("trigger"))))


def _why(decision: Json) -> str:
    parts = [local_text(decision.get("reason") or "")]
    said = parts[0]
    if decision.get("until") and short_time(decision["until"]) not in said:
        word = "until" if decision.get("kind") in ENDING_KINDS else "next attempt"
        parts.append(f"({word} {short_time(decision['until'])})")
    elif decision.get("waits_for") and not decision.get("until") and decision["waits_for"] not in said:
        parts.append(f"(waits for {decision['waits_for']})")
    if decision.get("actor") and not said.endswith(f"by {decision['actor']}"):
        parts.append(f"by {decision['actor']}")
    return " ".join(filter(None, parts))
