"""`event_waits`: what runs wait for. A row is open: it is deleted in the transaction that ends the wait."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.event import Event
from tidegate.model.ids import EventId, RunId, StepId, WaitId, wait_id
from tidegate.model.run import ClaimedRun
from tidegate.model.step import StepWrite
from tidegate.model.wait import MetWait, OpenWait, contained
from tidegate.store.db import Connection, Row
from tidegate.store.sql import load

_sql = load("waits")


async def record(connection: Connection, writes: Sequence[StepWrite]) -> None:
    """Begin to wait for what these steps, which this transaction has written, wait for; end the waits of those that
    were cut off."""
    cut_off = [write for write in writes if write.status == "cancelled"]
    if cut_off:
        await connection.execute(
            _sql["close"], [write.id for write in cut_off], [write.workflow_run_id for write in cut_off]
        )
    rows = [(write, wait) for write in writes for wait in write.waits]
    if not rows:
        return
    patterns = [wait.pattern for _, wait in rows]
    await connection.execute(
        _sql["register"],
        [wait_id(write.id, wait.number) for write, wait in rows],
        [write.workflow_run_id for write, _ in rows],
        [write.id for write, _ in rows],
        [wait.number for _, wait in rows],
        [wait.mode for _, wait in rows],
        [pattern.type for pattern in patterns],
        [pattern.source for pattern in patterns],
        [pattern.paths for pattern in patterns],
        [pattern.key for pattern in patterns],
        [contained(pattern.match) for pattern in patterns],
        [pattern.where for pattern in patterns],
        [wait.after_sequence for _, wait in rows],
        [wait.since for _, wait in rows],
        [wait.since_ms for _, wait in rows],
    )


async def list_path_sets(connection: Connection, types: Collection[str]) -> dict[str, list[str]]:
    """By type, the sets of fields by which runs wait for its events; types that nobody waits for are missing."""
    found: dict[str, list[str]] = {}
    for event_type, paths in await connection.fetch(_sql["list_path_sets"], sorted(types)):
        found.setdefault(event_type, []).append(paths)
    return found


class WaitOfRun(NamedTuple):
    """An open wait, and the parameters of its run where its expression needs them."""

    wait: OpenWait
    parameters: Mapping[str, object]


async def find(
    connection: Connection, keys: Sequence[tuple[str, str, str]], now: datetime
) -> list[tuple[int, WaitOfRun]]:
    """The open waits for events with these types, fields and values, each with the place of its key."""
    columns = [list(column) for column in zip(*keys, strict=True)]
    return [(row["n"] - 1, _of_run(row)) for row in await connection.fetch(_sql["find"], *columns, now)]


async def list_of_runs(connection: Connection, run_ids: Collection[RunId]) -> dict[RunId, list[OpenWait]]:
    """The open waits of runs that this transaction has locked."""
    found: dict[RunId, list[OpenWait]] = {}
    for row in await connection.fetch(_sql["list_of_runs"], list(run_ids)):
        wait = _wait(row)
        found.setdefault(wait.workflow_run_id, []).append(wait)
    return found


async def look_again(connection: Connection, step_ids: Collection[StepId]) -> None:
    """Events have met these steps of locked runs, which have yet to look back: they will find them."""
    if step_ids:
        await connection.execute(_sql["look_again"], list(step_ids), min(step_ids), max(step_ids))


async def looks_again(connection: Connection, step_ids: Sequence[StepId]) -> bool:
    """Whether an event has met one of these steps of locked runs before it had looked back."""
    found: bool = await connection.fetchval(_sql["looks_again"], step_ids, min(step_ids), max(step_ids))
    return found


async def is_overtaken(connection: Connection, events: Sequence[Event], *, by_lane: bool) -> bool:
    """Whether an event of the type of one of these, which came before it, is undecided; `by_lane`: of its source and
    priority."""
    if not events:
        return False
    last: dict[tuple[str | int, ...], int] = {}
    for event in events:
        key = (event.type, event.source, event.priority or 1) if by_lane else (event.type,)
        last[key] = max(last.get(key, 0), event.ingress_sequence)
    types, *lane = (list(column) for column in zip(*last, strict=True))
    block = _sql["is_overtaken_in_lane" if by_lane else "is_overtaken"]
    found: bool = await connection.fetchval(block, types, list(last.values()), *lane)
    return found


async def list_taken(connection: Connection, run_ids: Collection[RunId]) -> dict[RunId, set[EventId]]:
    """The events that waits of these runs were given before."""
    found: dict[RunId, set[EventId]] = {}
    for run_id, event_id in await connection.fetch(_sql["list_taken"], list(run_ids)):
        found.setdefault(run_id, set()).add(event_id)
    return found


class KeptEvent(NamedTuple):
    """An event (as JSON) that a pattern of `wait_all` keeps."""

    wait_id: WaitId
    event_id: EventId
    text: str
    step_id: StepId


async def keep(connection: Connection, kept: Sequence[KeptEvent]) -> None:
    """Patterns of `wait_all`, of locked runs, keep their events until the others have theirs."""
    if kept:
        wait_ids, event_ids, texts, step_ids = (list(column) for column in zip(*kept, strict=True))
        await connection.execute(_sql["keep"], wait_ids, event_ids, texts, min(step_ids), max(step_ids))


class MetStep(NamedTuple):
    """A step whose events have come: its result as JSON, and the events."""

    run_id: RunId
    step_id: StepId
    result: str
    event_ids: Sequence[EventId]


async def complete(connection: Connection, met: Sequence[MetStep]) -> dict[StepId, str]:
    """Steps of locked runs have their results, and their waits end. The names of the steps."""
    if not met:
        return {}
    rows = await connection.fetch(
        _sql["complete"],
        [one.step_id for one in met],
        [one.result for one in met],
        [msgspec.json.encode(list(one.event_ids)).decode() for one in met],
        [one.run_id for one in met],
        min(one.step_id for one in met),
        max(one.step_id for one in met),
    )
    return {row[0]: row[1] for row in rows}


async def request_cancel(connection: Connection, given: Sequence[MetWait]) -> set[RunId]:
    """Ask for the cancellation of locked runs by events; those for which nobody had asked before."""
    if not given:
        return set()
    rows = await connection.fetch(
        _sql["request_cancel"],
        [one.wait.workflow_run_id for one in given],
        [one.wait.step_id for one in given],
        [one.event.id for one in given],
    )
    return {row[0] for row in rows}


async def list_deciding(connection: Connection) -> list[str]:
    """The transactions that are deciding events now."""
    return [row[0] for row in await connection.fetch(_sql["list_deciding"])]


async def still_deciding(connection: Connection, transactions: Sequence[str]) -> bool:
    """Whether one of these transactions has not ended."""
    found: bool = await connection.fetchval(_sql["still_deciding"], transactions)
    return found


async def list_of_steps(connection: Connection, steps: Sequence[tuple[StepId, RunId]]) -> list[WaitOfRun]:
    """The open waits of steps, in no order."""
    rows = await connection.fetch(_sql["list_of_steps"], *(list(column) for column in zip(*steps, strict=True)))
    return [_of_run(row) for row in rows]


async def look_back(
    connection: Connection, asked: Sequence[tuple[WaitId, int, uuid.UUID]], of_each: int
) -> list[tuple[int, Event]]:
    """For each wait, after a sequence and from an id on, the next events that may be what it waits for; with its
    place."""
    rows = await connection.fetch(_sql["look_back"], *(list(column) for column in zip(*asked, strict=True)), of_each)
    return [(row[0] - 1, Event(*row[1:])) for row in rows]


async def lock_held(connection: Connection, held: Sequence[ClaimedRun]) -> dict[RunId, bool]:
    """Lock the runs that their workers still hold; those, and whether each is to be cancelled."""
    rows = await connection.fetch(_sql["lock_held"], [r.id for r in held], [r.claim_generation for r in held])
    return {row[0]: row[1] for row in rows}


async def looked_back(connection: Connection, step_ids: Sequence[StepId]) -> None:
    """These steps of locked runs need not look back again; a step that only looks back is done."""
    if step_ids:
        await connection.execute(_sql["looked_back"], step_ids, min(step_ids), max(step_ids))


async def time_out(connection: Connection, steps: Sequence[tuple[StepId, RunId]]) -> None:
    """The time of these steps of locked runs is over: if their events have not come, they are done without."""
    if steps:
        ids = [step_id for step_id, _ in steps]
        await connection.execute(_sql["time_out"], ids, min(ids), max(ids), [run_id for _, run_id in steps])


async def list_states(connection: Connection, step_ids: Sequence[StepId]) -> dict[StepId, tuple[str, object]]:
    """The status of steps, and their results."""
    rows = await connection.fetch(_sql["list_states"], step_ids, min(step_ids), max(step_ids))
    return {row[0]: (row[1], row[2]) for row in rows}


def _of_run(row: Row) -> WaitOfRun:
    fields = dict(row)
    fields.pop("n", None)
    return WaitOfRun(msgspec.convert(fields, OpenWait), fields.pop("parameters") or {})


def _wait(row: Row) -> OpenWait:
    return msgspec.convert(dict(row), OpenWait)
