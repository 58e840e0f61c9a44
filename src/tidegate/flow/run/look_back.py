"""Look back: have the events that a run begins to wait for come already? And what ended a wait whose time is over?

A wait is committed first. Then everything that was being decided at that time is waited for: those transactions may not
have seen the wait. After them, what has passed the gate is read: whatever is decided later sees the wait itself
(`decide/waits.py`). So an event is found by one of both, and the run's lock decides by which: before the wait has
looked back, an event that is decided is left to it, since one that came earlier may be stored, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.call.waits import WaitAnswer, WaitQuestion
from tidegate.flow.decide import waits as decide
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.flow.decide.waits import Meeting
from tidegate.model.event import Event
from tidegate.model.ids import EventId, RunId, WaitId
from tidegate.model.wait import OpenWait
from tidegate.store import locks, waits
from tidegate.store.db import Connection, Database
from tidegate.store.group_commit import GroupCommit
from tidegate.store.waits import WaitOfRun
from tidegate.telemetry.logs import logger

T = TypeVar("T")

MAX_QUESTIONS = 200
# Events that are read at a time for each wait.
PAGE = 50
_POLL_SECONDS = (0.001, 0.02)
_RETRY_SECONDS = 0.5
# How long it is waited for an event that came before one that is decided. No worker may be there that decides it.
_OLDER_SECONDS = (0.005, 0.02, 0.1, *[0.5] * 10)

_log = logger("wait")


class _Overtaken(Exception):
    """An event that came before the one found is not decided yet: its worker may have died."""


class LookBack:
    """Answers what executions ask about their waits; many questions share a transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_stopping = False
        self._begun: GroupCommit[WaitQuestion, WaitAnswer] = GroupCommit(
            self._look_back_all, weight=lambda _: 1, max_weight=MAX_QUESTIONS, max_waiting=1_000_000
        )
        self._over: GroupCommit[WaitQuestion, WaitAnswer] = GroupCommit(
            self._time_out_all, weight=lambda _: 1, max_weight=MAX_QUESTIONS, max_waiting=1_000_000
        )

    async def ask(self, question: WaitQuestion) -> WaitAnswer:
        """Whether the step's events have come; if its time is over, it ends without them."""
        return await (self._over if question.is_over else self._begun).submit(question)

    def stop(self) -> None:
        """The worker stops: what is asked while the database is down is not answered any more."""
        self._is_stopping = True

    async def _look_back_all(self, questions: list[WaitQuestion]) -> Sequence[WaitAnswer | Exception]:
        await self._when_reachable(self._wait_for_deciding)
        failpoints.hit("wait.before_look_back")
        answers, meetings = await self._when_reachable(partial(self._in_order, questions))
        decide.report(meetings)
        return answers

    async def _in_order(self, asked: Sequence[WaitQuestion]) -> tuple[list[WaitAnswer], Sequence[Meeting]]:
        for seconds in _OLDER_SECONDS:
            try:
                return await self._database.run(partial(_look_back, asked=asked, in_order=True))
            except _Overtaken:
                await asyncio.sleep(seconds)
        return await self._database.run(partial(_look_back, asked=asked, in_order=False))

    async def _time_out_all(self, questions: list[WaitQuestion]) -> Sequence[WaitAnswer | Exception]:
        failpoints.hit("wait.before_time_out")
        return await self._when_reachable(partial(self._database.run, partial(_time_out, asked=questions)))

    async def _wait_for_deciding(self) -> None:
        """Wait until what was being decided, when the waits were committed, is decided. Later transactions are not kept
        waiting."""
        async with self._database.connection() as connection:
            deciding = await waits.list_deciding(connection)
        seconds, longest = _POLL_SECONDS
        while deciding:
            async with self._database.connection() as connection:
                if not await waits.still_deciding(connection, deciding):
                    return
            await asyncio.sleep(seconds)
            seconds = min(longest, seconds * 2)

    async def _when_reachable(self, work: Callable[[], Awaitable[T]]) -> T:
        """A run must not fail because the database is away for a while."""
        while True:
            try:
                return await work()
            except Unavailable as exc:
                if self._is_stopping:
                    raise
                _log.warning("wait.delayed", error=exc)
                await asyncio.sleep(_RETRY_SECONDS)


