"""What a run waits for: patterns of events, keyed by fields of the payload where that is possible, and which event is
given to which wait. Pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from tidegate.errors import FieldError, InvalidInput
from tidegate.model.cel_library import cel
from tidegate.model.cel_reader import RUN, CelToken, Reader
from tidegate.model.event import Event, is_name
from tidegate.model.expression import CompiledExpression, compile_expression
from tidegate.model.ids import EventId, RunId, StepId, WaitId
from tidegate.model.run import ClaimedRun
from tidegate.model.trigger import compile_pattern
from tidegate.model.work_limit import TooMuchWork

MAX_PATTERNS = 20
MAX_MATCH = 10
MAX_KEY_LENGTH = 300
_ROOTS = ("event", RUN)
_MISSING = object()
# In place of a field of the payload: the event's correlation id. No path of a user begins with a dot.
CORRELATION = ".correlation_id"
_PATH = re.compile(r"[^.\x00]{1,100}(\.[^.\x00]{1,100}){0,9}")
_EXACT = Context(prec=2000)

Scalar = str | int | float | bool | None
# `event`, `first`: the step is done with the first event (of its only pattern, of any). `all`: when each pattern has an
# event of its own. `cancel`: the event cancels the run.
WaitMode = Literal["event", "first", "all", "cancel"]


class On(msgspec.Struct, frozen=True):
    """A pattern of events: the type, and optionally `where` (CEL over `event` and `run`), `match` (fields of the
    payload that must have these values) and `source` (exact, or with `*`)."""

    type: str
    where: str | None = None
    match: dict[str, Any] | None = None
    source: str = "*"


class WaitPattern(msgspec.Struct, frozen=True, kw_only=True):
    """A pattern as it is stored with the wait of one run. `match` are the fields of the payload that it is found by:
    those given, and those that `where` compares with a single value."""

    type: str
    source: str = "*"
    where: str | None = None
    match: dict[str, Any] = {}

    @property
    def paths(self) -> str:
        return written_paths(self.match)

    @property
    def key(self) -> str:
        found = key_of(sorted(self.match), self.match.get)
        assert found is not None, "a pattern whose values were not checked"
        return found


class OpenWait(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `event_waits`: one pattern of a step that waits, or of what cancels a run (`mode` `cancel`). Only events
    that came after `after_sequence`, and not before `since`, count; and only until `until`. `met_event_id` is the event
    that a pattern of `wait_all` has, while others are missing. `looks_back`: it has yet to look for events that came
    before it."""

    id: WaitId
    workflow_run_id: RunId
    step_id: StepId
    number: int
    mode: WaitMode
    event_type: str
    source: str
    paths: str
    key: str
    where_text: str | None
    after_sequence: int
    since: datetime | None
    until: datetime | None
    met_event_id: EventId | None
    met_event: Any
    created_at: datetime
    looks_back: bool = False

    @property
    def conditions(self) -> int:
        """How many conditions events must meet beside the type: fewer events meet a pattern that has more."""
        source = 0 if self.source == "*" else 1 if "*" in self.source else 2
        return len(read_paths(self.paths)) + source + (self.where_text is not None)

    def meets(self, event: Event, parameters: Mapping[str, object]) -> bool:
        """Whether an event is one that this wait is for, whatever its payload is found by."""
        if event.type != self.event_type or not is_source(self.source, event.source):
            return False
        if event.ingress_sequence <= self.after_sequence or (self.since is not None and event.arrived_at < self.since):
            return False
        if key_of_event(event, self.paths) != self.key:
            return False
        if self.where_text is None:
            return True
        run = {"id": str(self.workflow_run_id), "parameters": parameters}
        try:
            return unmet_where(self.where_text, event, run) is None
        except TooMuchWork:  # for this event; it does not meet the wait, as it would not fire a trigger
            return False


class NewWait(msgspec.Struct, frozen=True, kw_only=True):
    """A pattern that a step begins to wait for; it ends with its step. Events count that came after `after_sequence`,
    at or after `since`, or in the `since_ms` before now; by default those since the run was created."""

    number: int
    mode: WaitMode
    pattern: WaitPattern
    after_sequence: int | None = None
    since: datetime | None = None
    since_ms: int | None = None


class MetWait(NamedTuple):
    """An event that a wait is given."""

    wait: OpenWait
    event: Event


def check_pattern(on: On | str, run: ClaimedRun, field: str = "") -> WaitPattern:
    """The pattern of one run. InvalidInput names what is wrong."""
    checked, errors = check_on(on, field)
    if errors:
        raise InvalidInput("the wait is not valid", errors)
    match = dict(checked.match or {})
    if checked.where is not None:
        known = {"id": str(run.id), "parameters": run.parameters}
        for path, value in _equalities(checked.where, known).items():
            match.setdefault(path, value)
    return WaitPattern(type=checked.type, source=checked.source, where=checked.where, match=match)


