"""Whether the database keeps what it acknowledges."""

from __future__ import annotations

from headgate.errors import SettingsError
from headgate.store.db import Database


async def settings(database: Database) -> dict[str, str]:
    """The server's durability settings."""
    async with database.connection() as connection:
        rows = await connection.fetch(
            "select name, setting from pg_settings where name in ('fsync', 'full_page_writes', 'synchronous_commit')"
        )
    return {row["name"]: row["setting"] for row in rows}


async def require_safe(database: Database, *, allow_unsafe: bool) -> None:
    """Refuse a server that may lose acknowledged events in a crash."""
    if allow_unsafe:
        return
    found = await settings(database)
    for name in ("fsync", "full_page_writes"):
        if found[name] != "on":
            raise SettingsError(
                f"the database runs with {name}={found[name]}: a crash could lose accepted events. Turn it on, or set "
                "HEADGATE_ALLOW_UNSAFE_DURABILITY=true if that is what you want"
            )
