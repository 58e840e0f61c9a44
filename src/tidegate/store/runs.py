"""`workflow_runs`: claims with leases, fenced by a generation."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

import asyncpg
import msgspec

from tidegate.errors import first_line
from tidegate.model.ids import DefinitionId, EventId, RunId, TriggerId
from tidegate.model.run import SUSPECT_CRASHES, ClaimedRun, FinishedRun, Run, RunStatus
from tidegate.model.step import RunNotes, StepWrite, SuspendedRun
from tidegate.store.columns import column, same
from tidegate.store.db import Connection, Row
from tidegate.store.sql import load

_sql = load("runs")


async def claim_due(
    connection: Connection, *, definitions: Sequence[DefinitionId], limit: int, worker: str, lease_ms: int
) -> list[ClaimedRun]:
    """Claim due runs of the given workflows, suspects aside, until the lease ends."""
    rows = await connection.fetch(_sql["claim_due"], definitions, limit, worker, lease_ms, SUSPECT_CRASHES)
    return sorted((msgspec.convert(dict(row), ClaimedRun) for row in rows), key=lambda r: r.id)


async def claim_woken(
    connection: Connection,
    run_ids: Sequence[RunId],
    *,
    definitions: Sequence[DefinitionId],
    limit: int,
    worker: str,
    lease_ms: int,
) -> list[ClaimedRun]:
    """The same for runs that this transaction has locked and woken: those of them that are due."""
    rows = await connection.fetch(
        _sql["claim_woken"], definitions, limit, worker, lease_ms, SUSPECT_CRASHES, run_ids, min(run_ids), max(run_ids)
    )
    return sorted((msgspec.convert(dict(row), ClaimedRun) for row in rows), key=lambda r: r.id)


async def keep_claimed(
    connection: Connection, run_ids: Sequence[RunId], *, worker: str, lease_ms: int
) -> list[ClaimedRun]:
    """Those of the runs that the worker holds; their leases begin again."""
    rows = await connection.fetch(_sql["keep_claimed"], run_ids, worker, lease_ms, min(run_ids), max(run_ids))
    return sorted((msgspec.convert(dict(row), ClaimedRun) for row in rows), key=lambda r: r.id)


async def has_suspects(
    connection: Connection, definitions: Sequence[DefinitionId], *, worker: str, lease_ms: int
) -> bool:
    """Whether suspects of the given workflows are due that the worker may claim."""
    return bool(await connection.fetchval(_sql["has_suspects"], definitions, SUSPECT_CRASHES, worker, lease_ms))


class Suspect(NamedTuple):
    """A run to be executed alone, and how often in a row its workers have died."""

    run: ClaimedRun
    crashes: int


async def claim_suspect(
    connection: Connection, *, definitions: Sequence[DefinitionId], worker: str, lease_ms: int, is_counted: bool
) -> Suspect | None:
    """Claim a suspect of the given workflows; whether it counts as a trial if its worker dies."""
    row = await connection.fetchrow(
        _sql["claim_suspect"], definitions, SUSPECT_CRASHES, worker, lease_ms, int(is_counted)
    )
    if row is None:
        return None
    found = dict(row)
    crashes = found.pop("crashes")
    return Suspect(msgspec.convert(found, ClaimedRun), crashes)


async def pass_trial(connection: Connection, run: ClaimedRun) -> None:
    """Other runs may execute beside a run that was executed alone."""
    await connection.execute(_sql["pass_trial"], run.id, run.claim_generation)


async def cancel_requested(connection: Connection, run_ids: Sequence[RunId]) -> set[RunId]:
    """Those of the runs whose cancellation was asked for and that a worker still holds."""
    return {row[0] for row in await connection.fetch(_sql["cancel_requested"], run_ids)} if run_ids else set()


class KeptRun(NamedTuple):
    """A run that its worker still holds."""

    id: RunId
    is_renewed: bool
    cancel_requested: bool


async def renew(connection: Connection, held: Sequence[ClaimedRun], lease_ms: int) -> dict[RunId, KeptRun]:
    """Extend leases, but not of a run that another transaction is writing. The runs still held; the others belong to
    another worker."""
    rows = await connection.fetch(_sql["renew"], [r.id for r in held], [r.claim_generation for r in held], lease_ms)
    return {row[0]: KeptRun(*row) for row in rows}


class EndedRun(NamedTuple):
    """A run that has just ended, as its row says: the limits of its trigger may have changed while it was running."""

    id: RunId
    status: RunStatus
    trigger_id: TriggerId | None
    concurrency_key: str | None
    is_probe: bool
    event_id: EventId | None = None
    correlation_id: str | None = None
    is_asked_for: bool = False  # a trigger asks for the event of such an end


async def finish(connection: Connection, finished: Sequence[FinishedRun]) -> list[EndedRun]:
    """End runs that are still held; those ended."""
    return [EndedRun(*row) for row in await connection.fetch(_sql["finish"], *finish_columns(finished))]


def finish_columns(finished: Sequence[FinishedRun]) -> list[Sequence[object]]:
    """The parameters of statements that end runs."""
    return [
        [f.id for f in finished],
        [f.claim_generation for f in finished],
        column([f.status for f in finished], "succeeded"),
        column([f.output for f in finished]),
        column([f.error for f in finished]),
    ]


async def succeed(connection: Connection, finished: Sequence[FinishedRun], written: Sequence[StepWrite]) -> bool:
    """End runs that succeeded, with their last steps, which did too and are new. If that was not all of them, the
    caller must roll back: some are not held any more, or they, or their steps, are not so simple."""
    try:
        count = await connection.fetchval(
            _sql["succeed"],
            [f.id for f in finished],
            same([f.claim_generation for f in finished]),
            column([f.output for f in finished]),
            [w.id for w in written],
            [w.workflow_run_id for w in written],
            same([w.name for w in written]),
            column([w.result for w in written]),
        )
    except asyncpg.UniqueViolationError:
        return False
    return bool(count == len(finished))


async def ended_by(connection: Connection, finished: Sequence[FinishedRun]) -> set[RunId]:
    """Those of the runs that have ended already, by this very claim and in this way."""
    if not finished:
        return set()
    columns = [f.id for f in finished], [f.claim_generation for f in finished], [f.status for f in finished]
    return {row[0] for row in await connection.fetch(_sql["ended_by"], *columns)}


class KeptSuspension(NamedTuple):
    """A run that was suspended: whether it was woken since its claim, and the trigger and key of the slot that it gave
    back, if it holds one while it executes."""

    is_woken: bool
    trigger_id: TriggerId | None
    slot_key: str | None


async def suspend(connection: Connection, suspended: Sequence[SuspendedRun]) -> dict[RunId, KeptSuspension]:
    """Suspend runs that are still held until a time; those suspended. The others are lost, or to be cancelled."""
    rows = await connection.fetch(
        _sql["suspend"],
        [s.id for s in suspended],
        [s.claim_generation for s in suspended],
        [s.next_attempt_at for s in suspended],
        [s.delay_ms for s in suspended],
        [s.deadline_at for s in suspended],
        [s.is_retry for s in suspended],
        [s.warning for s in suspended],
        [s.wakes for s in suspended],
    )
    return {row[0]: KeptSuspension(*row[1:]) for row in rows}


class WokenRun(NamedTuple):
    """A run for which something has come: how often it was woken, and whether a worker holds it, by its last claim:
    then it is due when it is suspended, otherwise at once."""

    id: RunId
    wakes: int
    is_held: bool
    claim_generation: int


async def wake(connection: Connection, run_ids: Sequence[RunId]) -> list[WokenRun]:
    """What runs wait for has come, and is written in this transaction, which has locked them (`lock`): they are due at
    once, now or when their worker suspends them. Those that have not ended; after the commit, hint the queue."""
    if not run_ids:
        return []
    return [WokenRun(*row) for row in await connection.fetch(_sql["wake"], run_ids, min(run_ids), max(run_ids))]


async def note(connection: Connection, notes: Sequence[RunNotes]) -> None:
    """Note versions and tags of runs that are still held."""
    if notes:
        await connection.execute(
            _sql["note"],
            [n.id for n in notes],
            [n.claim_generation for n in notes],
            [n.version for n in notes],
            [msgspec.json.encode(n.tags).decode() if n.tags else None for n in notes],
        )


async def hold_for_version(connection: Connection, held: Sequence[SuspendedRun]) -> None:
    """Runs that were just suspended wait for a version of their code that fits."""
    if held:
        await connection.execute(_sql["hold_for_version"], [s.id for s in held], [s.misfit for s in held])


async def offer_versions(connection: Connection, worker: str) -> list[RunId]:
    """Make runs due that wait for a version that the worker has. The ids."""
    return [row[0] for row in await connection.fetch(_sql["offer_versions"], worker)]


async def accept_version(connection: Connection, run_id: RunId) -> bool:
    """Resume a run that waits for a version, on whatever code comes next; False when it does not."""
    return await connection.fetchval(_sql["accept_version"], run_id) is not None


class VersionHeld(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow with runs that wait for a version of its code."""

    workflow: str
    waiting: int
    versions: list[str]
    example: str
    since: datetime


