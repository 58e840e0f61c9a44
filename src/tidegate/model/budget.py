"""A budget: a named rate, a concurrency, or both, shared by any number of triggers and steps; with a key, one for each
key.

A launch spends its cost of the rate of each of its budgets, and its run holds one slot of the concurrency of each until
it has ended; all of them, or none. So does a call of a step, until the call has ended.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidegate.errors import FieldError, InvalidInput
from tidegate.model.allowance import MAX_INTERVAL_MS, MAX_LIMIT, RateLimit
from tidegate.model.expression import CompiledExpression, compile_expression
from tidegate.model.ids import RunId
from tidegate.model.trigger_terms import Render, TemplateError
from tidegate.model.units import rate as parse_rate
from tidegate.model.units import written_duration, written_rate
from tidegate.model.work_limit import TooMuchWork, WorkLeft

if TYPE_CHECKING:
    from tidegate.model.event import Event

# The most budgets of one trigger: each of them is locked by every launch.
MAX_BUDGETS = 8
MAX_CONCURRENCY = 1_000_000
MAX_KEY = 500
# What `RetryAfter(everyone=…)` means by these is no budget.
RESERVED_NAMES = ("trigger", "key")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}", re.ASCII)


class BudgetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a budget that a user sets. `key` is a template, `cost` a CEL expression; without them there is one
    key, the empty text, and everything costs 1."""

    name: str
    limit: int | None = None
    interval_ms: int | None = None
    concurrency: int | None = None
    key: str | None = None
    cost: str | None = None

    @property
    def rate(self) -> RateLimit | None:
        """What each key may spend in any sliding interval, if that is limited."""
        if self.limit is None or self.interval_ms is None:
            return None
        return RateLimit(limit=self.limit, interval_ms=self.interval_ms)

    def described(self) -> str:
        """`300/min, 2 at a time, per {{ event.payload.tenant }}`."""
        parts = [written_rate(self.limit, self.interval_ms)] if self.limit and self.interval_ms else []
        parts += [f"{self.concurrency} at a time"] if self.concurrency is not None else []
        parts += [f"per {self.key}"] if self.key else []
        parts += [f"cost {self.cost}"] if self.cost else []
        return ", ".join(parts)


SPEC_FIELDS = BudgetSpec.__struct_fields__

# What a step is given: its budgets, and values in place of what their key and cost say; of all of them, or by name.
BudgetUse = BudgetSpec | str | Sequence[BudgetSpec | str]
BudgetKey = str | int | Mapping[str, str | int] | None
BudgetCost = int | Mapping[str, int] | None


class Need(NamedTuple):
    """What a launch needs of a budget."""

    budget: str
    key: str
    cost: int


class StepSpend(msgspec.Struct, frozen=True):
    """What a step asks for: the names of its budgets, and the keys and costs that were given with it, by budget."""

    budgets: list[str]
    keys: dict[str, str] = {}
    costs: dict[str, int] = {}


class Spending(NamedTuple):
    """What a step asks for, and those of its budgets that it defines."""

    spend: StepSpend
    specs: Sequence[BudgetSpec]


class Reserved(NamedTuple):
    """What is kept for a delivery or a step until a time: its cost, and a slot."""

    delivery_id: uuid.UUID
    cost: int
    until: datetime


class ClosedKey(NamedTuple):
    """Until when nothing of a key is spent, why, and the run that is tried first after that."""

    until: datetime
    reason: str | None
    probe_run_id: RunId | None = None
    probe_until: datetime | None = None


class CannotSpend(TemplateError):
    """What an event needs of a budget cannot be evaluated, or is more than it ever allows; the text names it."""

    def __init__(self, budget: str, message: str) -> None:
        super().__init__(f"budget {budget}: {message}")
        self.budget = budget


