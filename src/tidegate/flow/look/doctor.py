"""Doctor: check that everything the guarantees depend on is in order. Facts are read, then judged (pure), one line
each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from tidegate.clock import monotonic, utc_now
from tidegate.errors import SchemaError
from tidegate.flow.keep.secrets import plain_text, unreadable_text
from tidegate.flow.look import health
from tidegate.model.health import HEALTH, HealthPolicy
from tidegate.store import doctor, durability, migrate, retention, secrets
from tidegate.store.connect import Pooling
from tidegate.store.db import Connection, Database
from tidegate.store.doctor import ORPHANS, Orphans, ServerFacts
from tidegate.store.health import Alive, QueueDepth
from tidegate.store.retention import HistorySpan
from tidegate.store.runs import VersionHeld
from tidegate.store.secrets import Survey
from tidegate.store.workers import Unserved

# A row younger than this may still be in progress: it is not an orphan yet.
GRACE_MS = 60_000
OLDEST_POSTGRES = 140_000
# This machine's clock schedules nothing, but a wrong one makes ids and logs misleading.
MAX_CLOCK_OFFSET_SECONDS = 5.0
# The most locks that one statement takes: so many for each day of history that it may read, and others.
LOCKS_PER_DAY, OTHER_LOCKS = 2, 30


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check."""

    name: str
    is_ok: bool
    detail: str


class DoctorFacts(NamedTuple):
    """What is judged, except the schema."""

    server: ServerFacts
    clock_offset_seconds: float
    own_clock_offset_seconds: float
    missing_guards: Sequence[str]
    orphans: Sequence[Orphans]
    queues: Mapping[str, QueueDepth]
    workers: Alive
    unserved: Sequence[Unserved]
    history: HistorySpan
    version_held: Sequence[VersionHeld] = ()
    standby_trouble: str | None = None


async def examine(
    database: Database, policy: HealthPolicy = HEALTH, *, grace_ms: int = GRACE_MS, allow_unsafe: bool = False
) -> list[Check]:
    """Every check. Without a current schema, only the check of the schema."""
    checks, is_current = await _schema(database)
    if not is_current:
        return checks
    async with database.transaction() as connection:
        found = await facts(connection, policy, grace_ms)
        stored = await secrets.survey(connection, database.keys)
    checks += judge(found, policy, allow_unsafe=allow_unsafe)
    return [*checks, stored_secrets(stored, has_key=bool(database.keys.names)), sessions(await database.pooling())]


async def _schema(database: Database) -> tuple[list[Check], bool]:
    try:
        found = await migrate.status(database)
    except SchemaError as exc:
        return [Check(name="schema", is_ok=False, detail=str(exc))], False
    detail = f"version {found.version}, this Tidegate knows {migrate.latest()}"
    if found.missing:
        detail += "; run `tidegate migrate`"
    elif found.pending:
        detail += "; `tidegate migrate --status` says what waits for processes of an earlier version"
    return [Check(name="schema", is_ok=not found.missing, detail=detail)], not found.missing


async def facts(connection: Connection, policy: HealthPolicy, grace_ms: int) -> DoctorFacts:
    """The input of the checks, read in one transaction."""
    before, at = utc_now(), monotonic()
    server = await doctor.server(connection)
    taken = timedelta(seconds=monotonic() - at)
    seen = await health.facts(connection, policy)
    return DoctorFacts(
        server=server,
        clock_offset_seconds=_offset(before, taken, server.clock),
        own_clock_offset_seconds=await doctor.own_clock_offset(connection),
        missing_guards=await doctor.missing_guards(connection),
        orphans=await doctor.orphans(connection, grace_ms),
        queues=seen.queues,
        workers=seen.workers,
        unserved=seen.unserved,
        history=await retention.span(connection),
        version_held=seen.version_held,
        standby_trouble=await durability.standby_trouble(connection),
    )


