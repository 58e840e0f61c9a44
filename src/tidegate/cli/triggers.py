"""`tidegate triggers`: which events launch which workflows, and their limits."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import quote

import click
import msgspec

from tidegate.cli.output import (
    Json,
    all_pages,
    asks,
    client,
    json_option,
    none_found,
    print_json,
    print_table,
    short_json,
    short_time,
    zoned_time,
)
from tidegate.cli.pauses import PAUSE_NAMES, pause_body, pause_options
from tidegate.cli.predictions import print_forecast, since
from tidegate.cli.trigger_files import read_object, set_fields, trigger_fields
from tidegate.cli.wording import written_as
from tidegate.client import Client
from tidegate.errors import NotFound
from tidegate.model.backlog import BacklogPolicy
from tidegate.model.units import written_duration, written_rate
from tidegate.model.window import CollectPolicy


@click.group()
def triggers() -> None:
    """Show, create, update, pause and test triggers. ID is a trigger's id, or WORKFLOW/NAME."""


@triggers.command("list")
@click.argument("workflow", required=False)
@json_option
def list_triggers(workflow: str | None, as_json: bool) -> None:
    """List the triggers of WORKFLOW, or of all workflows."""
    with client() as api:
        found = all_pages(api, _of_workflow(workflow) if workflow else "/admin/triggers", "triggers")
    if as_json:
        print_json({"triggers": found})
        return
    rows = [
        (
            t["id"],
            _name(t),
            _events(t),
            _limits(t),
            str(t["state"]["waiting"]),
            f"v{t['version']} by {t['updated_by']}",
            _state(t),
        )
        for t in found
    ]
    columns = ("ID", "TRIGGER", "ON", "LIMITS", "WAITING", "VERSION", "STATE")
    print_table(columns, rows, none_found("triggers", workflow))


@triggers.command("create")
@click.option("-f", "--file", required=True, help="YAML or JSON file; - for standard input.")
@click.option("--workflow", default=None, help="The workflow to launch, if the file does not name it.")
@json_option
def create_trigger(file: str, workflow: str | None, as_json: bool) -> None:
    """Create a trigger from a file."""
    given = read_object(file)
    target = workflow or given.get("workflow")
    if not isinstance(target, str) or not target:
        raise click.UsageError("name the workflow to launch: `workflow: NAME` in the file, or --workflow NAME")
    if workflow and given.get("workflow", workflow) != workflow:
        raise click.UsageError(f"the file names the workflow {given['workflow']}, --workflow names {workflow}")
    fields, names = trigger_fields(given, keep_version=False)
    with client() as api, written_as(names):
        created = api.request("POST", _of_workflow(target), fields)
    _print_result(created, as_json, "created")


@triggers.command("show")
@click.argument("trigger_id", metavar="ID")
@json_option
def show_trigger(trigger_id: str, as_json: bool) -> None:
    """Show one trigger: the events it matches, its limits, its state."""
    with client() as api:
        found = find_trigger(api, trigger_id)
    if as_json:
        print_json(found)
        return
    click.echo(f"{_name(found)}  {found['id']}")
    rows = [(name, text) for name, text in _lines(found) if text]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"  {name:<{width}}  {text}")


@triggers.command("update")
@click.argument("trigger_id", metavar="ID")
@click.option("-f", "--file", default=None, help="The fields to change, as YAML or JSON; - for standard input.")
@click.option(
    "--set", "assignments", multiple=True, metavar="FIELD=VALUE", help="Set one field (null clears it); repeatable."
)
@json_option
def update_trigger(trigger_id: str, file: str | None, assignments: tuple[str, ...], as_json: bool) -> None:
    """Update the given fields of a trigger. Waiting deliveries are evaluated again; disabling it cancels them."""
    if (file is None) == (not assignments):
        raise click.UsageError("give -f FILE, or --set FIELD=VALUE at least once")
    given = read_object(file) if file is not None else set_fields(assignments)
    fields, names = trigger_fields(given, keep_version=True)
    with client() as api:
        before = find_trigger(api, trigger_id)
        with written_as(names):
            changed = api.request("PATCH", trigger_path(before), fields)
    _print_result(changed, as_json, "changed" if changed["version"] != before["version"] else "unchanged")


