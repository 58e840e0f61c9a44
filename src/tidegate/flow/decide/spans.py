"""Event spans: what one transaction decided about events and deliveries, as spans of their traces.

Spans are created after the commit. Each is a child of the span in the event's stored `traceparent`, so that a worker
that continues after a crash uses the same trace. An event without a `traceparent` gets its root span here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.clock import epoch_ns
from tidegate.flow.decide.batch import Delivered
from tidegate.model.event import Event, trace_id
from tidegate.model.ids import EventId, TriggerId
from tidegate.model.ingress_retry import IngressRetry
from tidegate.store.deliveries import Decided
from tidegate.telemetry import traces


class Gated(NamedTuple):
    """The gate's decision about an event: allowed, held or expired; `attempt` is how often it was held before."""

    event: Event
    decision: str = "allowed"
    attempt: int = 0
    reason: str | None = None
    next_attempt_at: datetime | None = None


class EventSpans:
    """The spans of one transaction's events. `events` are the same events, each with a `traceparent`."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._began_ns = epoch_ns()
        self._roots: dict[EventId, traces.Span] = {}
        self.events = [event if trace_id(event.traceparent) else self._rooted(event) for event in events]

    @property
    def started(self) -> dict[EventId, str]:
        """The `traceparent` of the traces that begin here, by event; the same transaction must store them."""
        return {event_id: root.traceparent for event_id, root in self._roots.items()}

    def record(self, gated: Sequence[Gated], delivered: Delivered) -> None:
        """Create the spans; call it after the commit."""
        ended_ns = epoch_ns()
        matching = delivered.matching_ns or (ended_ns, ended_ns)
        fired = Counter(one.event_id for one in delivered.decided)
        filtered = Counter(one.event.id for one in delivered.filtered)
        by_id: dict[EventId, Event] = {}
        for event, decision, attempt, reason, next_attempt_at in gated:
            by_id[event.id] = event
            span = traces.begin(
                "gate", event.traceparent, began_ns=self._began_ns, event_id=event.id, event_type=event.type,
                source=event.source, decision=decision, attempt=attempt, reason=reason, next_attempt_at=next_attempt_at,
            )  # fmt: skip
            if decision == "expired":
                span.fail(decision)
            span.end(matching[0])
            if decision == "allowed":
                traces.begin(
                    "match", event.traceparent, began_ns=matching[0], event_id=event.id, fired=fired[event.id],
                    filtered=filtered[event.id],
                ).end(matching[1])  # fmt: skip
        record_deliveries(delivered.decided, delivered.names, by_id, matching[1], ended_ns)
        for root in self._roots.values():
            root.end(ended_ns)

    def _rooted(self, event: Event) -> Event:
        root = traces.begin(
            "dispatch", None, kind="CONSUMER", began_ns=self._began_ns, event_id=event.id, event_type=event.type,
            source=event.source,
        )  # fmt: skip
        if trace_id(root.traceparent) is None:  # the tracer has failed
            return event
        self._roots[event.id] = root
        return msgspec.structs.replace(event, traceparent=root.traceparent)


def newcomers_gated(
    events: Iterable[Event], held: Sequence[IngressRetry], expired: Sequence[IngressRetry]
) -> list[Gated]:
    """The gate's decisions about new events."""
    waiting = {one.event_id: ("held", one) for one in held} | {one.event_id: ("expired", one) for one in expired}
    gated = []
    for event in events:
        decision, one = waiting.get(event.id, ("allowed", None))
        gated.append(
            Gated(event) if one is None else Gated(event, decision, one.attempts, one.reason, one.next_attempt_at)
        )
    return gated


def record_deliveries(
    decided: Iterable[Decided],
    names: Mapping[TriggerId, str],
    events: Mapping[EventId, Event],
    began_ns: int,
    ended_ns: int,
) -> None:
    """A span for each delivery that was decided, of an event that has a trace."""
    for one in decided:
        event = events.get(one.event_id)
        if event is None or trace_id(event.traceparent) is None:
            continue
        span = traces.begin(
            "deliver", event.traceparent, began_ns=began_ns, event_id=event.id, trigger_id=one.trigger_id,
            trigger=names.get(one.trigger_id), status=one.status, run_id=one.run_id, reason=one.reason,
            attempt=one.retry_attempts, next_attempt_at=one.next_attempt_at,
        )  # fmt: skip
        if one.status in ("failed", "exhausted"):
            span.fail(one.status)
        span.end(ended_ns)
