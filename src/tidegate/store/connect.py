"""Opens connections: to one of several hosts, directly or through a pooler.

A pooler that keeps no session for a connection (pgbouncer with `pool_mode = transaction`) gives every transaction
another session, which other clients have used and will use. What is set for a session is lost there or, worse, found by
others; a statement prepared in one session does not exist in the next. So each new connection is asked whether a pooler
is in between, and then each transaction is given its settings itself.
"""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlunsplit

import asyncpg
import msgspec

from tidegate.errors import SettingsError
from tidegate.model.server_urls import split_database_url

# How many times as long as one statement a whole transaction may take. The server measures a statement only once it
# has all of it: for the rest of one that was cut it waits, with the locks held; before version 17 without end.
STATEMENTS_TO_TRANSACTION = 2
# For each host.
CONNECT_SECONDS = 3.0
# How long a notification to one's own session may take, if there is such a session.
ECHO_SECONDS = 2.0
# A peer that is gone is noticed after 5 + 3 x 2 s of silence, also while a statement runs; data not taken, after 10 s.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
_CACHED_STATEMENTS = 100  # the driver's default

_SET_UP = "select set_config(name, value, false) from unnest($1::text[], $2::text[]) as s (name, value)"
# Of no use, or refused, inside a transaction; a pooler knows the name by itself.
_ONLY_OF_SESSIONS = {"application_name", "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count"}


NO_SESSION = (
    "a pooler in front of the database gives every transaction another session (pgbouncer: pool_mode = transaction), "
    "but LISTEN and `tidegate migrate` need one of their own: set TIDEGATE_DATABASE_DIRECT_URL to Postgres itself"
)
OTHER_DATABASE = (
    "notifications sent through TIDEGATE_DATABASE_URL do not arrive at TIDEGATE_DATABASE_DIRECT_URL: both must be the "
    "same database"
)


class NoSession(SettingsError):
    """What needs a session cannot be done behind this pooler."""


class Pooling(NamedTuple):
    """What is between this process and the database; `lacking`: why there are no sessions for LISTEN and migrations."""

    is_pooled: bool
    is_tracked: bool
    has_direct_url: bool
    lacking: str | None


class Session(asyncpg.Connection):  # type: ignore[misc]
    """A connection. If it is pooled, each of its transactions begins with `local_settings`."""

    is_pooled = False
    # Whether the pooler keeps track of the names of prepared statements; then it keeps no sessions.
    is_tracked = False
    # Whether it was used and given back before.
    is_used = False
    local_settings = ""
    settings: dict[str, str] = {}  # noqa: RUF012 - replaced as a whole

    async def set_up_again(self) -> None:
        """Give the session its settings again, after a RESET ALL."""
        await self.execute(_SET_UP, list(self.settings), list(self.settings.values()))


class Connector:
    """Opens connections to one address, all with the same settings. Each attempt begins at the host that worked last,
    or after the one at which the last attempt was given up."""

    def __init__(self, url: str, settings: dict[str, str], answer_seconds: float) -> None:
        self._settings = settings
        self._answer_seconds = answer_seconds
        self._hosts = hosts(url)
        self._next = 0
        self._cached = _CACHED_STATEMENTS
        # Whether the last connection went through a pooler, and whether that keeps track of statements; None: none yet.
        self.is_pooled: bool | None = None
        self.is_tracked = False

    async def connect(self, answer_seconds: float | None = None) -> Session:
        """A connection to the first host that gives one."""
        for _ in self._hosts:
            at = self._next
            self._next = (at + 1) % len(self._hosts)  # also when this attempt is cancelled: a host may be silent
            try:
                session = await self._open(self._hosts[at], answer_seconds or self._answer_seconds)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InternalClientError) as exc:
                failure: Exception = exc
                continue
            self._next = at
            return session
        raise failure

    async def session(self, answer_seconds: float | None = None) -> Session:
        """A connection that keeps its session. NoSession behind a pooler that keeps none."""
        session = await self.connect(answer_seconds)
        if session.is_pooled:
            try:
                if session.is_tracked or not await self._has_session(session):
                    raise NoSession(NO_SESSION)
                await self._set_session(session)
            except BaseException:
                session.terminate()
                raise
        return session

    async def _has_session(self, session: Session) -> bool:
        other = await self.connect()
        try:
            return await echoes(session, other.execute)
        finally:
            other.terminate()

    async def _open(self, url: str, answer_seconds: float) -> Session:
        while True:
            cached = self._cached  # of this connection; another one that is opened meanwhile may change it
            session: Session = await asyncpg.connect(
                url,
                timeout=CONNECT_SECONDS,
                command_timeout=answer_seconds,
                server_settings={"application_name": self._settings["application_name"]},
                statement_cache_size=cached,
                connection_class=Session,
            )
            try:
                _keep_alive(session._transport.get_extra_info("socket"))  # the driver has no other way to its socket
                if await self._set_up(session, is_caching=cached > 0):
                    return session
                self._cached = 0
            except BaseException:
                session.terminate()  # the driver would wait for the server to agree
                raise
            session.terminate()

    async def _set_up(self, session: Session, *, is_caching: bool) -> bool:
        """Whether the session can be used as it was opened. It is set up by statements: a pooler may refuse or drop
        what is asked for when a connection begins."""
        same = await session.execute(f"select where pg_backend_pid() = {session.get_server_pid()}")
        session.is_pooled = self.is_pooled = same != "SELECT 1"  # a pooler makes up the id that it tells
        if not session.is_pooled:
            await self._set_session(session)
            await _set_codecs(session)
            return True
        session.local_settings = "; ".join(
            f"set local {name} = '{value}'"
            for name, value in self._of(session).items()
            if name not in _ONLY_OF_SESSIONS
        )
        await session.execute("begin")
        session.is_tracked = self.is_tracked = await _is_tracked(session)
        if is_usable := session.is_tracked or not is_caching:
            await _set_codecs(session)
        await session.execute("commit")
        return is_usable

    async def _set_session(self, session: Session) -> None:
        session.settings = self._of(session)
        await session.set_up_again()

    def _of(self, session: Session) -> dict[str, str]:
        if session.get_server_version().major >= 17:
            return self._settings
        return {name: value for name, value in self._settings.items() if name != "transaction_timeout"}


