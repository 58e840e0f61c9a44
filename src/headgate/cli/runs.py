"""`headgate runs`."""

from __future__ import annotations

import click

from headgate.cli.output import client, json_option, print_json, print_table, short_json, short_time
from headgate.model.run import RUN_STATUSES


@click.group()
def runs() -> None:
    """Look at runs, and cancel them."""


@runs.command("list")
@click.option("--workflow", default=None, help="Only of this workflow.")
@click.option("--status", default=None, type=click.Choice(RUN_STATUSES), help="Only in this status.")
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
            short_json(r["output"]) if not r["error"] else r["error"].splitlines()[-1][:80],
        )
        for r in page["runs"]
    ]
    print_table(("CREATED", "WORKFLOW", "STATUS", "ID", "PARAMETERS", "OUTPUT"), rows, "No runs yet.")


@runs.command("cancel")
@click.argument("run_id")
@json_option
def cancel_run(run_id: str, as_json: bool) -> None:
    """Cancel a run: one that waits at once, one that is running at its next step."""
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
def show_run(run_id: str) -> None:
    """Show one run with its steps."""
    with client() as api:
        print_json(api.request("GET", f"/v1/runs/{run_id}"))
