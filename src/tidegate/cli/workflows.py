"""`tidegate workflows`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click

from tidegate.cli.output import all_pages, asks, client, json_option, print_json, print_table, short_time
from tidegate.cli.trigger_files import read_object
from tidegate.cli.wording import parsed, written_as
from tidegate.model.units import duration_ms

# Set by the server; dropped from a file, so that the output of `show --json` can be sent back.
READ_ONLY = ("id", "parameters", "version", "created_by", "created_at", "updated_by", "updated_at")


@click.group()
def workflows() -> None:
    """Show workflow definitions; create and update those that post their runs to a URL."""


@workflows.command("list")
@json_option
def list_workflows(as_json: bool) -> None:
    """List workflows with the events that launch them."""
    with client() as api:
        found = all_pages(api, "/v1/workflows", "workflows")
        for workflow in found:
            workflow["triggers"] = all_pages(api, f"/v1/workflows/{workflow['slug']}/triggers", "triggers")
    if as_json:
        print_json({"workflows": found})
        return
    rows = [
        (w["slug"], w["kind"], t["event_type"], t["event_source"], t["where"] or "", short_time(t["updated_at"]))
        for w in found
        for t in w["triggers"] or [dict.fromkeys(("event_type", "event_source", "where", "updated_at"), "")]
    ]
    print_table(("WORKFLOW", "KIND", "ON", "SOURCE", "WHERE", "CHANGED"), rows, "No workflows yet.")


def _file_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "-f", "--file", default=None, help="YAML or JSON file; - for standard input. Options take precedence over it."
    )(command)


def _config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        json_option,
        click.option("--allow-private", is_flag=True, help="Allow the URL to resolve to a private address."),
        click.option("--header", "headers", multiple=True, metavar="NAME=VALUE",
                     help="A header to send; repeatable. Use -f for secrets."),
        click.option("--timeout", default=None, help="Timeout of one request, e.g. 30s."),
        click.option("--url", default=None, help="The URL that runs are posted to."),
        _file_option,
    ):  # fmt: skip
        command = option(command)
    return command


@workflows.command("create")
@click.argument("slug", required=False)
@_config_options
def create_workflow(slug: str | None, as_json: bool, **options: Any) -> None:
    """Create the workflow SLUG, which posts its runs to a URL. Its signing secret is printed once."""
    given = {"kind": "http"} | _given(**options) | ({} if slug is None else {"slug": slug})
    missing = [name for name in ("slug", "url") if name not in given]
    if missing:
        raise click.UsageError("slug and url are required: tidegate workflows create SLUG --url URL, or -f FILE")
    with client() as api, written_as(_names(options)):
        written = api.request("POST", "/v1/workflows", given)
    _print_result(written, as_json, "created" if written["changed"] else "unchanged")


@workflows.command("update")
@click.argument("slug")
@_config_options
def update_workflow(slug: str, as_json: bool, **options: Any) -> None:
    """Update where and how a workflow posts its runs; other fields are kept. Given headers replace the existing."""
    given = _given(**options)
    if given.get("slug", slug) != slug:
        raise click.UsageError(f"the file is for {given['slug']}, not {slug}; the slug of a workflow cannot change")
    given = {name: value for name, value in given.items() if name not in ("slug", "kind")}
    if not given:
        raise click.UsageError("nothing to change: give --url, --timeout, --header, --allow-private, or -f FILE")
    with client() as api, written_as(_names(options)):
        written = api.request("PATCH", _path(slug), given)
    _print_result(written, as_json, "changed" if written["changed"] else "unchanged")


@workflows.command("rotate")
@click.argument("slug")
@_file_option
@click.option(
    "--keep",
    default=None,
    help="How long requests are signed with the old secret too, e.g. 12h (default 24h); 0s ends it now.",
)
@json_option
def rotate_secret(slug: str, file: str | None, keep: str | None, as_json: bool) -> None:
    """Rotate the signing secret: to a generated one, which is printed once, or to the `secret` in the file of -f."""
    given = read_object(file) if file is not None else {}
    if keep is not None:
        given["keep_ms"] = parsed(duration_ms, keep, "--keep")
    with client() as api, written_as({} if keep is None else {"keep_ms": "--keep"}):
        written = api.request("POST", f"{_path(slug)}/rotate", given)
    _print_result(written, as_json, "rotated" if written["changed"] else "unchanged")


@workflows.command("show")
@click.argument("slug")
@json_option
def show_workflow(slug: str, as_json: bool) -> None:
    """Show one workflow, without its secrets."""
    with client() as api:
        found = api.request("GET", _path(slug))
    _print_result(found, as_json)


@workflows.command("delete")
@click.argument("slug")
@asks("Delete workflow {slug}?")
@json_option
def delete_workflow(slug: str, as_json: bool) -> None:
    """Delete a workflow that has no triggers and no unfinished runs, and, if it was declared in code, no living worker.

    Its past runs are kept.
    """
    with client() as api:
        gone = api.request("DELETE", _path(slug))
    _print_result(gone, as_json, "deleted")


def _path(slug: str) -> str:
    return f"/v1/workflows/{quote(slug, safe='')}"


def _given(
    file: str | None, url: str | None, timeout: str | None, headers: tuple[str, ...], allow_private: bool
) -> dict[str, Any]:
    """The fields from the file and the options; the options take precedence."""
    given = read_object(file) if file is not None else {}
    given = {name: value for name, value in given.items() if name not in READ_ONLY}
    if url is not None:
        given["url"] = url
    if allow_private:
        given["allow_private"] = True
    if headers:
        given["headers"] = dict(given.get("headers") or {}) | _headers(headers)
    if timeout is not None:
        given["timeout_ms"] = parsed(duration_ms, timeout, "--timeout")
    return given


def _names(options: dict[str, Any]) -> dict[str, str]:
    """The API's field names, and the given options that set them."""
    known = {"url": ("url", "--url"), "timeout": ("timeout_ms", "--timeout"), "headers": ("headers", "--header")}
    return {ours: written for option, (ours, written) in known.items() if options[option]}


def _headers(pairs: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise click.UsageError("--header takes NAME=VALUE")
        found[name.strip()] = value
    return found


def _print_result(workflow: dict[str, Any], as_json: bool, done: str = "") -> None:
    if as_json:
        print_json(workflow)
        return
    config = workflow["config"]
    where = f": POST {config['url']}, {config['timeout_ms'] / 1000:g}s" if workflow["kind"] == "http" else ""
    words = f"{done} {workflow['slug']}" if done else workflow["slug"]
    click.echo(f"{words} ({workflow['kind']}, v{workflow['version']}){where}")
    if config.get("old_secrets_until"):
        click.echo(f"requests are signed with an old secret too, until {short_time(max(config['old_secrets_until']))}")
    if workflow.get("secret"):
        click.echo(f"secret (shown only once): {workflow['secret']}")
