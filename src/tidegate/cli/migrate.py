"""`tidegate migrate`."""

from __future__ import annotations

import asyncio

import click

from tidegate.cli.given_settings import load_settings
from tidegate.store import grants, processes
from tidegate.store import migrate as migrating
from tidegate.store.db import Database


@click.command()
@click.option(
    "--status",
    "show_status",
    is_flag=True,
    help="Show which migrations are applied or pending, and which processes are alive; change nothing. Exit status 1 "
    "while this version cannot use the schema.",
)
@click.option(
    "--expand-only",
    is_flag=True,
    help="Apply only migrations that leave the way back to the version before; contractions stay pending.",
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
def migrate(
    show_status: bool, expand_only: bool, show_sql: bool, workers: tuple[str, ...], producers: tuple[str, ...]
) -> None:
    """Bring the database's schema up to date, while the processes of this and the previous version work.

    Safe to run from many processes at once. A migration that removes what an older version needs waits until no process
    of that version is alive; run the command again then.

    A migration may add tables: repeat --grant-to and --grant-publish-to for the same roles with each release.
    """
    if show_sql:
        for migration in migrating.migrations():
            click.echo(f"-- {migration.name} (checksum {migration.checksum})\n{migration.sql}")
        return
    asyncio.run(_status() if show_status else _migrate(workers, producers, expand_only=expand_only))


async def _status() -> None:
    database = Database(load_settings().require_direct_url(), "migrate", size=1)
    try:
        found, waiting = await migrating.status(database), await migrating.waiting(database)
        async with database.connection() as connection:
            living = await processes.alive(connection) if found.applied else []
    finally:
        await database.close()
    reasons = {one.migration.version: f": {one}" for one in waiting}
    for migration in migrating.migrations():
        state = "waiting" if migration.version in reasons else "pending"
        state = "applied" if migration.version in found.applied else state
        click.echo(f"{state}  {migration.name}{reasons.get(migration.version, '')}")
    for process in living:
        click.echo(f"alive    {process.kind} {process.name}, Tidegate {process.version}")
    click.echo(_versions(found))
    if found.missing:
        raise SystemExit(1)


async def _migrate(workers: tuple[str, ...], producers: tuple[str, ...], *, expand_only: bool) -> None:
    database = Database(load_settings().require_direct_url(), "migrate", size=1)
    try:
        applied = await migrating.migrate(database, expand_only=expand_only)
        async with database.transaction() as connection:
            for rights, roles in ((grants.WORK, workers), (grants.PUBLISH, producers)):
                for role in roles:
                    await grants.grant(connection, rights, role)
        found, waiting = await migrating.status(database), await migrating.waiting(database)
    finally:
        await database.close()
    for role in (*workers, *producers):
        click.echo(f"granted  {role}")
    for migration in applied:
        click.echo(f"applied  {migration.name}")
    for one in waiting:
        click.echo(f"waiting  {one.migration.name}: {one}")
    if applied:
        click.echo(f"schema version {found.version}")
    elif found.is_newer:
        click.echo(f"nothing to do: {_versions(found)}")
    elif not waiting:
        click.echo("the schema is up to date" if workers or producers else "nothing to do: the schema is up to date")


def _versions(found: migrating.Status) -> str:
    known = migrating.latest()
    if found.is_newer:
        return (
            f"schema version {found.version}, applied by a newer Tidegate. This version knows {known} and can use the "
            f"schema, as can every program that knows version {found.compatible_from} or newer"
        )
    return f"schema version {found.version}, this version of Tidegate expects {known}"
