"""What the trigger machine knows by itself: events, triggers, which of them match, and what a row may turn into.

The templates and conditions are so few that they are judged here without the product's own code.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.flow.checker import Epoch
from tests.flow.trigger_worker import POLICY
from tidegate.model.retry import RetryPolicy

SOURCES = ("a", "b")
CUSTOMER, ORDER, FEW = "{{ event.payload.customer }}", "{{ event.payload.order }}", "event.payload.n < 6"
NAMES = {CUSTOMER: "customer", ORDER: "order"}

FINAL = ("launched", "skipped", "failed", "exhausted", "cancelled")

# Where each event is, each delivery with its run, and the gate of each trigger.
EVENTS = """
select e.id, exists (select 1 from tidegate.event_inbox i where i.event_id = e.id) as inbox, r.retry_state as state,
       r.next_attempt_at, exists (select 1 from tidegate.dead_letters l where l.subject_id = e.id) as is_dead
  from tidegate.workflow_events e left join tidegate.event_ingress_retries r on r.event_id = e.id
"""
DELIVERIES = """
select d.id, d.trigger_id, d.event_id, d.status, d.retry_state as state, d.reason, d.next_attempt_at,
       d.retry_attempts as attempts, d.trigger_version, d.plan_version, d.launched_at, d.dedupe_key, d.concurrency_key,
       d.workflow_run_id as run_id, d.last_error, d.ingress_sequence as sequence,
       (select count(*) from tidegate.workflow_runs w where w.delivery_id = d.id) as runs,
       exists (select 1 from tidegate.dead_letters l where l.subject_id = d.id) as is_dead
  from tidegate.workflow_trigger_deliveries d
"""
RUNS = """
select r.id, r.delivery_id, r.event_id, r.trigger_id, r.concurrency_key, r.is_probe,
       r.status in ('pending', 'running') as is_unfinished
  from tidegate.workflow_runs r
"""
GATES = """
select t.id, t.version, coalesce(g.breaker_state, 'closed') as breaker_state, g.breaker_until, g.probe_run_id,
       coalesce(g.is_replanning, false) as is_replanning, coalesce(g.plan_version, 0) as plan_version
  from tidegate.workflow_event_triggers t left join tidegate.event_scheduler_triggers g on g.trigger_id = t.id
"""


class Place(NamedTuple):
    """Where an event is."""

    id: uuid.UUID
    inbox: bool
    state: str | None
    next_attempt_at: datetime | None
    is_dead: bool

    @property
    def is_decided(self) -> bool:
        return not self.inbox and self.state != "scheduled"

    @property
    def is_delivered(self) -> bool:
        """Whether triggers were asked: not when it was cancelled, came too late, or could not be processed."""
        return self.is_decided and self.state in (None, "completed") and not self.is_dead


class Row(NamedTuple):
    """A delivery."""

    id: uuid.UUID
    trigger_id: uuid.UUID
    event_id: uuid.UUID
    status: str
    state: str
    reason: str | None
    next_attempt_at: datetime | None
    attempts: int
    trigger_version: int
    plan_version: int
    launched_at: datetime | None
    dedupe_key: str | None
    concurrency_key: str | None
    run_id: uuid.UUID | None
    last_error: str | None
    sequence: int
    runs: int
    is_dead: bool

    @property
    def waits(self) -> bool:
        return self.state == "scheduled"


class Run(NamedTuple):
    """A run."""

    id: uuid.UUID
    delivery_id: uuid.UUID
    event_id: uuid.UUID
    trigger_id: uuid.UUID
    concurrency_key: str | None
    is_probe: bool
    is_unfinished: bool


class GateRow(NamedTuple):
    """A trigger's breaker and plan."""

    id: uuid.UUID
    version: int
    breaker_state: str
    breaker_until: datetime | None
    probe_run_id: uuid.UUID | None
    is_replanning: bool
    plan_version: int


class Tables(NamedTuple):
    """Everything the machine looks at, as it is after a step."""

    events: dict[uuid.UUID, Place]
    rows: dict[uuid.UUID, Row]
    runs: dict[uuid.UUID, Run]
    gates: dict[uuid.UUID, GateRow]


class ModelEvent(NamedTuple):
    """An event as it was published."""

    type: str
    source: str
    payload: dict[str, Any]
    received_at: datetime
    ttl_ms: int | None

    def is_expired(self, now: datetime) -> bool:
        return self.ttl_ms is not None and now > self.received_at + timedelta(milliseconds=self.ttl_ms)


class Kept(NamedTuple):
    """Who launched with an idempotency key, and until when it is taken; None: for ever."""

    run_id: uuid.UUID
    until: datetime | None


