"""`tidegate deliveries`: what triggers decided about events."""

from __future__ import annotations

import click

from tidegate.cli.output import client, json_option, none_found, print_json, print_table, short_time
from tidegate.cli.triggers import find_trigger, trigger_path
from tidegate.model.delivery import DELIVERY_STATUSES


@click.group()
def deliveries() -> None:
    """Show deliveries: one for each event and trigger that match."""


@deliveries.command("list")
@click.option(
    "--trigger", default=None, metavar="ID", help="Only deliveries of this trigger: its id, or WORKFLOW/NAME."
)
@click.option("--status", default=None, type=click.Choice(DELIVERY_STATUSES), help="Only deliveries in this status.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))
@json_option
def list_deliveries(trigger: str | None, status: str | None, limit: int, as_json: bool) -> None:
    """List deliveries, newest first."""
    with client() as api:
        path = f"{trigger_path(find_trigger(api, trigger))}/deliveries" if trigger is not None else "/v1/deliveries"
        page = api.request("GET", path, status=status, limit=limit)
    if as_json:
        print_json(page)
        return
    rows = [
        (
            d["id"],
            f"{d['workflow']}/{d['trigger']}",
            d["external_id"] or d["event_id"],
            d["source"],
            d["status"],
            d["workflow_run_id"] or "",
            short_time(d["launched_at"] or d["next_attempt_at"]),
            d["last_error"] or "",
        )
        for d in page["deliveries"]
    ]
    columns = ("ID", "TRIGGER", "EVENT", "SOURCE", "STATUS", "RUN", "LAUNCHED/NEXT", "WHY")
    print_table(columns, rows, none_found("deliveries", trigger, status), page)