def Budget(  # noqa: N802 - read as a noun where it is used: budgets=[Budget("openai", "300/min")]
    name: str,
    rate: str | None = None,
    *,
    concurrency: int | None = None,
    key: str | None = None,
    cost: str | None = None,
) -> BudgetSpec:
    """A budget: `Budget("openai", "300/min", cost="event.payload.tokens")`,
    `Budget("per-tenant", "20/s", concurrency=2, key="{{ event.payload.tenant }}")`.

    `rate`: how much may be spent in any sliding interval. `concurrency`: how many unfinished runs may hold it. `key`
    (template): each key has a rate and slots of its own. `cost` (CEL): what a launch spends, 1 without it.
    ValueError names the invalid argument.
    """
    limit = interval_ms = None
    if rate is not None:
        try:
            limit, interval_ms = parse_rate(rate)
        except ValueError as exc:
            raise ValueError(f"Budget: rate: {exc}") from exc
    spec = BudgetSpec(
        name=name, limit=limit, interval_ms=interval_ms, concurrency=concurrency, key=key, cost=cost
    )  # fmt: skip
    errors = budget_errors(spec)
    if errors:
        raise ValueError("; ".join(f"Budget: {_WRITTEN.get(e.field, e.field)}: {e.message}" for e in errors))
    return spec


_WRITTEN = {"limit": "rate", "interval_ms": "rate"}


def is_budget_name(name: object) -> bool:
    """Whether it can be the name of a budget."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def budget_errors(spec: BudgetSpec) -> list[FieldError]:
    """What is wrong with a budget, by field."""
    errors: list[FieldError] = []
    if not is_budget_name(spec.name):
        errors.append(FieldError("name", "must be 1 to 100 letters, digits, dots, colons, hyphens and underscores"))
    elif spec.name in RESERVED_NAMES:
        errors.append(FieldError("name", f"must not be {spec.name}, which has a meaning in RetryAfter(everyone=…)"))
    most = written_duration(MAX_INTERVAL_MS)
    for field, high, message in (
        ("limit", MAX_LIMIT, f"must be a whole number from 1 to {MAX_LIMIT}"),
        ("interval_ms", MAX_INTERVAL_MS, f"must be a whole number of milliseconds, at most {most}"),
        ("concurrency", MAX_CONCURRENCY, f"must be a whole number from 1 to {MAX_CONCURRENCY}"),
    ):
        value = getattr(spec, field)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and (not is_whole or not 1 <= value <= high):
            errors.append(FieldError(field, message))
    if (spec.limit is None) != (spec.interval_ms is None):
        missing = "limit" if spec.limit is None else "interval_ms"
        errors.append(FieldError(missing, "is required: set both limit and interval_ms, or neither"))
    elif spec.limit is None and spec.concurrency is None:
        errors.append(FieldError("limit", "is required, or concurrency: a budget without both limits nothing"))
    if spec.cost is not None and spec.limit is None:
        errors.append(FieldError("cost", "needs a rate: it is what a launch spends of it"))
    for field in ("key", "cost"):
        if not isinstance(getattr(spec, field), str | None):
            return [*errors, FieldError(field, "must be text: a template, or for the cost an expression")]
    try:
        CompiledBudget(spec)
    except InvalidInput as exc:
        errors += exc.errors
    return errors


def declared_names(given: Sequence[BudgetSpec | str], known: dict[str, BudgetSpec]) -> list[str]:
    """The names of the budgets that a declaration uses; those that it defines are added to `known`. ValueError when
    two differ that have the same name."""
    if isinstance(given, str | BudgetSpec):
        raise ValueError("budgets: is a list: budgets=[Budget(…), …]")
    names = []
    for one in given:
        if isinstance(one, BudgetSpec):
            if known.setdefault(one.name, one) != one:
                raise ValueError(f"budgets: {one.name} is declared twice, and differently")
            names.append(one.name)
        elif isinstance(one, str):
            names.append(one)
        else:
            raise ValueError(f"budgets: contains {one!r}; each is a Budget(…) or the name of one")
    return names


def step_spending(budget: BudgetUse, key: BudgetKey, cost: BudgetCost) -> Spending:
    """What a step asks for. A key or cost is of all of its budgets, or given by their names. ValueError names the
    invalid argument."""
    known: dict[str, BudgetSpec] = {}
    try:
        names = declared_names([budget] if isinstance(budget, str | BudgetSpec) else budget, known)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"budget: {str(exc).removeprefix('budgets: ')}") from None
    if errors := names_errors(names):
        raise ValueError(
            "; ".join(f"{error.field.replace('budgets', 'budget', 1)}: {error.message}" for error in errors)
        )
    if not names:
        raise ValueError("budget: names no budget")
    try:
        keys = {name: _key_text(one) for name, one in _by_name("budget_key", key, names).items()}
        costs = {name: _whole((one, None)) for name, one in _by_name("budget_cost", cost, names).items()}
    except TemplateError as exc:
        raise ValueError(f"budget_{str(exc).replace(' for this event', '')}") from None
    return Spending(StepSpend(sorted(names), keys, costs), list(known.values()))


def _by_name(field: str, given: object, names: Sequence[str]) -> dict[str, object]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    if unknown := [name for name in given if name not in names]:
        raise ValueError(f"{field}: {unknown[0]!r} is not one of the step's budgets")
    return dict(given)


def names_errors(names: Sequence[str]) -> list[FieldError]:
    """What is wrong with the names of a trigger's budgets."""
    if len(names) > MAX_BUDGETS:
        return [FieldError("budgets", f"must be at most {MAX_BUDGETS}")]
    if len(set(names)) < len(names):
        return [FieldError("budgets", "names a budget twice")]
    return [
        FieldError(f"budgets[{i}]", "is not the name of a budget")
        for i, name in enumerate(names)
        if not is_budget_name(name)
    ]