def cancel_pattern(on: On, run: ClaimedRun) -> WaitPattern:
    """What cancels one run. Without `where` and `match` only an event of its own correlation does."""
    pattern = check_pattern(on, run)
    if on.where is None and not on.match:
        return msgspec.structs.replace(pattern, match={CORRELATION: run.correlation_id or str(run.id)})
    return pattern


def cancelled_by(cancel_on: str | On | list[str | On] | tuple[str | On, ...]) -> list[On]:
    """What cancels the runs of a workflow. InvalidInput names what is wrong."""
    given = list(cancel_on) if isinstance(cancel_on, list | tuple) else [cancel_on]
    checked = [check_on(one, "cancel_on") for one in given]
    if errors := [error for _, wrong in checked for error in wrong]:
        raise InvalidInput("the workflow is not valid", errors)
    return [on for on, _ in checked]


def check_on(on: On | str, field: str = "") -> tuple[On, list[FieldError]]:
    """A pattern as a user writes it, and what is wrong with it."""
    if isinstance(on, str):
        on = On(on)
    errors: list[FieldError] = []
    if not isinstance(on, On):
        return On(""), [FieldError(field or "type", f"must be an event type or On(…), not {on!r}")]
    prefix = f"{field}." if field else ""
    if not isinstance(on.type, str) or not is_name(on.type):
        errors.append(FieldError(f"{prefix}type", f"must be the exact type of an event, without *, not {on.type!r}"))
    if not isinstance(on.source, str):
        errors.append(FieldError(f"{prefix}source", f"must be text, not {on.source!r}"))
    else:
        compile_pattern(on.source, f"{prefix}source", errors)
    if on.where is not None and not isinstance(on.where, str):
        errors.append(FieldError(f"{prefix}where", f"must be a CEL expression, not {on.where!r}"))
    elif on.where is not None:
        compile_expression(on.where, f"{prefix}where", errors, _ROOTS)
    if on.match is not None:
        errors += _wrong_match(on.match, f"{prefix}match")
    return on, errors


def _wrong_match(match: object, field: str) -> list[FieldError]:
    if not isinstance(match, dict) or not 1 <= len(match) <= MAX_MATCH:
        wanted = f"must be 1 to {MAX_MATCH} fields of the payload with their values, as in {{'id': 7}}"
        return [FieldError(field, wanted)]
    wrong = []
    for path, value in match.items():
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            wrong.append(FieldError(field, f"has {path!r}; write a path into the payload, as in 'customer.id'"))
        elif written_value(value) is None:
            wrong.append(FieldError(f"{field}.{path}", f"must be text, a number, true, false or None, not {value!r}"))
    return wrong


def written_value(value: object) -> str | None:
    """A value such that equal ones are written equally (7 and 7.0 are equal); None: it is not a single value."""
    if value is None or isinstance(value, bool | str):
        return None if isinstance(value, str) and not _is_text(value) else msgspec.json.encode(value).decode()
    if isinstance(value, int | float) and math.isfinite(value):
        number = Decimal(str(value)).normalize(_EXACT)
        return "0" if number == 0 else str(number)
    return None


def _is_text(value: str) -> bool:
    return "\x00" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def written_paths(paths: Iterable[str]) -> str:
    """The fields that a wait is found by, in one order: the same for all waits by these fields."""
    return msgspec.json.encode(sorted(paths)).decode()


def key_of_event(event: Event, paths: str) -> str | None:
    """The values of these fields in an event's payload, as one text; None: one is missing, or not a single value."""
    return key_of(read_paths(paths), lambda path: value_in(event, path, _MISSING))


def value_in(event: Event, path: str, missing: object) -> object:
    """The value of a field that events are found by; `missing` if the event has none."""
    found = event.correlation_id if path == CORRELATION else _value_at(event.payload, path)
    return missing if found is _MISSING else found


def unmet_where(where: str, event: Event, run: Mapping[str, object]) -> str | None:
    """Why an event does not meet an expression over it and the run; None if it does. TooMuchWork."""
    return _compiled(where).reason(event.envelope() | {RUN: run})


def key_of(paths: Sequence[str], value_of: Callable[[str], object]) -> str | None:
    values = [written_value(value_of(path)) for path in paths]
    if any(value is None for value in values):
        return None
    text = f"[{','.join(map(str, values))}]"
    return text if len(text) <= MAX_KEY_LENGTH else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def contained(match: Mapping[str, object]) -> str:
    """JSON that the payload of an event with these fields contains (`@>`): a first, quick filter."""
    nested: dict[str, Any] = {}
    for path, value in match.items():
        if path == CORRELATION:
            continue
        node, *names = nested, *path.split(".")
        for name in names[:-1]:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):  # one path continues another: no payload has both
                return "{}"
        if isinstance(node.get(names[-1]), dict):
            return "{}"
        node[names[-1]] = value
    return msgspec.json.encode(nested).decode()


