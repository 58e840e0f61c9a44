"""Whether the database keeps what it acknowledges."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.errors import SettingsError
from tidegate.store.db import Connection, Database

# A commit that has waited for this long for its standbys is no longer one that is merely slow.
STANDBY_SECONDS = 3

_SAFE = {"fsync": {"on"}, "full_page_writes": {"on"}, "synchronous_commit": {"on", "remote_apply"}}


async def settings(connection: Connection) -> dict[str, str]:
    """The durability settings, as the session has them."""
    rows = await connection.fetch(
        "select name, current_setting(name) as setting from unnest($1::text[]) as name", list(_SAFE)
    )
    return {row["name"]: row["setting"] for row in rows}


def unsafe(found: Mapping[str, str]) -> str | None:
    """What in these settings may lose acknowledged events in a crash, if anything."""
    for name, value in found.items():
        if value not in _SAFE[name]:
            return f"the database runs with {name}={value}: a crash could lose accepted events"
    return None


async def confirm(connection: Connection) -> None:
    """Let this transaction's commit wait until the synchronous standbys, if there are any, have all that it has seen. A
    session that was ended while it waited for them leaves a commit that is visible here and missing there."""
    await connection.execute(
        "select pg_logical_emit_message(true, 'tidegate', '') where current_setting('synchronous_standby_names') <> ''"
    )


# A role without pg_read_all_stats sees that there are standbys, not which are synchronous; of sessions, its own.
_STANDBYS = r"""
select s.names, s.needed,
       (select count(*) from pg_catalog.pg_stat_replication r
         where coalesce(r.sync_state, 'sync') in ('sync', 'quorum')) as present,
       (select count(*) from pg_catalog.pg_stat_activity a
         where a.wait_event = 'SyncRep' and a.query_start < clock_timestamp() - make_interval(secs => $1)) as waiting
  from (select n.names, coalesce(substring(n.names from '([0-9]+)\s*\(')::int, 1) as needed
          from current_setting('synchronous_standby_names') as n (names)) s
 where s.names <> ''
"""


async def standby_trouble(connection: Connection) -> str | None:
    """Why commits wait for synchronous standbys, if they do. What only reads, or is rolled back, does not notice."""
    found = await connection.fetchrow(_STANDBYS, STANDBY_SECONDS)
    if found is None:
        return None
    lacks = ""
    if found["present"] < found["needed"]:
        lacks = f"{found['present']} of {found['needed']} connected"
    elif found["waiting"]:
        lacks = f"{found['waiting']} have waited for more than {STANDBY_SECONDS} s"
    if not lacks:
        return None
    return f"commits wait for a synchronous standby ({lacks}): start it, or change synchronous_standby_names"


async def is_read_only(connection: Connection) -> bool:
    """Whether nothing can be written: a standby, or a server that was set so."""
    return bool(
        await connection.fetchval("select pg_is_in_recovery() or current_setting('transaction_read_only')::boolean")
    )


async def require_safe(database: Database, *, allow_unsafe: bool) -> None:
    """Refuse a server that may lose acknowledged events in a crash."""
    if allow_unsafe:
        return
    async with database.connection() as connection:
        found = unsafe(await settings(connection))
    if found:
        raise SettingsError(
            f"{found}. Turn it on, or set TIDEGATE_ALLOW_UNSAFE_DURABILITY=true if that is what you want"
        )