async def list_version_held(connection: Connection) -> list[VersionHeld]:
    """Workflows with runs that wait for a version of their code."""
    return [VersionHeld(**dict(row)) for row in await connection.fetch(_sql["list_version_held"])]


async def cancel_waiting(connection: Connection, run_id: RunId, actor: str) -> EndedRun | None:
    """End a run that no worker holds; None when it is not waiting."""
    row = await connection.fetchrow(_sql["cancel_waiting"], run_id, actor, f"cancelled by {actor}")
    return EndedRun(*row) if row else None


async def list_killers(connection: Connection, trials: int, limit: int) -> list[tuple[RunId, TriggerId | None]]:
    """Waiting runs, with their triggers, whose workers died each time they were executed alone."""
    return [(row[0], row[1]) for row in await connection.fetch(_sql["list_killers"], trials, limit)]


async def fail_killer(connection: Connection, run_id: RunId, error: str, trials: int) -> EndedRun | None:
    """End a run that `list_killers` has named as failed; None when it is not one any more."""
    row = await connection.fetchrow(_sql["fail_killer"], run_id, error, trials)
    return EndedRun(*row) if row else None


async def request_cancel(connection: Connection, run_id: RunId, actor: str) -> bool:
    """Ask the worker that holds a run to stop it at its next step; False when no worker holds it."""
    return await connection.fetchval(_sql["request_cancel"], run_id, actor) is not None


