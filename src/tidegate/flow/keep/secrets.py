"""Secrets at rest: encrypt all stored secrets with the first key, and report how they are stored.

Any number of processes may rotate at once while the system runs: a row is written only if it is unchanged since it was
read, and a process that has the old and the new key can read it before and after.
"""

from __future__ import annotations

import secrets as random
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import msgspec

from tidegate.errors import SettingsError
from tidegate.model.approval import KEY_BYTES
from tidegate.model.health import Notice
from tidegate.model.secrets import SETTING, SecretKeys
from tidegate.store import approvals, audit, locks, secrets
from tidegate.store.db import Connection, Database
from tidegate.store.secrets import Survey, Table
from tidegate.telemetry.logs import logger

BATCH = 50

_log = logger("secrets")


class Rotated(msgspec.Struct, frozen=True, kw_only=True):
    """How many webhooks, workflows and keys of links were encrypted again, how many already used the first key, and
    those with a secret that no key can read."""

    rotated: int
    current: int
    unreadable: list[str]


class _Renewed(NamedTuple):
    """The new content of a row, whether it differs, and whether a secret in it is unreadable."""

    after: Any
    is_changed: bool
    is_unreadable: bool


async def rotate(database: Database, *, actor: str, batch_size: int = BATCH) -> Rotated:
    """Encrypt every stored secret with the first key, plaintext ones too. SettingsError when there is no key."""
    if not database.keys.names:
        raise SettingsError(f"{SETTING} is not set; `tidegate secrets key` prints a key for it")
    seen, rotated, unreadable = set[str](), set[str](), set[str]()
    for table in get_args(Table):
        after = ""
        while page := await _page(database, table, after, batch_size):
            renewed = {name: _renewed(table, held, database.keys) for name, held in page.items()}
            wanted = {name: (page[name], new.after) for name, new in renewed.items() if new.is_changed}
            written = await _write(database, table, wanted)
            seen |= {f"{table} {name}" for name in page}
            rotated |= {f"{table} {name}" for name in written}
            unreadable |= {f"{table} {name}" for name, new in renewed.items() if new.is_unreadable}
            if written == wanted.keys():
                after = list(page)[-1]  # otherwise a row was changed meanwhile: the page is read again
    done = Rotated(rotated=len(rotated), current=len(seen - rotated - unreadable), unreadable=sorted(unreadable))
    counts = {"rotated": done.rotated, "current": done.current, "unreadable": len(done.unreadable)}
    async with database.connection() as connection:
        await audit.insert(connection, actor=actor, action="secrets.rotate", subject="*", after=counts)
    _log.warning("secrets.rotated", **counts, actor=actor)
    return done


async def renew_links(database: Database, *, actor: str) -> None:
    """Set another key for the links of approvals: those that were sent are no longer valid."""
    new = database.keys.seal(random.token_hex(KEY_BYTES))

    async def write(connection: Connection) -> None:
        await approvals.replace_key(connection, new)
        await audit.insert(connection, actor=actor, action="secrets.renew_links", subject="*")

    await database.run(write)
    _log.warning("secrets.links_renewed", actor=actor)


async def notices(connection: Connection, keys: SecretKeys) -> list[Notice]:
    """Warnings about stored secrets, as a process with these keys sees them."""
    found = await secrets.survey(connection, keys)
    warnings = []
    if found.unreadable:
        warnings.append(Notice(code="secrets_unreadable", message=unreadable_text(found)))
    if found.plain:
        warnings.append(Notice(code="secrets_in_plain", message=plain_text(found)))
    return warnings


async def log_notices(database: Database) -> None:
    """Log the warnings about stored secrets; called when a process starts."""
    async with database.connection() as connection:
        for notice in await notices(connection, database.keys):
            _log.warning("process.notice", code=notice.code, message=notice.message)


def unreadable_text(found: Survey) -> str:
    """Which secrets cannot be read, and what to do about it."""
    names = ", ".join(found.examples or ())
    more = f" and {found.unreadable - len(found.examples or ())} more" * (found.unreadable > len(found.examples or ()))
    return (
        f"secrets of {names}{more} are encrypted with a key that this process does not have: add it to {SETTING} "
        "(docs/operations/secrets.md). Until then such webhooks and links answer 503, and such workflows wait"
    )


def plain_text(found: Survey) -> str:
    """How many secrets are stored in plaintext, and what to do about it."""
    return (
        f"webhooks, workflows and keys whose secrets are stored in plaintext: {found.plain}; to encrypt them, set "
        f"{SETTING} and run `tidegate secrets rotate` (docs/operations/secrets.md)"
    )


async def _page(database: Database, table: Table, after: str, limit: int) -> dict[str, Any]:
    async with database.connection() as connection:
        return await secrets.list_held(connection, table, after, limit)


def _renewed(table: Table, held: Any, keys: SecretKeys) -> _Renewed:
    renewed: list[tuple[str, str]] = []

    def renew(stored: str) -> str:
        renewed.append((stored, keys.renew(stored)))
        return renewed[-1][1]

    after = secrets.changed(table, held, renew)
    return _Renewed(
        after,
        is_changed=any(old != new for old, new in renewed),
        is_unreadable=not all(keys.is_current(new) for _, new in renewed),
    )


async def _write(database: Database, table: Table, wanted: Mapping[str, tuple[Any, Any]]) -> set[str]:
    """The names of the rows that were written."""

    async def write(connection: Connection) -> set[str]:
        if table == "workflows":  # as every change of a definition does
            await locks.exclude_triggers(connection)
        return await secrets.replace(connection, table, wanted)

    return await database.run(write) if wanted else set()
