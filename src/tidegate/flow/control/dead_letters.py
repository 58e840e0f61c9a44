"""The operator's verbs for dead letters: replay one, schedule the replay of many at a rate, stop scheduled replays."""

from __future__ import annotations

import uuid
from functools import partial
from typing import NamedTuple

import msgspec

from tidegate.errors import Conflict, FieldError, InvalidInput, NotFound
from tidegate.flow.keep import replay
from tidegate.model.ids import DeadLetterId
from tidegate.store import audit, dead_letters
from tidegate.store.db import Connection, Database
from tidegate.store.dead_letters import DeadLetterFilters, LetterKind, Scheduled
from tidegate.telemetry.logs import logger

MIN_RATE, MAX_RATE = 0.001, 1000.0

_log = logger("control")


class LetterReplayed(NamedTuple):
    """The kind of the dead letter, and what it was replayed into; None: its run waits for a free slot of its
    trigger."""

    kind: LetterKind
    into: uuid.UUID | None


async def replay_letter(
    database: Database, letter_id: DeadLetterId, actor: str, *, force: bool = False
) -> LetterReplayed:
    """Replay one dead letter now. Conflict when it was replayed before (unless forced), or cannot be replayed, with the
    reason."""
    done = await database.run(partial(_replay, letter_id=letter_id, actor=actor, force=force))
    _log.info("dead_letter.replayed", dead_letter_id=str(letter_id), kind=done.kind, into=str(done.into), actor=actor)
    return done


async def replay_letters(database: Database, filters: DeadLetterFilters, actor: str, *, rate: float) -> Scheduled:
    """Schedule the replay of every dead letter that the filters select, `rate` of them per second, oldest first."""
    check_rate(rate)
    scheduled = await database.run(partial(_schedule, filters=filters, actor=actor, rate=rate))
    _log.info("dead_letters.replay_scheduled", count=scheduled.total, rate=rate, actor=actor)
    return scheduled


async def preview_replay(database: Database, filters: DeadLetterFilters, *, rate: float) -> int:
    """How many dead letters `replay_letters` would replay."""
    check_rate(rate)
    async with database.transaction() as connection:
        return len(await dead_letters.lock_matching(connection, filters))


async def stop_replays(database: Database, actor: str) -> int:
    """Cancel every scheduled replay that is not done yet; how many."""

    async def change(connection: Connection) -> int:
        count = await dead_letters.unschedule(connection)
        await audit.insert(connection, actor=actor, action="dead_letters.stop", subject="*", after={"count": count})
        return count

    count = await database.run(change)
    _log.info("dead_letters.replay_stopped", count=count, actor=actor)
    return count


def check_rate(rate: float) -> None:
    """Raises InvalidInput when the rate is out of bounds."""
    if not MIN_RATE <= rate <= MAX_RATE:
        problem = FieldError("rate", f"must lie between {MIN_RATE:g} and {MAX_RATE:g} per second, not {rate:g}")
        raise InvalidInput("the replay is not valid", [problem])


async def _replay(connection: Connection, letter_id: DeadLetterId, actor: str, force: bool) -> LetterReplayed:
    letter = await dead_letters.lock(connection, letter_id)
    if letter is None:
        raise NotFound(f"no dead letter {letter_id}")
    if letter.newer_id is not None:
        raise Conflict(f"it failed again since, as dead letter {letter.newer_id}: replay that one")
    if letter.replayed_at is not None and not force:
        when = letter.replayed_at.isoformat(timespec="seconds")
        raise Conflict(
            f"dead letter {letter_id} was replayed by {letter.replayed_by} at {when}; force it to do so again"
        )
    into = (await replay.perform(connection, letter, actor)).into
    if into is None:  # a worker replays it later; the audit row names the operator
        await audit.insert(
            connection, actor=actor, action="dead_letter.schedule", subject=str(letter_id),
            before={"replayed_at": letter.replayed_at}, after={"kind": letter.kind, "waits_for": "a slot"},
        )  # fmt: skip
    return LetterReplayed(letter.kind, into)


async def _schedule(connection: Connection, filters: DeadLetterFilters, actor: str, rate: float) -> Scheduled:
    ids = await dead_letters.lock_matching(connection, filters)
    scheduled = await dead_letters.schedule(connection, ids, apart_ms=1000 / rate, actor=actor)
    asked = {name: value for name, value in filters._asdict().items() if value is not None}
    after = {"filters": msgspec.to_builtins(asked), "rate": rate, "count": scheduled.total}
    await audit.insert(connection, actor=actor, action="dead_letters.replay", subject="*", after=after)
    return scheduled
