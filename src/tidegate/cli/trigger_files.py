"""Triggers and events as users write them: YAML or JSON files, and `--set field=value`."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml

from tidegate.model import units

MAX_DEPTH = 100
MAX_VALUES = 100_000
# Set by the server; dropped from a file, so that the output of `show --json` can be sent back.
READ_ONLY = ("id", "workflow", "state", "created_by", "created_at", "updated_by", "updated_at")
_TEXT_FIELDS = ("name", "event_type", "event_source", "where", "idempotency_key", "concurrency_key", "key", "status")
# Field names as users write them (as in code), and the API's; those that end in _ms are written as durations.
_WRITTEN = {
    "": {"idempotency_window": "idempotency_window_ms"},
    "retry": {"base": "base_ms", "cap": "max_ms", "jitter": "jitter_ratio", "max_age": "max_age_ms"},
    "breaker": {"window": "window_ms", "pause": "pause_ms"},
    "backlog": {"max_wait": "max_wait_ms"},
    "collect": {"debounce": "debounce_ms", "max_wait": "max_wait_ms", "size": "batch_size", "within": "batch_ms"},
}


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, of which PyYAML silently uses the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"duplicate key {key.value}"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_object(file: str) -> dict[str, Any]:
    """The object in a YAML or JSON file, `-` for standard input. UsageError says what is wrong, and where."""
    name = "standard input" if file == "-" else file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8 text"
        raise click.UsageError(f"{name} cannot be read: {reason}") from exc
    found = _parsed(text, name)
    if not isinstance(found, dict):
        raise click.UsageError(f"{name} must contain one object (name: value), not {_kind(found)}")
    _check(found, name)
    return found


def trigger_fields(given: dict[str, Any], *, keep_version: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields to send: without those that the server sets, with rates and durations converted. The second value maps
    the API's field names to the names in `given`, where they differ."""
    dropped = READ_ONLY if keep_version else (*READ_ONLY, "version")
    fields = {name: value for name, value in given.items() if name not in dropped}
    names: dict[str, str] = {}
    if "throttle" in fields:
        names = {"throttle_count": "throttle", "throttle_window_ms": "throttle"}
        _refuse_both(fields, "throttle", names)
        rate = fields.pop("throttle")
        count, window_ms = (None, None) if rate is None else _unit(units.rate, rate, "throttle")
        fields |= {"throttle_count": count, "throttle_window_ms": window_ms}
    if "skip_over" in fields:
        names |= {"skip_over_count": "skip_over", "skip_over_window_ms": "skip_over"}
        _refuse_both(fields, "skip_over", ["skip_over_count", "skip_over_window_ms"])
        rate = fields.pop("skip_over")
        count, window_ms = (None, None) if rate is None else _unit(units.rate, rate, "skip_over")
        fields |= {"skip_over_count": count, "skip_over_window_ms": window_ms}
    fields = _as_sent(fields, "", names)
    for name in ("retry", "breaker", "collect", "backlog"):
        if isinstance(fields.get(name), dict):
            fields[name] = _as_sent(fields[name], name, names)
    return fields, names


def set_fields(assignments: tuple[str, ...]) -> dict[str, Any]:
    """`field=value` pairs: text for text fields, JSON for the others; `null` clears a field."""
    fields: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise click.UsageError(f"--set takes field=value, not {assignment!r}")
        fields[name.strip()] = None if text == "null" else text if name in _TEXT_FIELDS else _value(text)
    return fields


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _as_sent(fields: dict[str, Any], place: str, names: dict[str, str]) -> dict[str, Any]:
    """The fields of one object by the API's names; adds the names as written to `names`."""
    sent: dict[str, Any] = {}
    inside = f"{place}." if place else ""
    for name, value in fields.items():
        ours = _WRITTEN[place].get(name)
        if ours is None:
            sent[name] = value
            continue
        _refuse_both(fields, f"{inside}{name}", [ours])
        names[f"{inside}{ours}"] = f"{inside}{name}"
        sent[ours] = _unit(units.duration_ms, value, f"{inside}{name}") if ours.endswith("_ms") else value
    return sent


def _refuse_both(fields: dict[str, Any], written: str, names: Iterable[str]) -> None:
    for name in names:
        if name in fields:
            raise click.UsageError(f"{written} and {name} set the same field: give one of them")


def _unit(parse: Callable[[Any], Any], value: Any, field: str) -> Any:
    try:
        return None if value is None else parse(value)
    except ValueError as exc:
        raise click.UsageError(f"{field}: {exc}") from exc


def _parsed(text: str, name: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as exc:
            if name.endswith(".json"):
                raise click.UsageError(f"{name} is not JSON: {exc}") from exc
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise click.UsageError(f"{name} is not YAML{place}: {exc.problem or exc.context}") from exc
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        reason = "it is nested too deeply" if isinstance(exc, RecursionError) else str(exc).splitlines()[0]
        raise click.UsageError(f"{name} is not YAML: {reason}") from exc


def _check(found: Any, name: str) -> None:
    """Refuse what YAML can express and JSON cannot. Aliases can make a small file huge, or infinitely nested."""
    left: list[tuple[Any, int]] = [(found, 0)]
    for count in itertools.count():
        if not left:
            return
        value, depth = left.pop()
        if depth > MAX_DEPTH or count > MAX_VALUES:
            raise click.UsageError(f"{name} is nested too deeply" if depth > MAX_DEPTH else f"{name} is too large")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    hint = (
                        "; YAML reads on, off, yes and no as true and false: quote them"
                        if isinstance(key, bool)
                        else ""
                    )
                    raise click.UsageError(f"{name}: a name must be text, not {key!r}{hint}")
            left += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            left += [(inner, depth + 1) for inner in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise click.UsageError(f"{name}: {value} cannot be sent as JSON")
        elif isinstance(value, bytes | set):
            raise click.UsageError(f"{name}: contains a {type(value).__name__}, which JSON does not support")


def _kind(value: Any) -> str:
    return {type(None): "nothing", list: "a list", str: "text"}.get(type(value), f"a {type(value).__name__}")
