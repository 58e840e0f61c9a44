"""`tidegate runs`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import click
import msgspec

from tidegate.cli.output import (
    Json,
    client,
    confirm,
    json_option,
    local_option,
    local_text,
    none_found,
    page_options,
    print_json,
    print_table,
    printable,
    require_answer,
    short_json,
    short_time,
    zoned_time,
)
from tidegate.cli.patience import patiently
from tidegate.cli.wording import written_as
from tidegate.client import Client
from tidegate.errors import Unavailable, first_line
from tidegate.model.approval import decided_text
from tidegate.model.run import ENDING_KINDS, FINAL_RUN_STATUSES, INTERNAL_STEPS, RUN_STATUSES, risk_of_resuming

# The API's field names, and the options that set them.
_NAMES = {
    "workflow": "--workflow", "status": "--status", "correlation_id": "--correlation-id", "from": "--from",
    "to": "--to", "error": "--error", "parameters": "--parameter", "event_id": "--event", "all": "--all",
    "cursor": "--cursor",
}  # fmt: skip
_DONE = {"cancel": "cancelled", "retry": "resumed", "rerun": "repeated"}


@click.group()
def runs() -> None:
    """Find runs, and cancel, retry, repeat or resume them."""


def _filters(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--parameter", "parameters", multiple=True, metavar="PATH=VALUE",
            help="Only runs with this parameter, e.g. order_id=7 or order.customer=ann; may be repeated.",
        ),
        click.option("--tag", default=None, metavar="NAME:VALUE", help="Only runs with this tag."),
        click.option("--error", default=None, help="Only runs with this text in their error or warning."),
        click.option("--to", "until", default=None, metavar="TIME", help="Only runs created before this time."),
        click.option("--from", "since", default=None, metavar="TIME", help="Only runs created at this time or later."),
        click.option("--correlation-id", default=None, help="Only runs with this correlation id."),
        click.option("--event", default=None, metavar="ID", help="Only runs that this event launched."),
        click.option("--status", default=None, type=click.Choice(RUN_STATUSES), help="Only runs in this status."),
        click.option("--workflow", default=None, help="Only runs of this workflow."),
    ):  # fmt: skip
        command = option(command)
    return command


def _asked(
    workflow: str | None,
    status: str | None,
    event: str | None,
    correlation_id: str | None,
    since: str | None,
    until: str | None,
    error: str | None,
    tag: str | None,
    parameters: tuple[str, ...],
) -> Json:
    found = {
        "workflow": workflow, "status": status, "event_id": event, "correlation_id": correlation_id, "from": since,
        "to": until, "error": error, "tag": tag, "parameters": _object(parameters) if parameters else None,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _object(parameters: tuple[str, ...]) -> Json:
    """The object that the parameters of a run must contain."""
    found: Json = {}
    for text in parameters:
        path, has_value, value = text.partition("=")
        if not has_value or not path or "" in path.split("."):
            raise click.UsageError(f"--parameter: {text!r} is not PATH=VALUE, such as order.id=7")
        place = found
        *parents, last = path.split(".")
        for name in parents:
            inner = place.setdefault(name, {})
            if not isinstance(inner, dict):
                raise click.UsageError(f"--parameter: {path} is below another value")
            place = inner
        try:
            place[last] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            place[last] = value
    return found


@runs.command("list")
@_filters
@page_options
@json_option
def list_runs(limit: int, cursor: str | None, as_json: bool, **filters: Any) -> None:
    """List runs, newest first."""
    asked = _asked(**filters)
    if "parameters" in asked:
        asked["parameters"] = msgspec.json.encode(asked["parameters"]).decode()
    with client() as api, written_as(_NAMES):
        page = api.request("GET", "/v1/runs", limit=limit, cursor=cursor, **asked)
    if as_json:
        print_json(page)
        return
    rows = [
        (
            short_time(r["created_at"]),
            r["workflow"],
            r["status"],
            r["id"],
            short_json(r["parameters"], 40),
            short_json(r["output"]) if not r["error"] else first_line(r["error"])[:80],
        )
        for r in page["runs"]
    ]
    none = none_found("runs", asked or None, cursor)
    print_table(("CREATED", "WORKFLOW", "STATUS", "ID", "PARAMETERS", "OUTPUT"), rows, none, page)


def _verb(verb: str, text: str) -> None:
    """The command of a verb: about one run, or about all that match the options."""

    @_filters
    @click.argument("run_id", required=False)
    @click.option("--all", "all_runs", is_flag=True, help="All runs that it applies to.")
    @click.option("--dry-run", is_flag=True, help="Only count them.")
    @click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
    @click.option("--cursor", default=None, help="Continue where a call ended that could not be completed, as it said.")
    @json_option
    def change(
        run_id: str | None, all_runs: bool, dry_run: bool, yes: bool, cursor: str | None, as_json: bool, **filters: Any
    ) -> None:
        asked = _asked(**filters)
        if [run_id is not None, bool(asked), all_runs].count(True) != 1:
            raise click.UsageError("say which runs: give an ID, options such as --workflow and --status, or --all")
        if run_id is not None and dry_run:
            raise click.UsageError("--dry-run works with options such as --workflow, not with an ID")
        if run_id is None:
            require_answer(yes=yes, dry_run=dry_run)
        with client() as api, written_as(_NAMES):
            if run_id is not None:
                done = _change_one(api, verb, run_id)
            elif dry_run:
                done = api.request("POST", f"/v1/runs/{verb}", asked | {"dry_run": True})
            else:
                done = _change_all(api, verb, asked | ({"all": True} if all_runs else {}), cursor, yes=yes)
        if as_json:
            print_json(done)
        elif run_id is not None:
            click.echo(_one(verb, run_id, done))
        else:
            _many(verb, done)

    change.__doc__ = text
    runs.command(verb)(change)


_verb("cancel", "Cancel a run, or all that match: a waiting one at once, a running one at its next step.")
_verb("retry", "Resume a failed or cancelled run, or all that match, after the steps that it has completed.")
_verb("rerun", "Execute a finished run, or all that match, again from the start, as a new run.")


def _change_one(api: Client, verb: str, run_id: str) -> Json:
    """Repeated only if that cannot be done twice: a rerun has an id by which the API knows it again."""
    path = f"/v1/runs/{run_id}/{verb}"
    if verb == "rerun":
        return patiently(partial(api.request, "POST", path, {"id": str(uuid4())}))
    done: Json = api.request("POST", path)
    return done


def _change_all(api: Client, verb: str, asked: Json, cursor: str | None, *, yes: bool) -> Json:
    """Count, ask, then change them call by call. A call without an answer is repeated with its cursor, which changes no
    run twice; one that fails in the end says how to continue."""
    path = f"/v1/runs/{verb}"
    if cursor is None:
        preview: Json = api.request("POST", path, asked | {"dry_run": True})
        cursor = preview["next_cursor"]
        if not yes:
            confirm(f"{verb.capitalize()} {counted_runs(preview['remaining'])}?")
    total: Json = {"verb": verb, "status": "done", "done": 0, "refused": 0, "reasons": {}, "remaining": 0}
    while cursor is not None:
        try:
            done = patiently(partial(api.request, "POST", path, asked | {"cursor": cursor}))
        except Unavailable:
            until_now = f"{counted_runs(total['done'])} {_DONE[verb]} until now"
            click.echo(f"{until_now}. To continue, give the same command with --cursor {cursor}", err=True)
            raise
        total["done"] += done["done"]
        total["refused"] += done["refused"]
        for reason, count in done["reasons"].items():
            total["reasons"][reason] = total["reasons"].get(reason, 0) + count
        cursor = done["next_cursor"]
    return total


def counted_runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _one(verb: str, run_id: str, done: Json) -> str:
    if verb == "rerun":
        return f"run {run_id} is repeated as {done['id']}"
    if not done.get("is_launched", True):
        return f"the start of run {run_id} is cancelled: no run is launched"
    return {
        "cancelled": f"run {run_id} is cancelled",
        "cancelling": f"run {run_id} is running; it stops at its next step, or ends by itself if it has begun the last",
        "resumed": f"run {run_id} is resumed",
        "scheduled": f"run {run_id} waits for a free slot of its trigger",
    }[done["status"]]


def _many(verb: str, done: Json) -> None:
    if done["status"] == "preview":
        click.echo(f"{done['remaining']} would be {_DONE[verb]}")
        return
    click.echo(f"{done['done']} {_DONE[verb]}")
    for reason, count in done["reasons"].items():
        click.echo(printable(f"{count} not: {reason}"), err=True)


@runs.command("watch")
@click.argument("run_id")
@click.option(
    "--interval", default=1.0, show_default=True, type=click.FloatRange(0.1, 60), help="Seconds between looks."
)
@local_option
def watch_run(run_id: str, interval: float) -> None:
    """Print what a run does until it has ended. The exit status is 1 if it did not succeed."""
    with client() as api:
        status = follow(api, run_id, interval)
    if status != "succeeded":
        sys.exit(1)


def follow(api: Client, run_id: str, interval: float) -> str:
    """Print each change of a run's state, until it has ended; its status."""
    last = ""
    while True:
        answer = api.request("GET", f"/v1/runs/{run_id}")
        found = answer.get("run") or answer  # a start that has not launched its run has none
        story = api.request("GET", f"/v1/explain/{run_id if found is not answer else found['event_id']}")
        if story["summary"] != last:
            last = story["summary"]
            click.echo(printable(f"{short_time(_now(story, found))}  {local_text(last)}"))
        if found["status"] in (*FINAL_RUN_STATUSES, "not_launched"):
            if found["output"] is not None:
                click.echo(printable(short_json(found["output"], 2000)))
            return str(found["status"])
        time.sleep(interval)


