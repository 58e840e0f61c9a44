"""`where`: a CEL expression over `event`. It must be true or false; on an event it cannot answer for, it is false."""

from __future__ import annotations

from typing import Any

import cel

from headgate.errors import FieldError

MAX_LENGTH = 2000


class CompiledExpression:
    """`reason(envelope)` is None when the expression is true, else why it is not."""

    __slots__ = ("_program", "source")

    def __init__(self, source: str, program: cel.Program) -> None:
        self.source = source
        self._program = program

    def reason(self, envelope: dict[str, Any]) -> str | None:
        try:
            result = self._program.execute({"event": envelope})
        except KeyError as exc:
            return f"where: {exc.args[0]} is not in the event"
        except Exception as exc:  # a division by zero, an index out of range: whatever the event makes of it
            return f"where: {(str(exc).splitlines() or [type(exc).__name__])[0][:200]}"
        if result is True:
            return None
        shown = self.source if len(self.source) <= 200 else f"{self.source[:199]}…"
        return f"where is false: {shown}" if result is False else f"where gives neither true nor false: {shown}"


def compile_expression(source: str, field: str, errors: list[FieldError]) -> CompiledExpression | None:
    """The expression ready to run, or None with what is wrong added to `errors`."""
    if not 0 < len(source) <= MAX_LENGTH:
        errors.append(FieldError(field, f"must be a CEL expression of 1 to {MAX_LENGTH} characters"))
        return None
    try:
        program = cel.compile(source)
    except ValueError as exc:
        errors.append(FieldError(field, f"is not a CEL expression: {str(exc).splitlines()[0][:300]}"))
        return None
    if "event" not in program.variables():
        errors.append(FieldError(field, "does not look at `event`; write for example event.payload.amount > 100"))
        return None
    return CompiledExpression(source, program)
