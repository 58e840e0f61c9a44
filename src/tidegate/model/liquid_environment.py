"""The supported Liquid: filters and tags with bounded work, and values written as in JSON, never as in Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

import liquid
import msgspec
from liquid.builtin.expressions.primitive import RangeLiteral
from liquid.builtin.output import Output, OutputNode
from liquid.builtin.tags.cycle_tag import CycleNode, CycleTag
from liquid.builtin.tags.echo_tag import EchoNode, EchoTag
from liquid.exceptions import LiquidValueError
from liquid.filter import sequence_filter, string_filter, with_environment

from tidegate.model import work_limit
from tidegate.model.work_limit import TooMuchWork

# A step here takes most of a microsecond, so it is charged as several steps of the work limit.
MAX_STEPS = 50_000
PRICE = work_limit.MAX_STEPS // MAX_STEPS
MAX_TEXT = 1 << 20
MAX_DATE_LENGTH = 100
# Larger integers are not useful, and each multiplication of two doubles their size.
MAX_BITS = 1024

# Filters that convert their input to text.
_OF_TEXT = frozenset(
    [
        "append",
        "base64_decode",
        "base64_encode",
        "base64_url_safe_decode",
        "base64_url_safe_encode",
        "capitalize",
        "downcase",
        "escape",
        "escape_once",
        "lstrip",
        "newline_to_br",
        "prepend",
        "remove",
        "remove_first",
        "remove_last",
        "replace",
        "replace_first",
        "replace_last",
        "rstrip",
        "split",
        "strip",
        "strip_newlines",
        "truncate",
        "truncatewords",
        "upcase",
        "url_decode",
        "url_encode",
    ]
)


def spelled(value: Any) -> str:
    """A value as text, as Liquid writes it: null as nothing, an array as its items; an object as JSON."""
    kind = type(value)  # isinstance would query the value, which raises if it is undefined
    if kind is str:
        return str(value)
    if value is None:
        return ""
    if kind is bool:
        return "true" if value else "false"
    if kind is list or kind is tuple:
        return "".join(map(spelled, value))
    return msgspec.json.encode(value).decode() if kind is dict else str(value)


def arguments_of(name: str, arguments: tuple[object, ...]) -> tuple[object, ...]:
    """The arguments of a filter, as text if it is a text filter. Raises if a number is too large."""
    for one in arguments:
        check_number(one)
    if name not in _OF_TEXT:
        return arguments
    kinds = (bool, type(None), dict, list, tuple)
    return tuple(spelled(one) if type(one) in kinds else one for one in arguments)


def check_result(value: object) -> None:
    """Raises if a filter has returned something too large."""
    check_number(value)
    if type(value) is str:
        _bounded(len(value))


def check_number(value: object) -> None:
    if type(value) is int and value.bit_length() > MAX_BITS:
        raise LiquidValueError(f"the number would have more than {MAX_BITS} bits", token=None)


class BoundedRange(RangeLiteral):
    """The range of a loop: the library may build a list of it before it counts the items."""

    def evaluate(self, context: liquid.RenderContext) -> range:
        found = super().evaluate(context)
        if found.stop - found.start > MAX_STEPS:
            raise TooMuchWork
        return found


class _OutputNode(OutputNode):
    def render_to_output(self, context: liquid.RenderContext, buffer: TextIO) -> int:
        return buffer.write(spelled(self.expression.evaluate(context)))


class _Output(Output):
    node_class = _OutputNode


class _EchoNode(EchoNode):
    def render_to_output(self, context: liquid.RenderContext, buffer: TextIO) -> int:
        return buffer.write(spelled(self.expression.evaluate(context)))


class _EchoTag(EchoTag):
    node_class = _EchoNode


class _CycleNode(CycleNode):
    def render_to_output(self, context: liquid.RenderContext, buffer: TextIO) -> int:
        group = spelled(self.group.evaluate(context)) if self.group else ""
        values = [spelled(argument.evaluate(context)) for argument in self.args]
        return buffer.write(values[context.cycle(group or str(values), len(values))])


class _CycleTag(CycleTag):
    node_class = _CycleNode


@string_filter
def _replace(text: str, old: object, new: object = "") -> str:
    """`replace` with a bounded result: it could build a text of any size from two small ones."""
    _bounded(len(text) + text.count(str(old)) * len(str(new)))
    return text.replace(str(old), str(new))


@sequence_filter
def _join(items: Iterable[object], separator: object = " ") -> str:
    """`join` with a bounded result."""
    texts, between = list(map(spelled, items)), spelled(separator)
    _bounded(sum(map(len, texts)) + len(texts) * len(between))
    return between.join(texts)


@string_filter
def _split(text: str, separator: object) -> list[str]:
    """`split` into a bounded number of pieces."""
    mark = str(separator)
    if (text.count(mark) if mark else len(text)) > MAX_STEPS:
        raise LiquidValueError(f"there would be more than {MAX_STEPS} pieces", token=None)
    return list(_library_split(text, mark))


@string_filter
def _truncatewords(text: str, *arguments: object) -> str:
    """`truncatewords` with a bounded number of words."""
    if text.count(" ") > MAX_STEPS:
        raise LiquidValueError(f"there would be more than {MAX_STEPS} words", token=None)
    return str(_library_truncatewords(text, *arguments))


@sequence_filter
def _uniq(items: Iterable[Any], key: object = None) -> list[object]:
    """`uniq` in linear time; the library compares every pair."""
    seen: dict[bytes, object] = {}
    for item in items:
        seen.setdefault(msgspec.json.encode(item if key is None else item.get(key), order="deterministic"), item)
    return list(seen.values())


@with_environment
def _date(value: object, form: object, *, environment: liquid.Environment) -> object:
    """`date` of a text of bounded length. There is no clock: rendering again gives the same result."""
    if isinstance(value, bool | dict | list):
        return spelled(value)
    if isinstance(value, str) and (len(value) > MAX_DATE_LENGTH or value in ("now", "today")):
        raise LiquidValueError(f"{value[:20]!r} is not a time", token=None)
    if isinstance(form, str) and len(form) > MAX_DATE_LENGTH:
        raise LiquidValueError(f"the time format is longer than {MAX_DATE_LENGTH} characters", token=None)
    return _library_date(value, form, environment=environment)


def _bounded(size: int) -> None:
    if size > MAX_TEXT:
        raise LiquidValueError(f"the text would be longer than {MAX_TEXT} characters", token=None)


environment = liquid.Environment(undefined=liquid.StrictDefaultUndefined, strict_filters=True)
for _tag in (_Output, _EchoTag, _CycleTag):
    environment.add_tag(_tag)
_library_date, _library_split = environment.filters["date"], environment.filters["split"]
_library_truncatewords = environment.filters["truncatewords"]
environment.filters |= {"replace": _replace, "join": _join, "split": _split, "uniq": _uniq, "date": _date}
environment.filters["truncatewords"] = _truncatewords
del environment.filters["strip_html"]  # takes quadratic time on a text with many unclosed tags
del environment.tags["include"], environment.tags["render"]