class CompiledBudget:
    """A compiled budget. InvalidInput names each field that cannot be compiled."""

    __slots__ = ("_cost", "_key", "spec")

    def __init__(self, spec: BudgetSpec) -> None:
        errors: list[FieldError] = []
        self.spec = spec
        self._key: Render | None = None
        if spec.key is not None:
            from tidegate.model.template import compile_template  # loads Liquid

            if spec.key.strip():
                self._key = compile_template(spec.key, "key", errors)
            else:
                errors.append(FieldError("key", "must not be empty; omit it for none"))
        self._cost: CompiledExpression | None = None
        if spec.cost is not None:
            self._cost = compile_expression(spec.cost, "cost", errors)
        if errors:
            raise InvalidInput(f"budget {spec.name} is not valid", errors)

    def step_need(self, spend: StepSpend, event: Event | None, work_left: WorkLeft) -> Need:
        """What a step needs: by what is given with it, else as a launch for the event of its run. Without an event, and
        for a start that does not give them, 1 of no key. CannotSpend says why that cannot be known, or never be
        spent."""
        name = self.spec.name
        key, cost = spend.keys.get(name), spend.costs.get(name)
        try:
            return self.need({} if event is None else event.envelope(), work_left, key, cost)
        except CannotSpend:
            is_start = event is None or (event.origin is not None and event.starts is not None)
            if not is_start or cost is not None:
                raise
            return Need(name, key or "", 1)

    @property
    def reads_event(self) -> bool:
        """Whether the key or the cost depend on the event."""
        return self._key is not None or self._cost is not None

    def need(
        self, envelope: dict[str, object], work_left: WorkLeft, key: str | None = None, cost: int | None = None
    ) -> Need:
        """What a launch for the event needs, or a step that gives its key or cost. CannotSpend says why that cannot be
        known, or never be spent."""
        try:
            limit = self.spec.limit
            if self._key is None:
                key = ""
            elif key is None:
                key = _key_text(self._key(envelope, work_left))
            if cost is None or limit is None:
                cost = 1 if self._cost is None else _whole(self._cost.value(envelope, work_left))
            if limit is not None and cost > limit:
                rate = written_rate(limit, self.spec.interval_ms or 0)
                raise TemplateError(f"cost: is {cost}, more than its rate of {rate} ever allows at once")
        except (TemplateError, TooMuchWork) as exc:
            raise CannotSpend(self.spec.name, str(exc)) from None
        return Need(self.spec.name, key, cost)


def _key_text(value: object) -> str:
    """A key as text: a number as its digits, so that 7 and "7" are the same key."""
    if value is None:
        raise TemplateError("key: renders null for this event")
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if not text.strip():
        raise TemplateError("key: renders an empty text for this event")
    if len(text) > MAX_KEY:
        raise TemplateError(f"key: renders {len(text)} characters for this event; at most {MAX_KEY}")
    return text


def _whole(found: tuple[object, str | None]) -> int:
    value, error = found
    if error is not None:
        raise TemplateError(f"cost: {error}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_LIMIT:
        shown = repr(value)[:100]
        raise TemplateError(f"cost: must be a whole number from 0 to {MAX_LIMIT}, not {shown}")
    return value
