"""`tidegate prune`: delete finished data that is older than its retention."""

from __future__ import annotations

import asyncio
from collections import Counter

import click

from tidegate import settings
from tidegate.cli.output import print_json, user
from tidegate.flow.keep.prune import Prune, Retention
from tidegate.model.units import duration_ms
from tidegate.store import audit, migrate
from tidegate.store.db import Database


def _seconds(_: click.Context, option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return duration_ms(text) // 1000
    except ValueError as exc:
        raise click.BadParameter(str(exc), param=option) from exc


@click.command()
@click.option(
    "--events",
    callback=_seconds,
    metavar="AGE",
    help="Delete finished events older than this, with everything derived from them, e.g. 30d.",
)
@click.option(
    "--dead-letters", callback=_seconds, metavar="AGE", help="Delete dead letters older than this, replayed or not."
)
@click.option("--audit", callback=_seconds, metavar="AGE", help="Delete audit log entries older than this.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prune(events: int | None, dead_letters: int | None, audit: int | None, as_json: bool) -> None:
    """Delete data that has been finished for longer than AGE. Options default to the settings TIDEGATE_RETENTION_…

    Works directly on the database at TIDEGATE_DATABASE_URL, in small batches. It can be stopped any time and run again.
    """
    given = settings.load()
    kept = Retention(
        given.retention_events_seconds if events is None else events,
        given.retention_dead_letters_seconds if dead_letters is None else dead_letters,
        given.retention_audit_seconds if audit is None else audit,
    )
    if not any(kept):
        raise click.UsageError(
            "nothing to delete: give --events, --dead-letters or --audit, or set TIDEGATE_RETENTION_…"
        )
    total = asyncio.run(_prune(given.require_database_url(), kept, quiet=as_json))
    if as_json:
        print_json(total)
    else:
        click.echo(f"deleted {_words(total)}")


async def _prune(url: str, kept: Retention, *, quiet: bool) -> Counter[str]:
    database = Database(url, "prune", size=1)
    total: Counter[str] = Counter()
    try:
        await migrate.require_current(database)
        pruning = Prune(database, kept)
        while not (pruned := await pruning.run_once()).is_done:
            total.update(pruned.deleted)
            if pruned.deleted and not quiet:
                click.echo(f"… {_words(total)}", err=True)
        async with database.connection() as connection:
            await audit.insert(connection, actor=user() or "cli", action="prune", subject="*", after=dict(total))
    finally:
        await database.close()
    return total


def _words(total: Counter[str]) -> str:
    return ", ".join(f"{count} {table.replace('_', ' ')}" for table, count in total.items()) or "nothing"
