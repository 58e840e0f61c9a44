"""Verdict: the causes of a status other than ok, from facts and thresholds. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from tidegate.flow.look.why import leave_out
from tidegate.model.health import HealthPolicy, Severity, severity
from tidegate.store.backlogs import FillingTrigger
from tidegate.store.health import (
    Alive,
    Counts,
    DeadLetters,
    Depths,
    ExpiredClaims,
    Group,
    PausedSource,
    PausedTrigger,
    QueueDepth,
    RetrySummary,
    SourceBreaker,
    TriggerBreaker,
)
from tidegate.store.runs import VersionHeld
from tidegate.store.schedules import OverdueSchedule
from tidegate.store.slot_lines import SlotBacklog
from tidegate.store.source_backlogs import FillingSource
from tidegate.store.troubled_budgets import LongClosed, TroubledBudget
from tidegate.store.workers import Unserved

RUNBOOK = "docs/operations/event-scheduler.md"


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why the status is not ok: what, which subject, since when, what to do (a command where there is one),
    and the section of the runbook."""

    code: str
    severity: Severity
    subject: str
    message: str
    since: datetime | None
    do: str
    runbook: str


# What to do about a cause; `{}` is its subject, of a trigger its name.
_NEXT_STEPS = {
    "source_paused": "tidegate sources resume {}",
    "trigger_paused": "tidegate triggers resume {}",
    "budget_paused": "tidegate budgets resume {}",
    "budget_unread": "tidegate budgets explain {0}; then correct it: tidegate budgets set {0} … --dry-run",
    "budget_closed": "it opens by itself; at once: tidegate budgets resume {}",
    "budget_backlog": "tidegate budgets explain {0}; to allow more: tidegate budgets set {0} RATE",
    "slot_backlog": "tidegate runs list --workflow {} --status pending; tidegate explain RUN says who holds the slots",
    "source_breaker_open": "it closes by itself once events succeed; at once: tidegate sources resume {}",
    "trigger_breaker_open": "it closes by itself once its probe succeeds; at once: tidegate triggers resume {}",
    "source_backlog": "tidegate retries list --source {0}; to allow more: tidegate sources backlog {0} --max-waiting N",
    "trigger_backlog": "tidegate triggers show {}; start more workers, or allow more: backlog.max_waiting",
    "retries_overdue": "tidegate retries list --kind {}",
    "ingress_stalled": "start more workers: tidegate worker APP",
    "triggers_stalled": "start more workers: tidegate worker APP",
    "runs_stalled": "start more workers: tidegate worker APP",
    "dead_letters_growing": "tidegate dlq list --kind {0}; once the cause is fixed: tidegate dlq replay --kind {0}",
    "no_worker": "start one: tidegate worker APP",
    "workflow_unserved": "start a worker whose APP has {}: tidegate worker APP",
    "schedule_overdue": "start a worker whose APP has {0}; if it is not to run: tidegate schedules pause {0}",
    "version_mismatch": "tidegate runs list --workflow {} --status pending; tidegate runs show ID says what they need",
    "reconcile_failing": "search the workers' logs for reconcile",
}


# What happens to one more when a backlog is full.
_THEN = {
    "refuse": "when it is full, publishing is refused",
    "skip": "when it is full, each new {} is skipped",
    "drop_oldest": "when it is full, the oldest {} leaves for each new one",
    "dead_letter": "when it is full, each new {} becomes a dead letter",
}


class HealthFacts(NamedTuple):
    """What was read at one moment of the database's clock. Pauses and breakers are those that a snapshot shows;
    `counts` has the totals. `waiting` are the waiting events of some sources."""

    now: datetime
    last_processed: datetime | None
    counts: Counts
    paused_sources: list[PausedSource]
    paused_triggers: list[PausedTrigger]
    source_breakers: list[SourceBreaker]
    trigger_breakers: list[TriggerBreaker]
    waiting: Mapping[str, Group]
    depths: Depths
    queues: dict[str, QueueDepth]
    retries: dict[str, RetrySummary]
    dead_letters: Mapping[str, DeadLetters]
    workers: Alive
    expired_claims: Sequence[ExpiredClaims]
    unserved: Sequence[Unserved]
    overdue_schedules: Sequence[OverdueSchedule] = ()
    version_held: Sequence[VersionHeld] = ()
    budgets: Sequence[TroubledBudget] = ()
    closed_budgets: Sequence[LongClosed] = ()
    filling_sources: Sequence[FillingSource] = ()
    filling_triggers: Sequence[FillingTrigger] = ()
    slot_backlog: Sequence[SlotBacklog] = ()


