"""Liquid templates over `event`: parameters and keys. Event text is only ever a value here, never a template."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from io import StringIO
from typing import Any, TextIO

import liquid
from liquid.builtin.expressions import LoopExpression
from liquid.builtin.expressions.primitive import RangeLiteral
from liquid.builtin.output import OutputNode
from liquid.exceptions import LiquidError, LiquidValueError
from liquid.filter import sequence_filter, string_filter
from liquid.output import LimitedStringIO

from headgate.errors import FieldError

MAX_LENGTH = 4000
MAX_DEPTH = 16
MAX_TEXT = 1 << 20

Render = Callable[[dict[str, Any]], Any]


class TemplateError(Exception):
    """A template failed on an event; the text says where and why."""


class _Environment(liquid.Environment):
    loop_iteration_limit = 10_000
    local_namespace_limit = MAX_TEXT
    output_stream_limit = 64 * 1024


class _Context(liquid.RenderContext):
    """A context whose buffers keep line ends as they are; the library's own turn each into a newline."""

    def get_buffer(self, buf: TextIO | None = None) -> StringIO:
        written = buf.size if isinstance(buf, LimitedStringIO) else 0
        return LimitedStringIO(limit=_Environment.output_stream_limit - written, newline="")


@string_filter
def _replace(text: str, old: object, new: object = "") -> str:
    """`replace`, which could make a text of any size out of two small ones, within bounds."""
    _bounded(len(text) + text.count(str(old)) * len(str(new)))
    return text.replace(str(old), str(new))


@sequence_filter
def _join(items: Iterable[object], separator: object = " ") -> str:
    """`join`, within the same bounds."""
    texts = [str(item) for item in items]
    _bounded(sum(map(len, texts)) + len(texts) * len(str(separator)))
    return str(separator).join(texts)


def _bounded(size: int) -> None:
    if size > MAX_TEXT:
        raise LiquidValueError(f"the text would be longer than {MAX_TEXT} characters", token=None)


_environment = _Environment(undefined=liquid.StrictDefaultUndefined, strict_filters=True)
_environment.add_filter("replace", _replace)
_environment.add_filter("join", _join)


def compile_template(source: Any, field: str, errors: list[FieldError], depth: int = 0) -> Render | None:
    """A function from the envelope to the rendered value; strings in objects and arrays are templates too.

    A string that is exactly one expression, `{{ event.payload.id }}`, keeps the JSON type of its value.
    """
    if depth > MAX_DEPTH:
        errors.append(FieldError(field, f"is nested deeper than {MAX_DEPTH} levels"))
        return None
    if isinstance(source, dict):
        parts = {k: compile_template(v, f"{field}.{k}", errors, depth + 1) for k, v in source.items()}
        return lambda envelope: {k: render(envelope) for k, render in parts.items() if render}
    if isinstance(source, list):
        items = [compile_template(v, f"{field}[{i}]", errors, depth + 1) for i, v in enumerate(source)]
        return lambda envelope: [render(envelope) for render in items if render]
    if not isinstance(source, str) or ("{{" not in source and "{%" not in source):
        return lambda _: source
    return _compile_text(source, field, errors)


def _compile_text(source: str, field: str, errors: list[FieldError]) -> Render | None:
    if len(source) > MAX_LENGTH:
        errors.append(FieldError(field, f"is longer than {MAX_LENGTH} characters"))
        return None
    try:
        template = _environment.from_string(source)
        analysis = template.analyze()
    except (LiquidError, RecursionError) as exc:
        errors.append(FieldError(field, f"is not a Liquid template: {str(exc).splitlines()[0]}"))
        return None
    unknown = sorted(analysis.globals.keys() - {"event"})
    if unknown:
        errors.append(FieldError(field, f"uses `{unknown[0]}`; only `event` is known here"))
        return None
    missing = sorted(analysis.filters.keys() - _environment.filters.keys())
    if missing:
        errors.append(FieldError(field, f"uses the unknown filter `{missing[0]}`"))
        return None
    if _has_loose_range(template):
        errors.append(FieldError(field, "uses a range such as (1..3) outside a `for`"))
        return None
    nodes = template.nodes
    single = nodes[0].expression if len(nodes) == 1 and isinstance(nodes[0], OutputNode) else None

    def render(envelope: dict[str, Any]) -> Any:
        try:
            context = _Context(template, globals={"event": envelope})
            if single is None:
                buffer = context.get_buffer()
                template.render_with_context(context, buffer)
                return buffer.getvalue()
            value = single.evaluate(context)
        except Exception as exc:  # filters raise whatever the event makes of them
            raise TemplateError(f"{field}: {(str(exc).splitlines() or [type(exc).__name__])[0][:200]}") from exc
        if issubclass(type(value), liquid.Undefined):  # isinstance would ask the value itself, which raises
            raise TemplateError(f"{field}: {source} is not in the event")
        return value

    return render


def _has_loose_range(template: liquid.BoundTemplate) -> bool:
    """Whether a range is used as a value. Only loops are bounded; a filter would write out a range of any length."""
    context = liquid.RenderContext(template)
    nodes: list[Any] = list(template.nodes)
    expressions: list[Any] = []
    while nodes:
        node = nodes.pop()
        nodes += node.children(context, include_partials=False)
        expressions += node.expressions()
    while expressions:
        expression = expressions.pop()
        if isinstance(expression, RangeLiteral):
            return True
        parts = expression.children()
        expressions += (p for p in parts if not (isinstance(expression, LoopExpression) and p is expression.iterable))
    return False
