"""The check before every route: when it is open, what it keeps, and what it makes of a database that is away."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from tests.conftest import Clock
from tidegate.errors import (
    Conflict,
    Forbidden,
    InvalidInput,
    NotFound,
    Overloaded,
    TidegateError,
    Unauthorized,
    Unavailable,
)
from tidegate.flow import control
from tidegate.flow.accept import access as module
from tidegate.flow.accept import lookups
from tidegate.flow.accept.access import Access
from tidegate.model.token import Scope, secret_of
from tidegate.settings import Settings
from tidegate.store.db import Connection, Database

ON = Settings(auth="on")
HERE = [(b"host", b"127.0.0.1:8700")]


async def create(database: Database, name: str = "ci", scopes: tuple[Scope, ...] = ("read",), **more: Any) -> str:
    made = await control.create_token(database, {"name": name, "scopes": list(scopes), **more}, actor="ann")
    return made.secret


async def refusal(access: Access, authorization: str | None, needed: Scope = "read") -> TidegateError:
    with pytest.raises((Unauthorized, Forbidden)) as caught:
        await access.check(authorization, needed)
    return caught.value


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), False),
        (Settings(host="0.0.0.0"), False),
        (Settings(auth="on"), False),
        (Settings(auth="off"), True),
        (Settings(auth="off", host="::1"), True),
    ],
)
async def test_when_it_is_open(database: Database, settings: Settings, expected: bool) -> None:
    async def is_open() -> bool:
        try:
            return await Access(settings, database).check(None, "admin", HERE) is None
        except Unauthorized:
            return False

    assert await is_open() is expected
    await create(database)
    assert await is_open() is expected
    await control.revoke_token(database, "ci", actor="ann")
    assert await is_open() is expected


async def test_refusals(database: Database, clock: Clock) -> None:
    secret = await create(database, expires_in_ms=60_000)
    other = await create(database, "other", ("publish",), sources=["shop.*", "crm"])
    access = Access(ON, database)
    for authorization in (None, ""):
        error = await refusal(access, authorization)
        assert isinstance(error, Unauthorized) and not error.is_given
    for authorization in (
        secret,
        f"Basic {secret}",
        "Bearer",
        "Bearer x",
        f"Bearer {secret}x",
        f"Bearer {secret[:-1]}",
    ):
        error = await refusal(access, authorization)
        assert isinstance(error, Unauthorized) and error.is_given and secret not in str(error)
    principal = await access.check(f"bearer  {secret}", "read")
    assert principal is not None and principal.name == "ci" and principal.may_use("anything")
    error = await refusal(access, f"Bearer {secret}", "operate")
    assert isinstance(error, Forbidden) and error.needed == "operate" and "scope operate" in str(error)
    bound = await access.check(f"Bearer {other}", "publish")
    assert bound is not None
    takes = {"shop.api": True, "crm": True, "crm.x": False, "shop": False, "x.shop.api": False}
    assert {source: bound.may_use(source) for source in takes} == takes
    await clock.advance(60_000)
    assert "expired" in str(await refusal(Access(ON, database), f"Bearer {secret}"))
    await control.revoke_token(database, "other", actor="ann")
    assert "revoked" in str(await refusal(Access(ON, database), f"Bearer {other}", "publish"))


async def test_one_look_serves_many_and_ends(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = await create(database)
    looks = 0
    by_hash = module.tokens.by_hash

    async def counted(connection: Connection, hashed: bytes) -> Any:
        nonlocal looks
        looks += 1
        return await by_hash(connection, hashed)

    monkeypatch.setattr(module.tokens, "by_hash", counted)
    access = Access(ON, database)
    await asyncio.gather(*(access.check(f"Bearer {secret}", "read") for _ in range(50)))
    assert looks == 1
    await control.revoke_token(database, "ci", actor="ann")
    assert lookups.KEEP_SECONDS == 1
    monkeypatch.setattr(lookups, "KEEP_SECONDS", -1)
    access.forget()
    await refusal(access, f"Bearer {secret}")
    await refusal(access, f"Bearer {secret}")
    assert looks == 3


async def test_a_database_that_is_away(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known stands (metrics must be readable then); what was not is refused."""
    monkeypatch.setattr(lookups, "KEEP_SECONDS", -1)
    open_access, access = Access(Settings(auth="off"), database), Access(ON, database)
    secret, unknown = await create(database), await create(database, "new")
    await access.check(f"Bearer {secret}", "read")

    async def away(*_: Any) -> Any:
        raise Unavailable("the database cannot be reached")

    monkeypatch.setattr(module.tokens, "by_hash", away)
    for _ in range(3):
        assert await access.check(f"Bearer {secret}", "read") is not None
        assert await open_access.check(None, "read", HERE) is None
    await refusal(access, f"Bearer {secret}", "admin")
    for _ in range(2):
        with pytest.raises(Unavailable):
            await access.check(f"Bearer {unknown}", "read")


