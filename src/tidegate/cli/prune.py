"""`tidegate prune`: delete finished data that is older than its retention."""

from __future__ import annotations

import asyncio
from collections import Counter

import click

from tidegate.cli.given_settings import load_settings
from tidegate.cli.output import confirm, print_json, require_answer, user
from tidegate.flow.keep.prune import Prune
from tidegate.flow.keep.prune_preview import PrunePreview, preview
from tidegate.model.retention import Retention, longest
from tidegate.model.units import duration_ms, written_duration
from tidegate.store import audit, migrate, processes
from tidegate.store.db import Database

_ONE = {"days": "day", "events": "event", "dead_letters": "dead letter", "external_ids": "producer's id",
        "audit_log": "row of the audit log"}  # fmt: skip
_MANY = {"external_ids": "producers' ids", "audit_log": "rows of the audit log"}


def _seconds(_: click.Context, option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        seconds = duration_ms(text) // 1000
    except ValueError as exc:
        raise click.BadParameter(str(exc), param=option) from exc
    if seconds == 0:
        raise click.BadParameter(f"must be at least 1s, not {text!r}", param=option)
    return seconds


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
@click.option("--dry-run", is_flag=True, help="Say what is old enough; delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; required without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prune(
    events: int | None, dead_letters: int | None, audit: int | None, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Delete data that has been finished for longer than AGE: only of the kinds that are given.

    Without a kind: what the workers would delete, by the settings TIDEGATE_RETENTION_… of the processes that are alive.

    Works directly on the database at TIDEGATE_DATABASE_URL, in small batches. It can be stopped any time and run again.
    """
    is_asked = any(age is not None for age in (events, dead_letters, audit))
    if is_asked:
        require_answer(yes=yes, dry_run=dry_run)
    asked = Retention(events or 0, dead_letters or 0, audit or 0) if is_asked else None
    given = load_settings()
    total = asyncio.run(_prune(given.require_database_url(), asked, dry_run=dry_run, yes=yes, as_json=as_json))
    if total is None:
        return
    if as_json:
        print_json(total)
    else:
        click.echo(f"deleted {_words(total)}")


async def _prune(url: str, asked: Retention | None, *, dry_run: bool, yes: bool, as_json: bool) -> Counter[str] | None:
    """What was deleted; None after a dry run."""
    database = Database(url, "prune", size=1)
    total: Counter[str] = Counter()
    try:
        await migrate.require_current(database)
        kept = asked or await _of_processes(database)
        if dry_run or (asked and not yes):
            async with database.transaction() as connection:
                found = await preview(connection, kept)
            print_json(found) if as_json and dry_run else click.echo(_preview_text(kept, found), err=not dry_run)
            if dry_run:
                return None
            confirm("Delete it?")
        elif not as_json:
            click.echo(_ages(kept), err=True)
        pruning = Prune(database, kept)
        while not (pruned := await pruning.run_once()).is_done:
            total.update(pruned.deleted)
            if pruned.deleted and not as_json:
                click.echo(f"… {_words(total)}", err=True)
        after = {**total, "retention": kept._asdict()}
        async with database.connection() as connection:
            await audit.insert(connection, actor=user() or "cli", action="prune", subject="*", after=after)
    finally:
        await database.close()
    return total


async def _of_processes(database: Database) -> Retention:
    """What the processes that are alive keep, of each kind the longest time."""
    async with database.connection() as connection:
        found = await processes.retentions(connection)
    if not found:
        raise click.UsageError(
            "no API or worker is alive whose settings would tell what is too old: give --events, --dead-letters or "
            "--audit with an AGE"
        )
    kept = longest(one.retention for one in found)
    if not any(kept):
        raise click.UsageError(
            "the processes that are alive keep everything for ever (TIDEGATE_RETENTION_…): give --events, "
            "--dead-letters or --audit with an AGE"
        )
    return kept


def _ages(kept: Retention) -> str:
    kinds = zip(("events", "dead letters", "audit log"), kept, strict=True)
    return "older than: " + ", ".join(
        f"{kind} {written_duration(seconds * 1000)}" for kind, seconds in kinds if seconds
    )


def _preview_text(kept: Retention, found: PrunePreview) -> str:
    days = f"{found.days[0]} to {found.days[-1]}, " if found.days else ""
    rows = (
        f"  days to drop: {len(found.days)} ({days}about {found.events_of_days:,} events)",
        f"  days that are kept, since too much of them is needed: {len(found.kept_days)}",
        f"  events to delete one by one, unless they are needed: {found.events:,}",
        f"  dead letters: {found.dead_letters:,}",
        f"  rows of the audit log: {found.audit_log:,}",
    )
    shown = (kept.events_seconds, found.kept_days, kept.events_seconds, kept.dead_letters_seconds, kept.audit_seconds)
    return "\n".join([_ages(kept), *(row for row, is_shown in zip(rows, shown, strict=True) if is_shown)])


def _words(total: Counter[str]) -> str:
    found = []
    for table, count in total.items():
        name = _ONE.get(table, table) if count == 1 else _MANY.get(table, table.replace("_", " "))
        found.append(f"{count} {name}")
    return ", ".join(found) or "nothing"