def verdict(facts: HealthFacts, policy: HealthPolicy, runbook: str = RUNBOOK) -> list[Cause]:
    """All causes, the most severe first; among equals, pauses by operators before faults.

    `runbook` is the address of the runbook; each cause names its section.
    """
    found = [
        *_sources(facts, policy),
        *_triggers(facts, policy),
        *_budgets(facts, policy),
        *_backlogs(facts),
        *_slots(facts),
        *_late(facts, policy),
        *_dead_letters(facts, policy),
        *_workers(facts, policy),
        *_schedules(facts, policy),
        *_reconcile(facts, policy),
    ]
    found.sort(key=lambda cause: cause.severity != "critical")
    return [msgspec.structs.replace(cause, runbook=f"{runbook}#{cause.runbook}") for cause in found]


def _sources(facts: HealthFacts, policy: HealthPolicy) -> Iterator[Cause]:
    now = facts.now
    for source in facts.paused_sources:
        if level := _pause_level(source.since, now, policy):
            text = f"paused{_by(source.paused_by)}{_until(source.until)}: {_reason(source.reason)}"
            yield _cause("source_paused", level, source.source, text, source.since)
    for breaker in facts.source_breakers:
        over = breaker.until is not None and breaker.until <= now
        text = f"the breaker is open after {breaker.reason}"
        text += "; the next event is the probe" if over else _until(breaker.until)
        yield _cause("source_breaker_open", "degraded", breaker.source, text, breaker.since)


def _triggers(facts: HealthFacts, policy: HealthPolicy) -> Iterator[Cause]:
    now = facts.now
    for trigger in facts.paused_triggers:
        if level := _pause_level(trigger.since, now, policy):
            how = f"paused{_by(trigger.paused_by)}{_until(trigger.until)}: {_reason(trigger.reason)}"
            name = f"{trigger.workflow}/{trigger.name}"
            yield _cause("trigger_paused", level, str(trigger.trigger_id), f"{name}: {how}", trigger.since, called=name)
    for breaker in facts.trigger_breakers:
        over = breaker.until is not None and breaker.until <= now
        name = f"{breaker.workflow}/{breaker.name}"
        text = f"{name}: the breaker is {_state(breaker)} after {breaker.reason}"
        text += "" if breaker.probe_run_id else "; the next delivery is the probe" if over else _until(breaker.until)
        yield _cause("trigger_breaker_open", "degraded", str(breaker.trigger_id), text, breaker.since, called=name)


def _waiting(budget: TroubledBudget) -> str:
    """`5 deliveries and 1 step wait`."""
    parts = [
        f"{count} {noun if count == 1 else plural}"
        for count, noun, plural in (
            (budget.waiting - budget.waiting_steps, "delivery", "deliveries"), (budget.waiting_steps, "step", "steps"),
        )
        if count
    ]  # fmt: skip
    return f"{' and '.join(parts)} {'waits' if budget.waiting == 1 else 'wait'}"


def _budgets(facts: HealthFacts, policy: HealthPolicy) -> Iterator[Cause]:
    for budget in facts.budgets:
        if budget.paused_at is not None and budget.is_paused(facts.now):
            if level := _pause_level(budget.paused_at, facts.now, policy):
                text = f"paused{_by(budget.paused_by)}{_until(budget.paused_until)}: {_reason(budget.pause_reason)}"
                text += f"; {_waiting(budget)} for it" if budget.waiting else ""
                yield _cause("budget_paused", level, budget.name, text, budget.paused_at)
        elif budget.unread:
            text = f"{_waiting(budget)}, {budget.unread} of them because its key or cost cannot be evaluated"
            yield _cause("budget_unread", "degraded", budget.name, f"{text} for them, or is never allowed", None)
        elif budget.oldest_at is not None:
            seconds = (facts.now - budget.oldest_at).total_seconds()
            text = f"{_waiting(budget)} for it, the oldest for {seconds:.0f} s: it allows less"
            yield _cause("budget_backlog", "degraded", budget.name, text, budget.oldest_at)
    for closed in facts.closed_budgets:
        of = f"key {closed.key} is" if closed.key else "it is"
        more = f" (and {closed.total - 1} more keys)" if closed.total > 1 else ""
        text = f"a run has closed it for everyone: {of} closed{_until(closed.until)}{more}: {_reason(closed.reason)}"
        yield _cause("budget_closed", "degraded", closed.name, text, None)