def _offset(before: datetime, taken: timedelta, theirs: datetime) -> float:
    """How far our clock is ahead of theirs, allowing for the round trip: 0 when they may be equal."""
    if before <= theirs <= before + taken:
        return 0.0
    nearest = before if theirs < before else before + taken
    return (nearest - theirs).total_seconds()


def judge(found: DoctorFacts, policy: HealthPolicy = HEALTH, *, allow_unsafe: bool = False) -> list[Check]:
    """The checks for these facts."""
    return [*_server(found, allow_unsafe), *_history(found), *_rows(found), *_lag(found, policy)]


def _server(found: DoctorFacts, allow_unsafe: bool) -> Iterator[Check]:
    server = found.server
    yield Check(
        name="postgres",
        is_ok=server.version >= OLDEST_POSTGRES and not server.is_read_only,
        detail=f"version {server.version_text}" + (", read-only: nothing can be accepted" * server.is_read_only),
    )
    yield _durability(found, allow_unsafe)
    yield Check(
        name="connections",
        is_ok=server.connections < server.max_connections * 0.9,
        detail=f"{server.connections} of {server.max_connections} in use",
    )
    offset = found.clock_offset_seconds
    yield Check(
        name="clock",
        is_ok=abs(offset) <= MAX_CLOCK_OFFSET_SECONDS,
        detail=f"this machine is {abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} the database"
        if offset
        else "this machine and the database agree",
    )
    yield Check(
        name="scheduling clock",
        is_ok=abs(found.own_clock_offset_seconds) <= 1,
        detail=f"tidegate.now() is {found.own_clock_offset_seconds:+.3f} s from the server's clock",
    )
    missing = ", ".join(found.missing_guards)
    yield Check(
        name="unique indexes",
        is_ok=not missing,
        detail=f"missing or not valid: {missing}" if missing else "all indexes that prevent duplicates are valid",
    )


def _durability(found: DoctorFacts, allow_unsafe: bool) -> Check:
    server = found.server
    is_safe = server.fsync == "on" and server.full_page_writes == "on" and server.synchronous_commit != "off"
    standby = server.synchronous_standby_names
    return Check(
        name="durability",
        is_ok=(is_safe or allow_unsafe) and not found.standby_trouble,
        detail=f"fsync={server.fsync}, full_page_writes={server.full_page_writes}, "
        f"synchronous_commit={server.synchronous_commit} in our sessions, "
        + (f"waits for standby {standby}" if standby else "no synchronous standby")
        + (" (unsafe is allowed)" if allow_unsafe and not is_safe else "")
        + (f"; {found.standby_trouble}" if found.standby_trouble else ""),
    )


def _history(found: DoctorFacts) -> Iterator[Check]:
    first, last, without = found.history
    tomorrow = (found.server.clock + timedelta(days=1)).date()
    without_a_day = f"; about {without} events have no day and are pruned row by row" if without else ""
    yield Check(
        name="history",
        is_ok=last is not None and last >= tomorrow,
        detail=f"partitions from {first} to {last}{without_a_day}"
        if last is not None and last >= tomorrow
        else f"no partition for {tomorrow}: workers add them, and none did; nothing is refused, but pruning is slow",
    )

    days = (last - first).days + 1 if first and last else 0
    needed = found.server.connections * (LOCKS_PER_DAY * days + OTHER_LOCKS)
    is_enough = found.server.max_locks >= needed
    yield Check(
        name="locks",
        is_ok=is_enough,
        detail=f"room for {found.server.max_locks:,}; {found.server.connections} connections may need {needed:,} with "
        f"{days} days of history"
        + ("" if is_enough else ": raise max_locks_per_transaction (256), and restart the server"),
    )


def _rows(found: DoctorFacts) -> Iterator[Check]:
    for one in found.orphans:
        example = f", e.g. {one.example}" if one.example else ""
        yield Check(name=one.name, is_ok=one.total == 0, detail=f"{one.total} {ORPHANS[one.name]}{example}")


