"""Why: what an event or a delivery waits for, and until when, or how it ended. Pure: each rule turns facts that were
read once into one answer (`Why`). `why_run` has the rules for runs, `waiting_steps` those for their waiting steps.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from tidegate.errors import first_line
from tidegate.model.backlog import FULL
from tidegate.model.delivery import Delivery
from tidegate.model.ingress_retry import IngressRetry
from tidegate.model.priority import share_of_event
from tidegate.model.run import is_misfit
from tidegate.store.budget_views import BudgetHolder
from tidegate.store.circumstances import DeliveryCircumstances, EventCircumstances, SlotHolder, StoryLetter
from tidegate.store.windows import WindowFacts
from tidegate.store.workers import WorkerRecord

# A worker that sent no heartbeat for this long counts as dead, as in the health snapshot by default.
ALIVE_MS = 60_000
# A run that whoever asks may not see; it is given without its workflow.
ANOTHERS = "a run of another source"
# What something waits for when no worker is there.
NO_WORKER = "a worker: none is running"
# How many runs, workers or workflows one sentence names.
NAMED = 3


class Why(NamedTuple):
    """An answer. `state` is a stable word for programs; `text` continues a sentence that begins with the subject.

    `waits_for` is None when it waits for nothing: it ended, or is being executed. `until` is when it continues; None
    when that cannot be known: somebody must do something, or something must end first.
    """

    state: str
    text: str
    waits_for: str | None = None
    until: datetime | None = None


def moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def present(workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """The workers that can be expected to act: they have sent their last heartbeat in time."""
    return [worker for worker in workers if worker.is_alive and not worker.is_late]


def some(items: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(items) - NAMED
    return ", ".join(items[:NAMED]) + (f" and {more} more" if more > 0 else "")


def leave_out(workers: Sequence[str], code: str) -> str:
    """That these workers have the code, and leave its runs to others."""
    do = ("have", "take") if len(workers) > 1 else ("has", "takes")
    return f"{some(workers)} {do[0]} {code} and {do[1]} other workflows only (--only)"


def nobody(now: datetime, workers: Sequence[WorkerRecord], none: str = "no worker is running") -> str:
    """That no worker is `present`, and which was the last; `none` when none is on record."""
    how = "start one: tidegate worker APP"
    if not workers:
        return f"{none}; {how}"
    last = max(workers, key=lambda worker: worker.seen_at)
    seconds = max(0, int((now - last.seen_at).total_seconds()))
    return f"no worker is alive; the last, {last.name}, was seen {seconds} s ago; {how}"


def why_event(
    retry: IngressRetry | None,
    around: EventCircumstances,
    letters: Sequence[StoryLetter],
    workers: Sequence[WorkerRecord],
) -> Why | None:
    """Why an event is not decided; None when it is, or is being decided again."""
    if around.is_undecided:
        return _undecided(around, workers)
    if retry is None or retry.retry_state == "completed":
        dead = _letter_of("event", letters)
        return None if dead is None or dead.replayed_at else _ended("dead_letter", first_line(dead.reason), dead)
    if retry.retry_state in ("exhausted", "cancelled"):
        text = retry.last_error or retry.retry_state
        dead = _letter_of("event", letters)
        if retry.retry_state == "cancelled":
            return _ended("cancelled", f"cancelled while it was held: {text}", dead)
        if retry.reason == FULL:
            return _ended("dropped", f"dropped: {text}", dead)
        return _ended("expired" if retry.reason == "expired" else "exhausted", text, dead)
    if retry.retry_state == "running":
        return Why("deciding", "is being decided", "the worker that decides it", retry.claim_expires_at)
    return _held(retry, around)


def _undecided(around: EventCircumstances, workers: Sequence[WorkerRecord]) -> Why:
    before = _before(around.undecided_ahead, "undecided event of its source", "undecided events of its source")
    if around.weight > 1:
        before += f"; its source has weight {around.weight}"
    if around.priority > 1:
        before += f"; {share_of_event(around.priority)}"
    if not present(workers):
        return Why("no_worker", f"waits in the inbox{before}: {nobody(around.now, workers)}", NO_WORKER)
    text = f"waits in the inbox for a worker to decide it{before}"
    return Why("undecided", text, "a worker to decide it")


def _held(retry: IngressRetry, around: EventCircumstances) -> Why:
    said, until = retry.last_error or retry.reason or "held", retry.next_attempt_at
    before = _before(around.held_ahead, "event of its source", "events of its source")
    if retry.reason == "scheduled" and until is not None:
        return Why("scheduled", f"scheduled for {moment(until)}: {said}", "its time", until)
    if around.source_paused_at is not None and around.source_paused_until is None:
        return Why("source_paused", f"held until its source is resumed: {said}{before}", "its source to be resumed")
    state, waits_for = {
        "rate_limit": ("rate_limit", "room in the limit of its source"),
        "paused": ("source_paused", "the end of its source's pause"),
        "breaker_open": ("breaker_open", "the breaker of its source to close"),
        "replay": ("replay", "a worker to decide it again"),
    }.get(retry.reason or "", (retry.reason or "held", "its time"))
    assert until is not None, "a row that is scheduled has a time"
    return Why(state, f"held until {moment(until)}: {said}{before}", waits_for, until)


def why_delivery(
    delivery: Delivery,
    around: DeliveryCircumstances | None,
    holders: Sequence[SlotHolder],
    letters: Sequence[StoryLetter],
    actor: str | None = None,
    window: WindowFacts | None = None,
    leader: Why | None = None,
) -> Why:
    """Why a delivery launched no run, or not yet. `actor` is who decided last, if an operator did; `window` is what it
    is collected in, and `leader` for what the first delivery in it waits."""
    said = delivery.last_error or delivery.reason or delivery.status
    if window is not None and delivery.status == "collected":
        return _collected(delivery, window, leader)
    if delivery.retry_state == "scheduled" and around is not None:
        return _leaving(_waiting(delivery, around, holders, said), around.stale_at)
    if delivery.retry_state == "running":
        return Why("deciding", "is being decided", "the worker that decides it", delivery.claim_expires_at)
    dead = _letter_of("delivery", letters, delivery.id)
    by = f" by {actor}" if actor and f"by {actor}" not in said else ""
    match delivery.status:
        case "skipped":
            return Why("skipped", f"skipped: {said}")
        case "cancelled":
            return Why("cancelled", f"cancelled{by}: {said}")
        case "collected":
            return Why("collected", f"collected in a window, which run {delivery.workflow_run_id} took")
        case "failed" | "exhausted":
            return _ended(delivery.status, f"{delivery.status}: {said}", dead)
        case _:
            return Why(delivery.status, delivery.status)


def _collected(delivery: Delivery, window: WindowFacts, leader: Why | None) -> Why:
    of = f"a window of {window.size} event{'' if window.size == 1 else 's'}"
    if delivery.workflow_run_id is not None:
        return Why("collected", f"collected in {of}, which run {delivery.workflow_run_id} took")
    if window.state == "open":
        text = f"waits in {of} that closes at {moment(window.closes_at)}"
        return Why("window", text, "its window to close", window.closes_at)
    text = f"waits in {of}, which is closed and to be launched"
    if leader is not None and leader.state != "window":
        said = f"{text}; its first delivery {leader.text}"
        return Why("window", said, leader.waits_for or "its window to be launched", leader.until)
    if leader is None and window.id != delivery.id:
        text += f"; for what it waits: tidegate explain {window.id}"
    return Why("window", text, "its window to be launched")


def _waiting(delivery: Delivery, around: DeliveryCircumstances, holders: Sequence[SlotHolder], said: str) -> Why:
    until = delivery.next_attempt_at
    assert until is not None, "a row that is scheduled has a time"
    before = _before(around.ahead, "delivery", "deliveries")
    if around.paused_at is not None and around.paused_until is None:
        return Why(
            "trigger_paused", f"waits for its trigger to be resumed: {said}{before}", "its trigger to be resumed"
        )
    if around.breaker_state == "half_open":
        probe = f" (run {around.probe_run_id})" if str(around.probe_run_id) not in said else ""
        return Why("breaker_half_open", f"waits for the probe to end{probe}: {said}", "the probe to end")
    is_paused = around.source_paused_at is not None and around.source_paused_until is None
    if delivery.reason == "source_paused" and is_paused:
        return Why("source_paused", f"waits for its source to be resumed: {said}", "its source to be resumed")
    if delivery.reason == "concurrency":
        return Why("concurrency", f"waits for a free slot: {said}{_held_by(holders)}{before}", "a free slot")
    if delivery.reason == "budget" and around.budget is not None:
        held = around.budget
        when = f" until about {moment(held.until)}" if held.until is not None else ""
        return Why("budget", f"waits{when}: {held.pause or said}; {held.text}", held.waits_for, held.until)
    state, waits_for = {
        "throttle": ("throttle", "room in the throttle of its trigger"),
        "paused": ("trigger_paused", "the end of its trigger's pause"),
        "breaker_open": ("breaker_open", "the breaker of its trigger to close"),
        "source_paused": ("source_paused", "the end of its source's pause"),
        "retry_after": ("retry_after", "the time that a step asked everyone to wait for"),
        "trigger_invalid": ("trigger_invalid", "a worker that can read its trigger"),
        "replay": ("replay", "a worker to decide it again"),
    }.get(delivery.reason or "", (delivery.reason or "waiting", "its time"))
    return Why(state, f"waits until {moment(until)}: {said}{before}", waits_for, until)


def _leaving(why: Why, stale_at: datetime | None) -> Why:
    """With the time at which it leaves (`max_wait`): that comes first if its turn comes later, or nobody knows when."""
    if stale_at is None:
        return why
    leaves = f"leaves at {moment(stale_at)} unless launched before (max_wait)"
    if why.until is not None and why.until <= stale_at:
        return why._replace(text=f"{why.text}; it {leaves}")
    return why._replace(text=f"{leaves}; it {why.text}", until=stale_at)


def _held_by(holders: Sequence[SlotHolder]) -> str:
    return f"; held by {named_holders(holders)}" if holders else ""


def named_holders(holders: Sequence[SlotHolder | BudgetHolder]) -> str:
    """The runs that hold slots, and when each resumes or until when its worker's lease lasts."""
    named = [f"{f'run {one.id}' if one.workflow else ANOTHERS} ({_doing(one)})" for one in holders[:NAMED]]
    more = holders[0].total - len(named)
    return f"{', '.join(named)}{f' and {more} more' if more > 0 else ''}"


