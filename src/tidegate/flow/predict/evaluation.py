"""Evaluation: what a trigger would do with an event, by the rules of `match` and `deliver`."""

from __future__ import annotations

from typing import NamedTuple

from tidegate.flow.decide import deliver
from tidegate.model.event import Event
from tidegate.model.ids import delivery_id
from tidegate.model.trigger import CompiledTrigger
from tidegate.model.work_limit import TooMuchWork


class Evaluation(NamedTuple):
    """The `check` that the event fails, and why; else it fires the trigger, and the delivery fails with the `error`, or
    has the idempotency key."""

    check: str | None = None
    reason: str | None = None
    error: str | None = None
    dedupe_key: str | None = None

    @property
    def fires(self) -> bool:
        return self.check is None


def evaluate(compiled: CompiledTrigger, event: Event) -> Evaluation:
    """What the trigger would do with the event, if it is of its type and source or not. Limits are not looked at."""
    trigger = compiled.trigger
    if trigger.status == "disabled":
        return Evaluation("status", "the trigger is disabled")
    if event.starts not in (None, trigger.id):
        return Evaluation("event_type", "the event starts a workflow by another trigger")
    if (not_taken := compiled.not_taken(event)) is not None and event.starts is None:
        return Evaluation("event_source" if compiled.takes_type(event.type) else "event_type", not_taken)
    envelope = event.envelope()
    try:
        failing = compiled.failing(envelope) if event.starts is None else None
    except TooMuchWork as exc:
        return Evaluation(error=str(exc))
    except Exception as exc:  # noqa: BLE001 - as in `match`, whatever a check raises fails the delivery
        return Evaluation(error=f"{type(exc).__name__}: {exc}"[:1000])
    if failing is not None:
        return Evaluation(*failing)
    candidate = deliver.render(delivery_id(event.id, trigger.id), event, compiled, envelope)
    return Evaluation(error=candidate.error, dedupe_key=candidate.keys.dedupe_key)
