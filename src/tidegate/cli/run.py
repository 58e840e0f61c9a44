"""`tidegate run`."""

from __future__ import annotations

import click

from tidegate.cli.output import client, json_option, print_json
from tidegate.cli.publish import read_object
from tidegate.cli.wording import written_as
from tidegate.client_runs import Ending, runs_of, start_body
from tidegate.errors import RunFailed

# The API's field names, and the arguments and options that set them.
# Statuses of a start whose run has come to an end, or will not come to be.
FINAL = ("succeeded", "failed", "cancelled", "not_launched")
_NAMES = {"parameters": "--data", "id": "--id", "wait": "--wait"}


@click.command()
@click.argument("slug")
@click.option("--data", default=None, help="The parameters: a JSON object, @FILE, or - for standard input.")
@click.option("--id", "start_id", default=None, help="Your id for the start. Starting it again starts no second run.")
@click.option(
    "--wait",
    default=None,
    help="Wait this long for the run to end, e.g. 30s, and print its output; exit status 1 if it has not.",
)
@json_option
def run(slug: str, data: str | None, start_id: str | None, wait: str | None, as_json: bool) -> None:
    """Start a run of the workflow SLUG. Returns after the start is committed, or with --wait when the run has ended."""
    try:
        ending = Ending(wait or 0)
    except ValueError as exc:
        raise click.UsageError(f"--wait: {exc}") from exc
    with client() as api, written_as(_NAMES):
        answer = api.waiting("POST", runs_of(slug), ending.wait, start_body(read_object(data), start_id))
        run_id = answer["run_id"]
        if wait is not None:
            try:
                while not ending.is_over(answer):
                    answer = api.waiting("GET", f"/v1/runs/{run_id}", ending.wait)
            except TimeoutError:
                pass
    found = answer.get("run") or answer
    if as_json:
        print_json(found)
    elif found["status"] == "succeeded":
        print_json(found["output"])
    else:
        click.echo(f"{found['status']} {run_id}")
        if wait is not None and found["status"] not in FINAL:
            click.echo(
                f"the run has not ended within {wait}; tidegate explain {run_id} says what it waits for", err=True
            )
            raise SystemExit(1)
    if found["status"] in ("failed", "cancelled", "not_launched"):
        raise RunFailed(run_id, found["status"], found["error"] or "")
