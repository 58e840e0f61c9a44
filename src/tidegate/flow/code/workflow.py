"""A workflow written in Python: the function, its triggers, and how to call it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from tidegate.errors import AppError, NonRetryable
from tidegate.model.declared import hint_of, refusal, result_rule
from tidegate.model.function_source import steps_of, version_of
from tidegate.model.trigger import TriggerSpec
from tidegate.model.typed import TypeRule, Unsupported, has_fields, rule_of, type_name
from tidegate.model.wait import On


def checked_version(version: str | None) -> str | None:
    """A version that a workflow is declared with. ValueError if it cannot be one."""
    if version is None or (isinstance(version, str) and re.fullmatch(r"[\x21-\x7e]{1,100}", version)):
        return version
    raise ValueError(f"version: must be text of 1 to 100 printable ASCII characters without spaces, not {version!r}")


class Workflow:
    """A function that runs for each matching event; its slug is its name."""

    def __init__(
        self,
        slug: str,
        function: Callable[..., Any],
        triggers: list[TriggerSpec],
        *,
        timeout_ms: int | None = None,
        takes_payload: bool = False,
        cancel_on: Sequence[On] = (),
        version: str | None = None,
    ) -> None:
        self.slug = slug
        self.function = function
        self.triggers = triggers
        self.timeout_ms = timeout_ms
        self.cancel_on = cancel_on
        self.before_step: Callable[[str], None] | None = None  # called before each attempt at a step, by tests
        self.is_async = inspect.iscoroutinefunction(function)
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise AppError(f"workflow {slug}: the function must take the context first, as in def {slug}(ctx, …)")
        self._context = parameters[0].name
        self.version = checked_version(version) or version_of(function, self._context)
        self._parameters = {p.name: p for p in parameters[1:] if p.kind is not inspect.Parameter.VAR_KEYWORD}
        self._takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        for parameter in self._parameters.values():
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                raise AppError(f"workflow {slug}: argument {parameter.name} cannot be given by name")
        self._required = {n for n, p in self._parameters.items() if p.default is inspect.Parameter.empty}
        self._rules: dict[str, TypeRule | None] = {}
        self._unresolved = {*self._parameters, "return"}
        self.check_types()
        # The argument that takes the whole payload, unless the payload has a field of that name.
        self.payload_argument = self._only_with_fields() if takes_payload else None

    def _only_with_fields(self) -> str | None:
        """The only argument, if it is required and its type is a dataclass, a Struct or a pydantic model."""
        if self._takes_any or len(self._parameters) != 1 or len(self._required) != 1:
            return None
        [name] = self._parameters
        return name if has_fields(hint_of(self.function, name)) else None

    def check_types(self) -> None:
        """Find how arguments are restored from JSON. AppError names an argument, or the return value, whose type cannot
        be. A name that is not defined yet is looked for again the next time."""
        for name in sorted(self._unresolved):
            hint = hint_of(self.function, name)
            if hint is Any and name in getattr(self.function, "__annotations__", {}):
                continue
            try:
                self._rules[name] = rule_of(hint)
            except NameError:
                continue
            except Unsupported as exc:
                what = "what it returns" if name == "return" else f"argument {name}"
                raise AppError(f"workflow {self.slug}: {what} is of type {type_name(hint)}: {exc}") from exc
            self._unresolved.discard(name)

    def check_steps(self) -> None:
        """AppError names a step whose function declares to return what cannot be kept, as far as that can be read."""
        for name, function in steps_of(self.function, self._context):
            try:
                result_rule(function)
            except Unsupported as exc:
                code = inspect.unwrap(function).__code__
                place = f"line {code.co_firstlineno} of {code.co_filename}"
                raise AppError(f"workflow {self.slug}: step {name!r}: {refusal(function, exc)} ({place})") from exc

    @property
    def result_rule(self) -> TypeRule | None:
        """How the output of a run is restored from JSON; None: as JSON has it."""
        return self._rules.get("return")

    @property
    def parameter_names(self) -> list[str]:
        """The argument names, or `["*"]` when it takes any, or the whole payload."""
        return ["*"] if self._takes_any or self.payload_argument else list(self._parameters)

    @property
    def required_names(self) -> list[str]:
        """The parameters that have no default; none where the only argument takes the whole payload."""
        return [] if self.payload_argument else [name for name in self._parameters if name in self._required]

    @property
    def stored_config(self) -> dict[str, object]:
        """What starts need to know of the function: which parameters it requires, or which one takes the payload."""
        if self.payload_argument:
            return {"payload_argument": self.payload_argument}
        return {"required": self.required_names} if self.required_names else {}

    def bind(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments, checked against the signature. NonRetryable names the one that is missing or wrong."""
        if given.keys() != self._parameters.keys():
            if (name := self.payload_argument) is not None:
                given = {name: given.get(name, given)}
            self._check_names(given)
        rules = self._rules
        return {n: v if (rule := rules.get(n)) is None or type(v) is rule.exact else self._converted(n, v, rule)
                for n, v in given.items()}  # fmt: skip

    def _check_names(self, given: dict[str, Any]) -> None:
        if not given.keys() >= self._required:
            missing = next(name for name in self._parameters if name in self._required and name not in given)
            raise NonRetryable(f"parameter {missing!r} of workflow {self.slug} is missing in the event")
        if not self._takes_any and not given.keys() <= self._parameters.keys():
            extra = min(given.keys() - self._parameters.keys())
            raise NonRetryable(f"workflow {self.slug} takes no parameter {extra!r}")

    def _converted(self, name: str, value: object, rule: TypeRule) -> object:
        try:
            return rule.convert(value)
        except ValueError as exc:
            raise NonRetryable(f"parameter {name!r} of workflow {self.slug} is wrong: {exc}") from exc
