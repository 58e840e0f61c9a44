"""`headgate workflows`."""

from __future__ import annotations

import click

from headgate.cli.output import client, json_option, print_json, print_table, short_time


@click.group()
def workflows() -> None:
    """Look at workflow definitions."""


@workflows.command("list")
@json_option
def list_workflows(as_json: bool) -> None:
    """List workflows with the events that launch them."""
    with client() as api:
        found = api.request("GET", "/v1/workflows")["workflows"]
        for workflow in found:
            workflow["triggers"] = api.request("GET", f"/v1/workflows/{workflow['slug']}/triggers")["triggers"]
    if as_json:
        print_json(found)
        return
    rows = [
        (w["slug"], w["kind"], t["event_type"], t["event_source"], t["where"] or "", short_time(t["updated_at"]))
        for w in found
        for t in w["triggers"] or [dict.fromkeys(("event_type", "event_source", "where", "updated_at"), "")]
    ]
    print_table(("WORKFLOW", "KIND", "ON", "SOURCE", "WHERE", "CHANGED"), rows, "No workflows yet.")