def _value_at(payload: Mapping[str, object], path: str) -> object:
    node: object = payload
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return _MISSING  # which is not a single value
        node = node[name]
    return node


@lru_cache(1000)
def read_paths(paths: str) -> list[str]:
    return msgspec.json.decode(paths, type=list[str])


@lru_cache(1000)
def _source_regex(pattern: str) -> Any:
    return compile_pattern(pattern, "source", [])


def is_source(pattern: str, source: str) -> bool:
    """Whether a source is meant by a pattern: exact, or with `*`."""
    if pattern in ("*", source):
        return True
    regex = _source_regex(pattern)
    return regex is not None and regex.fullmatch(source) is not None


@lru_cache(1000)
def _compiled(where: str) -> CompiledExpression:
    errors: list[FieldError] = []
    found = compile_expression(where, "where", errors, _ROOTS)
    if found is None:
        raise InvalidInput("a stored wait is not valid", errors)
    return found


def _equalities(where: str, run: Mapping[str, object]) -> dict[str, object]:
    """The fields of the payload that `where` demands to equal a single value (of the run, or written there): so the
    wait is looked up by them, and `where` is evaluated only for events that have them."""
    found: dict[str, object] = {}
    for left, right in _compared(Reader(where, _ROOTS).tokens):
        for one, other in ((left, right), (right, left)):
            path, value = _payload_path(one), _known_value(other, run)
            if path is not None and value is not _MISSING and written_value(value) is not None:
                found.setdefault(path, value)
    return dict(list(found.items())[:MAX_MATCH])


def _compared(tokens: Sequence[CelToken]) -> list[tuple[list[str], list[str]]]:
    """The two sides of each `==` of an expression that is a conjunction; the tokens of each side."""
    parts: list[list[str]] = [[]]
    depth = 0
    texts = [token.text for token in tokens]
    for i, text in enumerate(texts):
        depth += (text in "([{") - (text in ")]}")
        if depth == 0 and (text == "?" or (text == "|" and texts[i + 1 : i + 2] == ["|"])):
            return []
        if depth == 0 and text == "&":
            if parts[-1]:
                parts.append([])
        else:
            parts[-1].append(text)
    sides = []
    for part in parts:
        for i in range(1, len(part) - 2):
            if part[i : i + 2] == ["=", "="] and not {"=", "!", "<", ">"} & {*part[:i], *part[i + 2 :]}:
                sides.append((part[:i], part[i + 2 :]))
    return sides


def _names(tokens: Sequence[str]) -> list[str] | None:
    """`a.b.c` as its names."""
    is_path = len(tokens) % 2 == 1 and {*tokens[1::2]} <= {"."}
    return list(tokens[::2]) if is_path and all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in tokens[::2]) else None


def _payload_path(tokens: Sequence[str]) -> str | None:
    names = _names(tokens)
    return ".".join(names[2:]) if names and names[:2] == ["event", "payload"] and len(names) > 2 else None


def _known_value(tokens: Sequence[str], run: Mapping[str, object]) -> object:
    """The value of a literal, or of a path into the run."""
    if len(tokens) == 1 and (tokens[0] in ("true", "false") or re.match(r"[\d'\"]", tokens[0])):
        return cel.evaluate(tokens[0])
    names = _names(tokens)
    return _value_at(run, ".".join(names[1:])) if names and names[0] == RUN and len(names) > 1 else _MISSING


def give(
    waits: Sequence[OpenWait], events: Sequence[tuple[Event, Collection[WaitId]]], taken: Collection[EventId]
) -> list[MetWait]:
    """Which of a run's waits is given which of the events, in their order; `events` are given with the waits that they
    meet. Each event goes to the oldest open wait that it meets, and to one only; of the patterns of a `wait_all` to the
    one with the most conditions, so that a wider one does not take what only a narrower one needs. What the run was
    given before (`taken`) is not given again. An event that cancels the run comes alone."""
    open_waits = sorted(
        (wait for wait in waits if wait.met_event_id is None),
        key=lambda w: (w.created_at, w.step_id, -w.conditions if w.mode == "all" else 0, w.number),
    )
    used = {*taken, *(wait.met_event_id for wait in waits if wait.met_event_id is not None)}
    given: list[MetWait] = []
    for event, met in events:
        wait = next((wait for wait in open_waits if wait.id in met), None)
        if wait is None or event.id in used:
            continue
        if wait.mode == "cancel":
            return [MetWait(wait, event)]
        used.add(event.id)
        given.append(MetWait(wait, event))
        done = None if wait.mode == "all" else wait.step_id
        open_waits = [one for one in open_waits if one is not wait and (done is None or one.step_id != done)]
    return given
