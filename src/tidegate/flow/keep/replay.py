"""Replay: process dead letters again. An event passes its source's gate again, a delivery is decided again by its
trigger, a failed run resumes as the same run after its completed steps.

To replay many dead letters, each gets a time. Any worker that finds one due replays it in its own transaction, which
also marks it as replayed. So no process has to stay alive for it, and nothing is replayed twice.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from tidegate import failpoints
from tidegate.errors import Conflict, first_line
from tidegate.flow.decide.one_by_one import MAX_ERROR_CHARACTERS, error_text, one_by_one
from tidegate.flow.run import budget_slots
from tidegate.flow.run.children import OF_RUN
from tidegate.model.ids import DeadLetterId, DeliveryId, EventId, RunId, StepId
from tidegate.queue.port import Topic
from tidegate.store import audit, budgets, children, dead_letters, decisions, locks, runs, trigger_gates, windows
from tidegate.store.budgets import Holder, Line
from tidegate.store.db import Connection, Database
from tidegate.store.dead_letters import DeadRun, LockedLetter
from tidegate.store.decisions import NewDecision
from tidegate.telemetry.logs import logger

# How long a dead letter waits before the next attempt when its run finds no free slot.
SLOT_WAIT_MS = 1000
NO_SLOT = "waiting for a free slot of its trigger"

# When dead letters are overdue by more than this, because no worker ran, they are postponed together, so that the
# requested rate holds instead of all being replayed at once.
LATE_MS = 5000

# Which loop of the workers to wake after a replay, by the kind of dead letter.
TOPICS: dict[str, Topic] = {"event": "retries", "delivery": "deliveries", "run": "runs", "step": "runs"}

Outcome = Literal["replayed", "waiting", "refused", "lost"]

_log = logger("replay")


class Later(NamedTuple):
    """What a run that is to resume waits for."""

    why: str


class Replayed(NamedTuple):
    """The event, delivery or run that was replayed into; None while it waits for a slot, or for a child to stop."""

    into: uuid.UUID | None


async def perform(connection: Connection, letter: LockedLetter, actor: str) -> Replayed:
    """Replay a dead letter that this transaction has locked, and mark it. Conflict says why it cannot be replayed."""
    how = {"event": _event, "delivery": _delivery, "run": _run, "step": _run}[letter.kind]
    into = await how(connection, letter, actor)
    if isinstance(into, Later):
        await dead_letters.mark_waiting(connection, letter.id, delay_ms=SLOT_WAIT_MS, actor=actor, why=into.why)
        return Replayed(None)
    await dead_letters.mark_replayed(connection, letter.id, actor, into)
    await audit.insert(
        connection, actor=actor, action="dead_letter.replay", subject=str(letter.id),
        before={"replayed_at": letter.replayed_at}, after={"kind": letter.kind, "into": into},
    )  # fmt: skip
    return Replayed(into)


class Replay:
    """Replays due dead letters. `after_replay` is called with their kinds after the commits."""

    def __init__(
        self, database: Database, *, batch_size: int, after_replay: Callable[[set[str]], None] = lambda _: None
    ) -> None:
        self._database = database
        self._batch_size = batch_size
        self._after_replay = after_replay

    async def run_once(self) -> int:
        """One batch of due dead letters; how many were replayed or refused."""
        due = await self._due()
        outcomes: Counter[Outcome] = Counter()
        kinds: set[str] = set()
        for letter_id in due:
            [(outcome, kind)] = await one_by_one([letter_id], self._replay, self._refuse)
            failpoints.hit("replay.after_commit")
            outcomes[outcome] += 1
            kinds |= {kind} if kind and outcome == "replayed" else set()
        if kinds:
            self._after_replay(kinds)
        return outcomes["replayed"] + outcomes["refused"]

    async def _due(self) -> list[DeadLetterId]:
        async with self._database.connection() as connection:
            seconds = await dead_letters.next_due_seconds(connection)
            if seconds is None or seconds > 0:
                return []
            if seconds >= -LATE_MS / 1000:
                return await dead_letters.list_due(connection, self._batch_size)
        moved = await self._database.run(partial(dead_letters.postpone, late_ms=LATE_MS))
        if moved:
            _log.info(
                "dead_letters.replay_late", count=moved, reason="no worker was running; postponed to keep the rate"
            )
        async with self._database.connection() as connection:
            return await dead_letters.list_due(connection, self._batch_size)

    async def next_due_seconds(self) -> float | None:
        """Seconds until the next dead letter is due, or None."""
        async with self._database.connection() as connection:
            return await dead_letters.next_due_seconds(connection)

    async def _replay(self, letter_id: DeadLetterId) -> tuple[Outcome, str | None]:
        letter, into = await self._database.run(partial(self._one, letter_id=letter_id))
        if letter is None:
            return "lost", None
        if into is None:
            return "waiting", letter.kind
        _log.info("dead_letter.replayed", dead_letter_id=letter.id, kind=letter.kind, event_id=letter.event_id,
                  into=into, actor=letter.replay_by)  # fmt: skip
        return "replayed", letter.kind

    async def _one(
        self, connection: Connection, letter_id: DeadLetterId
    ) -> tuple[LockedLetter | None, uuid.UUID | None]:
        letter = await dead_letters.lock_due(connection, letter_id)
        if letter is None:
            return None, None
        done = await perform(connection, letter, letter.replay_by or "worker")
        failpoints.hit("replay.before_commit")
        return letter, done.into

    async def _refuse(self, letter_id: DeadLetterId, error: Exception) -> tuple[Outcome, str | None]:
        why = str(error) if isinstance(error, Conflict) else error_text(error)
        outcome = await self._database.run(partial(_mark_refused, letter_id=letter_id, why=why))
        if outcome == "refused":
            _log.warning("dead_letter.replay_refused", dead_letter_id=str(letter_id), reason=why)
        return outcome, None


async def _mark_refused(connection: Connection, letter_id: DeadLetterId, why: str) -> Outcome:
    if await dead_letters.lock_due(connection, letter_id) is None:
        return "lost"
    await dead_letters.mark_refused(connection, letter_id, why[:MAX_ERROR_CHARACTERS])
    return "refused"


async def _event(connection: Connection, letter: LockedLetter, actor: str) -> EventId:
    found = await dead_letters.describe_event(connection, EventId(letter.subject_id))
    if found is None:
        raise Conflict(f"event {letter.subject_id} no longer exists")
    if found.deliveries:
        raise Conflict(
            f"event {found.id} was decided meanwhile: it has {found.deliveries} deliveries; replay their dead letters"
        )
    is_alive = found.is_undecided or found.retry_state in ("scheduled", "running")
    if is_alive or not await dead_letters.replay_event(connection, found.id, letter.id, actor):
        raise Conflict(f"event {found.id} is already waiting to be decided")
    line = NewDecision(found.id, None, "gate", "replayed", f"from dead letter {letter.id}", actor=actor)
    await decisions.insert(connection, [line])
    return found.id


async def _delivery(connection: Connection, letter: LockedLetter, actor: str) -> DeliveryId:
    delivery_id = DeliveryId(letter.subject_id)
    found = await dead_letters.describe_delivery(connection, delivery_id)
    if found is None or letter.event_id is None:
        raise Conflict(f"delivery {delivery_id} no longer exists")
    # The lock excludes changes and deletions of triggers, so that what is read here is valid until the commit.
    await locks.share_all(connection)
    await trigger_gates.lock(connection, always=[found.trigger_id])
    found = await dead_letters.describe_delivery(connection, delivery_id) or found
    if found.is_trigger_deleted or found.trigger_status != "active":
        state = "deleted" if found.is_trigger_deleted else found.trigger_status
        raise Conflict(f"trigger {found.trigger_id} is {state}: nothing would decide the delivery")
    if not await dead_letters.replay_delivery(connection, delivery_id, letter.event_id, letter.id, actor):
        raise Conflict(f"delivery {delivery_id} is already active: it is {found.status}")
    line = NewDecision(
        letter.event_id, None, "deliver", "replayed", f"from dead letter {letter.id}", actor=actor,
        trigger_id=found.trigger_id,
    )  # fmt: skip
    await decisions.insert(connection, [line])
    return delivery_id


async def _run(connection: Connection, letter: LockedLetter, actor: str) -> RunId | Later:
    found = await dead_letters.describe_run(connection, letter.subject_id)
    if found is None:
        raise Conflict(f"the run of {letter.kind} {letter.subject_id} no longer exists")
    if found.status not in ("failed", "cancelled") and (letter.replay_by or "").startswith(OF_RUN):
        return found.id  # somebody has retried it beside its parent
    step_id = StepId(letter.subject_id) if letter.kind == "step" else None
    line = NewDecision(
        letter.event_id or EventId(found.id), None, "run", "replayed", f"from dead letter {letter.id}", actor=actor
    )
    return await resume(connection, found.id, line if letter.event_id else None, step_id=step_id, letter_id=letter.id)


async def resume(
    connection: Connection,
    run_id: RunId,
    line: NewDecision | None,
    *,
    step_id: StepId | None = None,
    letter_id: DeadLetterId | None = None,
) -> RunId | Later:
    """Resume a failed or cancelled run after its completed steps, and record the decision; Later when its trigger has
    no free slot, or a child of it is stopping. Conflict says why it cannot resume."""
    await locks.share_all(connection)  # excludes changes of the workflow and the trigger until the commit
    found = await dead_letters.describe_run(connection, run_id)
    if found is None:
        raise Conflict(f"run {run_id} no longer exists")
    if found.is_workflow_deleted:
        raise Conflict(f"workflow {found.workflow} of run {found.id} was deleted: nothing could run it")
    if found.status not in ("failed", "cancelled"):
        raise Conflict(f"run {found.id} is not failed or cancelled, or was already resumed: it is {found.status}")
    slot = await find_slot(connection, found)
    if not slot.is_free:
        return Later(NO_SLOT)
    if not await dead_letters.keep_story(connection, found.id):
        raise Conflict(f"run {found.id} no longer exists")
    # A child whose end is in progress has ended, or ends after this; its own parent does not resume it meanwhile.
    parents = {one.run_id for one in (await children.of_runs(connection, [found.id])).values()}
    await runs.lock(connection, sorted({found.id} | parents))
    if (stopping := await children.is_stopping(connection, found.id)) is not None:
        return Later(f"waiting for its child, run {stopping}, to stop: it was asked to and is still running")
    gone = await dead_letters.replay_run(connection, found, step_id, letter_id, slot.key, gives_back=slot.gives_back)
    if gone is None:
        raise Conflict(f"run {found.id} was already resumed")
    await slot.hold(connection, found.id)
    if found.window_id is not None:
        await windows.keep(connection, found.window_id)
    if line is not None:
        if gone:
            anew = f"{gone} of its children start anew: the run that they had does not exist"
            line = line._replace(reason=f"{line.reason}; {anew}" if line.reason else anew)
        lines = [_end_before(found, line.event_id), line]
        about = {"run_id": found.id}
        await decisions.insert(connection, [one._replace(trigger_id=found.trigger_id, detail=about) for one in lines])
    return found.id


def _end_before(run: DeadRun, event_id: EventId) -> NewDecision:
    """How a run ended that resumes: its row does not tell that any more."""
    said = first_line(run.error or "")[:MAX_ERROR_CHARACTERS] or None
    return NewDecision(event_id, run.finished_at, "run", run.status, said, attempt=run.attempts, actor=run.cancelled_by)


class FoundSlot(NamedTuple):
    """Whether a run may hold a concurrency slot of its trigger, and of which key (None without a limit), and of its
    trigger's budgets; `why` says what is in use. `gives_back`: it holds them while it executes."""

    is_free: bool
    key: str | None = None
    why: str = ""
    of_budgets: Sequence[Line] = ()
    gives_back: bool = False

    async def hold(self, connection: Connection, run_id: RunId) -> None:
        """The run holds the slots of the budgets."""
        await budgets.hold(connection, [Holder(run_id, *line) for line in self.of_budgets])


async def find_slot(connection: Connection, run: DeadRun) -> FoundSlot:
    """Lock the run's trigger and its budgets, and look for a free slot of its key in each."""
    if run.trigger_id is None:
        return FoundSlot(True)
    locked = (await trigger_gates.lock(connection, always=[run.trigger_id]))[run.trigger_id]
    most, key = locked.max_concurrency, run.concurrency_key or ""
    held = await budgets.lock(connection, locked.budgets) if locked.budgets else {}
    if most is not None:
        slots = await trigger_gates.slots(connection, [(run.trigger_id, key)])
        if slots[run.trigger_id, key].in_use >= most:
            of_key = f" of key {key}" if key else ""
            return FoundSlot(False, key, f"all {most} slots{of_key} of its trigger are in use")
    gives_back = locked.gives_back
    if not held:
        return FoundSlot(True, None if most is None else key, gives_back=gives_back)
    lines, full = await budget_slots.find(connection, held, run.event_id)
    return FoundSlot(not full, key, full or "", lines, gives_back)