@dataclass
class ModelTrigger:
    """A trigger as it was created and edited; `paused` holds the end of a pause, None for one without."""

    spec: dict[str, Any]
    status: str = "active"
    paused: list[datetime | None] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    launches: list[tuple[int, float]] = field(default_factory=list)
    keys: dict[str, Kept] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.spec.get(name)

    @property
    def policy(self) -> RetryPolicy:
        return RetryPolicy(**self.spec["retry"]) if self.spec.get("retry") else POLICY

    def is_paused(self, now: datetime) -> bool:
        return bool(self.paused) and (self.paused[0] is None or self.paused[0] > now)

    def matches(self, event: ModelEvent) -> bool:
        of_type = self.event_type == event.type or (self.event_type == "t*" and event.type.startswith("t"))
        of_source = self.event_source in (None, "*", event.source)
        return of_type and of_source and (self.where is None or event.payload["n"] < 6)

    def fails(self, event: ModelEvent) -> bool:
        """Whether a template asks for what the event does not have."""
        templates = (self.concurrency_key, self.idempotency_key, (self.parameter_template or {}).get("x"))
        return any(NAMES[t] not in event.payload for t in templates if t is not None)

    def slot(self, event: ModelEvent) -> str | None:
        """Whose slots its run holds one of."""
        if self.max_concurrency is None:
            return None
        return event.payload.get("customer", "") if self.concurrency_key else ""

    def dedupe(self, event: ModelEvent) -> str | None:
        return str(event.payload["order"]) if self.idempotency_key else None

    def begin_epoch(self, real_ms: float) -> None:
        """The throttle in force from now on, if it is another one."""
        bound = (self.throttle_count, self.throttle_window_ms or 1)
        if not self.epochs or self.epochs[-1][1:] != bound:
            self.epochs.append(Epoch(real_ms, *bound))


# What may be said about a trigger; an edit takes one of these.
throttles = st.sampled_from([(None, None), (1, 1000), (2, 1000), (3, 1001), (1, 10), (2, 20_000)]).map(
    lambda pair: {"throttle_count": pair[0], "throttle_window_ms": pair[1]}
)
concurrencies = st.builds(
    lambda bound, key: {"max_concurrency": bound, "concurrency_key": key if bound else None},
    st.sampled_from([None, 1, 1, 2, 3]),
    st.sampled_from([None, CUSTOMER]),
)
wheres = st.sampled_from([None, FEW]).map(lambda where: {"where": where})
retries = st.sampled_from(
    [
        None,
        None,
        {"base_ms": 50, "factor": 2.0, "max_ms": 400, "jitter_ratio": 0.0, "max_attempts": 50, "max_age_ms": 0},
        {"base_ms": 200, "factor": 1.0, "max_ms": 200, "jitter_ratio": 0.5, "max_attempts": 3, "max_age_ms": 30_000},
    ]
).map(lambda retry: {"retry": retry})
idempotencies = st.sampled_from([(None, 86_400_000), (ORDER, 0), (ORDER, 2000)]).map(
    lambda pair: {"idempotency_key": pair[0], "idempotency_window_ms": pair[1]}
)
breakers = st.sampled_from([None, {"threshold": 1, "window_ms": 1000, "pause_ms": 500}]).map(lambda b: {"breaker": b})
parameters = st.sampled_from([None, None, {"x": CUSTOMER}]).map(lambda p: {"parameter_template": p})
statuses = st.sampled_from(["active", "disabled"]).map(lambda status: {"status": status})
scopes = st.sampled_from(
    [{"event_type": "tick"}, {"event_type": "tock"}, {"event_type": "t*"}, {"event_source": "a"}, {"event_source": "*"}]
)
edits = st.one_of(
    throttles, concurrencies, concurrencies, wheres, retries, idempotencies, breakers, parameters, statuses, scopes,
    statuses,
)  # fmt: skip

# A new trigger: mostly with a limit, seldom with a condition.
specs = st.builds(
    lambda event_type, source, *parts: (
        {k: v for part in parts for k, v in part.items() if v is not None}
        | {"event_type": event_type, "event_source": source}
    ),
    st.sampled_from(["tick", "tick", "t*"]),
    st.sampled_from(["*", "*", "*", "a"]),
    throttles,
    concurrencies,
    st.just({}) | wheres,
    retries,
    st.just({}) | idempotencies,
    breakers,
)

payloads = st.builds(
    lambda n, customer, order: (
        {"n": n} | ({"customer": customer} if customer else {}) | ({"order": order} if order else {})
    ),
    st.integers(0, 9),
    st.sampled_from(["x", "x", "x", "y", "y", None]),
    st.sampled_from([1, 2, 3, 4, None]),
)
