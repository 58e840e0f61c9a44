"""`tidegate approvals`: decisions that runs wait for."""

from __future__ import annotations

import click

from tidegate.cli.output import client, json_option, page_options, print_json, print_table, short_time


@click.group()
def approvals() -> None:
    """Show the approvals that runs wait for; approve, reject."""


@approvals.command("list")
@page_options
@json_option
def list_approvals(limit: int, cursor: str | None, as_json: bool) -> None:
    """List the approvals that can be decided, with their ids."""
    with client() as api:
        page = api.request("GET", "/admin/approvals", limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
        return
    rows = [
        (
            one["id"],
            one["name"],
            one["workflow"],
            one["to"] or "",
            short_time(one["until"]),
            one["run_id"],
            " ".join((one["note"] or "").split())[:80],
        )
        for one in page["approvals"]
    ]
    columns = ("ID", "NAME", "WORKFLOW", "TO", "UNTIL", "RUN", "NOTE")
    print_table(columns, rows, "No run waits for an approval.", page)


@approvals.command("approve")
@click.argument("approval_id")
@click.option("--comment", default=None, help="What the workflow is told beside the decision.")
@json_option
def approve(approval_id: str, comment: str | None, as_json: bool) -> None:
    """Approve; the run that waits resumes. The ID is in `tidegate approvals list` and in `tidegate explain RUN`."""
    _decide(approval_id, "approve", comment, as_json)


@approvals.command("reject")
@click.argument("approval_id")
@click.option("--comment", default=None, help="What the workflow is told beside the decision.")
@json_option
def reject(approval_id: str, comment: str | None, as_json: bool) -> None:
    """Reject; the run that waits resumes. The ID is in `tidegate approvals list` and in `tidegate explain RUN`."""
    _decide(approval_id, "reject", comment, as_json)


def _decide(approval_id: str, verb: str, comment: str | None, as_json: bool) -> None:
    body = {} if comment is None else {"comment": comment}
    with client() as api:
        done = api.request("POST", f"/admin/approvals/{approval_id}/{verb}", body)
    if as_json:
        print_json(done)
        return
    word = "approved" if done["decision"]["approved"] else "rejected"
    click.echo(f"{word} {done['name']} of run {done['run_id']}")