def _backlogs(facts: HealthFacts) -> Iterator[Cause]:
    """Backlogs that are nearly full: what happens then is meant to happen, but somebody should know before."""
    for source in facts.filling_sources:
        then = _THEN[source.when_full].format("event")
        text = f"{_filled(source.waiting, source.max_waiting)} events that may wait do; {then}"
        yield _cause("source_backlog", "degraded", source.source, text, None)
    for trigger in facts.filling_triggers:
        name = f"{trigger.workflow}/{trigger.name}"
        of_key = f" of key {trigger.key}" if trigger.key else ""
        then = _THEN[trigger.when_full or "skip"].format("delivery")
        text = f"{name}: {_filled(trigger.waiting, trigger.max_waiting)} deliveries{of_key} that may wait do; {then}"
        yield _cause("trigger_backlog", "degraded", str(trigger.trigger_id), text, None, called=name)


def _filled(waiting: int, most: int) -> str:
    return f"{waiting} of {most}"


def _slots(facts: HealthFacts) -> Iterator[Cause]:
    for one in facts.slot_backlog:
        seconds = (facts.now - one.since).total_seconds()
        text = f"{one.waiting} due runs wait for a slot to go on, the oldest ({one.example}) for {seconds:.0f} s"
        yield _cause("slot_backlog", "degraded", one.workflow, text, one.since)


def _late(facts: HealthFacts, policy: HealthPolicy) -> Iterator[Cause]:
    for kind, summary in facts.retries.items():
        if level := severity(summary.overdue, policy.overdue_degraded, policy.overdue_critical):
            late = f"are overdue by more than {policy.overdue_ms / 1000:g} s"
            text = f"{summary.overdue} of {summary.total} waiting {kind} {late}"
            yield _cause("retries_overdue", level, kind, text, summary.overdue_since)
    for queue, depth in facts.queues.items():
        seconds = depth.oldest_due_age_seconds
        if level := severity(seconds * 1000, policy.due_age_degraded_ms, policy.due_age_critical_ms):
            text = f"the oldest of {depth.ready} due has been due for {seconds:.0f} s; are there enough workers?"
            since = facts.now - timedelta(seconds=seconds)
            yield _cause(f"{queue}_stalled", level, queue, text, since, section="queue-stalled")


def _dead_letters(facts: HealthFacts, policy: HealthPolicy) -> Iterator[Cause]:
    for kind, letters in facts.dead_letters.items():
        if level := severity(letters.recent, policy.dead_letters_degraded, policy.dead_letters_critical):
            within = f"{policy.dead_letters_window_ms / 60_000:g} min"
            text = f"{letters.recent} new dead letters of kind {kind} in the last {within}, {letters.total} in all"
            yield _cause("dead_letters_growing", level, kind, text, letters.recent_since)


def _workers(facts: HealthFacts, policy: HealthPolicy) -> Iterator[Cause]:
    if facts.workers.alive == 0:
        waiting = max((depth.oldest_due_age_seconds for depth in facts.queues.values()), default=0.0)
        level = severity(waiting * 1000, 0, policy.worker_critical_ms) or "degraded"
        due = sum(depth.ready for depth in facts.queues.values())
        silent = f"each has stopped, or sent no heartbeat for {policy.worker_degraded_ms / 1000:g} s"
        text = f"no worker is running: {silent}; due: {due}"
        # A worker that stopped cleanly leaves no row, so the time is unknown: `since` is when the oldest due work was
        # due.
        since = facts.now - timedelta(seconds=waiting) if due else None
        yield _cause("no_worker", level, "workers", text, since)
    for one in facts.unserved:
        yield _unserved(one)
    for held in facts.version_held:
        text = (
            f"{f'{held.waiting} runs wait' if held.waiting > 1 else '1 run waits'} for version "
            f"{', '.join(held.versions)} of {held.workflow}, since recorded steps do not fit the code that workers "
            f"have, e.g. {held.example}. Start such a worker, or resume or cancel what waits"
        )
        yield _cause("version_mismatch", "degraded", held.workflow, text, held.since)


