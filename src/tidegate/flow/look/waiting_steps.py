"""Waiting steps: what a step that waits waits for. Pure. One rule for each kind of step (RULES); a new kind adds its
own there, and to ENDED_BY_OTHERS if it has no time at which it is due.

A rule is found by the step's `kind` and the `reason` in its `retry_metadata`, or by the kind alone (reason None).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from tidegate.errors import first_line
from tidegate.flow.decide.budgets import BUDGET
from tidegate.flow.look.why import Why, moment
from tidegate.model.approval import APPROVAL
from tidegate.model.run import Step
from tidegate.model.wait import WaitPattern
from tidegate.store.circumstances import MAX_ENDED, BudgetWait, StepChildren

# Given the step and the time at which its run is due again.
StepRule = Callable[[Step, datetime | None], Why]


def waiting(steps: Sequence[Step]) -> list[Step]:
    """The steps that wait, the first due first; those without a time, which something else ends, last."""
    found = [
        step
        for step in steps
        if step.status == "pending" and (step.retry_state == "scheduled" or step.kind in ENDED_BY_OTHERS)
    ]
    return sorted(found, key=lambda step: (step.next_attempt_at is None, step.next_attempt_at or _NEVER, step.name))


class AwaitedChildren(NamedTuple):
    """The children that a step waits for, and why the first that has not ended has not."""

    children: StepChildren
    first: Why | None


def why_step(
    step: Step, until: datetime | None, awaited: AwaitedChildren | None = None, held: BudgetWait | None = None
) -> Why:
    """What a waiting step waits for; `until` is when its run is due, which is never later. `held`: the budget that it
    waits for."""
    if awaited is not None and awaited.children.run_id is not None:
        return _awaited(step, awaited)
    reason = step.retry_metadata.get("reason")
    if held is not None and reason == BUDGET:
        return _budget(step, held)
    rule = RULES.get((step.kind, reason)) or RULES.get((step.kind, None)) or _other
    return rule(step, until)


def others(steps: Sequence[Step]) -> str:
    """That other steps wait, too, to be appended; an approval among them is named, since somebody has to decide it."""
    if not steps:
        return ""
    told = "; 1 other step waits too" if len(steps) == 1 else f"; {len(steps)} other steps wait too"
    asked = next((step for step in steps if step.retry_metadata.get("reason") == APPROVAL), None)
    if asked is None:
        return told
    return f"{told}: {'it' if len(steps) == 1 else 'one'} {why_step(asked, asked.next_attempt_at).text}"


def _sleep(step: Step, until: datetime | None) -> Why:
    end = f" until {moment(until)}" if until else ""
    return Why("sleeping", f"sleeps{end} (timer {step.name!r})", f"the timer {step.name!r}", until)


def _retry(step: Step, until: datetime | None) -> Why:
    said = first_line(step.error or "") or "no reason"
    at = f" at {moment(until)}" if until else ""
    if not step.retry_attempts:  # it waits for an operator: no attempt was used
        return Why("step_waits", f"waits to try step {step.name!r} again{at}: {said}", f"step {step.name!r}", until)
    of = step.retry_metadata.get("of")
    number = f"{step.retry_attempts + 1} of {of}" if of else f"{step.retry_attempts + 1}"
    times = "once" if step.retry_attempts == 1 else f"{step.retry_attempts} times"
    text = f"waits for attempt {number} of step {step.name!r}{at}; it failed {times}: {said}"
    return Why("step_retry", text, f"attempt {number} of step {step.name!r}", until)


def _budget(step: Step, held: BudgetWait) -> Why:
    said = held.pause or step.retry_metadata.get("message", "its budget has no room")
    at = f" until about {moment(held.until)}" if held.until else ""
    text = f"waits{at} to call step {step.name!r}: {said}; {held.text}"
    return Why("budget", text, f"{held.waits_for} (step {step.name!r})", held.until)


def _turn(step: Step, until: datetime | None) -> Why:
    """Its turn has come, or is being decided."""
    return Why(
        "step_waits", f"waits to call step {step.name!r}: its budgets have room now", f"step {step.name!r}", until
    )


def _event(step: Step, until: datetime | None) -> Why:
    told = awaited_events(step)
    at = f"until {moment(until)} " if until else ""
    has = kept_events(step)
    also = f"; it has {' and '.join(f'{name} (event {event_id})' for event_id, name in has.items())}" if has else ""
    return Why("waiting_for_event", f"{'still ' if has else ''}waits {at}for {told}{also}", told, until)


def awaited_events(step: Step) -> str:
    """The events that a step waits for; of `wait_all`, those that have not come. `waits_for` in the metadata are the
    patterns, `mode` whether any or all of them must be met, `kept` the events of those that are met, by number."""
    kept = step.retry_metadata.get("kept", {})
    patterns = [one for n, one in enumerate(step.retry_metadata.get("waits_for", ())) if str(n) not in kept]
    joined = " and " if step.retry_metadata.get("mode") == "all" else " or "
    told = joined.join(pattern_text(msgspec.convert(one, WaitPattern)) for one in patterns)
    return told or f"the event of step {step.name!r}"


def kept_events(step: Step) -> dict[str, str]:
    """The ids of the events that a `wait_all` has while others are missing, and their types."""
    kept, patterns = step.retry_metadata.get("kept", {}), step.retry_metadata.get("waits_for", ())
    return {str(kept[str(n)]): one["type"] for n, one in enumerate(patterns) if str(n) in kept}


def pattern_text(pattern: WaitPattern) -> str:
    """A pattern of events in words."""
    source = f" from {pattern.source}" if pattern.source != "*" else ""
    keys = [f"{path.lstrip('.')} = {value!r}" for path, value in sorted(pattern.match.items())]
    where = f" where {pattern.where}" if pattern.where else ""
    return f"event {pattern.type}{source}{' with ' + ', '.join(keys) if keys else ''}{where}"


def _approval(step: Step, until: datetime | None) -> Why:
    to = f" by {step.retry_metadata['to']}" if step.retry_metadata.get("to") else ""
    at = f"until {moment(until)} " if until else ""
    how = f"to decide: tidegate approvals approve {step.id} (or reject)"
    told = f"the approval {step.name!r}{to}"
    return Why("waiting_for_approval", f"waits {at}for {told}; {how}", told, until)


def _children(step: Step, until: datetime | None) -> Why:
    total = step.retry_metadata.get("total", 1)
    told = "its child" if total == 1 else f"its {total} children"
    return Why("waiting_for_child", f"waits for {told} of step {step.name!r}", f"{told} of step {step.name!r}")


def _awaited(step: Step, awaited: AwaitedChildren) -> Why:
    children, total = awaited.children, step.retry_metadata.get("total", 1)
    named = f"{children.workflow} {children.run_id}"
    why = f", which {_continued(awaited.first.text)}" if awaited.first else ""
    if step.kind == "child":
        told = f"its child {named} (step {step.name!r})"
        return Why("waiting_for_child", f"waits for {told}{why}", told)
    told = f"its {total} children (step {step.name!r})"
    ended = f"{children.ended}{' or more' * (children.ended >= MAX_ENDED)} of {total} have ended"
    text = f"waits for {told}: {ended}; the first that has not is item {children.position}, {named}{why}"
    return Why("waiting_for_child", text, told)


def _continued(text: str) -> str:
    """What is said of a child, as the rest of a sentence."""
    return text if text.startswith(("is ", "waits", "still waits", "sleeps", "lost", "may", "failed")) else f"is {text}"


def _other(step: Step, until: datetime | None) -> Why:
    at = f" until {moment(until)}" if until else ""
    return Why("step_waits", f"waits{at} for step {step.name!r} ({step.kind})", f"step {step.name!r}", until)


# Kinds of steps that wait without a time of their own.
ENDED_BY_OTHERS = frozenset({"child", "map"})
_NEVER = datetime.max.replace(tzinfo=UTC)

RULES: dict[tuple[str, str | None], StepRule] = {
    ("sleep", None): _sleep,
    ("step", None): _retry,
    ("step", BUDGET): _turn,
    ("wait", None): _event,
    ("wait", APPROVAL): _approval,
    ("child", None): _children,
    ("map", None): _children,
}
