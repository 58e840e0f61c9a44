"""`tidegate sources`: limits, weights and pauses."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from tidegate.cli.output import all_pages, client, json_option, print_json, print_table, short_time, zoned_time
from tidegate.cli.pauses import PAUSE_NAMES, pause_body, pause_options
from tidegate.cli.predictions import print_limit
from tidegate.cli.wording import parsed, written_as
from tidegate.model import units
from tidegate.model.units import written_duration, written_rate

_Source = dict[str, Any]
# The API's field names, and the arguments and options that set them.
_NAMES = {"limit": "RATE", "interval_ms": "RATE", "pause_ms": "--pause", "window_ms": "--window",
          "threshold": "--threshold", "ratio": "--ratio", "weight": "WEIGHT", "max_waiting": "--max-waiting",
          "when_full": "--when-full"}  # fmt: skip


@click.group()
def sources() -> None:
    """Show sources; limit, weight, pause and resume them."""


@sources.command("list")
@json_option
def list_sources(as_json: bool) -> None:
    """List sources that have a limit, a weight, a pause, a breaker or waiting events."""
    with client() as api:
        found = all_pages(api, "/admin/sources", "sources")
    if as_json:
        print_json({"sources": found})
        return
    rows = [
        (s["source"], _limit(s), str(s["weight"]), _waiting(s), _next(s), s["updated_by"], _state(s)) for s in found
    ]
    empty = "No source has a limit, a weight, a pause, a breaker or waiting events."
    print_table(("SOURCE", "LIMIT", "WEIGHT", "WAITING", "NEXT", "CHANGED BY", "STATE"), rows, empty)


@sources.command("limit")
@click.argument("source")
@click.argument("rate", required=False)
@click.option(
    "--pause",
    "pause",
    default=None,
    metavar="DURATION",
    help="How long to hold all events of the source once the limit is exceeded.",
)
@click.option("--remove", is_flag=True, help="Remove the limit.")
@click.option("--dry-run", is_flag=True, help="Only predict: what it would have held in the last week.")
@json_option
def limit_source(source: str, rate: str | None, pause: str | None, remove: bool, dry_run: bool, as_json: bool) -> None:
    """Limit SOURCE to RATE events (20/s, 500/h, 20/10s). '*' sets the default for all sources without a limit."""
    if remove == (rate is not None) or (remove and pause is not None):
        raise click.UsageError("give a RATE such as 100/s (optionally with --pause 5s), or --remove alone")
    body: dict[str, int] | None = None
    if rate is not None:
        count, interval_ms = parsed(units.rate, rate, "RATE")
        pause_ms = parsed(units.duration_ms, pause, "--pause") if pause is not None else 0
        body = {"limit": count, "interval_ms": interval_ms, "pause_ms": pause_ms}
    found = _change("DELETE" if remove else "PUT", _path(source, "limit"), body, dry_run=dry_run)
    if not dry_run:
        _print_changed(found, as_json, _limit(found))
    elif as_json:
        print_json(found)
    else:
        print_limit(found)


@sources.command("weight")
@click.argument("source")
@click.argument("weight", type=int)
@json_option
def weight_of_source(source: str, weight: int, as_json: bool) -> None:
    """Set the WEIGHT (1 to 100) of SOURCE: while several sources wait to be decided, each gets its share. 1 is the
    default."""
    changed = _change("PUT", _path(source, "weight"), {"weight": weight})
    _print_changed(changed, as_json, f"weight {changed['weight']}")


@sources.command("backlog")
@click.argument("source")
@click.option("--max-waiting", type=int, default=None, metavar="N", help="How many of its events may wait, at most.")
@click.option(
    "--when-full",
    type=click.Choice(["refuse", "drop_oldest", "dead_letter"]),
    default=None,
    help="What happens to one more: it is refused with 429 (default), the oldest leaves, or it becomes a dead letter.",
)
@click.option("--remove", is_flag=True, help="Remove the cap.")
@json_option
def backlog_of_source(source: str, max_waiting: int | None, when_full: str | None, remove: bool, as_json: bool) -> None:
    """Cap how many events of SOURCE may be undecided or held at a time."""
    if remove == (max_waiting is not None) or (remove and when_full is not None):
        raise click.UsageError("give --max-waiting N (optionally with --when-full), or --remove alone")
    body = {"max_waiting": max_waiting} | ({"when_full": when_full} if when_full else {})
    changed = _change("DELETE" if remove else "PUT", _path(source, "backlog"), None if remove else body)
    _print_changed(changed, as_json, _backlog(changed) or "no cap on what waits")


@sources.command("breaker")
@click.argument("source")
@click.option(
    "--threshold", type=int, default=None, help="Minimum number of failures that open the breaker (default 5)."
)
@click.option("--ratio", type=float, default=None, help="Minimum share of failures among the outcomes, e.g. 0.5.")
@click.option("--window", default=None, metavar="DURATION", help="Time over which failures are counted, e.g. 5m.")
@click.option("--pause", "pause", default=None, metavar="DURATION", help="How long the breaker stays open, e.g. 5m.")
@click.option("--runs", is_flag=True, help="Count failed runs too.")
@click.option("--non-retryable", is_flag=True, help="With --runs: count runs that ended with NonRetryable too.")
@click.option("--remove", is_flag=True, help="Remove the policy: the settings TIDEGATE_SOURCE_ERROR_… apply again.")
@json_option
def breaker_of_source(source: str, remove: bool, as_json: bool, **given: Any) -> None:
    """Set the breaker policy of SOURCE. Options that are not given get their defaults."""
    body = {name: value for name, value in given.items() if value is not None and value is not False}
    if remove and body:
        raise click.UsageError("give options such as --threshold 10, or --remove alone")
    for name in ("window", "pause"):
        if name in body:
            body[f"{name}_ms"] = parsed(units.duration_ms, body.pop(name), f"--{name}")
    changed = _change("DELETE" if remove else "PUT", _path(source, "breaker"), None if remove else body)
    _print_changed(changed, as_json, _policy(changed))


@sources.command("pause")
@click.argument("source")
@pause_options
@json_option
def pause_source(source: str, duration: str | None, until: str | None, reason: str | None, as_json: bool) -> None:
    """Pause SOURCE: hold all its events for a duration, until a time, or until it is resumed."""
    _act("POST", _path(source, "pause"), pause_body(duration, until, reason), as_json)


@sources.command("resume")
@click.argument("source")
@json_option
def resume_source(source: str, as_json: bool) -> None:
    """Resume SOURCE: end its pause and close its breaker. Waiting events are released at the allowed rate."""
    _act("POST", _path(source, "resume"), None, as_json)


def _act(method: str, path: str, body: Any, as_json: bool) -> None:
    changed = _change(method, path, body)
    _print_changed(changed, as_json, _limit(changed))


def _change(method: str, path: str, body: Any, *, dry_run: bool = False) -> _Source:
    with client() as api, written_as(_NAMES | PAUSE_NAMES):
        changed: _Source = api.request(method, path, body, dry_run=dry_run or None)
    return changed


def _print_changed(changed: _Source, as_json: bool, what: str) -> None:
    if as_json:
        print_json(changed)
        return
    waiting = f"; {changed['waiting']} waiting" if changed["waiting"] else ""
    click.echo(f"{changed['source']}: {what}; {_state(changed)}{waiting}")


def _path(source: str, verb: str) -> str:
    return f"/admin/sources/{quote(source, safe='')}/{verb}"


def _limit(source: _Source) -> str:
    if source["limit"] is None:
        return "no limit"
    text = written_rate(source["limit"], source["interval_ms"])
    return f"{text}, pause {written_duration(source['pause_ms'])}" if source["pause_ms"] else text


def _waiting(source: _Source) -> str:
    """How many of its events wait, and how many may."""
    if source["max_waiting"] is None:
        return str(source["waiting"])
    return f"{source['waiting'] + source['undecided']} of {source['max_waiting']}"


def _backlog(source: _Source) -> str:
    """The cap on what waits, in words; empty without one."""
    if source["max_waiting"] is None:
        return ""
    then = {"refuse": "then publishing is refused", "drop_oldest": "then the oldest leaves",
            "dead_letter": "then new ones become dead letters"}[source["when_full"]]  # fmt: skip
    return f"at most {source['max_waiting']} events wait, {then}"


def _policy(source: _Source) -> str:
    """The breaker policy of a source, in words."""
    policy = source["breaker"]
    if policy is None:
        return "no breaker policy of its own, the settings TIDEGATE_SOURCE_ERROR_… apply"
    failures = "1 failure" if policy["threshold"] == 1 else f"{policy['threshold']} failures"
    runs = "failed runs count" if policy["runs"] else "failed runs do not count"
    non_retryable = ", also with NonRetryable" if policy["runs"] and policy["non_retryable"] else ""
    return (
        f"breaker opens for {written_duration(policy['pause_ms'])} after {failures} within "
        f"{written_duration(policy['window_ms'])}, if they are at least {policy['ratio'] * 100:g}% of the outcomes; "
        f"{runs}{non_retryable}"
    )


def _next(source: _Source) -> str:
    """The time of the next attempt; empty while a pause without an end holds the events: it is only the next check."""
    is_open_ended = source["paused"] and not source["paused_until"]
    return "" if is_open_ended else short_time(source["next_attempt_at"])


def _state(source: _Source) -> str:
    if source["paused"]:
        until = f"until {zoned_time(source['paused_until'])}" if source["paused_until"] else "until resumed"
        reason = f": {source['pause_reason']}" if source["pause_reason"] else ""
        return f"paused {until} by {source['paused_by']}{reason}"
    if source["breaker_state"] != "closed":
        return f"breaker open, next probe after {zoned_time(source['breaker_until'])}: {source['breaker_reason']}"
    return "ok"
