"""Budgets as operators see them: which budget holds a delivery or step, its place in line, when its turn comes, and
which runs hold the slots. Reads only."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from tidegate.flow.decide.budgets import eta
from tidegate.flow.look.near.look_up import MaySee
from tidegate.flow.look.why import NAMED, moment, named_holders
from tidegate.model.budget import BudgetSpec
from tidegate.model.ids import RunId
from tidegate.model.units import written_rate
from tidegate.store import budget_views, circumstances
from tidegate.store.budget_views import BudgetHolder, KeyLine, Place
from tidegate.store.budgets import BudgetRecord, LockedBudget
from tidegate.store.circumstances import BudgetWait, RunCircumstances, RunSlotWait, SlotHolder, SlotWait
from tidegate.store.db import Connection

Id = TypeVar("Id", bound=uuid.UUID)

# How many lines and holders of a budget are shown.
SHOWN = 20


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """A budget, the keys for which most wait, and the runs that have held its slots longest."""

    budget: BudgetRecord
    lines: list[KeyLine]
    holders: list[BudgetHolder]


async def view(connection: Connection, record: BudgetRecord, key: str | None = None) -> BudgetView:
    """The budget with its lines and holders; of one key, if one is given."""
    lines = await budget_views.key_lines(connection, record.name, key, SHOWN)
    return BudgetView(
        budget=record, lines=lines, holders=await budget_views.holders(connection, record.name, key, SHOWN)
    )


async def waits(connection: Connection, ids: Iterable[Id], may_see: MaySee) -> dict[Id, BudgetWait]:
    """What holds each of the deliveries, or steps, that wait for a budget."""
    found, places = {}, await budget_views.places(connection, wanted := [*ids])
    for delivery_id in wanted:
        if (place := places.get(delivery_id)) is None:
            continue
        spec = place.budget.spec
        holders = []
        if spec.concurrency is not None and place.in_use >= spec.concurrency:
            holders = await budget_views.holders(connection, spec.name, place.key, NAMED)
        seen = [one if may_see(one.source) else msgspec.structs.replace(one, workflow="") for one in holders]
        found[delivery_id] = told(delivery_id, place, seen)
    return found


def told(delivery_id: uuid.UUID, place: Place, holders: Sequence[BudgetHolder]) -> BudgetWait:
    """What a delivery waits for in the line where it stands, and until when, if that can be known."""
    spec, now = place.budget.spec, place.now
    if place.key is None:
        told = f"{place.budget.pause}" if place.budget.is_paused(now) else "it is in no line"
        return BudgetWait(text=told, waits_for="its budget to be corrected", until=None)
    of_key = f" for key {place.key}" if place.key else ""
    parts = [f"it is number {place.ahead + 1} in line{of_key}"]
    if spec.limit is not None and spec.interval_ms is not None:
        free = place.allowance.free(now)
        parts.append(f"{free} of {written_rate(spec.limit, spec.interval_ms)} are left, and it costs {place.cost}")
    if holders:
        parts.append(f"{place.in_use} of {spec.concurrency} slots are held by {named_holders(holders)}")
    kept = place.reserved
    if kept is not None and (kept.delivery_id == delivery_id or kept.until <= now):
        kept = None
    if kept is not None:
        parts.append(f"{_kept(kept.cost, spec)} until {moment(kept.until)} for another that needs several budgets")
    text = "; ".join(parts)
    if place.budget.is_paused(now):
        until = place.budget.paused_until
        waits_for = "its budget to be resumed" if until is None else "the end of its budget's pause"
        until = until and max(until, place.next_attempt_at)
        return BudgetWait(text=text, waits_for=waits_for, until=until, pause=_pause(place.budget))
    if (shut := place.closed) is not None and shut.probe_run_id is None and shut.until > now:
        waits_for = "the time that a run asked everyone to wait for"
        return BudgetWait(text=text, waits_for=waits_for, until=max(shut.until, place.next_attempt_at))
    if shut is not None and shut.probe_until is not None and shut.probe_until > now:
        waits_for = f"run {shut.probe_run_id}, which is tried first, to end"
        return BudgetWait(text=text, waits_for=waits_for, until=shut.probe_until)
    if holders:
        return BudgetWait(text=text, waits_for="a slot of its budget", until=None)
    if (until := eta(place.allowance, place.budget, place.cost, place.ahead_cost, now)) is not None:
        return BudgetWait(text=text, waits_for="room in its budget", until=until)
    if kept:
        return BudgetWait(text=text, waits_for="what is kept for another", until=kept.until)
    if place.ahead:
        return BudgetWait(text=text, waits_for="its turn in the line of its budget", until=None)
    until = place.next_attempt_at if place.next_attempt_at > now else None
    return BudgetWait(text=text, waits_for="a worker to decide it: its turn has come", until=until)


def _pause(budget: LockedBudget) -> str:
    by = f" by {budget.paused_by}" if budget.paused_by else ""
    until = moment(budget.paused_until) if budget.paused_until else "it is resumed"
    return f"budget {budget.spec.name}: paused{by} until {until}: {budget.pause_reason or 'no reason given'}"


def _kept(cost: int, spec: BudgetSpec) -> str:
    of_rate = [f"{cost} of the rate"] if spec.limit is not None else []
    slot = ["a slot"] if spec.concurrency is not None else []
    return f"{' and '.join([*of_rate, *slot])} {'are' if of_rate and (slot or cost != 1) else 'is'} kept"


async def of_runs(connection: Connection, run_ids: Sequence[RunId], may_see: MaySee) -> dict[RunId, RunCircumstances]:
    """What keeps each of the runs, with the slot for which one waits that is due."""
    found = await circumstances.of_runs(connection, run_ids)
    for wait in await circumstances.slot_waits(connection, [one.id for one in found.values() if one.has_no_slot]):
        slot = RunSlotWait(text=await _slot_text(connection, wait, may_see), since=wait.since, budget=wait.budget)
        found[wait.run_id] = msgspec.structs.replace(found[wait.run_id], slot=slot)
    return found


async def _slot_text(connection: Connection, wait: SlotWait, may_see: MaySee) -> str:
    """Which slots a run waits for, who holds them, and its place in line."""
    holders: Sequence[SlotHolder | BudgetHolder]
    if wait.budget is not None:
        holders = await budget_views.holders(connection, wait.budget, wait.key, NAMED)
    else:
        assert wait.trigger_id is not None, "a line is of a trigger or of a budget"
        holders = await circumstances.trigger_slot_holders(connection, wait.trigger_id, wait.key, NAMED)
    of = "its trigger" if wait.budget is None else f"budget {wait.budget}"
    of_key = f" for key {wait.key}" if wait.key else ""
    before = f"; it is number {wait.ahead + 1} of the runs in line" if wait.ahead else ""
    if not holders:
        return f"a slot of {of}{of_key}, which is free: a worker takes it up next{before}"
    seen = [one if may_see(one.source) else msgspec.structs.replace(one, workflow="") for one in holders]
    return f"a slot of {of}{of_key}: {holders[0].total} of {wait.most} are held by {named_holders(seen)}{before}"
