"""`tidegate budgets`: rates and slots that triggers share."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import click

from tidegate.cli.output import (
    Json,
    all_pages,
    asks,
    client,
    json_option,
    print_json,
    print_table,
    printable,
    short_time,
    zoned_time,
)
from tidegate.cli.pauses import PAUSE_NAMES, pause_body, pause_options
from tidegate.cli.wording import parsed, written_as
from tidegate.client import Client
from tidegate.errors import NotFound
from tidegate.model import units
from tidegate.model.units import written_rate

# The API's field names, and the arguments and options that set them.
_NAMES = {"limit": "RATE", "interval_ms": "RATE", "concurrency": "--concurrency", "key": "--key", "cost": "--cost",
          "name": "BUDGET"}  # fmt: skip
# What a request replaces of a budget.
_FIELDS = ("limit", "interval_ms", "concurrency", "key", "cost")


@click.group()
def budgets() -> None:
    """Show budgets, which triggers and steps share; set, pause and resume them."""


@budgets.command("list")
@json_option
def list_budgets(as_json: bool) -> None:
    """List budgets with what waits for them."""
    with client() as api:
        found = all_pages(api, "/admin/budgets", "budgets")
    if as_json:
        print_json({"budgets": found})
        return
    rows = [
        (b["name"], _limits(b), _waiting(b), str(b["in_use"]), ", ".join(b["used_by"]) or "nobody", _state(b))
        for b in found
    ]
    empty = "There is no budget. Set one: tidegate budgets set openai 300/min"
    print_table(("BUDGET", "LIMITS", "WAITING", "IN USE", "USED BY", "STATE"), rows, empty)


@budgets.command("show")
@click.argument("budget")
@json_option
def show_budget(budget: str, as_json: bool) -> None:
    """Show BUDGET."""
    found = _read(budget, None)
    if as_json:
        print_json(found)
    else:
        click.echo(_line(found["budget"]))


@budgets.command("set")
@click.argument("budget")
@click.argument("rate", required=False)
@click.option(
    "--concurrency",
    type=int,
    default=None,
    help="How many unfinished runs, and steps that are called, may hold it, of each key.",
)
@click.option("--key", default=None, metavar="TEMPLATE", help="A rate and slots for each: {{ event.payload.tenant }}.")
@click.option(
    "--cost", default=None, metavar="CEL", help="What a launch or step spends: event.payload.tokens; 1 without it."
)
@click.option("--no-rate", is_flag=True, help="Remove its rate.")
@click.option("--no-concurrency", is_flag=True, help="Remove its concurrency.")
@click.option("--no-key", is_flag=True, help="Remove its key: one rate for all.")
@click.option("--no-cost", is_flag=True, help="Remove its cost: each spends 1.")
@click.option("--dry-run", is_flag=True, help="Only check: can its key and cost be evaluated for what waits?")
@json_option
def set_budget(
    budget: str,
    rate: str | None,
    concurrency: int | None,
    key: str | None,
    cost: str | None,
    dry_run: bool,
    as_json: bool,
    **flags: bool,
) -> None:
    """Create BUDGET, or change what is given of it: RATE (300/min, 20/s), --concurrency, --key, --cost. The rest stays
    as it is. What waits for it is decided by it as it is then."""
    given: Json = {"rate": rate, "concurrency": concurrency, "key": key, "cost": cost}
    given = {name: value for name, value in given.items() if value is not None}
    removed = [name.removeprefix("no_") for name, is_set in flags.items() if is_set]
    for name in removed:
        if name in given:
            raise click.UsageError(f"give {_NAMES.get(name, 'RATE')} or --no-{name}, not both")
    if not given and not removed:
        raise click.UsageError("give a RATE such as 300/min, --concurrency, or both; or what else is to be changed")
    body = given | dict.fromkeys(removed)
    if "rate" in body:
        text = body.pop("rate")
        body["limit"], body["interval_ms"] = (None, None) if text is None else parsed(units.rate, text, "RATE")
    with client() as api, written_as(_NAMES):
        before = _before(api, budget)
        whole = {name: before[name] for name in _FIELDS if before} | body
        found: Json = api.request("PUT", _path(budget), whole, dry_run=dry_run or None)
    if as_json:
        print_json(found)
    else:
        _print_set(budget, before, before | whole, found, is_dry_run=dry_run)


def _before(api: Client, budget: str) -> Json:
    """The budget as it is; empty if there is none."""
    try:
        found: Json = api.request("GET", _path(budget))["budget"]
    except NotFound:
        return {}
    return found


def _print_set(budget: str, before: Json, after: Json, found: Json, *, is_dry_run: bool) -> None:
    """What a budget is now, or would be, and what became different."""
    checked = found if is_dry_run else found["check"]
    if not is_dry_run:
        click.echo(printable(_line(found) if before else f"created {_line(found)}"))
    elif not before:
        click.echo(printable(f"there is no budget {budget}: it would be created"))
    if (is_dry_run and before) or checked["unread"]:
        click.echo(printable(_checked(checked)))
        for one in checked["examples"]:
            click.echo(printable(f"  event {one['event_id']}: {one['error']}"))
    if before:
        click.echo(printable(_changes(before, after, "would change" if is_dry_run else "changed")))


def _changes(before: Json, after: Json, verb: str) -> str:
    old, new = _parts(before), _parts(after)
    told = [f"{name} from {old[name]} to {new[name]}" for name in old if old[name] != new[name]]
    return f"{verb}: {'; '.join(told) or 'nothing'}"


def _parts(budget: Json) -> dict[str, str]:
    rate = "none" if budget["limit"] is None else written_rate(budget["limit"], budget["interval_ms"])
    others = {name: budget[name] for name in ("concurrency", "key", "cost")}
    return {"rate": rate} | {name: "none" if value is None else str(value) for name, value in others.items()}


@budgets.command("delete")
@click.argument("budget")
@asks("Delete budget {budget}?")
@json_option
def delete_budget(budget: str, as_json: bool) -> None:
    """Delete BUDGET, which no trigger may use any more."""
    with client() as api, written_as(_NAMES):
        gone: Json = api.request("DELETE", _path(budget))
    if as_json:
        print_json(gone)
    else:
        click.echo(f"deleted {gone['name']}")


@budgets.command("pause")
@click.argument("budget")
@pause_options
@json_option
def pause_budget(budget: str, duration: str | None, until: str | None, reason: str | None, as_json: bool) -> None:
    """Pause BUDGET: hold everything that needs it for a duration, until a time, or until it is resumed."""
    _change("POST", _path(budget, "pause"), pause_body(duration, until, reason), as_json)


@budgets.command("resume")
@click.argument("budget")
@json_option
def resume_budget(budget: str, as_json: bool) -> None:
    """Resume BUDGET. What waits for it is launched as far as it allows, in order."""
    _change("POST", _path(budget, "resume"), None, as_json)


@budgets.command("explain")
@click.argument("budget")
@click.option("--key", default=None, help="Only of this key.")
@json_option
def explain_budget(budget: str, key: str | None, as_json: bool) -> None:
    """Say what waits for BUDGET, key by key, and which runs hold its slots."""
    found = _read(budget, key)
    if as_json:
        print_json(found)
        return
    click.echo(_line(found["budget"]))
    # The stored time is only the next check then.
    has_no_end = found["budget"]["paused"] and found["budget"]["paused_until"] is None
    lines = [
        (line["key"] or "(none)", _waiting(line), str(line["cost"]), str(line["in_use"]), str(line["resuming"]),
         short_time(line["oldest_at"]), "when resumed" if has_no_end else short_time(line["next_attempt_at"]))
        for line in found["lines"]
    ]  # fmt: skip
    print_table(("KEY", "WAITING", "COST", "IN USE", "RESUMING", "OLDEST", "NEXT"), lines, "Nothing waits for it.")
    closed = [one for one in found["budget"]["closed"] if key is None or one["key"] == key]
    if closed:
        print_table(("KEY", "STATE"), [(one["key"] or "(none)", _closed(one)) for one in closed], "")
    if found["holders"]:
        held = [
            (h["key"] or "(none)", h["id"], h["workflow"], h["step"] or "", h["status"], short_time(h["created_at"]),
             _resumes(h), short_time(h["lease_until"]))
            for h in found["holders"]
        ]  # fmt: skip
        print_table(("KEY", "RUN", "WORKFLOW", "STEP", "STATUS", "SINCE", "RESUMES", "LEASE"), held, "")


def _read(budget: str, key: str | None) -> Json:
    with client() as api:
        found: Json = api.request("GET", _path(budget), key=key)
    return found


def _change(method: str, path: str, body: Json | None, as_json: bool) -> None:
    with client() as api, written_as(_NAMES | PAUSE_NAMES):
        changed: Json = api.request(method, path, body)
    if as_json:
        print_json(changed)
    else:
        click.echo(_line(changed))


def _checked(check: Json) -> str:
    first = "first " if check["is_cut"] else ""
    if not check["unread"]:
        return f"it can be evaluated for all of the {first}{check['waiting']} deliveries that wait at its triggers"
    unread = f"{check['unread']} of the {first}{check['waiting']} deliveries that wait at its triggers"
    return f"it cannot be evaluated for {unread}: they wait until it is corrected"


def _path(budget: str, verb: str = "") -> str:
    return f"/admin/budgets/{quote(budget, safe='')}{f'/{verb}' if verb else ''}"


def _line(budget: Json) -> str:
    waiting = f"; {_waiting(budget)} waiting" if budget["waiting"] else ""
    waiting += f"; {budget['resuming']} resuming" if budget["resuming"] else ""
    used_by = ", ".join(budget["used_by"]) or "nobody"
    return f"{budget['name']} (v{budget['version']}): {_limits(budget)}; used by {used_by}; {_state(budget)}{waiting}"


def _waiting(counted: Json) -> str:
    """How many wait, and how many of them are steps."""
    steps = counted["waiting_steps"]
    return str(counted["waiting"]) + (f" ({steps} steps)" if steps > 1 else " (1 step)" if steps else "")


def _limits(budget: Json) -> str:
    parts = []
    if budget["limit"] is not None:
        parts.append(written_rate(budget["limit"], budget["interval_ms"]))
    if budget["concurrency"] is not None:
        parts.append(f"{budget['concurrency']} at once")
    text = ", ".join(parts)
    text += f" per {budget['key']}" if budget["key"] else ""
    return text + (f", cost {budget['cost']}" if budget["cost"] else "")


def _state(budget: Json) -> str:
    if not budget["paused"]:
        return "; ".join(_troubles(budget)) or "ok"
    until = f"until {zoned_time(budget['paused_until'])}" if budget["paused_until"] else "until resumed"
    reason = f": {budget['pause_reason']}" if budget["pause_reason"] else ""
    return f"paused {until} by {budget['paused_by']}{reason}"


def _troubles(budget: Json) -> Iterator[str]:
    """What keeps it from being spent, but for a pause; of a budget with keys, of the one that is closed longest."""
    if budget["unread"]:
        yield f"its key or cost cannot be evaluated for {budget['unread']} of those that wait"
    if budget["closed"]:
        first, more = budget["closed"][0], budget["closed_keys"] - 1
        of_key = f"key {first['key']}: " if first["key"] else ""
        yield of_key + _closed(first) + (f" (and {more} more keys)" if more else "")


def _closed(key: Json) -> str:
    reason = f": {key['reason']}" if key["reason"] else ""
    if key["state"] == "closed":
        return f"closed until {zoned_time(key['until'])}{reason}"
    first = f"run {key['run_id']} is" if key["run_id"] else "the next run is"
    return f"half open: {first} tried first{reason}"


def _resumes(holder: Json) -> str:
    return short_time(holder["next_attempt_at"]) if holder["status"] == "pending" else ""