async def test_one_who_goes_away_takes_nobody_along(database: Database) -> None:
    secret = await create(database)
    access = Access(ON, database)
    first = asyncio.create_task(access.check(f"Bearer {secret}", "read"))
    await asyncio.sleep(0)
    second = asyncio.create_task(access.check(f"Bearer {secret}", "read"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is not None


async def test_verbs_and_their_record(database: Database, connection: Connection) -> None:
    secret = await create(database, scopes=("publish",), sources=["shop.*"])
    with pytest.raises(Conflict):
        await create(database)
    for wrong in ({"scopes": None}, {"scopes": ["root"]}, {"expires_in_ms": 0}, {"expires_at": "2020-01-01T00:00:00Z"}):
        with pytest.raises(InvalidInput):
            await control.create_token(database, {"name": "x", "scopes": ["read"]} | wrong, actor="ann")
    for unknown in ("nobody", secret, "0198f2a0-0000-7000-8000-000000000000"):
        with pytest.raises(NotFound) as caught:
            await control.revoke_token(database, unknown, actor="ann")
        assert unknown not in str(caught.value)
    revoked = await control.revoke_token(database, "ci", actor="bob")
    assert await control.revoke_token(database, str(revoked.id), actor="eve") == revoked
    await create(database)  # the name is free again
    rows = await connection.fetch("select * from tidegate.audit_log order by id")
    assert [(r["actor"], r["action"]) for r in rows] == [
        ("ann", "token.create"), ("bob", "token.revoke"), ("ann", "token.create"),
    ]  # fmt: skip
    assert rows[0]["after"]["sources"] == ["shop.*"] and rows[1]["before"]["revoked_at"] is None
    assert rows[1]["after"]["revoked_at"] is not None
    assert secret not in str([dict(r) for r in rows])


async def test_names_stay_unique_under_a_race(database: Database) -> None:
    done = await asyncio.gather(*(create(database) for _ in range(5)), return_exceptions=True)
    assert sorted(isinstance(one, Conflict) for one in done) == [False, True, True, True, True]


async def test_last_use_is_noted_about_once_a_minute(database: Database, connection: Connection, clock: Clock) -> None:
    secret = await create(database)
    seen = []
    for ms in (0, 30_000, 31_000):
        await clock.advance(ms)
        await Access(ON, database).check(f"Bearer {secret}", "read")
        seen.append(await connection.fetchval("select last_used_at from tidegate.api_tokens"))
    assert seen[0] == seen[1] and seen[2] == clock.now


@pytest.mark.parametrize(
    "lock",
    ["lock table tidegate.api_tokens in share row exclusive mode", "select 1 from tidegate.api_tokens for update"],
)
async def test_a_use_that_cannot_be_noted_refuses_nobody(database_url: str, lock: str) -> None:
    """Tokens are being changed, or another process notes the same."""
    hasty = Database(database_url, "api", size=3, lock_timeout_ms=50)
    try:
        secret = await create(hasty)
        async with hasty.transaction() as other:
            await other.execute(lock)
            principal = await Access(ON, hasty).check(f"Bearer {secret}", "read")
        assert principal is not None and principal.name == "ci"
    finally:
        await hasty.close()


async def test_strangers_do_not_hold_up_those_who_are_known(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens are invented, a few are looked up at once, and the rest is turned away."""
    secret = await create(database)
    access = Access(ON, database)
    await access.check(f"Bearer {secret}", "read")
    by_hash, go_on, most, now = module.tokens.by_hash, asyncio.Event(), 0, 0
    known = module.secret_hash(secret)

    async def slow(connection: Connection, hashed: bytes) -> Any:
        nonlocal most, now
        if hashed != known:
            now += 1
            most = max(most, now)
            await go_on.wait()
            now -= 1
        return await by_hash(connection, hashed)

    monkeypatch.setattr(module.tokens, "by_hash", slow)
    monkeypatch.setattr(lookups, "KEEP_SECONDS", -1)
    invented = [secret_of(f"{i:043}") for i in range(300)]
    asking = [asyncio.create_task(access.check(f"Bearer {one}", "read")) for one in invented]
    for _ in range(5):
        assert await access.check(f"Bearer {secret}", "read") is not None
    go_on.set()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    kinds = [type(answer) for answer in answers]
    assert 0 < most <= lookups.AT_ONCE
    assert set(kinds) == {Unauthorized, Overloaded}
    assert kinds.count(Unauthorized) == lookups.AT_ONCE + lookups.MAX_WAITING


async def test_invented_tokens_do_not_make_us_forget_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MAX_KEPT", 5)
    secret = await create(database)
    access = Access(ON, database)
    await access.check(f"Bearer {secret}", "read")
    for i in range(23):
        await refusal(access, f"Bearer {secret_of(f'{i:043}')}")
    assert module.secret_hash(secret) in access._tokens and len(access._tokens) <= 5


async def test_nobody_without_a_token_learns_where_the_database_is() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        unused_port = free.getsockname()[1]
    away = Database(f"postgresql://someone@127.0.0.1:{unused_port}/x", "api", size=1)
    try:
        with pytest.raises(Unavailable) as caught:
            await Access(ON, away).check(f"Bearer {secret_of('0' * 43)}", "read", HERE)
        assert str(unused_port) not in str(caught.value) and "127.0.0.1" not in str(caught.value)
    finally:
        await away.close()