@triggers.command("delete")
@click.argument("trigger_id", metavar="ID")
@asks("Delete trigger {trigger_id}, and cancel its waiting deliveries?")
@json_option
def delete_trigger(trigger_id: str, as_json: bool) -> None:
    """Delete a trigger and cancel its waiting deliveries; runs that have been launched continue."""
    with client() as api:
        deleted = api.request("DELETE", trigger_path(find_trigger(api, trigger_id)))
    if as_json:
        print_json(deleted)
    else:
        count = deleted["cancelled"]
        also = f"; {count} waiting {'delivery' if count == 1 else 'deliveries'} cancelled" if count else ""
        click.echo(f"deleted {deleted['workflow']}/{deleted['name']}{also}")


@triggers.command("pause")
@click.argument("trigger_id", metavar="ID")
@pause_options
@json_option
def pause_trigger(trigger_id: str, duration: str | None, until: str | None, reason: str | None, as_json: bool) -> None:
    """Pause a trigger: hold all its launches for a duration, until a time, or until it is resumed."""
    body = pause_body(duration, until, reason)
    with client() as api:
        found = find_trigger(api, trigger_id)
        with written_as(PAUSE_NAMES):
            changed = api.request("POST", f"/admin/triggers/{found['id']}/pause", body)
    _print_result(changed, as_json)


@triggers.command("resume")
@click.argument("trigger_id", metavar="ID")
@json_option
def resume_trigger(trigger_id: str, as_json: bool) -> None:
    """Resume a trigger: end its pause and close its breaker. Waiting deliveries are launched within its limits."""
    with client() as api:
        changed = api.request("POST", f"/admin/triggers/{find_trigger(api, trigger_id)['id']}/resume")
    _print_result(changed, as_json)


