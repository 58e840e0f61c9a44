"""`tidegate schedules`."""

from __future__ import annotations

import click

from tidegate.cli.output import all_pages, client, json_option, print_json, print_table, short_time
from tidegate.model.units import written_duration


@click.group()
def schedules() -> None:
    """Show the schedules of workflows."""


@schedules.command("list")
@json_option
def list_schedules(as_json: bool) -> None:
    """List schedules with their last and next ticks (UTC)."""
    with client() as api:
        found = all_pages(api, "/v1/schedules", "schedules")
    if as_json:
        print_json(found)
        return
    rows = [
        (
            s["workflow"],
            s["cron"] or f"every {written_duration(s['every_ms'])}",
            s["timezone"] or "",
            short_time(s["next_at"]),
            short_time(s["last_at"]),
        )
        for s in found
    ]
    print_table(("WORKFLOW", "WHEN", "TIMEZONE", "NEXT", "LAST"), rows, "No schedules yet.")