async def rerun(
    connection: Connection, run_id: RunId, new_id: RunId, concurrency_key: str | None, *, gives_back: bool = False
) -> None:
    """Create a run that begins anew with the parameters and the event of another."""
    await connection.execute(_sql["rerun"], run_id, new_id, concurrency_key, gives_back)


async def lock(connection: Connection, run_ids: Sequence[RunId]) -> None:
    """Lock runs. A statement of its own: one that waited for a lock still sees the tables as before it waited."""
    if run_ids:
        await connection.fetch(_sql["lock"], run_ids, min(run_ids), max(run_ids))


async def dead_letter(connection: Connection, failed: Sequence[FinishedRun]) -> None:
    """Dead letters for failed runs."""
    if failed:
        await connection.execute(
            _sql["dead_letter"],
            [f.id for f in failed],
            [f.dead_step_id for f in failed],
            [first_line(f.error or "failed")[:1000] for f in failed],
        )


async def release(connection: Connection, held: Sequence[ClaimedRun], delay_ms: int = 0) -> set[RunId]:
    """Release runs, due again after a delay. The ids released."""
    if not held:
        return set()
    rows = await connection.fetch(_sql["release"], [r.id for r in held], [r.claim_generation for r in held], delay_ms)
    return {row[0] for row in rows}


async def release_unstarted(connection: Connection, unbegun: Sequence[ClaimedRun]) -> set[RunId]:
    """Release runs that were claimed and not started. The ids released."""
    rows = await connection.fetch(
        _sql["release_unstarted"], [r.id for r in unbegun], [r.claim_generation for r in unbegun]
    )
    return {row[0] for row in rows}


async def release_expired(connection: Connection, limit: int) -> list[RunId]:
    """Make runs whose lease has run out due again."""
    return [row[0] for row in await connection.fetch(_sql["release_expired"], limit, SUSPECT_CRASHES)]


async def next_due_seconds(
    connection: Connection, definitions: Sequence[DefinitionId], *, worker: str, lease_ms: int
) -> float | None:
    """Seconds until the next pending run that is no suspect and that the worker may claim is due (negative when
    overdue), or None."""
    seconds: float | None = await connection.fetchval(_sql["next_due"], definitions, SUSPECT_CRASHES, worker, lease_ms)
    return seconds


class UnfinishedRun(NamedTuple):
    """An unfinished run, its event, and whether it has given its slots back."""

    id: RunId
    event_id: EventId | None
    has_no_slot: bool


async def list_unfinished(
    connection: Connection, trigger_id: TriggerId, *, after: uuid.UUID, limit: int
) -> list[UnfinishedRun]:
    """A trigger's unfinished runs, in the order of their ids."""
    return [UnfinishedRun(*row) for row in await connection.fetch(_sql["list_unfinished"], trigger_id, after, limit)]


async def set_concurrency_keys(
    connection: Connection, run_ids: Sequence[RunId], keys: Sequence[str | None], *, gives_back: bool = False
) -> None:
    """Set the concurrency key whose slot each unfinished run holds, all of the time or while it executes; None: it
    holds none."""
    await connection.execute(_sql["set_concurrency_keys"], run_ids, keys, gives_back)


async def trigger_of(connection: Connection, run_id: RunId) -> TriggerId | None:
    """The trigger that launched a run."""
    found: TriggerId | None = await connection.fetchval(_sql["trigger_of"], run_id)
    return found


async def get(connection: Connection, run_id: RunId) -> Run | None:
    """One run."""
    row = await connection.fetchrow(_sql["get"], run_id)
    return _run(row) if row else None


async def list_ended(connection: Connection, run_ids: Collection[RunId]) -> list[Run]:
    """Those of the runs that have ended."""
    rows = await connection.fetch(_sql["list_ended"], list(run_ids), min(run_ids), max(run_ids))
    return [_run(row) for row in rows]


async def list_page(
    connection: Connection,
    *,
    workflow: str | None = None,
    status: RunStatus | None = None,
    event_id: EventId | None = None,
    before_id: uuid.UUID | None = None,
    limit: int = 50,
) -> list[Run]:
    """Runs, newest first."""
    rows = await connection.fetch(_sql["list"], workflow, status, event_id, before_id, limit)
    return [_run(row) for row in rows]


def _run(row: Row) -> Run:
    return msgspec.convert(dict(row), Run)
