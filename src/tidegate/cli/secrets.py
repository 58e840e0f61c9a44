"""`tidegate secrets`: the encryption of stored secrets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click

from tidegate.cli.given_settings import load_settings
from tidegate.cli.output import json_option, print_json, user
from tidegate.flow.keep.secrets import Rotated, renew_links, rotate
from tidegate.model.secrets import SecretKeys, new_key
from tidegate.settings import Settings
from tidegate.store import migrate
from tidegate.store.db import Database
from tidegate.telemetry import logs


@click.group()
def secrets() -> None:
    """Manage the keys that encrypt the secrets of webhooks and http workflows in the database."""


@secrets.command("key")
def print_key() -> None:
    """Print a new key for TIDEGATE_SECRETS_KEY. It is not stored: keep it safe, apart from the database's backups."""
    click.echo(new_key())


@secrets.command("rotate")
@json_option
def rotate_all(as_json: bool) -> None:
    """Encrypt all stored secrets with the first key of TIDEGATE_SECRETS_KEY, including unencrypted ones.

    Works directly on the database at TIDEGATE_DATABASE_URL, in small batches, while Tidegate runs. It can be stopped at
    any time and run again. Exit status 1 if some secrets cannot be decrypted with any of the keys.
    """
    done = asyncio.run(_rotate(load_settings()))
    if as_json:
        print_json(done)
    else:
        click.echo(f"webhooks, workflows and keys re-encrypted: {done.rotated}, already up to date: {done.current}")
        for name in done.unreadable:
            click.echo(f"cannot be decrypted with any key of TIDEGATE_SECRETS_KEY: {name}", err=True)
    if done.unreadable:
        sys.exit(1)


@secrets.command("renew-links")
def renew() -> None:
    """Sign the links of approvals with a new key, because the old key or a list of links has leaked.

    Works directly on the database at TIDEGATE_DATABASE_URL, while Tidegate runs. Within a minute the links that were
    sent answer 404. Runs that wait go on waiting: decide with `tidegate approvals`.
    """
    asyncio.run(_renew_links(load_settings()))
    click.echo("approval links are signed with a new key; within a minute no process accepts the old ones")


async def _rotate(given: Settings) -> Rotated:
    async with _opened(given) as database:
        return await rotate(database, actor=user() or "cli")


async def _renew_links(given: Settings) -> None:
    async with _opened(given) as database:
        await renew_links(database, actor=user() or "cli")


@asynccontextmanager
async def _opened(given: Settings) -> AsyncIterator[Database]:
    logs.configure("error", given.log_format)  # the command tells itself what it did
    database = Database(given.require_database_url(), "secrets", size=1, keys=SecretKeys(given.secrets_key))
    try:
        await migrate.require_current(database)
        yield database
    finally:
        await database.close()
