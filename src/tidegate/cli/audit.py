"""`tidegate audit`: who changed what."""

from __future__ import annotations

import click

from tidegate.cli.output import client, json_option, none_found, print_json, print_table, short_json, short_time


@click.group()
def audit() -> None:
    """Show what operators and tokens have changed."""


@audit.command("list")
@click.option("--actor", default=None, help="Only changes by this actor: a token's name.")
@click.option("--action", default=None, help="Only this action, e.g. source.pause.")
@click.option(
    "--subject",
    default=None,
    help="Only changes of this subject: a source, a workflow, or the id of any other resource.",
)
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))
@click.option("--cursor", default=None, help="next_cursor of the previous page (see --json).")
@json_option
def list_audit(as_json: bool, limit: int, **filters: str | None) -> None:
    """List changes, newest first. --json prints the full state before and after, and the token's id."""
    asked = {name: value for name, value in filters.items() if value is not None}
    with client() as api:
        page = api.request("GET", "/admin/audit", limit=limit, **asked)
    if as_json:
        print_json(page)
        return
    rows = [
        (short_time(one["at"]), one["actor"], one["address"] or "", one["action"], one["subject"],
         short_json(one["before"]), short_json(one["after"]))
        for one in page["entries"]
    ]  # fmt: skip
    none = none_found("changes", *asked.values())
    print_table(("AT", "ACTOR", "FROM", "ACTION", "SUBJECT", "BEFORE", "AFTER"), rows, none, page)