def _doing(one: SlotHolder | BudgetHolder) -> str:
    if one.resumes_at is not None:
        return f"resumes {moment(one.resumes_at)}"
    lease = f", lease until {moment(one.lease_until)}" if one.lease_until is not None else ""
    of_step = f"step {one.step!r}, " if isinstance(one, BudgetHolder) and one.step is not None else ""
    return f"{of_step}{one.status} since {moment(one.created_at)}{lease}"


def _letter_of(kind: str, letters: Sequence[StoryLetter], subject: uuid.UUID | None = None) -> StoryLetter | None:
    """The newest dead letter of a kind, and of a subject."""
    found = [one for one in letters if one.kind == kind and (subject is None or one.subject_id == subject)]
    return found[-1] if found else None


def _ended(state: str, text: str, dead: StoryLetter | None) -> Why:
    after, until = letter_text(dead)
    return Why(state, f"{text}{after}", "its dead letter to be replayed" if until else None, until)


def letter_text(dead: StoryLetter | None) -> tuple[str, datetime | None]:
    """What became of a dead letter, to be appended to the reason; and when it is replayed, if that is scheduled."""
    if dead is None:
        return "", None
    if dead.replayed_at is not None:
        return f"; replayed by {dead.replayed_by} at {moment(dead.replayed_at)} from dead letter {dead.id}", None
    if dead.replay_at is not None:
        why = f" ({dead.replay_error})" if dead.replay_error else ""
        text = f"; dead letter {dead.id} is to be replayed by {dead.replay_by} at {moment(dead.replay_at)}{why}"
        return text, dead.replay_at
    refused = f" (its replay was refused: {dead.replay_error})" if dead.replay_error else ""
    if is_misfit(dead.reason):
        again = "publish the event again with a payload that fits; after a change of the code: "
        return f"; dead letter {dead.id}{refused}: {again}tidegate dlq replay {dead.id}", None
    return f"; dead letter {dead.id}{refused}: tidegate dlq replay {dead.id}", None


def _before(count: int, one: str, many: str | None = None) -> str:
    """How many are before it in line; nothing for none."""
    if not count:
        return ""
    return f"; {count} {one if count == 1 else many or one + 's'} {'is' if count == 1 else 'are'} before it"
