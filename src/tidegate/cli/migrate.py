"""`tidegate migrate`."""

from __future__ import annotations

import asyncio

import click

from tidegate import settings
from tidegate.store import grants
from tidegate.store import migrate as migrating
from tidegate.store.db import Database


@click.command()
@click.option(
    "--status",
    "show_status",
    is_flag=True,
    help="Show which migrations are applied and which are pending; change nothing.",
)
@click.option("--sql", "show_sql", is_flag=True, help="Print the SQL of all migrations; change nothing.")
@click.option(
    "--grant-to",
    "workers",
    multiple=True,
    metavar="ROLE",
    help="Grant ROLE the rights to run `serve` and `worker`, without DDL.",
)
@click.option("--grant-publish-to", "producers", multiple=True, metavar="ROLE",
              help="Grant ROLE the right to call tidegate.publish(), and nothing else.")  # fmt: skip
def migrate(show_status: bool, show_sql: bool, workers: tuple[str, ...], producers: tuple[str, ...]) -> None:
    """Bring the database's schema up to date. Safe to run from many processes at once.

    A migration may add tables: repeat --grant-to and --grant-publish-to for the same roles with each release.
    """
    if show_sql:
        for migration in migrating.migrations():
            click.echo(f"-- {migration.name} (checksum {migration.checksum})\n{migration.sql}")
        return
    asyncio.run(_status() if show_status else _migrate(workers, producers))


async def _status() -> None:
    database = Database(settings.load().require_database_url(), "migrate", size=1)
    try:
        found = await migrating.status(database)
    finally:
        await database.close()
    for migration in migrating.migrations():
        click.echo(f"{'pending' if migration in found.pending else 'applied'}  {migration.name}")
    click.echo(f"schema version {found.version}, this version of Tidegate expects {migrating.latest()}")


async def _migrate(workers: tuple[str, ...], producers: tuple[str, ...]) -> None:
    database = Database(settings.load().require_database_url(), "migrate", size=1)
    try:
        applied = await migrating.migrate(database)
        async with database.transaction() as connection:
            for rights, roles in ((grants.WORK, workers), (grants.PUBLISH, producers)):
                for role in roles:
                    await grants.grant(connection, rights, role)
    finally:
        await database.close()
    for migration in applied:
        click.echo(f"applied  {migration.name}")
    click.echo(f"schema version {migrating.latest()}" if applied else "nothing to do: the schema is up to date")