def _unserved(one: Unserved) -> Cause:
    if one.left_out_by:
        text = f"{leave_out(one.left_out_by, f'the code of {one.workflow}')}; due runs: {one.waiting}. Start a worker "
        text += "that takes it, or cancel them"
        do = f"start a worker without --only, or one that names it: tidegate worker APP --only {one.workflow}"
        return _cause("workflow_unserved", "degraded", one.workflow, text, one.since, do=do)
    text = f"no running worker has the code of {one.workflow}; due runs: {one.waiting}. Start a worker that has it, "
    return _cause("workflow_unserved", "degraded", one.workflow, f"{text}or cancel them", one.since)


def _schedules(facts: HealthFacts, policy: HealthPolicy) -> Iterator[Cause]:
    for one in facts.overdue_schedules if policy.due_age_degraded_ms else ():
        late = (facts.now - one.next_at).total_seconds()
        why = f"{one.workers} running workers have its code" if one.workers else "no running worker has its code"
        text = f"the tick of {one.next_at:%Y-%m-%d %H:%M:%S} UTC was not published for {late:.0f} s; {why}"
        yield _cause("schedule_overdue", "degraded", one.workflow, text, one.next_at)


def _reconcile(facts: HealthFacts, policy: HealthPolicy) -> Iterator[Cause]:
    """Reconcile releases an expired claim within a second, and records each pass: an expired claim that stays, or a
    long time without a pass, shows that it does not work."""
    for claims in facts.expired_claims:
        late_ms = (facts.now - claims.since) / timedelta(milliseconds=1)
        if level := severity(late_ms, policy.reconcile_degraded_ms, policy.reconcile_critical_ms):
            text = f"{claims.kind} whose claim has expired and was not released: {claims.total}"
            yield _cause("reconcile_failing", level, claims.kind, text, claims.since)
    since = facts.workers.reconciled_at
    if facts.workers.alive and since is not None:
        late_ms = (facts.now - since) / timedelta(milliseconds=1)
        if level := severity(late_ms, policy.reconcile_degraded_ms, policy.reconcile_critical_ms):
            text = f"none of {facts.workers.alive} workers could check for expired claims; see their logs"
            yield _cause("reconcile_failing", level, "workers", text, since)


def _pause_level(since: datetime | None, now: datetime, policy: HealthPolicy) -> Severity | None:
    # A pause that has just begun is one millisecond old: the default threshold reports it at once.
    age_ms = max(1.0, (now - since) / timedelta(milliseconds=1)) if since else 1.0
    return severity(age_ms, policy.paused_degraded_ms, policy.paused_critical_ms)


def _cause(
    code: str,
    level: Severity,
    subject: str,
    message: str,
    since: datetime | None,
    *,
    called: str | None = None,
    section: str | None = None,
    do: str | None = None,
) -> Cause:
    """`called` is what commands call the subject, if that is another word; `section` that of the runbook; `do` what to
    do, if it is not what the code always asks for."""
    return Cause(
        code=code,
        severity=level,
        subject=subject,
        message=message,
        since=since,
        do=do or _NEXT_STEPS[code].format(called or subject),
        runbook=section or code.replace("_", "-"),
    )


def _state(breaker: TriggerBreaker) -> str:
    return f"half open (run {breaker.probe_run_id} is the probe)" if breaker.probe_run_id else "open"


def _by(actor: str | None) -> str:
    return f" by {actor}" if actor else ""


def _until(until: datetime | None) -> str:
    return f" until {until:%Y-%m-%d %H:%M:%S} UTC" if until else " until it is resumed"


def _reason(reason: str | None) -> str:
    return reason or "no reason given"
