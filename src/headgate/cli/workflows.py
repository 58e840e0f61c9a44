"""`headgate workflows`."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from headgate.cli.output import client, json_option, print_json, print_table, short_time
from headgate.cli.trigger_files import read_object
from headgate.model.units import duration_ms

# What the server decides, and what it shows in place of secrets; a file made from `show --json` may hold them.
READ_ONLY = ("id", "parameters", "version", "created_by", "created_at", "updated_by", "updated_at")


@click.group()
def workflows() -> None:
    """Look at workflow definitions; create those that post their runs to a URL."""


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


@workflows.command("create")
@click.argument("slug", required=False)
@click.option("-f", "--file", default=None, help="YAML or JSON; - for standard input. Options win over it.")
@click.option("--url", default=None, help="Where runs are posted to.")
@click.option("--timeout", default=None, help="How long one request may take, as in 30s.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header to send; for secrets use -f.")
@click.option("--allow-private", is_flag=True, help="The URL may lead to a private address.")
@json_option
def create_workflow(
    slug: str | None,
    file: str | None,
    url: str | None,
    timeout: str | None,
    headers: tuple[str, ...],
    allow_private: bool,
    as_json: bool,
) -> None:
    """Create the workflow SLUG, which posts its runs to a URL. Its signing secret is printed once."""
    given = read_object(file) if file is not None else {}
    said = {"slug": slug, "url": url, "allow_private": allow_private or None}
    given = {"kind": "http"} | given | {name: value for name, value in said.items() if value is not None}
    if headers:
        given["headers"] = dict(given.get("headers") or {}) | _headers(headers)
    if timeout is not None:
        try:
            given["timeout_ms"] = duration_ms(timeout)
        except ValueError as exc:
            raise click.UsageError(f"--timeout: {exc}") from exc
    missing = [name for name in ("slug", "url") if name not in given]
    if missing:
        raise click.UsageError("say what to create: headgate workflows create SLUG --url URL, or -f FILE")
    with client() as api:
        made = api.request("POST", "/v1/workflows", {n: v for n, v in given.items() if n not in READ_ONLY})
    _tell(made, as_json, "created" if made["version"] == 1 else "unchanged")


@workflows.command("show")
@click.argument("slug")
@json_option
def show_workflow(slug: str, as_json: bool) -> None:
    """Show one workflow, without its secrets."""
    with client() as api:
        found = api.request("GET", f"/v1/workflows/{quote(slug, safe='')}")
    _tell(found, as_json)


@workflows.command("delete")
@click.argument("slug")
@json_option
def delete_workflow(slug: str, as_json: bool) -> None:
    """Delete a workflow that has neither triggers nor runs."""
    with client() as api:
        gone = api.request("DELETE", f"/v1/workflows/{quote(slug, safe='')}")
    _tell(gone, as_json, "deleted")


def _headers(pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise click.UsageError("--header is written NAME=VALUE")
        found[name.strip()] = value
    return found


def _tell(workflow: dict[str, Any], as_json: bool, done: str = "") -> None:
    if as_json:
        print_json(workflow)
        return
    config = workflow["config"]
    where = f": POST {config['url']}, {config['timeout_ms'] / 1000:g}s" if workflow["kind"] == "http" else ""
    words = f"{done} {workflow['slug']}" if done else workflow["slug"]
    click.echo(f"{words} ({workflow['kind']}, v{workflow['version']}){where}")
    if workflow.get("secret"):
        click.echo(f"secret, shown this once: {workflow['secret']}")
