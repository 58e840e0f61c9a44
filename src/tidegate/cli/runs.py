"""`tidegate runs`."""

from __future__ import annotations

import click

from tidegate.cli.output import client, json_option, print_json, print_table, printable, short_json, short_time
from tidegate.errors import first_line
from tidegate.model.run import RUN_STATUSES


@click.group()
def runs() -> None:
    """Show runs, and cancel them."""


@runs.command("list")
@click.option("--workflow", default=None, help="Only runs of this workflow.")
@click.option("--status", default=None, type=click.Choice(RUN_STATUSES), help="Only runs in this status.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))
@json_option
def list_runs(workflow: str | None, status: str | None, limit: int, as_json: bool) -> None:
    """List runs, newest first."""
    with client() as api:
        page = api.request("GET", "/v1/runs", workflow=workflow, status=status, limit=limit)
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
    print_table(("CREATED", "WORKFLOW", "STATUS", "ID", "PARAMETERS", "OUTPUT"), rows, "No runs yet.", page)


@runs.command("cancel")
@click.argument("run_id")
@json_option
def cancel_run(run_id: str, as_json: bool) -> None:
    """Cancel a run: a waiting one at once, a running one at its next step."""
    with client() as api:
        done = api.request("POST", f"/v1/runs/{run_id}/cancel")
    if as_json:
        print_json(done)
    elif done["status"] == "cancelled":
        click.echo(f"run {run_id} is cancelled")
    else:
        click.echo(f"run {run_id} is running; it stops at its next step")


@runs.command("show")
@click.argument("run_id")
@json_option
def show_run(run_id: str, as_json: bool) -> None:
    """Show one run with its steps."""
    with client() as api:
        found = api.request("GET", f"/v1/runs/{run_id}")
    if as_json:
        print_json(found)
        return
    run = found["run"]
    click.echo(f"run {run['id']} of {run['workflow']}: {run['status']}")
    known = ("event_id", "correlation_id", "attempts", "created_at", "started_at", "finished_at", "next_attempt_at")
    for field in (*known, "cancelled_by", "warning"):
        if run.get(field) is not None:
            click.echo(f"  {field:<16}{short_time(run[field]) if field.endswith('_at') else run[field]}")
    click.echo(f"  {'parameters':<16}{short_json(run['parameters'], 100)}")
    if run["error"]:
        click.echo(f"  {'error':<16}{printable(first_line(run['error']))}")
    elif run["output"] is not None:
        click.echo(f"  {'output':<16}{short_json(run['output'], 100)}")
    rows = [
        (
            s["name"], s["status"], str(s["retry_attempts"]), short_time(s["next_attempt_at"]),
            first_line(s["error"])[:80] if s["error"] else short_json(s["result"]),
        )
        for s in found["steps"]
    ]  # fmt: skip
    print_table(("STEP", "STATUS", "FAILED", "NEXT", "RESULT"), rows, "No steps.")