@triggers.command("test")
@click.argument("trigger_id", metavar="ID")
@click.option(
    "--event",
    "file",
    default=None,
    metavar="FILE",
    help="A sample event, as a YAML or JSON file; - for standard input.",
)
@click.option("--event-id", default=None, help="A stored event, by its id or the producer's id.")
@click.option("--since", "past", default=None, metavar="AGE", help="Past events: those of this long (7d), or a time.")
@click.option("--to", "until", default=None, metavar="TIME", help="Only past events received before this time.")
@click.option(
    "--limit", default=None, type=click.IntRange(1, 10_000), help="At most this many past events: the newest."
)
@click.option("-f", "--file", "change", default=None, help="Test it with these fields changed, as YAML or JSON.")
@click.option("--set", "assignments", multiple=True, metavar="FIELD=VALUE", help="Test it with this field changed.")
@json_option
def test_trigger(
    trigger_id: str,
    file: str | None,
    event_id: str | None,
    past: str | None,
    until: str | None,
    limit: int | None,
    change: str | None,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Evaluate a trigger, as it is or edited (--set, -f), on an event or on past events. Nothing is stored or launched.

    Without an event, the events of the last week are evaluated: how many it would have launched, and the difference
    to the current version.
    """
    if change is not None and assignments:
        raise click.UsageError("give -f FILE, or --set FIELD=VALUE")
    of_past = {"from": since(past) if past else None, "to": until, "limit": limit}
    asked: Json = {name: value for name, value in of_past.items() if value is not None}
    given_ways = [file is not None, event_id is not None, bool(asked)].count(True)
    if given_ways > 1 or (given_ways == 0 and change is None and not assignments):
        raise click.UsageError("give --event FILE, or --event-id ID, or --since AGE for past events")
    names: dict[str, str] = {}
    if change is not None or assignments:
        given = read_object(change) if change is not None else set_fields(assignments)
        fields, names = trigger_fields(given, keep_version=False)
        asked["change"] = fields
    if file is not None or event_id is not None:
        asked |= {"event": read_object(file)} if file is not None else {"event_id": event_id}
    written = {f"change.{name}": names.get(name, name) for name in [*names, *asked.get("change", ())]}
    with client() as api:
        found = find_trigger(api, trigger_id)
        with written_as(written | {"from": "--since", "to": "--to", "limit": "--limit"}):
            answer = api.request("POST", f"{trigger_path(found)}/test", asked)
    if as_json:
        print_json(answer)
    elif "matches" in answer:
        _print_dry_run(_name(found), answer)
    else:
        print_forecast(_name(found), answer)


@triggers.command("versions")
@click.argument("trigger_id", metavar="ID")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))
@json_option
def list_versions(trigger_id: str, limit: int, as_json: bool) -> None:
    """List the versions of a trigger, newest first: who changed what, and when."""
    with client() as api:
        page = api.request("GET", f"{trigger_path(find_trigger(api, trigger_id))}/versions", limit=limit)
    if as_json:
        print_json(page)
        return
    versions = page["versions"]
    rows = [
        (f"v{v['version']}", short_time(v["changed_at"]), v["changed_by"], _difference(older, v))
        for v, older in zip(versions, [*versions[1:], None], strict=True)
    ]
    print_table(("VERSION", "AT", "BY", "CHANGED"), rows, "No versions.", page)


def find_trigger(api: Client, trigger_id: str) -> Any:
    """The trigger with this id or WORKFLOW/NAME."""
    try:
        return api.request("GET", f"/admin/triggers/{uuid.UUID(trigger_id)}")
    except ValueError:
        workflow, slash, name = trigger_id.partition("/")
    if not slash:
        raise click.UsageError(f"ID is a trigger's id or WORKFLOW/NAME, not {trigger_id!r}; see tidegate triggers list")
    found = all_pages(api, _of_workflow(workflow), "triggers")
    named = [t for t in found if t["name"] == name]
    if not named:
        known = ", ".join(t["name"] for t in found) or "none"
        raise NotFound(f"{workflow} has no trigger {name!r}; its triggers: {known}")
    return named[0]


def _of_workflow(workflow: str) -> str:
    return f"/v1/workflows/{quote(workflow, safe='')}/triggers"


def trigger_path(trigger: dict[str, Any]) -> str:
    return f"{_of_workflow(trigger['workflow'])}/{trigger['id']}"


def _print_result(trigger: dict[str, Any], as_json: bool, done: str = "") -> None:
    if as_json:
        print_json(trigger)
        return
    waiting = f"; {trigger['state']['waiting']} waiting" if trigger["state"]["waiting"] else ""
    words = f"{done} {_name(trigger)}" if done else _name(trigger)
    click.echo(f"{words} (v{trigger['version']}, {trigger['id']}): {_limits(trigger)}; {_state(trigger)}{waiting}")


def _name(trigger: dict[str, Any]) -> str:
    return f"{trigger['workflow']}/{trigger['name']}"


def _events(trigger: dict[str, Any]) -> str:
    return f"{trigger['event_type']} from {'any source' if trigger['event_source'] == '*' else trigger['event_source']}"


def _limits(trigger: dict[str, Any]) -> str:
    parts = []
    if trigger["throttle_count"] is not None:
        parts.append(written_rate(trigger["throttle_count"], trigger["throttle_window_ms"]))
    if trigger["max_concurrency"] is not None:
        executing = " executing" if trigger.get("holds") == "executing" else ""
        parts.append(
            f"{trigger['max_concurrency']}{executing} at once{' per key' if trigger['concurrency_key'] else ''}"
        )
    if trigger.get("skip_over_count") is not None:
        rate = written_rate(trigger["skip_over_count"], trigger["skip_over_window_ms"])
        parts.append(f"skips what is over {rate}{' per key' if trigger['key'] else ''}")
    if trigger.get("cancel_running"):
        parts.append("cancels the run before")
    if trigger.get("collect") is not None:
        parts.append(f"windows{' per key' if trigger['key'] else ''}")
    if trigger.get("backlog") is not None:
        parts.append(f"{msgspec.convert(trigger['backlog'], BacklogPolicy)}{' per key' if trigger['key'] else ''}")
    if trigger["priority"] != 1:
        parts.append(f"priority {trigger['priority']}")
    if trigger.get("budgets"):
        held = " while executing" if trigger.get("holds") == "executing" else ""
        parts.append(f"budgets {' '.join(trigger['budgets'])}{held}")
    return ", ".join(parts) or "no limit"


def _state(trigger: dict[str, Any]) -> str:
    state = trigger["state"]
    if trigger["status"] == "disabled":
        return "disabled"
    if state["paused"]:
        until = f"until {zoned_time(state['paused_until'])}" if state["paused_until"] else "until resumed"
        reason = f": {state['pause_reason']}" if state["pause_reason"] else ""
        return f"paused {until} by {state['paused_by']}{reason}"
    if state["breaker_state"] == "half_open":
        return f"breaker half open, run {state['probe_run_id']} is the probe: {state['breaker_reason']}"
    if state["breaker_state"] == "open":
        return f"breaker open, next probe after {zoned_time(state['breaker_until'])}: {state['breaker_reason']}"
    return "active"


def _lines(trigger: dict[str, Any]) -> list[tuple[str, str]]:
    window = written_duration(trigger["idempotency_window_ms"]) if trigger["idempotency_window_ms"] else "ever"
    key = trigger["idempotency_key"]
    return [
        ("on", _events(trigger)),
        *(("if", f"{p['path']} {p['operator']} {_operand(p)}".strip()) for p in trigger["predicates"]),
        ("where", trigger["where"] or ""),
        ("parameters", short_json(trigger["parameter_template"], 500) or "from the payload, by name"),
        ("limits", _limits(trigger)),
        ("concurrency key", trigger["concurrency_key"] or ""),
        ("collects", _collects(trigger)),
        ("idempotency", f"once per {key} within {window}" if key else ""),
        ("retry", short_json(trigger["retry"], 500)),
        ("breaker", short_json(trigger["breaker"], 500)),
        ("state", _state(trigger)),
        ("waiting", str(trigger["state"]["waiting"])),
        ("resuming", _resuming(trigger["state"].get("resuming", 0))),
        ("version", f"v{trigger['version']}, {zoned_time(trigger['updated_at'])} by {trigger['updated_by']}"),
        ("created", f"{zoned_time(trigger['created_at'])} by {trigger['created_by']}"),
    ]


def _resuming(count: int) -> str:
    return f"{count} run{'s' * (count > 1)} wait{'s' * (count == 1)} for a slot to go on" if count else ""


def _collects(trigger: Json) -> str:
    if trigger.get("collect") is None:
        return ""
    of_key = f" of {trigger['key']}" if trigger["key"] else ""
    return f"events{of_key} into one run: {msgspec.convert(trigger['collect'], CollectPolicy)}"


def _operand(predicate: dict[str, Any]) -> str:
    if predicate["operator"] == "exists" and "value" not in predicate:
        return ""
    return short_json(predicate["values"] if predicate.get("values") is not None else predicate.get("value"), 200)


def _print_dry_run(name: str, dry_run: dict[str, Any]) -> None:
    checks = [("type", dry_run["event_type"]), ("source", dry_run["event_source"])]
    checks += [(f"{p['path']} {p['operator']}", p) for p in dry_run["predicates"]]
    if dry_run["where"]:
        checks.append(("where", dry_run["where"]))
    rows = [("yes" if c["holds"] else "no", what, c["reason"] or "") for what, c in checks]
    print_table(("HOLDS", "CHECK", "WHY NOT"), rows, "")
    if not dry_run["matches"]:
        click.echo(f"=> {name} does not match: {dry_run['reason']}")
        return
    rendered = {
        "parameters": short_json(dry_run["parameters"], 500),
        "idempotency key": dry_run["idempotency_key"],
        "concurrency key": dry_run["concurrency_key"],
        "key": dry_run["key"],
        "collected in a window": dry_run["collects"],
    }
    for what, text in rendered.items():
        if text:
            click.echo(f"{what}: {text}")
    if dry_run["errors"]:
        click.echo(f"=> {name} matches, but the delivery would fail: {'; '.join(dry_run['errors'])}")
    else:
        click.echo(f"=> {name} matches")


def _difference(older: dict[str, Any] | None, newer: dict[str, Any]) -> str:
    if older is None:
        return "created" if newer["version"] == 1 else ""
    before, after = older["definition"], newer["definition"]
    if after.get("deleted_at"):
        return "deleted"
    names = sorted(name for name in after if after[name] != before.get(name) and name != "deleted_at")
    return "; ".join(f"{n}: {short_json(before.get(n)) or 'null'} → {short_json(after[n]) or 'null'}" for n in names)
