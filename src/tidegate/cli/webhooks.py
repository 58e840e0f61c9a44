"""`tidegate webhooks`: signed requests of other services that become events."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from tidegate.cli.output import all_pages, asks, client, json_option, print_json, print_table, short_time
from tidegate.cli.wording import parsed, written_as
from tidegate.model.units import duration_ms
from tidegate.model.webhook import SCHEMES


@click.group()
def webhooks() -> None:
    """Receive signed requests (Standard Webhooks, GitHub, Stripe) as events, at /v1/webhooks/SOURCE."""


def _secret_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        json_option,
        click.option("--ask", is_flag=True, help="Prompt for the secret."),
        click.option("--secret-file", default=None, metavar="FILE",
                     help="Read the secret from a file; - for standard input."),
    ):  # fmt: skip
        command = option(command)
    return command


@webhooks.command("list")
@json_option
def list_webhooks(as_json: bool) -> None:
    """List webhooks, without secrets."""
    with client() as api:
        found = all_pages(api, "/admin/webhooks", "webhooks")
    if as_json:
        print_json({"webhooks": found})
        return
    rows = [
        (
            w["source"],
            w["scheme"],
            w["event_type"] or "",
            ", ".join(_secret(secret) for secret in w["secrets"]),
            w["updated_by"],
            short_time(w["updated_at"]),
        )
        for w in found
    ]
    print_table(("SOURCE", "SCHEME", "TYPE", "SECRETS", "CHANGED BY", "CHANGED"), rows, "No webhooks yet.")


@webhooks.command("show")
@click.argument("source")
@json_option
def show_webhook(source: str, as_json: bool) -> None:
    """Show the webhook of SOURCE, without secrets."""
    with client() as api:
        _print_result(api.request("GET", _path(source)), as_json)


@webhooks.command("set")
@click.argument("source")
@click.option("--scheme", required=True, type=click.Choice(SCHEMES), help="How the sender signs its requests.")
@click.option("--event-type", default=None, help="The type of its events (default: the sender's own types).")
@click.option(
    "--tolerance", default=None, metavar="DURATION", help="Maximum difference between the signed time and now, e.g. 5m."
)
@_secret_options
def set_webhook(source: str, scheme: str, event_type: str | None, tolerance: str | None, **options: Any) -> None:
    """Accept signed requests as events of SOURCE. Options that are not given get their defaults; the secret is kept.

    A given secret replaces all existing ones. If there is none yet, one is generated and printed once.
    """
    body: dict[str, Any] = {"scheme": scheme, "event_type": event_type, "secret": _given_secret(options)}
    if tolerance is not None:
        milliseconds = parsed(duration_ms, tolerance, "--tolerance")
        if milliseconds % 1000:
            raise click.UsageError("--tolerance must be in whole seconds")
        body["tolerance_seconds"] = milliseconds // 1000
    with client() as api, written_as({"tolerance_seconds": "--tolerance", "event_type": "--event-type"}):
        done = api.request("PUT", _path(source), body)
    _print_result(done, options["as_json"], "set" if done["changed"] else "unchanged")


@webhooks.command("rotate")
@click.argument("source")
@click.option(
    "--keep", default=None, help="How long the old secret stays valid, e.g. 12h (default 24h); 0s revokes it now."
)
@_secret_options
def rotate_webhook(source: str, keep: str | None, **options: Any) -> None:
    """Rotate the secret of SOURCE: to the given one, or to a generated one, which is printed once."""
    body: dict[str, Any] = {"secret": _given_secret(options)}
    if keep is not None:
        body["keep_ms"] = parsed(duration_ms, keep, "--keep")
    with client() as api, written_as({"keep_ms": "--keep"}):
        done = api.request("POST", f"{_path(source)}/rotate", body)
    _print_result(done, options["as_json"], "rotated" if done["changed"] else "unchanged")


@webhooks.command("retire")
@click.argument("source")
@click.argument("fingerprint")
@asks("Revoke the secret {fingerprint} of {source} now?")
@json_option
def retire_secret(source: str, fingerprint: str, as_json: bool) -> None:
    """Revoke a replaced secret of SOURCE now, by its fingerprint."""
    with client() as api:
        done = api.request("DELETE", f"{_path(source)}/secrets/{quote(fingerprint, safe='')}")
    _print_result(done, as_json, "retired a secret of")


@webhooks.command("delete")
@click.argument("source")
@asks("Delete the webhook of {source}? Its requests are refused then.")
@json_option
def delete_webhook(source: str, as_json: bool) -> None:
    """Delete the webhook of SOURCE: its signed requests are refused. Its events are kept."""
    with client() as api:
        _print_result(api.request("DELETE", _path(source)), as_json, "deleted")


def _path(source: str) -> str:
    return f"/admin/sources/{quote(source, safe='')}/webhook"


def _given_secret(options: dict[str, Any]) -> str | None:
    """The secret from a file, standard input or the terminal; never from the command line, which others can read."""
    file: str | None = options["secret_file"]
    if file is not None and options["ask"]:
        raise click.UsageError("give --secret-file or --ask, not both")
    if options["ask"]:
        asked: str = click.prompt("Secret", hide_input=True, err=True)
        return asked.strip()
    if file is None:
        return None
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise click.UsageError(f"--secret-file: {exc}") from exc
    if not text.strip():
        raise click.UsageError("--secret-file: the file is empty")
    return text.strip()


def _print_result(webhook: dict[str, Any], as_json: bool, done: str = "") -> None:
    if as_json:
        print_json(webhook)
        return
    words = f"{done} {webhook['source']}" if done else webhook["source"]
    kind = f"type {webhook['event_type']}" if webhook["event_type"] else "the sender's types"
    click.echo(f"{words} ({webhook['scheme']}, v{webhook['version']}): {kind}")
    click.echo(f"secrets: {', '.join(_secret(secret) for secret in webhook['secrets'])}")
    if done != "deleted":
        click.echo(f"address: /v1/webhooks/{quote(webhook['source'], safe='/')}")
    if webhook.get("secret"):
        click.echo(f"secret (shown only once): {webhook['secret']}")


def _secret(secret: dict[str, Any]) -> str:
    return f"{secret['fingerprint']} until {short_time(secret['until'])}" if secret["until"] else secret["fingerprint"]
