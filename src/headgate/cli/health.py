"""`headgate health`."""

from __future__ import annotations

import sys
from typing import Any

import click

from headgate.cli.output import client, json_option, print_json, print_table, short_eta


@click.command()
@json_option
def health(as_json: bool) -> None:
    """Say whether everything that should move moves, and if not, why. Exit status 0 ok, 1 otherwise."""
    with client() as api:
        found = api.request("GET", "/admin/event-health")
    if as_json:
        print_json(found)
    else:
        _print(found)
    if found["status"] != "ok":
        sys.exit(1)


def _print(found: dict[str, Any]) -> None:
    click.echo(f"{found['status']} at {found['generated_at']}")
    if found["causes"]:
        rows = [(c["severity"], c["code"], c["subject"], c["message"], c["runbook"]) for c in found["causes"]]
        print_table(("SEVERITY", "CAUSE", "SUBJECT", "WHAT", "SEE"), rows, "")
    rows = [
        (name, str(q["ready"]), str(q["delayed"]), str(q["active"]), short_eta(q["oldest_due_age_seconds"]))
        for name, q in found["queues"].items()
    ]
    click.echo("")
    print_table(("QUEUE", "READY", "DELAYED", "ACTIVE", "OLDEST DUE FOR"), rows, "")
    click.echo(f"dead letters: {found['dead_letters']['total']}, {found['dead_letters']['last_24h']} in the last 24 h")
