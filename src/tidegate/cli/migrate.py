"""`tidegate migrate`."""

from __future__ import annotations

import asyncio

import click

from tidegate import settings
from tidegate.store import migrate as migrating
from tidegate.store.db import Database


@click.command()
@click.option("--status", "show_status", is_flag=True, help="Say what is applied and what is pending; change nothing.")
@click.option("--sql", "show_sql", is_flag=True, help="Print the SQL of all migrations; change nothing.")
def migrate(show_status: bool, show_sql: bool) -> None:
    """Bring the database's schema up to date. Safe to run from many processes at once."""
    if show_sql:
        for migration in migrating.migrations():
            click.echo(f"-- {migration.name} (checksum {migration.checksum})\n{migration.sql}")
        return
    asyncio.run(_status() if show_status else _migrate())


async def _status() -> None:
    database = Database(settings.load().require_database_url(), "migrate", size=1)
    try:
        found = await migrating.status(database)
    finally:
        await database.close()
    for migration in migrating.migrations():
        click.echo(f"{'pending' if migration in found.pending else 'applied'}  {migration.name}")
    click.echo(f"schema version {found.version}, this Tidegate knows {migrating.latest()}")


async def _migrate() -> None:
    database = Database(settings.load().require_database_url(), "migrate", size=1)
    try:
        applied = await migrating.migrate(database)
    finally:
        await database.close()
    for migration in applied:
        click.echo(f"applied  {migration.name}")
    click.echo(f"schema version {migrating.latest()}" if applied else "nothing to do: the schema is up to date")
