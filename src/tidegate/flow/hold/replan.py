"""Replan: give waiting rows new times, in arrival order, in small batches: events of a source, deliveries of a trigger.

A replan is requested durably, by raising the plan version of the source or trigger (the subject): when a pause begins
or ends, a limit or the trigger changes, a breaker moves, or rows that were due found no room. Any worker may carry it
out. `event_plan` and `delivery_plan` say how rows of each kind are read and written; this module is the loop over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from tidegate.errors import Unavailable
from tidegate.store.db import Connection, Database

BATCH = 500

Subject = TypeVar("Subject")
Row = TypeVar("Row")
Written = TypeVar("Written")
Written_co = TypeVar("Written_co", covariant=True)


class Cursor(NamedTuple):
    """How far a replan has come. When the plan version has changed, it starts again at the front."""

    plan_version: int = 0
    after: int = 0


class OpenPlan(Protocol[Row, Written_co]):
    """The plan of one subject, which this transaction has locked."""

    @property
    def version(self) -> int: ...

    async def take(self, *, after: int, limit: int) -> Sequence[Row]:
        """Lock the waiting rows with an older plan version and a later ingress sequence than `after`, in order."""

    async def write(self, rows: Sequence[Row], *, overtook: bool) -> Written_co:
        """Give the rows new times, or dead-letter them. `overtook`: rows that arrived later have new times already."""

    async def end(self) -> None:
        """Record that every waiting row follows the plan."""

    def position(self, row: Row) -> int:
        """The row's ingress sequence."""


class Plans(Protocol[Subject, Row, Written]):
    """The plans of one kind of subject."""

    async def start(self, connection: Connection) -> tuple[Sequence[Subject], int]:
        """The subjects whose waiting rows need new times, and how many rows were made due outside of any plan."""

    async def open(self, connection: Connection, subject: Subject) -> OpenPlan[Row, Written] | None:
        """Lock the subject; None when it no longer needs a replan."""

    def committed(self, subject: Subject, written: Written) -> int:
        """Count, log and announce a batch after its commit; returns how many rows it changed."""

    def finished(self, subject: Subject, count: int) -> None:
        """Log that the subject's replan is complete; `count` rows were changed."""

    def failed(self, subject: Subject, error: Exception) -> None:
        """Log that the subject could not be replanned; the next call of `run_once` tries again."""


class PlannedBatch(NamedTuple, Generic[Written]):
    """What one transaction wrote and how far it came; `written` is None when nothing was left to do."""

    written: Written | None = None
    cursor: Cursor = Cursor()


class Replan(Generic[Subject, Row, Written]):
    """Gives new times to the waiting rows of every subject whose plan has changed."""

    def __init__(self, database: Database, plans: Plans[Subject, Row, Written]) -> None:
        self._database = database
        self._plans = plans

    async def run_once(self) -> int:
        """Carry out every requested replan to its end; returns how many rows were changed.

        Subjects alternate batch by batch, so that a short line does not wait for a long one. A subject that fails is
        logged and left for the next call; the others continue.
        """
        async with self._database.connection() as connection:
            subjects, total = await self._plans.start(connection)
        cursors = dict.fromkeys(subjects, Cursor())
        changed: Counter[Subject] = Counter()
        while cursors:
            for subject, cursor in list(cursors.items()):
                try:
                    planned = await self._database.run(partial(self._batch, subject=subject, cursor=cursor))
                except Unavailable:
                    raise
                except Exception as exc:  # noqa: BLE001 - one subject that cannot be planned must not stop the others
                    self._plans.failed(subject, exc)
                    del cursors[subject]
                    continue
                if planned.written is None:
                    self._plans.finished(subject, changed[subject])
                    del cursors[subject]
                else:
                    changed[subject] += self._plans.committed(subject, planned.written)
                    cursors[subject] = planned.cursor
        return total + changed.total()

    async def _batch(self, connection: Connection, subject: Subject, cursor: Cursor) -> PlannedBatch[Written]:
        plan = await self._plans.open(connection, subject)
        if plan is None:
            return PlannedBatch()
        after = cursor.after if cursor.plan_version == plan.version else 0
        rows = await plan.take(after=after, limit=BATCH)
        overtook = not rows and after > 0
        if overtook:
            rows = await plan.take(after=0, limit=BATCH)  # an earlier row may have been added behind the cursor
        if not rows:
            await plan.end()
            return PlannedBatch()
        written = await plan.write(rows, overtook=overtook)
        return PlannedBatch(written, Cursor(plan.version, max(after, plan.position(rows[-1]))))
