"""`tidegate workers`."""

from __future__ import annotations

import click

from tidegate.cli.output import Json, client, json_option, print_json, print_table, short_time


@click.group()
def workers() -> None:
    """Show workers."""


@workers.command("list")
@json_option
def list_workers(as_json: bool) -> None:
    """List workers: their slots, what each executes and since when, and whose code each has."""
    with client() as api:
        page = api.request("GET", "/admin/workers")
    if as_json:
        print_json(page)
        return
    rows = [
        (
            one["name"],
            "alive" if one["is_alive"] and not one["is_late"] else f"last seen {short_time(one['seen_at'])}",
            f"{len(one['executing'])}/{one['slots']}",
            one["version"],
            short_time(one["started_at"]),
            _workflows(one),
            _executing(one["executing"]),
        )
        for one in page["workers"]
    ]
    columns = ("WORKER", "STATE", "SLOTS", "VERSION", "STARTED", "WORKFLOWS", "EXECUTING")
    print_table(columns, rows, "No worker is running; start one: tidegate worker APP")


def _workflows(worker: Json) -> str:
    """The workflows whose runs it takes, with the slots that it reserves, and those that it leaves out."""
    reserved = worker["reserved"]
    taken = ", ".join(
        f"{name} ({reserved[name]} reserved)" if name in reserved else name for name in worker["workflows"]
    )
    return f"{taken} (not {', '.join(worker['left_out'])})" if worker["left_out"] else taken


def _executing(held: list[Json]) -> str:
    shown = [f"{one['workflow']} {one['run_id']} since {short_time(one['since'])}" for one in held[:3]]
    return ", ".join(shown) + (f" and {len(held) - 3} more" if len(held) > 3 else "")