def _lag(found: DoctorFacts, policy: HealthPolicy) -> Iterator[Check]:
    for name, depth in found.queues.items():
        seconds = depth.oldest_due_age_seconds
        is_late = 0 < policy.due_age_degraded_ms <= seconds * 1000
        yield Check(
            name=f"due lag of {name}",
            is_ok=not is_late,
            detail=f"{depth.ready} due, the oldest for {seconds:.1f} s; {depth.delayed} later, {depth.active} claimed",
        )
    due = sum(depth.ready for depth in found.queues.values())
    yield Check(
        name="workers",
        is_ok=found.workers.alive > 0 or due == 0,
        detail=f"{found.workers.alive} active in the last {policy.worker_degraded_ms / 1000:g} s",
    )
    yield Check(name="resuming", is_ok=True, detail=_resuming(found, due))
    unserved = ", ".join(f"{one.workflow} ({one.waiting})" for one in found.unserved)
    yield Check(
        name="workflows",
        is_ok=not unserved,
        detail=f"have due runs, and no worker takes them: {unserved}" if unserved else "every due run has a worker",
    )
    yield _versions(found)


def _versions(found: DoctorFacts) -> Check:
    held = ", ".join(
        f"{one.workflow} version {' or '.join(one.versions)} ({one.waiting}, e.g. {one.example})"
        for one in found.version_held
    )
    return Check(
        name="versions",
        is_ok=not held,
        detail=f"runs wait for code that fits their steps, which no worker has: {held}" if held else "every run fits",
    )


def _resuming(found: DoctorFacts, due: int) -> str:
    """What the first worker will do after all were stopped, or a backup was restored."""
    runs, ticks = (
        next((one.total for one in found.orphans if one.name == name), 0)
        for name in ("runs_claimed_by_nobody", "ticks_not_published_in_time")
    )
    if not runs and not ticks:
        return "no run and no schedule was left behind"
    return (
        f"when a worker starts: {runs} runs that were in progress are executed again after their last stored step, "
        f"{ticks} schedules publish the latest tick they missed, and {due} items are due"
    )


def stored_secrets(found: Survey, *, has_key: bool) -> Check:
    """How the secrets of webhooks and http workflows are stored. Without a key, plaintext is the operator's choice."""
    if found.unreadable:
        detail = unreadable_text(found)
    elif found.plain:
        detail = plain_text(found)
    elif found.old:
        first = f"encrypted with another key than the first: {found.old}"
        detail = f"{first}; run `tidegate secrets rotate` before removing that key"
    else:
        detail = "encrypted with the first key" if has_key else "none are stored"
    return Check(name="secrets", is_ok=not found.unreadable and not (has_key and found.plain), detail=detail)


def sessions(found: Pooling) -> Check:
    """Whether LISTEN and migrations have the session they need. Without it wake-ups are late; nothing is lost."""
    if found.lacking:
        return Check(
            name="sessions", is_ok=False, detail=f"{found.lacking}. Until then wake-ups come with the next poll"
        )
    if not found.is_pooled:
        return Check(name="sessions", is_ok=True, detail="no pooler in front of the database")
    prepared = "it keeps prepared statements" if found.is_tracked else "statements are planned each time"
    kept = "LISTEN and migrations use TIDEGATE_DATABASE_DIRECT_URL" if found.has_direct_url else "it keeps sessions"
    return Check(name="sessions", is_ok=True, detail=f"through a pooler: {kept}, {prepared}")


def eviction(policy: str | None, error: str | None = None) -> Check:
    """What Redis does when it is full. Losing its data loses no work, but wake-ups are late."""
    if error is not None:
        return Check(name="redis", is_ok=False, detail=f"does not answer ({error}): wake-ups are late, nothing is lost")
    return Check(
        name="redis",
        is_ok=policy == "noeviction",
        detail=f"maxmemory-policy is {policy}" + ("" if policy == "noeviction" else "; it should be noeviction"),
    )
