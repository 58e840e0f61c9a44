"""Liquid templates over `event`: parameters and keys. Text from an event is always a value, never a template."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any, TextIO

import liquid
from liquid.builtin.expressions import FilteredExpression, LoopExpression, TernaryFilteredExpression
from liquid.builtin.expressions.arguments import KeywordArgument
from liquid.builtin.expressions.filtered import Filter
from liquid.builtin.expressions.primitive import IntegerLiteral, RangeLiteral
from liquid.builtin.output import OutputNode
from liquid.exceptions import LiquidError
from liquid.output import LimitedStringIO

from tidegate.errors import FieldError
from tidegate.model.liquid_environment import (
    MAX_STEPS,
    PRICE,
    BoundedRange,
    arguments_of,
    check_result,
    environment,
)
from tidegate.model.trigger_terms import FIELDS, Render, TemplateError, unknown_field
from tidegate.model.work_limit import TooMuchWork, WorkLeft

MAX_LENGTH = 4000
MAX_DEPTH = 16
MAX_OUTPUT = 64 * 1024
_TEXT_STEPS = 10


class _Rendering:
    """One event and the work that is left; all templates of a trigger share it."""

    def __init__(self, envelope: dict[str, Any], paying: WorkLeft) -> None:
        self.globals = {"event": envelope}
        self._work_left = paying
        # Kept with the values, so that no other value gets the same id.
        self._sizes: dict[int, tuple[object, int]] = {}

    def pay(self, steps: int) -> None:
        self._work_left.pay(steps * PRICE)

    def size(self, value: Any) -> int:
        """The number of values in it; a long text counts as several."""
        if issubclass(type(value), str):  # isinstance would query the value, which raises if it is undefined
            return len(value) // 64
        if not issubclass(type(value), list | tuple | dict):
            return 0
        if id(value) not in self._sizes:
            size, waiting = 0, [value]
            while waiting and size <= MAX_STEPS * 2:
                node: Any = waiting.pop()
                size += 1 + (len(node) // 64 if isinstance(node, str) else 0)
                if isinstance(node, list | tuple | dict):
                    waiting += node.values() if isinstance(node, dict) else node
            self._sizes[id(value)] = value, size
        return self._sizes[id(value)][1]


class _TemplateContext(liquid.RenderContext):
    """A context that charges the work to the work limit, and whose buffers keep line ends (the library's do not)."""

    def __init__(self, template: liquid.BoundTemplate, rendering: _Rendering, nodes: int) -> None:
        super().__init__(template, globals=rendering.globals)
        self._rendering = rendering
        self._nodes = nodes

    def get_buffer(self, buf: TextIO | None = None) -> StringIO:
        written = buf.size if isinstance(buf, LimitedStringIO) else 0
        return LimitedStringIO(limit=MAX_OUTPUT - written, newline="")

    def get(self, *args: Any, **more: Any) -> object:
        value = super().get(*args, **more)
        self._rendering.pay(1 + self._rendering.size(value) // 2)  # it may be compared or written out, which is fast
        return value

    def filter(self, name: str, token: Any) -> Callable[..., object]:
        function = super().filter(name, token)

        def counted(*args: object, **more: object) -> object:
            self._rendering.pay(1 + sum(map(self._rendering.size, args)))
            value = function(*arguments_of(name, args), **more)
            check_result(value)
            self._rendering.pay(self._rendering.size(value))
            return value

        return counted

    def raise_for_loop_limit(self, length: int = 1) -> None:
        self._rendering.pay(length * self._nodes)


def compile_template(source: object, field: str, errors: list[FieldError], depth: int = 0) -> Render | None:
    """A function from the envelope to the rendered value; strings in objects and arrays are templates too.

    A string that is exactly one expression, `{{ event.payload.id }}`, keeps the JSON type of its value.
    """
    render = _compile(source, field, errors, depth)
    return None if render is None else lambda envelope, paying=None: render(_Rendering(envelope, paying or WorkLeft()))


def _compile(source: object, field: str, errors: list[FieldError], depth: int) -> Callable[[_Rendering], object] | None:
    if depth > MAX_DEPTH:
        errors.append(FieldError(field, f"is nested deeper than {MAX_DEPTH} levels"))
        return None
    if isinstance(source, dict):
        parts = {k: _compile(v, f"{field}.{k}", errors, depth + 1) for k, v in source.items()}
        return lambda rendering: {k: render(rendering) for k, render in parts.items() if render}
    if isinstance(source, list):
        items = [_compile(v, f"{field}[{i}]", errors, depth + 1) for i, v in enumerate(source)]
        return lambda rendering: [render(rendering) for render in items if render]
    if not isinstance(source, str) or ("{{" not in source and "{%" not in source):
        return lambda _: source
    return _compile_text(source, field, errors)


def _compile_text(source: str, field: str, errors: list[FieldError]) -> Callable[[_Rendering], Any] | None:
    if len(source) > MAX_LENGTH:
        errors.append(FieldError(field, f"is longer than {MAX_LENGTH} characters"))
        return None
    try:
        template = environment.from_string(source)
        analysis = template.analyze()
        nodes, expressions = _parts(template)
        mistake = _mistake(analysis, expressions) or _endless(expressions)
    except (LiquidError, RecursionError) as exc:
        why = exc.message if isinstance(exc, LiquidError) else "it is nested too deeply"
        token = getattr(exc, "token", None)
        mistake = f"is not a Liquid template: {why}", len(source) if token is None else token.start_index
    if mistake:
        message, index = mistake
        index = index if index >= 0 else len(source)
        line, column = source.count("\n", 0, index) + 1, index - source.rfind("\n", 0, index)
        errors.append(FieldError(field, f"{message} (line {line}, column {column})"))
        return None
    single = _single(template)
    size = len(nodes) + len(expressions)

    def render(rendering: _Rendering) -> Any:
        try:
            rendering.pay(_TEXT_STEPS)
            context = _TemplateContext(template, rendering, size)
            if isinstance(single, FilteredExpression) and not single.filters:
                value = single.left.evaluate(liquid.RenderContext(template, globals=rendering.globals))
            elif single is not None:
                value = single.evaluate(context)
            else:
                buffer = context.get_buffer()
                template.render_with_context(context, buffer)
                return buffer.getvalue()
        except TooMuchWork:
            raise TooMuchWork(field) from None
        except Exception as exc:  # filters may raise anything, depending on the event
            raise TemplateError(f"{field}: {(str(exc).splitlines() or [type(exc).__name__])[0][:200]}") from exc
        if issubclass(type(value), liquid.Undefined):
            raise TemplateError(f"{field}: {source} is not in the event")
        return value

    return render


def _single(template: liquid.BoundTemplate) -> Any:
    """The expression of a template that consists of a single one: its value keeps its type."""
    node = template.nodes[0] if len(template.nodes) == 1 else None
    return node.expression if isinstance(node, OutputNode) else None


def _parts(template: liquid.BoundTemplate) -> tuple[list[Any], list[Any]]:
    """All nodes, and all expressions except the ranges of loops, which are allowed."""
    context = liquid.RenderContext(template)
    nodes, expressions = list[Any](template.nodes), list[Any]()
    for node in nodes:
        nodes += node.children(context, include_partials=False)
        expressions += node.expressions()
    for expression in expressions:
        over = expression.iterable if isinstance(expression, LoopExpression) else None
        expressions += (e for e in expression.children() if e is not over or not isinstance(e, RangeLiteral))
        if isinstance(over, RangeLiteral):
            expressions += over.children()
            expression.iterable = BoundedRange(over.token, over.start, over.stop)
    return nodes, expressions


def _mistake(analysis: Any, expressions: list[Any]) -> tuple[str, int] | None:
    """Why a syntactically correct template is not valid, and where."""
    for name, variables in analysis.globals.items():
        if name != "event":
            return f"uses `{name}`; only `event` is available", variables[0].span.index
    if "event" in analysis.locals:
        return "assigns to the reserved name `event`", analysis.locals["event"][0].span.index
    for variable in analysis.globals.get("event", ()):
        first = variable.segments[1] if len(variable.segments) > 1 else None
        if isinstance(first, int) or (isinstance(first, str) and first not in FIELDS):
            return unknown_field(first), variable.span.index
    for used in _filters(expressions):
        function = environment.filters.get(used.name)
        if function is None:
            return f"uses the unknown filter `{used.name}`", used.token.start_index
        named = {a.name: None for a in used.args if isinstance(a, KeywordArgument)}
        given = [None] * (1 + len(used.args) - len(named))
        inner = {n: None for n in ("environment", "context") if getattr(function, f"with_{n}", False)}
        try:
            inspect.signature(function).bind(*given, **named, **inner)
        except TypeError as exc:
            return f"uses the filter `{used.name}` with wrong arguments: {exc}", used.token.start_index
    for expression in expressions:
        if isinstance(expression, RangeLiteral):
            return "uses a range such as (1..3) outside a `for`", expression.token.start_index
    return None


def _endless(expressions: list[Any]) -> tuple[str, int] | None:
    """A loop that exceeds the work limit for every event."""
    for expression in expressions:
        over = expression.iterable if isinstance(expression, LoopExpression) else None
        if not isinstance(over, RangeLiteral) or expression.limit is not None:
            continue
        start, stop = over.start, over.stop
        literal = isinstance(start, IntegerLiteral) and isinstance(stop, IntegerLiteral)
        if literal and stop.value - start.value > MAX_STEPS:  # type: ignore[attr-defined]
            return f"loops over {over}, which is more than the work limit of an event allows", over.token.start_index
    return None


def _filters(expressions: list[Any]) -> Iterator[Filter]:
    for expression in expressions:
        if isinstance(expression, FilteredExpression | TernaryFilteredExpression):
            yield from expression.filters or ()
        if isinstance(expression, TernaryFilteredExpression):
            yield from (*(expression.left.filters or ()), *(expression.tail_filters or ()))
