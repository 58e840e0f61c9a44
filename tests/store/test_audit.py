"""The audit log in the database: rows are added, listed, and deleted by age alone."""

from __future__ import annotations

import asyncpg
import pytest

from tidegate.store import audit, retention
from tidegate.store.db import Connection


async def add(connection: Connection, count: int = 1, actor: str = "ann", action: str = "source.pause") -> None:
    for n in range(count):
        await audit.insert(connection, actor=actor, action=action, subject=f"s{n}", before={"n": n}, after=None)


@pytest.mark.parametrize(
    "statement",
    [
        "update tidegate.audit_log set actor = 'nobody'",
        "update tidegate.audit_log set after = null",
        "delete from tidegate.audit_log",
        "delete from tidegate.audit_log where at < now() - interval '10 years' or true",
        "truncate tidegate.audit_log",
        "insert into tidegate.audit_log select * from tidegate.audit_log on conflict (id) do update set actor = 'x'",
        "merge into tidegate.audit_log a using tidegate.audit_log b on a.id = b.id when matched then delete",
    ],
)
async def test_audit_update_denied(connection: Connection, statement: str) -> None:
    await add(connection, 2)
    await connection.execute("savepoint before")
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="append-only"):
        await connection.execute(statement)
    await connection.execute("rollback to savepoint before")
    left = sorted(await audit.list_page(connection), key=lambda one: one.subject)
    assert [(one.actor, one.before) for one in left] == [("ann", {"n": 0}), ("ann", {"n": 1})]


async def test_only_what_is_old_is_deleted_and_only_by_pruning(connection: Connection) -> None:
    await connection.execute(
        "insert into tidegate.audit_log (id, at, actor, action, subject) "
        "select tidegate.uuid7(), tidegate.now() - n * interval '1 day', 'ann', 'x', n::text "
        "from generate_series(1, 9) n"
    )
    assert await retention.delete_audit(connection, older_seconds=5 * 86_400 - 60, limit=3) == 3
    assert {one.subject for one in await audit.list_page(connection)} == set("123456")
    assert await retention.delete_audit(connection, older_seconds=5 * 86_400 - 60, limit=3) == 2
    assert await retention.delete_audit(connection, older_seconds=5 * 86_400 - 60, limit=3) == 0
    await connection.execute("savepoint before")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):  # it is off again when the function has ended
        await connection.execute("delete from tidegate.audit_log")
    await connection.execute("rollback to savepoint before")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="older_seconds"):
        await retention.delete_audit(connection, older_seconds=-1, limit=3)


async def test_pages_and_filters(connection: Connection) -> None:
    await add(connection, 5)
    await add(connection, 2, actor="bob", action="run.cancel")
    seen, cursor = [], None
    while page := await audit.list_page(connection, before_id=cursor, limit=2):
        seen += page
        cursor = page[-1].id
    assert [one.id for one in seen] == sorted((one.id for one in seen), reverse=True)
    assert sorted(one.subject for one in seen) == ["s0", "s0", "s1", "s1", "s2", "s3", "s4"]
    by_bob = await audit.list_page(connection, actor="bob")
    assert by_bob == await audit.list_page(connection, action="run.cancel") and len(by_bob) == 2
    assert {one.actor for one in await audit.list_page(connection, subject="s1")} == {"bob", "ann"}
    assert await audit.list_page(connection, actor="bob", subject="s4") == []
