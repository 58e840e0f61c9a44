"""`tidegate token`: directly on the database if its URL is set, to create the first token; otherwise over the API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import click
import msgspec

from tidegate.cli.given_settings import load_settings
from tidegate.cli.output import all_pages, asks, client, json_option, print_json, print_table, short_time, user
from tidegate.cli.wording import parsed, written_as
from tidegate.client import Client
from tidegate.flow import control
from tidegate.model import units
from tidegate.model.token import SCOPES, Token
from tidegate.store import migrate, tokens
from tidegate.store.db import Database
from tidegate.telemetry import logs

DEFAULT_ACTOR = "cli"


@click.group()
def token() -> None:
    """Create, list and revoke API tokens.

    If TIDEGATE_DATABASE_URL is set, works directly on that database and needs no token. Otherwise it calls the API at
    TIDEGATE_URL, with a token of scope admin in TIDEGATE_TOKEN.
    """


@token.command("create")
@click.argument("name")
@click.option("--scope", "scopes", multiple=True, required=True, type=click.Choice(SCOPES),
              help="What the token may do; repeatable. admin includes all others.")  # fmt: skip
@click.option("--source", "sources", multiple=True, metavar="PATTERN",
              help="Restrict the token to these sources, exact or with *; repeatable.")  # fmt: skip
@click.option(
    "--rate", default=None, metavar="RATE", help="Maximum rate of requests, e.g. 100/s; more are answered with 429."
)
@click.option("--network", "networks", multiple=True, metavar="NETWORK",
              help="Accept the token from these networks only, e.g. 10.0.0.0/8; repeatable.")  # fmt: skip
@click.option(
    "--expires",
    default=None,
    metavar="DURATION",
    help="How long the token is valid, e.g. 90d (default: until revoked).",
)
@json_option
def create(
    name: str,
    scopes: tuple[str, ...],
    sources: tuple[str, ...],
    rate: str | None,
    networks: tuple[str, ...],
    expires: str | None,
    as_json: bool,
) -> None:
    """Create a token and print its secret. The secret is shown only once."""
    bounds = {"sources": list(sources), "rate": rate, "networks": list(networks)}
    body: dict[str, Any] = {"name": name, "scopes": list(scopes)} | {k: v for k, v in bounds.items() if v}
    if expires is not None:
        body["expires_in_ms"] = parsed(units.duration_ms, expires, "--expires")
    names = {"expires_in_ms": "--expires", "rate": "--rate", "networks": "--network", "sources": "--source"}
    with written_as(names):
        created = _done(
            lambda database: control.create_token(database, body, actor=user() or DEFAULT_ACTOR),
            lambda api: api.request("POST", "/admin/tokens", body),
        )
    if as_json:
        print_json(created)
        return
    click.echo(created["secret"])
    click.echo(f"tidegate: token {name} created; its secret is shown only once", err=True)


@token.command("list")
@json_option
def list_tokens(as_json: bool) -> None:
    """List tokens, including revoked ones."""
    found = _done(_listed, lambda api: all_pages(api, "/admin/tokens", "tokens"))
    if as_json:
        print_json({"tokens": found})
        return
    rows = [
        (
            t["name"],
            ", ".join(t["scopes"]),
            ", ".join(t["sources"] or []),
            ", ".join([*([t["rate"]] if t["rate"] else []), *(t["networks"] or [])]),
            f"revoked {short_time(t['revoked_at'])}" if t["revoked_at"] else short_time(t["expires_at"]),
            short_time(t["last_used_at"]),
            t["created_by"],
            t["id"],
        )
        for t in found
    ]
    print_table(
        ("NAME", "SCOPES", "SOURCES", "BOUNDS", "ENDS", "LAST USED", "CREATED BY", "ID"), rows, "No tokens yet."
    )


@token.command("revoke")
@click.argument("name_or_id", metavar="NAME|ID")
@asks("Revoke token {name_or_id}?")
@json_option
def revoke(name_or_id: str, as_json: bool) -> None:
    """Revoke a token. Every API process refuses it within a second."""
    revoked = _done(
        lambda database: control.revoke_token(database, name_or_id, actor=user() or DEFAULT_ACTOR),
        lambda api: api.request("DELETE", f"/admin/tokens/{quote(name_or_id, safe='')}"),
    )
    if as_json:
        print_json(revoked)
        return
    click.echo(f"token {revoked['name']} is revoked")


async def _listed(database: Database) -> list[Token]:
    async with database.connection() as connection:
        return await tokens.list_page(connection)


def _done(on_database: Callable[[Database], Awaitable[Any]], over_api: Callable[[Client], Any]) -> Any:
    """The result from the database, or else from the API, as built-in types."""
    given = load_settings()
    if given.database_url is None:
        with client() as api:
            return over_api(api)
    logs.configure("error", given.log_format)  # the command prints the result itself

    async def work(url: str) -> Any:
        database = Database(url, "cli", size=1)
        try:
            await migrate.require_current(database)
            return await on_database(database)
        finally:
            await database.close()

    return msgspec.to_builtins(asyncio.run(work(given.database_url)))
