"""Children: cancel those of runs that were cancelled or timed out, and find those whose start launched nothing.

Both are rows, worked off in small transactions: whoever dies midway, another worker goes on.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from tidegate.errors import first_line
from tidegate.flow.run import children, finish
from tidegate.model.child import ChildEnd
from tidegate.model.ids import DeliveryId
from tidegate.model.source import BreakerPolicy
from tidegate.store import budgets, held_deliveries, ingress_retries, locks, runs, starts, trigger_gates
from tidegate.store import children as store
from tidegate.store.children import PassedDown, StartedChild
from tidegate.store.db import Connection, Database
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

MAX_PARENTS, MAX_CHILDREN = 20, 100
_FIRST = (uuid.UUID(int=0), -1)

_log = logger("reconcile")


class _ParentResumed(Exception):
    """The children of a run are not to be cancelled any more; what this transaction did is rolled back."""


class _Cancelled(NamedTuple):
    """How much was cancelled, and the workflow of the run that ended with it."""

    total: int
    ended: str | None = None


class ChildKeeper:
    """What workers do for the children of runs, beside their ends."""

    def __init__(self, database: Database, *, batch_size: int, breaker: BreakerPolicy) -> None:
        self._database = database
        self._batch_size = batch_size
        self._breaker = breaker
        self._after: tuple[uuid.UUID, int] = _FIRST

    async def run_once(self) -> int:
        """Cancel children that are to be, and end those that will never run; how many were found."""
        return await self._pass_down() + await self._find_lost()

    async def _pass_down(self) -> int:
        async with self._database.connection() as connection:
            found = await store.list_passed_down(connection, MAX_PARENTS, MAX_CHILDREN)
        done = {one.run_id for one in found if one.child is None}
        cancelled = 0
        for one in found:
            if one.child is not None:
                with suppress(_ParentResumed):
                    did = await self._database.run(partial(self._cancel_with, one=one, child=one.child))
                    cancelled += did.total
                    if did.ended is not None:
                        metrics.ran(did.ended, "cancelled")
        if done:
            await self._database.run(partial(store.passed_down, run_ids=done))
        if cancelled:
            _log.info("reconcile.passed_down", count=cancelled, reason="their parents were cancelled or timed out")
        return cancelled

    async def _cancel_with(self, connection: Connection, one: PassedDown, child: StartedChild) -> _Cancelled:
        """Cancel one child, unless its parent was resumed meanwhile."""
        cancelled = await self._cancel(connection, one, child)
        await runs.lock(connection, [one.run_id])
        if not await store.is_passed_down(connection, one.run_id):
            raise _ParentResumed
        return cancelled

    async def _cancel(self, connection: Connection, one: PassedDown, child: StartedChild) -> _Cancelled:
        """Cancel one child: at once when no worker holds it, at its next step otherwise, or before it is launched."""
        actor = f"run {one.run_id}"
        run = await runs.get(connection, child.run_id)
        if run is None:
            reason = f"cancelled: {one.reason}"
            found = await _cancel_held(connection, DeliveryId(child.run_id), reason)
            return _Cancelled(found + len(await ingress_retries.cancel(connection, [child.event_id], reason)))
        trigger_id = await runs.trigger_of(connection, child.run_id)
        end = partial(runs.cancel_waiting, connection, child.run_id, actor)
        if await finish.end_waiting(connection, child.run_id, trigger_id, end, self._breaker) is not None:
            return _Cancelled(1, run.workflow)
        if run.cancel_requested_at is None:
            return _Cancelled(int(await runs.request_cancel(connection, child.run_id, actor)))
        return _Cancelled(0)

    async def _find_lost(self) -> int:
        async with self._database.connection() as connection:
            page = await store.list_started(connection, self._after, self._batch_size)
            reasons = await starts.unlaunched(connection, {one.run_id: one.event_id for one in page})
            stopped = await store.list_unresumed(connection, page)
        is_full = len(page) == self._batch_size
        self._after = (page[-1].step_id, page[-1].position) if is_full else _FIRST
        for one in page:
            if one.run_id in reasons:
                await self._database.run(partial(_end_lost, child=one, reason=reasons[one.run_id]))
                _log.warning("reconcile.child_lost", run_id=one.parent_run_id, event_id=one.event_id,
                             reason=reasons[one.run_id])  # fmt: skip
            if one.run_id in stopped:
                await self._database.run(partial(_end_stopped, child=one))
        return len(reasons) + len(stopped)


async def _cancel_held(connection: Connection, delivery_id: DeliveryId, reason: str) -> int:
    """Cancel a delivery that waits; 0 when it does not. What it was offered, or stood in line for, is for the next."""
    known = await held_deliveries.get(connection, delivery_id)
    if known is None:
        return 0
    locked = await trigger_gates.lock(connection, always=[known.trigger_id])
    held = await budgets.lock(connection, {name for one in locked.values() for name in one.budgets})
    found = await held_deliveries.cancel(connection, [delivery_id], reason)
    slots = [(one.trigger_id, one.concurrency_key) for one in found if one.concurrency_key is not None]
    await trigger_gates.wake(connection, slots)
    lines = [one.line for one in found if one.line is not None and one.line[0] in held]
    await budgets.nudge(connection, dict.fromkeys(lines, await locks.now(connection)) if lines else {})
    return len(found)


async def _end_lost(connection: Connection, child: StartedChild, reason: str) -> None:
    await children.lock_parents(connection, [child.parent_run_id], ())
    error = f"was not launched: {reason}"
    await children.end(connection, [ChildEnd(child.child_of, child.run_id, "failed", error=error)])


async def _end_stopped(connection: Connection, child: StartedChild) -> None:
    """The run of a child has ended, and does not resume although its parent was retried."""
    await children.lock_parents(connection, [child.parent_run_id], [child.run_id])
    found = (await store.list_unresumed(connection, [child])).get(child.run_id)
    if found is None:
        return
    why = f" (not resumed: {found.refusal or 'its replay was called off'})"
    error = None if found.status == "succeeded" else f"{first_line(found.error or found.status)}{why}"
    end = ChildEnd(child.child_of, child.run_id, found.status, result=found.output, error=error)
    await children.end(connection, [end])
