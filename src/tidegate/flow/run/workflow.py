"""A workflow written in Python: the function, how to call it, and what it is given (`ctx`)."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, get_type_hints, overload

import msgspec

from tidegate.errors import AppError, NonRetryable
from tidegate.model.event import Event
from tidegate.model.retry import RetryPolicy
from tidegate.model.run import ClaimedRun
from tidegate.model.trigger import TriggerSpec
from tidegate.telemetry.logs import logger

T = TypeVar("T")

# The step that the current task or thread runs in.
current_step: contextvars.ContextVar[str | None] = contextvars.ContextVar("tidegate_step", default=None)


class StepRunner(Protocol):
    """What a context needs of the execution it belongs to."""

    run: ClaimedRun
    event: Event | None

    async def step(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *,
        retry: RetryPolicy | None, timeout: str | int | float | None,
    ) -> Any: ...  # fmt: skip
    async def sleep(self, duration: str | int | float, name: str | None = None, *, is_alone: bool = True) -> None: ...


class _Context:
    """The first argument of every workflow."""

    __slots__ = ("_execution", "_log", "event", "run_id")

    def __init__(self, execution: StepRunner) -> None:
        run = execution.run
        self._execution = execution
        self.run_id = run.id
        self.event = execution.event
        self._log: Any = None

    @property
    def log(self) -> Any:
        """A structlog logger whose lines name the run."""
        if self._log is None:
            run = self._execution.run
            self._log = logger("workflow").bind(
                run_id=str(run.id), workflow=run.workflow, correlation_id=run.correlation_id, attempt=run.attempts
            )
        return self._log

    @property
    def attempt(self) -> int:
        """How many times this run has been started or resumed."""
        return self._execution.run.attempts

    @property
    def idempotency_key(self) -> str:
        """The same in every attempt at the current step (outside a step: of the run). Pass it to services that take an
        idempotency key."""
        step = current_step.get()
        return f"{self.run_id}:{step}" if step else str(self.run_id)


class Context(_Context):
    """The context of an `async def` workflow."""

    __slots__ = ()

    @overload
    async def step(
        self,
        name: str,
        function: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        retry: RetryPolicy | None = None,
        timeout: str | int | float | None = None,
        **kwargs: Any,
    ) -> T: ...

    @overload
    async def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        retry: RetryPolicy | None = None,
        timeout: str | int | float | None = None,
        **kwargs: Any,
    ) -> T: ...

    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        retry: RetryPolicy | None = None,
        timeout: str | int | float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function and store its result (JSON); when the run resumes, the stored result is returned instead.

        A synchronous function runs in a thread. When it fails it is retried by `retry` (default: the settings
        TIDEGATE_STEP_RETRY_*), and no worker is held meanwhile; raises StepFailed when the retries are exhausted.
        """
        return await self._execution.step(name, function, args, kwargs, retry=retry, timeout=timeout)

    async def sleep(self, duration: str | int | float, *, name: str | None = None) -> None:
        """Suspend the run for a duration (`"2h"`, `"30s"`); it survives restarts and holds no worker.

        A sleep that runs beside other steps (in `asyncio.gather` or a task) needs a name of its own.
        """
        await self._execution.sleep(duration, name)


class SyncContext(_Context):
    """The context of a synchronous (`def`) workflow, which runs in a thread: the same, without `await`."""

    __slots__ = ("_loop", "_thread")

    def __init__(self, execution: StepRunner, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(execution)
        self._loop = loop
        self._thread: int | None = None

    def called_here(self) -> None:
        """The function is called in this thread."""
        self._thread = threading.get_ident()

    def step(
        self,
        name: str,
        function: Callable[..., T],
        /,
        *args: Any,
        retry: RetryPolicy | None = None,
        timeout: str | int | float | None = None,
        **kwargs: Any,
    ) -> T:
        """Call a function and store its result; see `Context.step`."""
        work = self._execution.step(name, function, args, kwargs, retry=retry, timeout=timeout)
        found: T = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return found

    def sleep(self, duration: str | int | float, *, name: str | None = None) -> None:
        """Suspend the run for a duration; it survives restarts and holds no worker. In a thread of your own it needs a
        name."""
        is_alone = self._thread in (None, threading.get_ident())
        work = self._execution.sleep(duration, name, is_alone=is_alone)
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Workflow:
    """A function that runs for each matching event; its slug is its name."""

    def __init__(
        self, slug: str, function: Callable[..., Any], triggers: list[TriggerSpec], *, timeout_ms: int | None = None
    ) -> None:
        self.slug = slug
        self.function = function
        self.triggers = triggers
        self.timeout_ms = timeout_ms
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
        self._required = {n for n, p in self._parameters.items() if p.default is inspect.Parameter.empty}
        self._hints: dict[str, Any] | None = None

    @property
    def parameter_names(self) -> list[str]:
        """The argument names, or `["*"]` when it takes any."""
        return ["*"] if self._takes_any else list(self._parameters)

    def bind(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments, checked against the signature. NonRetryable names the one that is missing or wrong."""
        if given.keys() != self._parameters.keys():
            self._check_names(given)
        hints = self._hints if self._hints is not None else self._type_hints()
        return {n: v if type(v) is hints.get(n, Any) else self._converted(n, v, hints) for n, v in given.items()}

    def _check_names(self, given: dict[str, Any]) -> None:
        if not given.keys() >= self._required:
            missing = next(name for name in self._parameters if name in self._required and name not in given)
            raise NonRetryable(f"parameter {missing!r} of workflow {self.slug} is missing in the event")
        if not self._takes_any and not given.keys() <= self._parameters.keys():
            extra = min(given.keys() - self._parameters.keys())
            raise NonRetryable(f"workflow {self.slug} takes no parameter {extra!r}")

    def _converted(self, name: str, value: Any, hints: dict[str, Any]) -> Any:
        try:
            return msgspec.convert(value, hints.get(name, Any))
        except msgspec.ValidationError as exc:
            raise NonRetryable(f"parameter {name!r} of workflow {self.slug} is wrong: {exc}") from exc
        except TypeError:  # a type that msgspec cannot check JSON values against
            return value

    def _type_hints(self) -> dict[str, Any]:
        """The types that values are checked against."""
        try:
            found = get_type_hints(self.function)
        except Exception:  # noqa: BLE001 - a hint that exists for type checkers only
            found = {}
        self._hints = {name: hint for name, hint in found.items() if hint is not Any}
        return self._hints
