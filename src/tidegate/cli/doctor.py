"""`tidegate doctor`: checks of the guarantees, directly on the database."""

from __future__ import annotations

import asyncio
import sys

import click

from tidegate.cli.given_settings import load_settings
from tidegate.cli.output import json_option, print_json, print_table
from tidegate.flow.look.doctor import GRACE_MS, Check, eviction, examine
from tidegate.model.secrets import SecretKeys
from tidegate.settings import Settings
from tidegate.store.db import Database


@click.command()
@click.option(
    "--grace",
    type=click.IntRange(0, 86_400),
    default=GRACE_MS // 1000,
    show_default=True,
    help="Seconds for which work in progress is not reported.",
)
@json_option
def doctor(grace: int, as_json: bool) -> None:
    """Check for broken guarantees: rows that no worker processes, unsafe settings, wrong clocks, overdue work.

    Reads the database at TIDEGATE_DATABASE_URL directly and changes nothing. Exit status 0 if all checks pass, else 1.
    """
    checks = asyncio.run(_examine(load_settings(), grace * 1000))
    is_ok = all(check.is_ok for check in checks)
    if as_json:
        print_json({"is_ok": is_ok, "checks": checks})
    else:
        rows = [("ok" if check.is_ok else "NOT OK", check.name, check.detail) for check in checks]
        print_table(("", "CHECK", "FOUND"), rows, "")
    if not is_ok:
        sys.exit(1)


async def _examine(settings: Settings, grace_ms: int) -> list[Check]:
    url, direct_url = settings.require_database_url(), settings.database_direct_url
    database = Database(url, "doctor", size=1, keys=SecretKeys(settings.secrets_key), direct_url=direct_url)
    try:
        allow_unsafe = settings.allow_unsafe_durability
        checks = await examine(database, settings.health, grace_ms=grace_ms, allow_unsafe=allow_unsafe)
    finally:
        await database.close()
    return [*checks, await _redis(settings)] if settings.queue == "bullmq" else checks


async def _redis(settings: Settings) -> Check:
    from tidegate.queue.choose import eviction_policy

    try:
        return eviction(await eviction_policy(settings))
    except OSError as exc:
        return eviction(None, str(exc))