async def _look_back(
    connection: Connection, asked: Sequence[WaitQuestion], in_order: bool
) -> tuple[list[WaitAnswer], Sequence[Meeting]]:
    """Search without locks first; lock the runs, and give them what was found. Search again if an event was decided
    meanwhile that meets one of the waits, and where another wait of the same run was given the event found. With
    `in_order`, _Overtaken says that an event which came before one that was found is undecided."""
    run_ids = {question.run.id for question in asked}
    taken = await waits.list_taken(connection, run_ids)
    held: dict[RunId, bool] | None = None
    meetings: list[Meeting] = []
    while True:
        found = await _search(connection, asked, taken)
        if held is None:
            held = await waits.lock_held(connection, [question.run for question in asked])
            if await waits.looks_again(connection, [question.step_id for question in asked]):
                found = await _search(connection, asked, taken)
        if in_order and await waits.is_overtaken(connection, [e for w, e in found if _is_ordered(w, e)], by_lane=True):
            raise _Overtaken
        taken = await waits.list_taken(connection, run_ids)
        offers = _offers(found, {run_id for run_id, is_cancelled in held.items() if not is_cancelled})
        now = await locks.now(connection)
        meetings += await decide.hand_over(connection, offers, now, wakes=False, taken=taken)
        taken = await waits.list_taken(connection, run_ids)
        cancelled = {meeting.run_id for meeting in meetings if meeting.step is None}
        offered = {wait.id for wait, _ in found if wait.workflow_run_id in offers.keys() - cancelled}
        if not any(one.wait.id in offered for one in await _open(connection, asked)):
            break
    await waits.looked_back(connection, [q.step_id for q in asked if q.run.id in held])
    failpoints.hit("wait.before_looked_back")
    return await _answers(connection, asked, held, cancelled), meetings


def _offers(
    found: Sequence[tuple[OpenWait, Event]], run_ids: Collection[RunId]
) -> dict[RunId, list[tuple[Event, set[WaitId]]]]:
    """What is offered to each of the runs: its events in their order, each with all its waits that found it."""
    offers: dict[RunId, dict[EventId, tuple[Event, set[WaitId]]]] = {}
    for wait, event in found:
        if wait.workflow_run_id in run_ids:
            mine = offers.setdefault(wait.workflow_run_id, {})
            mine.setdefault(event.id, (event, set()))[1].add(wait.id)
    return {run_id: sorted(mine.values(), key=lambda one: one[0].ingress_sequence) for run_id, mine in offers.items()}


def _is_ordered(wait: OpenWait, event: Event) -> bool:
    """Whether the event must not come before those with a lesser number. A delayed or replayed one was not in the
    inbox with them; what cancels a run does so in any order."""
    return wait.mode != "cancel" and event.deliver_at is None and event.replayed_at is None


async def _time_out(connection: Connection, asked: Sequence[WaitQuestion]) -> list[WaitAnswer]:
    """Under the runs' locks either the event or the end of the time comes first."""
    held = await waits.lock_held(connection, [question.run for question in asked])
    await waits.time_out(connection, [(q.step_id, q.run.id) for q in asked if q.run.id in held])
    failpoints.hit("wait.before_timed_out")
    return await _answers(connection, asked, held, ())


async def _answers(
    connection: Connection, asked: Sequence[WaitQuestion], held: dict[RunId, bool], cancelled: Collection[RunId]
) -> list[WaitAnswer]:
    states = await waits.list_states(connection, [question.step_id for question in asked])
    answers = []
    for question in asked:
        run_id = question.run.id
        status, result = states.get(question.step_id, ("pending", None))
        is_cancelled = held.get(run_id, False) or run_id in cancelled
        answers.append(WaitAnswer(run_id in held, is_cancelled, status == "succeeded", result))
    return answers


async def _open(connection: Connection, asked: Sequence[WaitQuestion]) -> list[WaitOfRun]:
    return await waits.list_of_steps(connection, [(question.step_id, question.run.id) for question in asked])


async def _search(
    connection: Connection, asked: Sequence[WaitQuestion], taken: dict[RunId, set[EventId]]
) -> list[tuple[OpenWait, Event]]:
    """For each open wait the first event that it may be given."""
    least_ids = {question.step_id: question.least_id for question in asked}
    looking = {one.wait.id: (one, one.wait.after_sequence) for one in await _open(connection, asked)}
    found: dict[WaitId, tuple[OpenWait, Event]] = {}
    time_slice = TimeSlice()
    while looking:
        these = [(one, after) for one, after in looking.values()]
        page = await waits.look_back(
            connection, [(one.wait.id, after, least_ids[one.wait.step_id]) for one, after in these], PAGE
        )
        read: dict[int, list[Event]] = {}
        for place, event in page:
            read.setdefault(place, []).append(event)
        looking = {}
        for place, (one, _) in enumerate(these):
            events = read.get(place, [])
            for event in events:
                if time_slice.is_over:
                    await time_slice.next()
                if event.id not in taken.get(one.wait.workflow_run_id, ()) and one.wait.meets(event, one.parameters):
                    found[one.wait.id] = (one.wait, event)
                    break
            else:
                if len(events) == PAGE:
                    looking[one.wait.id] = (one, events[-1].ingress_sequence)
    return list(found.values())
