"""Budgets: may a delivery be launched by what its budgets have left, and if not, which of them holds it and until when?

Pure: the keys' state is loaded under the locks of the budgets (`delivery_state`). A launch spends of all of its budgets
or of none. Whoever waits stands in the line of one key of one budget, the first that refuses it, in the order of
arrival; nobody in that line is overtaken, and other lines do not wait for it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from tidegate.model.allowance import HORIZON, Allowance
from tidegate.model.budget import ClosedKey, Need, Reserved
from tidegate.model.ids import RunId, StepId
from tidegate.model.source import OPEN_PAUSE
from tidegate.model.units import written_rate
from tidegate.store.budgets import ChangedKey, Holder, KeyRow, Line, LockedBudget

# The reason of a delivery that waits for a budget.
BUDGET = "budget"
# The reason of a new delivery that failed because what it needs of a budget cannot be evaluated, or never be spent.
BUDGET_ERROR = "budget_error"
# A delivery that has changed lines this often reserves what its other budgets have: one of them always has no room when
# another has. A reservation lasts a little longer than until the expected time, but never longer than RESERVED_AT_MOST.
MOVES_BEFORE_RESERVING = 2
RESERVED_LONGER = timedelta(seconds=1)
RESERVED_AT_MOST = timedelta(minutes=1)
# How long the others wait at most for the run that is tried first after a key was closed.
PROBE = timedelta(minutes=1)


class Refused(NamedTuple):
    """Why a budget refuses a delivery, and when it is checked again; without a time, the end of a run wakes it.
    `is_move`: it stood in the line of another budget until now."""

    message: str
    waits_for: dict[str, object]
    until: datetime | None
    is_pause: bool = False
    is_move: bool = False


@dataclass(slots=True)
class KeyState:
    """One key while a batch is decided. `is_blocked`: somebody of this batch waits for it, so all that follow do.
    `next_at` is the time for the next that is refused again at its time; `resuming`: since when runs wait for one."""

    allowance: Allowance
    in_use: int = 0
    first_waiting: int | None = None
    reserved: Reserved | None = None
    closed: ClosedKey | None = None
    resuming: Sequence[datetime] = ()
    is_blocked: bool = False
    next_at: datetime | None = None
    is_changed: bool = False

    def shut_until(self, now: datetime, run_id: RunId | None = None) -> datetime | None:
        """Until when a run that asked everyone to wait, or the one that is tried first after that, keeps it shut; not
        for the steps of that one."""
        one = self.closed
        if one is None or (run_id is not None and one.probe_run_id == run_id):
            return None
        until = one.until if one.probe_until is None else one.probe_until
        return until if until > now else None

    def begin(self, run_id: RunId, now: datetime) -> None:
        """A run is launched: if the key was closed, it is tried first."""
        if self.closed is not None and self.closed.probe_run_id != run_id:
            is_first = self.closed.probe_run_id is None
            self.closed = self.closed._replace(probe_run_id=run_id, probe_until=now + PROBE) if is_first else None
            self.is_changed = True

    def used(self, came_at: datetime | None) -> int:
        """The slots that a delivery or step which came then does not get: those in use, and those for which runs that
        resume have waited longer; a new one comes after all of them."""
        return self.in_use + sum(came_at is None or since <= came_at for since in self.resuming)

    def kept_from(self, delivery_id: uuid.UUID, now: datetime) -> Reserved | None:
        """What is reserved for another delivery."""
        one = self.reserved
        return None if one is None or one.delivery_id == delivery_id or one.until <= now else one

    def reserve(self, reserved: Reserved | None) -> None:
        self.reserved, self.is_changed = reserved, True


class Asking(NamedTuple):
    """A delivery or step that needs budgets: its arrival, the budget whose line it stood in, and how often it changed
    lines."""

    id: uuid.UUID
    needs: Sequence[Need]
    sequence: int
    is_newcomer: bool
    came_from: str | None = None
    moves: int = 0
    came_at: datetime | None = None
    run_id: RunId | None = None  # of a step


@dataclass(slots=True)
class BudgetState:
    """The budgets of one transaction, and the slots that its launches hold."""

    budgets: Mapping[str, LockedBudget] = field(default_factory=dict)
    keys: dict[Line, KeyState] = field(default_factory=dict)
    held: list[Holder] = field(default_factory=list)

    def load(self, rows: Mapping[Line, KeyRow], *, are_newcomers: bool) -> None:
        """Take what was read. Where nobody waits, the plan starts anew."""
        for line, row in rows.items():
            if are_newcomers and row.first_waiting is None:
                row.allowance.forget_backlog()
            self.keys[line] = KeyState(
                row.allowance, row.in_use, row.first_waiting, row.reserved, row.closed, row.resuming
            )

    def why_wait(self, asking: Asking, now: datetime) -> Refused | None:
        """Why a delivery must wait; None when each of its budgets has room."""
        for need in asking.needs:
            budget, key = self.budgets.get(need.budget), self.keys.get((need.budget, need.key))
            if budget is None or key is None:
                continue
            why = self._why(budget, key, need, asking, now)
            if why is not None:
                key.is_blocked = True
                refused = self._refused(budget, key, need, why, now, asking)
                if refused.is_move and asking.moves >= MOVES_BEFORE_RESERVING and why != "line":
                    self._reserve_others(asking, need, refused.until, now)
                return refused
        return None

    def why_unread(self, name: str, error: str, is_new: bool, now: datetime) -> Refused | None:
        """Why a delivery waits of which it cannot be evaluated what it needs of a budget; None if it fails.

        When it came, it could be evaluated: the budget was edited since then. It waits, in no line, until that is
        corrected. A new delivery fails, as with any other template, but not while the budget is paused.
        """
        budget = self.budgets.get(name)
        if is_new and (budget is None or not budget.is_paused(now)):
            return None
        detail = {"name": name, "key": None, "cost": None, "why": "unread"}
        message = f"{error}; it waits until the budget is corrected"
        return Refused(message, {BUDGET: detail}, now + OPEN_PAUSE, is_pause=True)

    def spend(
        self,
        delivery_id: uuid.UUID,
        needs: Sequence[Need],
        run_id: RunId,
        now: datetime,
        step: tuple[str, int | None] | None = None,
    ) -> None:
        """Launch: spend of each budget, and hold a slot of each. For a `step`, its id is given, its name, and the claim
        by which it is called (None: its run is not claimed yet)."""
        step_id, named = (None, (None, None)) if step is None else (StepId(delivery_id), step)
        for need in needs:
            budget, key = self.budgets.get(need.budget), self.keys.get((need.budget, need.key))
            if budget is None or key is None:
                continue
            key.allowance.spend(now, need.cost)
            key.begin(run_id, now)
            if key.reserved is not None and key.reserved.delivery_id == delivery_id:
                key.reserve(None)
            if budget.spec.concurrency is not None:
                key.in_use += 1
                self.held.append(Holder(run_id, need.budget, need.key, step_id, *named))

    def changed(self) -> list[ChangedKey]:
        """The keys to be written back."""
        return [
            ChangedKey(line, key.allowance, key.reserved, key.closed)
            for line, key in self.keys.items()
            if key.allowance.is_changed or key.is_changed
        ]

    def opens_at(
        self, line: Line, delivery_id: uuid.UUID, cost: int, now: datetime, came_at: datetime | None = None
    ) -> datetime | None:
        """When the first in line may find room; None when that is not known: a pause or a run must end first."""
        budget, key = self.budgets.get(line[0]), self.keys.get(line)
        if budget is None or key is None:
            return None
        if self.lacks(line, delivery_id, cost, now, came_at) is None:
            return now  # also if something is reserved for another: there is enough for both
        if budget.is_paused(now):
            return budget.paused_until
        if (shut := key.shut_until(now)) is not None:
            return shut
        if budget.spec.concurrency is not None and key.used(came_at) >= budget.spec.concurrency:
            return None
        opens = key.allowance.room_at(now, cost)
        kept = key.kept_from(delivery_id, now)
        return opens if kept is None else max(opens, kept.until)

    def lacks(
        self,
        line: Line,
        delivery_id: uuid.UUID,
        cost: int,
        now: datetime,
        came_at: datetime | None = None,
        run_id: RunId | None = None,
    ) -> str | None:
        """What the key of a budget has not enough of for a delivery, or for a step of a run: `paused`, `closed`,
        `concurrency` or `rate`."""
        budget, key = self.budgets[line[0]], self.keys[line]
        if budget.is_paused(now):
            return "paused"
        if key.shut_until(now, run_id) is not None:
            return "closed"
        kept, most = key.kept_from(delivery_id, now), budget.spec.concurrency
        if most is not None and key.used(came_at) + (kept is not None) >= most:
            return "concurrency"
        free = key.allowance.free(now)
        return "rate" if free is not None and cost > free - (kept.cost if kept else 0) else None

    def _why(self, budget: LockedBudget, key: KeyState, need: Need, asking: Asking, now: datetime) -> str | None:
        lacking = self.lacks((need.budget, need.key), asking.id, need.cost, now, asking.came_at, asking.run_id)
        if lacking in ("paused", "closed"):
            return lacking
        if budget.spec.concurrency is None and need.cost == 0:
            return None  # it needs nothing that others wait for
        first = key.first_waiting
        if key.is_blocked or (first is not None and (asking.is_newcomer or first < asking.sequence)):
            return "line"
        return lacking

    def _reserve_others(self, asking: Asking, refusing: Need, until: datetime | None, now: datetime) -> None:
        """Keep what the other budgets have for this delivery until the refusing one should have room: else, whenever
        one has room, others may have taken the rest, for ever."""
        for need in asking.needs:
            budget, key = self.budgets.get(need.budget), self.keys.get((need.budget, need.key))
            if need == refusing or budget is None or key is None or self._why(budget, key, need, asking, now):
                continue
            most = RESERVED_AT_MOST
            if budget.spec.interval_ms is not None:
                most = min(most, 2 * timedelta(milliseconds=budget.spec.interval_ms))
            key.reserve(Reserved(asking.id, need.cost, now + min(most, (until or now + most) - now + RESERVED_LONGER)))

    def _refused(
        self, budget: LockedBudget, key: KeyState, need: Need, why: str, now: datetime, asking: Asking
    ) -> Refused:
        spec = budget.spec
        of_key = f" for key {need.key}" if need.key else ""
        messages: dict[str, Callable[[], str]] = {
            "paused": lambda: budget.pause,
            "closed": lambda: _closed(key, of_key),
            "line": lambda: f"waiting in line{of_key}",
            "concurrency": lambda: _in_use(key, spec.concurrency or 0, of_key),
            "rate": lambda: (
                f"over {written_rate(spec.limit or 0, spec.interval_ms or 0)}{of_key}"
                + (f" with a cost of {need.cost}" if need.cost != 1 else "")
            ),
        }
        # While all slots are in use, the end of a run wakes the first in line; by the rate it may be due all the time.
        is_full = spec.concurrency is not None and key.used(asking.came_at) >= spec.concurrency
        is_timed = why in ("paused", "closed") or (why != "concurrency" and spec.limit is not None and not is_full)
        until = self._slot(budget, key, need, now, asking) if is_timed else None
        detail = {"name": need.budget, "key": need.key, "cost": need.cost, "why": why}
        is_move = asking.came_from is not None and asking.came_from != need.budget
        return Refused(f"budget {need.budget}: {messages[why]()}", {BUDGET: detail}, until, why == "paused", is_move)

    def _slot(self, budget: LockedBudget, key: KeyState, need: Need, now: datetime, asking: Asking) -> datetime:
        """A time for a delivery that waits: newcomers after all that wait; those that were due, in their order, from
        the time at which there is room again."""
        opens = key.allowance.room_at(now, need.cost)
        if budget.is_paused(now):
            opens = max(opens, budget.paused_until or now + OPEN_PAUSE)
        if (kept := key.kept_from(asking.id, now)) is not None:
            opens = max(opens, kept.until)
        opens = max(opens, key.shut_until(now) or opens)
        if asking.is_newcomer:
            return key.allowance.take_slots(opens, now + HORIZON, 1, need.cost)[0]
        found = max(opens, key.next_at or opens)
        key.next_at = found + _pace(key.allowance, need.cost)
        return min(found, now + HORIZON)


def _in_use(key: KeyState, most: int, of_key: str) -> str:
    waiting = f", and {len(key.resuming)} resuming runs wait for one" if key.in_use < most and key.resuming else ""
    return f"{key.in_use} of {most} slots{of_key} are in use{waiting}"


def _closed(key: KeyState, of_key: str) -> str:
    assert key.closed is not None, "it is closed"
    if key.closed.probe_run_id is not None:
        return f"half open{of_key}: run {key.closed.probe_run_id} is tried first ({key.closed.reason})"
    return f"closed{of_key}: {key.closed.reason}"


def eta(allowance: Allowance, budget: LockedBudget, cost: int, ahead_cost: int, now: datetime) -> datetime | None:
    """When a delivery with that much before it in line is expected to have room; None when that is not known."""
    if budget.is_paused(now) and budget.paused_until is None:
        return None
    if budget.spec.rate is None:
        return None
    opens = max(allowance.room_at(now, cost), budget.paused_until or now if budget.is_paused(now) else now)
    return min(opens + _pace(allowance, ahead_cost), now + HORIZON)


def _pace(allowance: Allowance, cost: int) -> timedelta:
    if allowance.limit is None:
        return timedelta(0)
    us = allowance.limit.pace // timedelta(microseconds=1) * cost
    return HORIZON if us > HORIZON // timedelta(microseconds=1) else timedelta(microseconds=us)
