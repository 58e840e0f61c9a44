"""`tidegate secrets`: the encryption of stored secrets."""

from __future__ import annotations

import asyncio
import sys

import click

from tidegate import settings
from tidegate.cli.output import json_option, print_json, user
from tidegate.flow.keep.secrets import Rotated, rotate
from tidegate.model.secrets import SecretKeys, new_key
from tidegate.settings import Settings
from tidegate.store import migrate
from tidegate.store.db import Database


@click.group()
def secrets() -> None:
    """Keys that encrypt the secrets of webhooks and http workflows in the database."""


@secrets.command("key")
def print_key() -> None:
    """Print a new key for TIDEGATE_SECRETS_KEY. It is stored nowhere: keep it, apart from the database's backups."""
    click.echo(new_key())


@secrets.command("rotate")
@json_option
def rotate_all(as_json: bool) -> None:
    """Encrypt all stored secrets with the first key of TIDEGATE_SECRETS_KEY, also those in plain.

    Works on TIDEGATE_DATABASE_URL itself, in small batches, while everything runs; stop it whenever you like and begin
    again. Exit status 1 when some cannot be read with any of the keys.
    """
    done = asyncio.run(_rotate(settings.load()))
    if as_json:
        print_json(done)
    else:
        click.echo(f"webhooks and workflows encrypted anew: {done.rotated}, as they should be before: {done.current}")
        for name in done.unreadable:
            click.echo(f"cannot be read with any key of TIDEGATE_SECRETS_KEY: {name}", err=True)
    if done.unreadable:
        sys.exit(1)


async def _rotate(given: Settings) -> Rotated:
    database = Database(given.require_database_url(), "secrets", size=1, keys=SecretKeys(given.secrets_key))
    try:
        await migrate.require_current(database)
        return await rotate(database, actor=user() or "cli")
    finally:
        await database.close()
