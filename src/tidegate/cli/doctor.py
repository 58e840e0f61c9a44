"""`tidegate doctor`: the promises as checks that anybody can run."""

from __future__ import annotations

import asyncio
import sys

import click

from tidegate import settings as settings_module
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
    help="For so many seconds something may be on its way.",
)
@json_option
def doctor(grace: int, as_json: bool) -> None:
    """Look for whatever breaks a promise: rows that nobody moves, unsafe settings, wrong clocks, work that is late.

    Works on TIDEGATE_DATABASE_URL itself and changes nothing. Exit status 0 when all is well, 1 otherwise.
    """
    checks = asyncio.run(_examine(settings_module.load(), grace * 1000))
    is_well = all(check.is_ok for check in checks)
    if as_json:
        print_json({"is_ok": is_well, "checks": checks})
    else:
        rows = [("ok" if check.is_ok else "NOT OK", check.name, check.detail) for check in checks]
        print_table(("", "CHECK", "FOUND"), rows, "")
    if not is_well:
        sys.exit(1)


async def _examine(settings: Settings, grace_ms: int) -> list[Check]:
    database = Database(settings.require_database_url(), "doctor", size=1, keys=SecretKeys(settings.secrets_key))
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