async def echoes(session: Session, notify: Callable[[str], Awaitable[object]]) -> bool:
    """Whether a notification from elsewhere arrives here while nothing is done: not if a pooler keeps no session."""
    channel, heard = f"tidegate_echo_{uuid.uuid4().hex}", asyncio.Event()

    def hear(*_: object) -> None:
        heard.set()

    await session.add_listener(channel, hear)
    try:
        await notify(f"notify {channel}")
        return await is_set(heard, ECHO_SECONDS)
    finally:
        await session.remove_listener(channel, hear)


async def is_set(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event is set within the time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


def hosts(url: str) -> list[str]:
    """An address for each host of a URL. Of several, one is used that accepts writes, unless the URL says which."""
    netloc, parts = split_database_url(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    login, at, place = netloc.rpartition("@")
    if "," in place:
        places: list[tuple[str, dict[str, str]]] = [(f"{login}{at}{host}", {}) for host in place.split(",")]
    elif "," in query.get("host", ""):
        names, ports = query["host"].split(","), query.get("port", "").split(",")
        ports = ports * len(names) if len(ports) == 1 else ports
        if len(ports) != len(names):
            raise asyncpg.ClientConfigurationError(f"it has {len(names)} hosts and {len(ports)} ports")
        places = [
            (netloc, {"host": name} | ({"port": port} if port else {})) for name, port in zip(names, ports, strict=True)
        ]
    else:
        return [url]
    query = {"target_session_attrs": "read-write"} | query
    return [urlunsplit(parts._replace(netloc=whole, query=urlencode(query | own))) for whole, own in places]


def session_settings(role: str, lock_timeout_ms: int, statement_seconds: float) -> dict[str, str]:
    """What every session, or transaction, of this role is given."""
    statement_ms = max(1000, round(statement_seconds * 1000))
    return {
        "application_name": f"tidegate-{role}",
        "timezone": "UTC",
        # An acknowledged event is on disk: whatever the server's default is, our commits wait for the flush.
        "synchronous_commit": "on",
        "statement_timeout": f"{round(statement_seconds * 1000)}ms",
        "lock_timeout": f"{lock_timeout_ms}ms",
        # So that the server, too, lets go of the locks of a client that is gone, or cannot be heard.
        "idle_in_transaction_session_timeout": f"{statement_ms}ms",
        "transaction_timeout": f"{STATEMENTS_TO_TRANSACTION * statement_ms}ms",
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
        "jit": "off",
        # Statements are prepared once; planning it again costs more than running it. Only lists, whose filters may be
        # null, and statements of users' functions are better off with a plan of their own.
        "plan_cache_mode": "auto" if role in ("api", "transaction") else "force_generic_plan",
        # A plan is kept while a new day's partition grows from nothing to millions of rows: what batches look up, they
        # look up by an index, whatever the size was when the plan was made.
        "enable_seqscan": "off" if role in ("worker", "ingest", "prune") else "on",
    }


async def _is_tracked(session: Session) -> bool:
    """Whether a pooler gives prepared statements names of its own, by which it finds them in every session."""
    name = f"tidegate_{uuid.uuid4().hex}"
    statement = await session.prepare("select", name=name)
    is_ours = await session.execute(f"select from pg_prepared_statements where name = '{name}'") == "SELECT 1"
    if is_ours:
        await session.execute(f"deallocate {name}")
    del statement
    return not is_ours


async def _set_codecs(session: Session) -> None:
    for kind in ("jsonb", "json"):
        await session.set_type_codec(
            kind, schema="pg_catalog", encoder=_encode_json, decoder=msgspec.json.decode, format="text"
        )


def _keep_alive(connected: socket.socket | None) -> None:
    """Have the kernel notice that the other side is gone."""
    if connected is None or connected.family == socket.AF_UNIX:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not every system has every one
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _encode_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
