"""A trigger: which events launch which workflow, compiled once and indexed by event type."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import re2

from tidegate.errors import FieldError, InvalidInput
from tidegate.model.backlog import BacklogPolicy
from tidegate.model.backlog import check_policy as check_backlog
from tidegate.model.budget import CannotSpend, CompiledBudget, Need, names_errors
from tidegate.model.event import RESERVED, Event
from tidegate.model.expression import compile_expression
from tidegate.model.ids import DefinitionId, TriggerId
from tidegate.model.predicate import Predicate, compile_predicate
from tidegate.model.retry import RetryPolicy
from tidegate.model.shares import MAX_PRIORITY
from tidegate.model.source import MAX_INTERVAL_MS, MAX_LIMIT, BreakerPolicy, RateLimit
from tidegate.model.trigger_terms import Render, TemplateError
from tidegate.model.window import CollectPolicy, check_policy
from tidegate.model.work_limit import MAX_STEPS, TooMuchWork, WorkLeft

TriggerStatus = Literal["active", "disabled"]
# What happens to a delivery that finds no concurrency slot: it waits, or is skipped.
TriggerOverlap = Literal["queue", "skip"]
# How long a run holds its concurrency slots: until it ends, or while it executes and not while it waits.
TriggerHolds = Literal["unfinished", "executing"]
MAX_PREDICATES = 50
MAX_NAME = 100
MAX_KEY = 500
MAX_CONCURRENCY = 1_000_000
MAX_IDEMPOTENCY_WINDOW_MS = 3650 * 86_400_000
# Paths to a single value in the payload.
_OF_PAYLOAD = re.compile(r"\$\.payload(\.[A-Za-z_]\w*|\[\d+\])*", re.ASCII)


class TriggerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a trigger that a user sets."""

    name: str
    event_type: str
    event_source: str = "*"
    predicates: list[Predicate] = []
    where: str | None = None
    parameter_template: dict[str, Any] | None = None
    idempotency_key: str | None = None
    idempotency_window_ms: int = 86_400_000
    concurrency_key: str | None = None
    throttle_count: int | None = None
    throttle_window_ms: int | None = None
    max_concurrency: int | None = None
    retry: RetryPolicy | None = None
    breaker: BreakerPolicy | None = None
    overlap: TriggerOverlap = "queue"
    key: str | None = None
    collect: CollectPolicy | None = None
    priority: int = 1
    skip_over_count: int | None = None
    skip_over_window_ms: int | None = None
    cancel_running: bool = False
    budgets: list[str] = []
    backlog: BacklogPolicy | None = None
    holds: TriggerHolds = "unfinished"

    @property
    def throttle(self) -> RateLimit | None:
        """The limit on launches in any sliding window, if there is one."""
        if self.throttle_count is None or self.throttle_window_ms is None:
            return None
        return RateLimit(limit=self.throttle_count, interval_ms=self.throttle_window_ms)

    @property
    def skip_over(self) -> RateLimit | None:
        """The limit over which events are skipped, in any sliding window, if there is one."""
        if self.skip_over_count is None or self.skip_over_window_ms is None:
            return None
        return RateLimit(limit=self.skip_over_count, interval_ms=self.skip_over_window_ms)

    @property
    def is_limited(self) -> bool:
        """Whether a launch must be decided under the trigger's lock."""
        return (
            self.throttle_count is not None
            or self.max_concurrency is not None
            or self.collect is not None
            or self.skip_over_count is not None
            or bool(self.budgets)
            or (self.backlog is not None and self.backlog.keep is not None)
        )

    @property
    def holds_slots(self) -> bool:
        """Whether the end of a run may free a slot that others wait for: of the trigger, or of a budget."""
        return self.max_concurrency is not None or bool(self.budgets)

    @property
    def gives_back(self) -> bool:
        """Whether a run that waits gives its slots back, and queues for them when it resumes."""
        return self.holds == "executing" and self.holds_slots


class Trigger(TriggerSpec, frozen=True, kw_only=True):
    """A row of `workflow_event_triggers`, with the workflow it launches."""

    id: TriggerId
    workflow_definition_id: DefinitionId
    workflow: str
    status: TriggerStatus = "active"
    version: int = 1
    created_by: str = ""
    updated_by: str = ""
    created_at: datetime | None = None
    updated_at: datetime | None = None


class WorkflowDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `workflow_definitions`; `parameters` are the argument names, `["*"]` for any."""

    id: DefinitionId
    slug: str
    kind: str
    parameters: list[str]
    config: dict[str, Any]
    version: int
    created_by: str
    updated_by: str
    created_at: datetime
    updated_at: datetime


class RenderedKeys(NamedTuple):
    """The keys rendered for an event; the concurrency key, and the key of its window, are empty if the trigger has no
    template for them."""

    dedupe_key: str | None
    concurrency_key: str
    key: str = ""


NO_KEYS = RenderedKeys(None, "")


class CompiledTrigger:
    """A compiled trigger. InvalidInput names each field that cannot be compiled."""

    __slots__ = (
        "_checks",
        "_concurrency_key",
        "_idempotency_key",
        "_key",
        "_names",
        "_parameters",
        "_source",
        "_type",
        "budgets",
        "is_light",
        "is_limited",
        "of_payload",
        "trigger",
    )

    def __init__(self, trigger: Trigger, parameter_names: list[str], budgets: Sequence[CompiledBudget] = ()) -> None:
        errors: list[FieldError] = names_errors(trigger.budgets)
        self.trigger = trigger
        self.budgets = budgets
        _check_numbers(trigger, errors)
        self._source = compile_pattern(trigger.event_source, "event_source", errors)
        self._type = compile_pattern(trigger.event_type, "event_type", errors)
        if len(trigger.predicates) > MAX_PREDICATES:
            errors.append(FieldError("predicates", f"must be at most {MAX_PREDICATES}"))
        compiled = [compile_predicate(p, f"predicates[{i}]", errors) for i, p in enumerate(trigger.predicates)]
        where = compile_expression(trigger.where, "where", errors) if trigger.where is not None else None
        self._checks = [check for check in (*compiled, where) if check is not None]
        self._parameters = _compile_template(trigger.parameter_template, "parameter_template", errors)
        self._names = parameter_names
        self._idempotency_key = _compile_key(trigger.idempotency_key, "idempotency_key", errors)
        self._concurrency_key = _compile_key(trigger.concurrency_key, "concurrency_key", errors)
        self._key = _compile_key(trigger.key, "key", errors)
        if trigger.collect is not None:
            check_policy(trigger.collect, errors)
        if trigger.backlog is not None:
            collects = trigger.collect is not None
            check_backlog(trigger.backlog, collects=collects, cancels=trigger.cancel_running, errors=errors)
        self.is_limited = trigger.is_limited  # asked for every delivery
        # Whether it reads only the payload of an event, as most triggers do: then the envelope is not built.
        is_plain = all(
            one is None
            for one in (
                trigger.parameter_template, trigger.where, trigger.idempotency_key, trigger.concurrency_key, trigger.key
            )
        ) and not any(budget.reads_event for budget in budgets)  # fmt: skip
        self.of_payload = is_plain and all(_OF_PAYLOAD.fullmatch(p.path) for p in trigger.predicates)
        # Whether its checks are cheap: paths to a single value, and no patterns.
        self.is_light = self.of_payload and all(p.operator != "regex" for p in trigger.predicates)
        if errors:
            raise InvalidInput(f"{_called(trigger.name)} is not valid", errors)

    def takes_type(self, event_type: str) -> bool:
        if event_type.startswith(RESERVED) and not self.trigger.event_type.startswith(RESERVED):
            return False  # `*` stands for users' types only
        return self._type is None or self._type.fullmatch(event_type) is not None

    def takes_source(self, source: str) -> bool:
        return self._source is None or self._source.fullmatch(source) is not None

    def reason(self, envelope: dict[str, Any], work_left: WorkLeft | None = None) -> str | None:
        """None if the event fires this trigger, else the check that fails. TooMuchWork names the check that would take
        too long. A `work_left` that is passed in is reset first."""
        failing = self.failing(envelope, work_left)
        return None if failing is None else failing[1]

    def failing(self, envelope: dict[str, object], work_left: WorkLeft | None = None) -> tuple[str, str] | None:
        """As `reason`, with the field of the check before it: `predicates[0]`, `where`."""
        work_left = work_left or WorkLeft()
        work_left.left = MAX_STEPS
        for check in self._checks:
            try:
                reason = check.reason(envelope, work_left)
            except TooMuchWork:
                raise TooMuchWork(check.field) from None
            if reason is not None:
                return check.field, reason
        return None

    def results(self, envelope: dict[str, Any]) -> list[str | TooMuchWork | None]:
        """The result of each predicate, then of `where` if there is one: None if it holds, else why it does not. All
        share one limit, as for a delivery; once it is used up, the result is TooMuchWork."""
        work_left, results = WorkLeft(), list[str | TooMuchWork | None]()
        for check in self._checks:
            try:
                results.append(check.reason(envelope, work_left))
            except TooMuchWork:
                results.append(TooMuchWork(check.field))
        return results

    def why_not(self, event: Event, envelope: dict[str, Any]) -> str | None:
        """None if the event fires this trigger, including its type and source; else the reason."""
        return self.not_taken(event) or self.reason(envelope)

    def not_taken(self, event: Event) -> str | None:
        """Why the type or the source of the event does not match; None if both do."""
        if not self.takes_type(event.type):
            return f"the trigger takes events of type {self.trigger.event_type}"
        if not self.takes_source(event.source):
            return f"the trigger takes events from {self.trigger.event_source}"
        return None

    def keys(self, envelope: dict[str, Any], work_left: WorkLeft | None = None) -> RenderedKeys:
        """The rendered keys. TemplateError or TooMuchWork names the key that cannot be rendered."""
        dedupe, concurrency, key = self._idempotency_key, self._concurrency_key, self._key
        if dedupe is None and concurrency is None and key is None:
            return NO_KEYS
        work_left = work_left or WorkLeft()
        return RenderedKeys(
            _key(dedupe(envelope, work_left), "idempotency_key") if dedupe else None,
            _key(concurrency(envelope, work_left), "concurrency_key") if concurrency else "",
            _key(key(envelope, work_left), "key") if key else "",
        )

    def start_keys(self, envelope: dict[str, Any], work_left: WorkLeft | None = None) -> RenderedKeys:
        """The keys for a start: its own id makes it idempotent, and without a key it holds a slot of no key."""
        if self._concurrency_key is None:
            return NO_KEYS
        try:
            rendered = self._concurrency_key(envelope, work_left or WorkLeft())
            return RenderedKeys(None, _key(rendered, "concurrency_key"))
        except (TemplateError, TooMuchWork):
            return NO_KEYS

    def needs(self, envelope: dict[str, object], work_left: WorkLeft, *, is_start: bool = False) -> tuple[Need, ...]:
        """What a launch needs of the trigger's budgets, in the order in which they are checked. CannotSpend names the
        budget for which that cannot be evaluated; a start that does not give a key or a cost needs 1 of no key."""
        found = []
        for budget in self.budgets:
            try:
                found.append(budget.need(envelope, work_left))
            except CannotSpend:
                if not is_start:
                    raise
                found.append(Need(budget.spec.name, "", 1))
        return tuple(sorted(found))

    def parameters(self, event: Event, envelope: dict[str, Any], work_left: WorkLeft | None = None) -> dict[str, Any]:
        """The run's arguments: the rendered template, else the payload's fields by argument name."""
        if self._parameters is not None:
            rendered = self._parameters(envelope, work_left or WorkLeft())
            if not isinstance(rendered, dict):
                raise TemplateError("parameter_template: must render an object")
            return rendered
        if self._names == ["*"]:
            return event.payload
        return {name: event.payload[name] for name in self._names if name in event.payload}


def _called(name: str) -> str:
    return f"trigger {name}" if name else "the trigger"


def check_spec(spec: TriggerSpec, workflow: str, parameter_names: list[str]) -> None:
    """Compile a trigger to reject errors when it is saved, not on the first event. InvalidInput names each field."""
    if spec.concurrency_key is not None and spec.max_concurrency is None:
        error = "is required with concurrency_key: it is the maximum number of unfinished runs per key"
        raise InvalidInput(f"{_called(spec.name)} is not valid", [FieldError("max_concurrency", error)])
    if spec.key is not None and spec.collect is None and spec.skip_over_count is None and spec.backlog is None:
        error = (
            "requires debounce or batch (collect in a file), skip_over, max_waiting or keep (backlog in a file) or, in "
            "code, while_running: it is the key by which events are collected, counted or run one at a time"
        )
        raise InvalidInput(f"{_called(spec.name)} is not valid", [FieldError("key", error)])
    unset = uuid.UUID(int=0)
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    CompiledTrigger(
        Trigger(id=TriggerId(unset), workflow_definition_id=DefinitionId(unset), workflow=workflow, **fields),
        parameter_names,
    )


def compile_pattern(pattern: str, field: str, errors: list[FieldError]) -> Any:
    """A name in which `*` matches any characters, as a regex; None for `*` alone, which matches everything."""
    if pattern == "*":
        return None
    if not 0 < len(pattern) <= 200 or pattern.isspace():
        errors.append(FieldError(field, "must be 1 to 200 characters; * matches any characters"))
        return None
    return re2.compile(".*".join(re2.escape(part) for part in pattern.split("*")))


def _check_numbers(spec: TriggerSpec, errors: list[FieldError]) -> None:
    if not 0 < len(spec.name.strip()) <= MAX_NAME or not spec.name.isprintable():
        errors.append(FieldError("name", f"must be 1 to {MAX_NAME} printable characters"))
    for field, low, high in (
        ("throttle_count", 1, MAX_LIMIT),
        ("throttle_window_ms", 1, MAX_INTERVAL_MS),
        ("skip_over_count", 1, MAX_LIMIT),
        ("skip_over_window_ms", 1, MAX_INTERVAL_MS),
        ("max_concurrency", 1, MAX_CONCURRENCY),
        ("idempotency_window_ms", 0, MAX_IDEMPOTENCY_WINDOW_MS),
        ("priority", 1, MAX_PRIORITY),
    ):
        value = getattr(spec, field)
        if value is not None and (not isinstance(value, int) or not low <= value <= high):
            errors.append(FieldError(field, f"must be a whole number from {low} to {high}"))
    if (spec.throttle_count is None) != (spec.throttle_window_ms is None):
        missing = "throttle_count" if spec.throttle_count is None else "throttle_window_ms"
        errors.append(FieldError(missing, "is required: set both throttle_count and throttle_window_ms, or neither"))
    if (spec.skip_over_count is None) != (spec.skip_over_window_ms is None):
        missing = "skip_over_count" if spec.skip_over_count is None else "skip_over_window_ms"
        errors.append(FieldError(missing, "is required: set both skip_over_count and skip_over_window_ms, or neither"))
    if spec.cancel_running and (spec.max_concurrency != 1 or spec.overlap != "queue"):
        errors.append(FieldError("cancel_running", "requires max_concurrency 1 and overlap queue"))
    if spec.cancel_running and spec.collect is not None:
        errors.append(
            FieldError("cancel_running", "cannot be combined with collect; a window's run waits for its turn")
        )
    if spec.overlap == "skip" and spec.max_concurrency is None:
        errors.append(FieldError("overlap", "skip requires max_concurrency: without it nothing overlaps"))
    if spec.holds not in get_args(TriggerHolds):
        errors.append(FieldError("holds", f"must be unfinished or executing, not {spec.holds!r:.60}"))
    if spec.holds == "executing" and not spec.holds_slots:
        errors.append(
            FieldError("holds", "executing requires max_concurrency or budgets: without them nothing is held")
        )


def _compile_key(source: str | None, field: str, errors: list[FieldError]) -> Render | None:
    if source is None:
        return None
    if not source.strip():
        errors.append(FieldError(field, "must not be empty; omit it for none"))
        return None
    return _compile_template(source, field, errors)


def _compile_template(source: object, field: str, errors: list[FieldError]) -> Render | None:
    if source is None:
        return None
    from tidegate.model.template import compile_template  # loads Liquid

    return compile_template(source, field, errors)


def _key(value: object, field: str) -> str:
    """A key as text: a number as its digits, so that 7 and "7" are the same key."""
    if value is None:
        raise TemplateError(f"{field}: renders null for this event")
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if not text.strip():
        raise TemplateError(f"{field}: renders an empty text for this event")
    if len(text) > MAX_KEY:
        raise TemplateError(f"{field}: renders {len(text)} characters for this event; at most {MAX_KEY} are allowed")
    return text
