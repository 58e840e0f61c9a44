"""A workflow written in Python: the function, how to call it, and what it is given (`ctx`)."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from headgate.errors import AppError, NonRetryable
from headgate.model.event import Event
from headgate.model.trigger import TriggerSpec
from headgate.telemetry.logs import logger


class Context:
    """What a workflow gets as its first argument."""

    __slots__ = ("event", "log", "run_id")

    def __init__(self, run_id: uuid.UUID, workflow: str, event: Event | None, correlation_id: str | None) -> None:
        self.run_id = run_id
        self.event = event
        self.log = logger("workflow").bind(run_id=str(run_id), workflow=workflow, correlation_id=correlation_id)


class Workflow:
    """A function that runs for each matching event; its slug is its name."""

    def __init__(self, slug: str, function: Callable[..., Any], triggers: list[TriggerSpec]) -> None:
        self.slug = slug
        self.function = function
        self.triggers = triggers
        self.is_async = inspect.iscoroutinefunction(function)
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise AppError(f"workflow {slug}: the function must take the context first, as in def {slug}(ctx, …)")
        self._parameters = {p.name: p for p in parameters[1:] if p.kind is not inspect.Parameter.VAR_KEYWORD}
        self._takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        for parameter in self._parameters.values():
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                raise AppError(f"workflow {slug}: argument {parameter.name} cannot be given by name")
        self._hints: dict[str, Any] | None = None

    @property
    def parameter_names(self) -> list[str]:
        """The argument names, or `["*"]` when it takes whatever comes."""
        return ["*"] if self._takes_any else list(self._parameters)

    def bind(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments, checked against the signature. NonRetryable names the one that is missing or wrong."""
        missing = [n for n, p in self._parameters.items() if p.default is inspect.Parameter.empty and n not in given]
        if missing:
            raise NonRetryable(f"parameter {missing[0]!r} of workflow {self.slug} is missing in the event")
        if not self._takes_any:
            extra = sorted(given.keys() - self._parameters.keys())
            if extra:
                raise NonRetryable(f"workflow {self.slug} takes no parameter {extra[0]!r}")
        hints = self._type_hints()
        return {name: self._converted(name, value, hints.get(name, Any)) for name, value in given.items()}

    def _converted(self, name: str, value: Any, hint: Any) -> Any:
        if hint is Any:
            return value
        try:
            return msgspec.convert(value, hint)
        except msgspec.ValidationError as exc:
            raise NonRetryable(f"parameter {name!r} of workflow {self.slug} is wrong: {exc}") from exc
        except TypeError:  # a type that JSON values cannot be checked against
            return value

    def _type_hints(self) -> dict[str, Any]:
        if self._hints is None:
            try:
                self._hints = get_type_hints(self.function)
            except Exception:  # a hint that exists for type checkers only
                self._hints = {}
        return self._hints