def _now(story: Json, run: Json) -> str | None:
    """When the last thing that is known happened."""
    times = [line["at"] for line in story["decisions"] if line.get("at")]
    return run.get("finished_at") or (max(times) if times else None)


@runs.command("resume")
@click.argument("run_id")
@click.option(
    "--on-current-code", is_flag=True, required=True,
    help="Although its recorded steps do not fit that code: they are used where it asks for them, others are not.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
@json_option
def resume_run(run_id: str, on_current_code: bool, yes: bool, as_json: bool) -> None:
    """Resume a run that waits for a version of its code, on the code that workers have now. It says first which steps
    that executes or leaves unused, and asks."""
    with client() as api:
        run = {} if yes else api.request("GET", f"/v1/runs/{run_id}").get("run", {})
        if run.get("version_held_at") is not None:
            risk = printable(f"this {risk_of_resuming(run['warning'])}")
            if not sys.stdin.isatty():
                raise click.UsageError(f"{risk}; standard input is not a terminal: add --yes to go ahead")
            click.echo(risk, err=True)
            confirm(f"Resume run {run_id} on the code that workers have now?")
        done = api.request("POST", f"/v1/runs/{run_id}/resume", {"on_current_code": on_current_code})
    if as_json:
        print_json(done)
    else:
        click.echo(f"run {run_id} is due: it goes on with the code of the worker that claims it")


@runs.command("show")
@click.argument("run_id")
@json_option
def show_run(run_id: str, as_json: bool) -> None:
    """Show one run with its steps."""
    with client() as api:
        found = api.request("GET", f"/v1/runs/{run_id}")
        story = api.request("GET", f"/v1/explain/{found['event_id']}") if "run" not in found and not as_json else None
    if as_json:
        print_json(found)
        return
    if story is not None:
        _print_start(found, story)
        return
    run = found["run"]
    click.echo(f"run {run['id']} of {run['workflow']}: {run['status']}")
    known = ("event_id", "correlation_id", "rerun_of", "attempts", "created_at", "started_at", "finished_at")
    for field in (*known, "next_attempt_at", "cancelled_by", "version", "warning"):
        if field == "next_attempt_at" and not _resumes_then(run, found["steps"]):
            continue
        if run.get(field) is not None:  # the next attempt is when the function is called, first or again: not a retry
            name = field if field != "next_attempt_at" else "resumes_at" if run["started_at"] else "starts_at"
            click.echo(f"  {name:<16}{short_time(run[field]) if field.endswith('_at') else run[field]}")
    if run["tags"]:
        click.echo(f"  {'tags':<16}{printable(', '.join(f'{n}:{v}' for n, v in run['tags'].items()))}")
    click.echo(f"  {'parameters':<16}{short_json(run['parameters'], 100)}")
    if run["error"]:
        click.echo(f"  {'error':<16}{printable(first_line(run['error']))}")
    elif run["output"] is not None:
        click.echo(f"  {'output':<16}{short_json(run['output'], 100)}")
    if found.get("parent_run_id"):
        click.echo(f"  {'child of':<16}run {found['parent_run_id']}")
    rows = [
        (
            s["name"], "timed out" if s["is_timed_out"] else s["status"], str(s["retry_attempts"]),
            ("until " if s["next_attempt_at"] and s["kind"] in ENDING_KINDS else "") + short_time(s["next_attempt_at"]),
            first_line(s["error"])[:80] if s["error"] else _result(s),
        )
        for s in found["steps"]
        if not s["name"].startswith(INTERNAL_STEPS)
    ]  # fmt: skip
    print_table(("STEP", "STATUS", "FAILED", "NEXT", "RESULT"), rows, "No steps.")
    if found.get("children"):
        shown = [
            (c["step"], str(c["position"]), c["workflow"], _child_status(c), c["run_id"] or "", (c["error"] or "")[:80])
            for c in found["children"]
        ]
        print_table(("STEP", "ITEM", "WORKFLOW", "STATUS", "RUN", "ERROR"), shown, "")
        if found["children_total"] > len(shown):
            click.echo(f"the first {len(shown)} of {found['children_total']} children")


def _resumes_then(run: Json, steps: list[Json]) -> bool:
    """Whether something of the run has the time at which it is looked at again: children that it waits for, and a
    version of its code, have none."""
    if run["version_held_at"] is not None:
        return False
    waiting = [step for step in steps if step["status"] == "pending"]
    return not waiting or any(step["next_attempt_at"] or step["kind"] not in ("child", "map") for step in waiting)


def _result(step: Json) -> str:
    """The result of a step; of an approval, who decided what."""
    at = zoned_time(step["updated_at"])
    said = decided_text(step["retry_metadata"], step["result"], is_timed_out=step["is_timed_out"], at=at)
    return printable(said) if said else short_json(step["result"])


def _print_start(found: Json, story: Json) -> None:
    """A start that has not launched its run, and why."""
    state = "was not launched" if found["status"] == "not_launched" else "is not launched yet"
    click.echo(printable(f"run {found['run_id']} {state}: {local_text(story['summary'])}"))
    click.echo(f"  {'event_id':<16}{found['event_id']}")
    if story["until"]:
        click.echo(f"  {'until':<16}{short_time(story['until'])}")


def _child_status(child: Json) -> str:
    is_held = child["status"] == "started" and not child["is_launched"]
    return "not launched" if is_held else str(child["status"])
