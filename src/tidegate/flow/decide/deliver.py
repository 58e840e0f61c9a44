"""Deliver: one decision for each event and trigger that match: launch a run, wait for a reason, skip, or fail.

Pure: everything it depends on is in the `DeliveryState`, which the caller has loaded under the triggers' locks. Checked
in this order: idempotency key, the trigger's pause and breaker, its throttle, its concurrency, its budgets. A new
event of a trigger that collects is put into a window instead, and the run of the window is decided when it closes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tidegate.flow import trigger_backlog as backlog
from tidegate.flow.decide.budgets import BUDGET, BUDGET_ERROR, Asking, BudgetState
from tidegate.model.backlog import Backlogs
from tidegate.model.budget import CannotSpend, Need
from tidegate.model.delivery import DeliveryStatus
from tidegate.model.event import Event
from tidegate.model.ids import DeliveryId, RunId, TriggerId
from tidegate.model.retry import RetryPolicy, RetryState, next_check_at, why_exhausted
from tidegate.model.source import Gate
from tidegate.model.trigger import NO_KEYS, CompiledTrigger, RenderedKeys
from tidegate.model.trigger_terms import TemplateError
from tidegate.model.units import written_rate
from tidegate.model.window import WINDOW, Windows
from tidegate.model.work_limit import TooMuchWork, WorkLeft
from tidegate.store.deliveries import Decided
from tidegate.store.trigger_gates import LockedTrigger, Slots
from tidegate.store.trigger_rates import Superseding

MAX_PARAMETER_BYTES = 256 * 1024
# The time of a delivery that is added while its trigger is being replanned; the replan gives it its own soon after.
PROVISIONAL = timedelta(minutes=1)

# The reason of a delivery that failed because its trigger exceeded its work limit on the event.
TOO_MUCH_WORK = "too_much_work"
NO_FAULT_OF_SOURCE = (TOO_MUCH_WORK, BUDGET_ERROR)
# The reason of a delivery that was skipped because earlier runs of its trigger are unfinished.
OVERLAP = "overlap"
# The reason of a delivery that was skipped because its trigger takes no more events for now.
SKIP_OVER = "skip_over"

NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class Candidate(NamedTuple):
    """An event that fires a trigger, with its rendered templates, or the trigger's `error` (of an `unread_budget`, if
    it is one). `attempts` counts how often it was due and refused; `waited_for` is the reason it waited last."""

    id: DeliveryId
    event: Event
    trigger: CompiledTrigger
    parameters: str = "{}"
    keys: RenderedKeys = NO_KEYS
    error: str | None = None
    attempts: int = 0
    waited_for: str | None = None
    is_too_much_work: bool = False
    needs: tuple[Need, ...] = ()
    waited_budget: str | None = None
    unread_budget: str | None = None
    came_at: datetime | None = None

    @property
    def trigger_id(self) -> TriggerId:
        return self.trigger.trigger.id

    @property
    def dedupe(self) -> tuple[TriggerId, str] | None:
        """The idempotency key, with its trigger."""
        key = self.keys.dedupe_key
        return None if key is None else (self.trigger_id, key)

    @property
    def slot(self) -> tuple[TriggerId, str] | None:
        """The trigger and key of which it needs a concurrency slot; None without a limit."""
        return None if self.trigger.trigger.max_concurrency is None else (self.trigger_id, self.keys.concurrency_key)

    @property
    def rate(self) -> tuple[TriggerId, str] | None:
        """The trigger and key of which a new event is counted, and skipped if it is over; None if it is not. A start is
        not."""
        is_counted = self.trigger.trigger.skip_over_count is not None and self.event.starts is None
        return (self.trigger_id, self.keys.key) if is_counted else None

    @property
    def window(self) -> tuple[TriggerId, str] | None:
        """The trigger and key whose window a new event is collected in; None if it is not. A start is not."""
        is_collected = self.trigger.trigger.collect is not None and self.event.starts is None
        return (self.trigger_id, self.keys.key) if is_collected else None


@dataclass(slots=True)
class DeliveryState:
    """What the decisions of one transaction depend on and change, loaded under the triggers' locks.

    `keys` maps an idempotency key to the run that holds it (None: this transaction has claimed it, see `taken`);
    `lines` maps triggers with waiting deliveries to the last one's ingress sequence; loaded for newcomers only, like
    `rates`: what was taken of triggers and keys that skip what is over. `superseding` are the new deliveries that take
    the place of what waits or runs.
    """

    now: datetime
    policy: RetryPolicy
    gates: Mapping[TriggerId, LockedTrigger] = field(default_factory=dict)
    are_newcomers: bool = True
    lines: Mapping[TriggerId, int] = field(default_factory=dict)
    slots: dict[tuple[TriggerId, str], Slots] = field(default_factory=dict)
    keys: dict[tuple[TriggerId, str], RunId | None] = field(default_factory=dict)
    taken: set[tuple[TriggerId, str]] = field(default_factory=set)
    windows: Windows | None = None  # loaded if a new event is to be collected
    rates: dict[tuple[TriggerId, str], Gate] = field(default_factory=dict)
    superseding: dict[tuple[TriggerId, str], Superseding] = field(default_factory=dict)
    budgets: BudgetState = field(default_factory=BudgetState)
    backlogs: Backlogs | None = None  # loaded if a candidate may be added to one that has a policy

    def policy_of(self, candidate: Candidate) -> RetryPolicy:
        return candidate.trigger.trigger.retry or self.policy


class Wait(NamedTuple):
    """Why a delivery cannot be launched now, and what it waits for."""

    reason: str
    message: str
    waits_for: dict[str, Any]
    until: datetime | None = None
    is_pause: bool = False
    is_move: bool = False


def render(
    delivery_id: DeliveryId,
    event: Event,
    trigger: CompiledTrigger,
    envelope: dict[str, Any],
    *,
    attempts: int = 0,
    waited_for: str | None = None,
    waited_budget: str | None = None,
) -> Candidate:
    """The candidate with its parameters and keys; a template that fails on the event fails this delivery only."""
    parameters, keys, error, is_too_much_work, unread = "{}", NO_KEYS, None, False, None
    needs: tuple[Need, ...] = ()
    work_left = WorkLeft()
    try:
        if event.origin is None or event.starts is None:
            given = msgspec.json.encode(trigger.parameters(event, envelope, work_left)).decode()
            keys = trigger.keys(envelope, work_left)
        else:
            given, keys = msgspec.json.encode(event.payload).decode(), trigger.start_keys(envelope, work_left)
        if trigger.budgets:
            needs = trigger.needs(envelope, work_left, is_start=event.origin is not None and event.starts is not None)
        if len(given) <= MAX_PARAMETER_BYTES:
            parameters = given
        else:
            error = f"the parameters are {len(given)} bytes; at most {MAX_PARAMETER_BYTES} are allowed"
    except TooMuchWork as exc:
        error, is_too_much_work = str(exc), True
    except CannotSpend as exc:
        error, unread = str(exc), exc.budget
    except (TemplateError, TypeError, ValueError, RecursionError) as exc:
        error = str(exc)
    return Candidate(delivery_id, event, trigger, parameters, keys, error, attempts, waited_for, is_too_much_work,
                     needs, waited_budget, unread)  # fmt: skip


def decide(state: DeliveryState, candidates: Sequence[Candidate], *, are_newcomers: bool) -> list[Decided]:
    """The deliveries of a batch, in order. New deliveries queue behind those that already wait."""
    found = [_decide(state, candidate, are_newcomers) for candidate in candidates]
    if state.windows is None:
        return found
    closes_at = state.windows.times  # those that came later may have moved it
    return [d._replace(next_attempt_at=closes_at[d.id]) if d.window_id == d.id else d for d in found]


def launched(candidate: Candidate, concurrency_key: str | None = None) -> Decided:
    """The decision for a new candidate that nothing holds back. Spelled out for speed: most deliveries take it."""
    event, trigger = candidate.event, candidate.trigger.trigger
    return Decided(
        candidate.id, trigger.id, event.id, trigger.version, "launched", None, RunId(candidate.id),
        trigger.workflow_definition_id, event.correlation_id, candidate.parameters, None, concurrency_key,
        metadata=NO_METADATA, source=event.source, ingress_sequence=event.ingress_sequence,
    )  # fmt: skip


def _decide(state: DeliveryState, candidate: Candidate, is_newcomer: bool) -> Decided:
    if candidate.error is not None:
        held = _why_held(state, candidate) or _why_unread(state, candidate, is_newcomer)
        if held is not None:
            return _wait(state, candidate, held, is_newcomer)
        reason = TOO_MUCH_WORK if candidate.is_too_much_work else BUDGET_ERROR if candidate.unread_budget else None
        return decided(candidate, "failed", last_error=candidate.error, reason=reason)
    holder = state.keys.get(candidate.dedupe) if candidate.dedupe else None
    if holder is not None:
        message = f"run {holder} was launched with the same idempotency key"
        return decided(candidate, "skipped", last_error=message, run_id=holder, reason="idempotency")
    if is_newcomer and candidate.rate is not None and (rate := state.rates[candidate.rate]).limit is not None:
        if rate.room(state.now) == 0:
            message = (
                f"over {written_rate(rate.limit.limit, rate.limit.interval_ms)}, and the trigger skips what is over"
            )
            return decided(candidate, "skipped", last_error=message, reason=SKIP_OVER)
        rate.spend(state.now, 1)
    if (
        is_newcomer
        and state.windows is not None
        and (collected := _collect(state, state.windows, candidate)) is not None
    ):
        return collected
    gate = state.gates[candidate.trigger_id].gate if candidate.trigger_id in state.gates else None
    is_unlimited = gate is None and candidate.slot is None and not candidate.needs
    wait = None if is_unlimited else _why_wait(state, candidate, is_newcomer)
    if wait is not None and wait.reason == OVERLAP:
        return decided(candidate, "skipped", last_error=wait.message, reason=OVERLAP)
    if wait is not None:
        return _wait(state, candidate, wait, is_newcomer)
    run_id = RunId(candidate.id)  # the primary key of runs then prevents a second launch
    is_probe = gate is not None and gate.is_probing(state.now)
    if gate is not None:
        gate.spend(state.now, 1)
        if is_probe:
            gate.begin_probe(run_id)
    if candidate.slot is not None:
        slots = state.slots[candidate.slot]
        state.slots[candidate.slot] = slots._replace(in_use=slots.in_use + 1, oldest=slots.oldest or run_id)
    state.budgets.spend(candidate.id, candidate.needs, run_id, state.now)
    if is_newcomer and state.backlogs is not None:
        backlog.follow(state, candidate)
    if candidate.dedupe is not None:
        state.keys[candidate.dedupe] = run_id
    done: RetryState = "none" if is_newcomer else "completed"
    return decided(candidate, "launched", run_id=run_id, is_probe=is_probe, retry_state=done)


def _collect(state: DeliveryState, windows: Windows, candidate: Candidate) -> Decided | None:
    """The candidate in the window of its key; None if it is launched on its own. The first of a window waits for
    all."""
    trigger = candidate.trigger.trigger
    if candidate.window is None or trigger.collect is None:
        return None
    is_opening = trigger.backlog is not None and windows.opens(trigger.collect, candidate.window, state.now)
    if is_opening and (left := backlog.over(state, candidate, is_new=True)) is not None:
        return decided(candidate, **left)
    own = trigger.id, trigger.version
    found = windows.collect(trigger.collect, candidate.id, candidate.event, own, candidate.keys.key, state.now)
    if found is None:
        return None
    of_key = f" of key {candidate.keys.key}" if candidate.keys.key else ""
    message = f"collected in a window{of_key}: {trigger.collect}"
    waits_for = {"window": {"id": found.window.id, "key": candidate.keys.key or None}}
    return decided(
        candidate,
        "collected",
        last_error=message,
        retry_state="scheduled" if found.is_first else "none",
        next_attempt_at=found.window.closes_at if found.is_first else None,
        reason=WINDOW,
        metadata={"reason": WINDOW, "message": message, "waits_for": waits_for}
        | backlog.noted(candidate, state.now, is_new=True),
    )._replace(window_id=found.window.id)


def _why_held(state: DeliveryState, candidate: Candidate) -> Wait | None:
    """A pause or an open breaker."""
    locked = state.gates.get(candidate.trigger_id)
    hold = locked.gate.hold(state.now) if locked is not None else None
    return None if hold is None else Wait(hold.reason, hold.message, {hold.reason: {"until": hold.until}})


def _why_unread(state: DeliveryState, candidate: Candidate, is_newcomer: bool) -> Wait | None:
    if candidate.unread_budget is None:
        return None
    is_new = is_newcomer or candidate.waited_for == "replay"
    refused = state.budgets.why_unread(candidate.unread_budget, candidate.error or "", is_new, state.now)
    return None if refused is None else Wait(BUDGET, *refused)


def _why_wait(state: DeliveryState, candidate: Candidate, is_newcomer: bool) -> Wait | None:
    held = _why_held(state, candidate)
    if held is not None:
        return held
    locked = state.gates.get(candidate.trigger_id)
    if locked is not None:
        gate, limit = locked.gate, locked.gate.limit
        if is_newcomer and candidate.trigger_id in state.lines:
            message = "waiting behind earlier deliveries of the same trigger"
            return Wait("throttle", message, {"throttle": {"behind": state.lines[candidate.trigger_id]}})
        if limit is not None and gate.room(state.now) == 0:
            message = f"over the throttle of {written_rate(limit.limit, limit.interval_ms)}"
            return Wait("throttle", message, {"throttle": {"count": limit.limit, "window_ms": limit.interval_ms}})
    return _why_no_slot(state, candidate, is_newcomer) or _why_no_budget(state, candidate, is_newcomer)


def _why_no_budget(state: DeliveryState, candidate: Candidate, is_newcomer: bool) -> Wait | None:
    if not candidate.needs:
        return None
    event, came_from = candidate.event, None if is_newcomer else candidate.waited_budget
    asking = Asking(candidate.id, candidate.needs, event.ingress_sequence, is_newcomer, came_from, candidate.attempts,
                    candidate.came_at)  # fmt: skip
    refused = state.budgets.why_wait(asking, state.now)
    if refused is None:
        return None
    # Without a time, the end of a run wakes it; this is the fallback.
    until = refused.until or next_check_at(state.policy_of(candidate), state.now - event.counted_from, state.now)
    return Wait(BUDGET, *refused._replace(until=until))


def _why_no_slot(state: DeliveryState, candidate: Candidate, is_newcomer: bool) -> Wait | None:
    most, holds = candidate.trigger.trigger.max_concurrency, candidate.trigger.trigger.holds
    if candidate.slot is None or most is None:
        return None
    slots, key = state.slots[candidate.slot], candidate.keys.concurrency_key
    if slots.closed_until is not None:
        waits_for = {"retry_after": {"key": key, "until": slots.closed_until}}
        return Wait("retry_after", slots.closed_reason or "", waits_for, slots.closed_until)
    # A new delivery leaves a free slot for each that is already waiting for one, others for runs that wait longer.
    if slots.in_use + (slots.waiting if is_newcomer else slots.ahead) >= most:
        if candidate.trigger.trigger.overlap == "skip":
            which = slots.in_the_way(most, holds)
            return Wait(OVERLAP, f"{which}, and the trigger skips what overlaps (overlap: skip)", {})
        if is_newcomer and candidate.trigger.trigger.cancel_running:
            state.superseding[candidate.slot] = Superseding(candidate.id, candidate.event.id)
        state.slots[candidate.slot] = slots._replace(waiting=slots.waiting + 1)
        of_key = f" of key {key}" if key else ""
        full = f"{slots.in_use} of {most} slots{of_key} are in use"
        message = full if slots.in_use >= most else f"waiting in line for a slot{of_key}"
        return Wait("concurrency", message, {"concurrency": {"max": most, "key": key or None}})
    return None


def _wait(state: DeliveryState, candidate: Candidate, wait: Wait, is_newcomer: bool) -> Decided:
    policy, now = state.policy_of(candidate), state.now
    is_new = is_newcomer or candidate.waited_for == "replay"
    if (left := backlog.over(state, candidate, is_new=is_new)) is not None:
        return decided(candidate, **left)
    # Only a refusal by the throttle at its scheduled time uses an attempt. Waiting for something to end (a pause, a
    # breaker, the run that holds its slot) uses none, however long it takes.
    is_refused = wait.reason == candidate.waited_for == "throttle"
    attempts_used = candidate.attempts if is_refused else 0
    why = why_exhausted(policy, attempts_used, now - candidate.event.counted_from)
    if why and not is_newcomer and wait.reason != "paused" and not wait.is_pause:
        text = f"retries exhausted ({why}): {wait.message}"
        return decided(candidate, "exhausted", last_error=text, retry_state="exhausted", reason=wait.reason)
    attempts = candidate.attempts + int(is_newcomer or is_refused or wait.is_move)
    locked = state.gates.get(candidate.trigger_id)
    plan_version = locked.plan_version if locked else 0
    if wait.until is not None:
        at = wait.until
    elif wait.reason == "concurrency":  # the end of a run wakes it; this time is the fallback
        at = next_check_at(policy, now - candidate.event.counted_from, now)
    elif locked is not None and not locked.is_replanning:
        at = locked.gate.slots(now, 1)[0]
    else:
        at, plan_version = now + PROVISIONAL, plan_version - 1
    return decided(
        candidate,
        "paused" if wait.reason in ("paused", "breaker_open") else "throttled",
        last_error=wait.message,
        retry_state="scheduled",
        next_attempt_at=at,
        retry_attempts=attempts,
        reason=wait.reason,
        plan_version=plan_version,
        metadata={"reason": wait.reason, "message": wait.message, "until": at, "waits_for": wait.waits_for}
        | backlog.noted(candidate, now, is_new=is_new),
    )


def decided(
    candidate: Candidate,
    status: DeliveryStatus,
    *,
    last_error: str | None = None,
    run_id: RunId | None = None,
    is_probe: bool = False,
    retry_state: RetryState = "none",
    next_attempt_at: datetime | None = None,
    retry_attempts: int | None = None,
    reason: str | None = None,
    plan_version: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Decided:
    """The decision about a candidate."""
    event, trigger = candidate.event, candidate.trigger.trigger
    return Decided(
        candidate.id, trigger.id, event.id, trigger.version, status, last_error, run_id, trigger.workflow_definition_id,
        event.correlation_id, candidate.parameters, candidate.keys.dedupe_key,
        candidate.keys.concurrency_key if trigger.holds_slots else None, is_probe, retry_state, next_attempt_at,
        candidate.attempts if retry_attempts is None else retry_attempts, reason, plan_version,
        metadata if metadata is not None else {"reason": reason} if reason else NO_METADATA, event.source,
        event.ingress_sequence,
    )  # fmt: skip
