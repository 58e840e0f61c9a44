"""What a workflow is given: `ctx`, for `async def` functions and for synchronous ones."""

from __future__ import annotations

import contextvars
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol, TypeVar, overload

from tidegate.errors import NonRetryable
from tidegate.flow.code.approval_call import ApprovalCall, ApprovalHandle
from tidegate.flow.code.calls import Calls, noted
from tidegate.flow.code.child_calls import Child, ChildCalls, Given
from tidegate.flow.code.wait_call import FirstEvent, WaitCall, event_of, events_of, first_event_of
from tidegate.model.budget import BudgetCost, BudgetKey, BudgetUse, Spending, step_spending
from tidegate.model.event import Accepted, Event
from tidegate.model.retry import RetryPolicy
from tidegate.model.run import ClaimedRun
from tidegate.model.wait import On
from tidegate.telemetry.logs import logger

T = TypeVar("T")
Fields = dict[str, object]
Duration = str | int | float

# The step that the current task or thread runs in.
current_step: contextvars.ContextVar[str | None] = contextvars.ContextVar("tidegate_step", default=None)


class StepRunner(Protocol):
    """What a context needs of the execution it belongs to."""

    run: ClaimedRun
    event: Event | None
    calls: Calls

    def patched(self, name: str) -> bool: ...
    def tag(self, given: dict[str, str | int | uuid.UUID]) -> None: ...
    async def step(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *,
        retry: RetryPolicy | None, timeout: str | int | float | None, spending: Spending | None = None,
    ) -> Any: ...  # fmt: skip
    async def transaction(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], *,
        name: str | None, retry: RetryPolicy | None, timeout: str | int | float | None, engine: object,
    ) -> Any: ...  # fmt: skip
    async def sleep(self, duration: str | int | float, name: str | None = None, *, is_alone: bool = True) -> None: ...
    async def publish(self, name: str | None, fields: Fields, *, is_alone: bool = True) -> Accepted: ...
    async def wait(self, call: WaitCall) -> Any: ...
    async def approval(self, call: ApprovalCall) -> ApprovalHandle: ...

    async def start_child(
        self, name: str | None, child: Child, given: Mapping[str, object], *, is_alone: bool = True
    ) -> str: ...
    async def child_result(self, name: str, child: Child) -> Any: ...
    async def map_children(
        self, name: str | None, child: Child, items: Sequence[object], at_once: int, *, goes_on: bool,
        is_alone: bool = True,
    ) -> list[Any]: ...  # fmt: skip


class RunContext:
    """The first argument of every workflow."""

    __slots__ = ("_execution", "_log", "event", "run_id")

    def __init__(self, execution: StepRunner) -> None:
        self._execution = execution
        self.run_id = execution.run.id
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
    def events(self) -> list[Event]:
        """The events of the window that the run takes, in the order of arrival; without a window, its own event."""
        window = self._execution.run.window
        return list(window) if window else [] if self.event is None else [self.event]

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


class Context(ChildCalls, RunContext):
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
        budget: BudgetUse | None = None,
        budget_key: BudgetKey = None,
        budget_cost: BudgetCost = None,
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
        budget: BudgetUse | None = None,
        budget_key: BudgetKey = None,
        budget_cost: BudgetCost = None,
        **kwargs: Any,
    ) -> T: ...

    @noted("ctx")
    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        retry: RetryPolicy | None = None,
        timeout: str | int | float | None = None,
        budget: BudgetUse | None = None,
        budget_key: BudgetKey = None,
        budget_cost: BudgetCost = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function and store its result (JSON); when the run resumes, the stored result is returned instead.

        A synchronous function runs in a thread. When it fails it is retried by `retry` (default: the settings
        TIDEGATE_STEP_RETRY_*), and no worker is held meanwhile; raises StepFailed when the retries are exhausted.
        Each call spends of its `budget` (a name, a Budget, or several of them), and waits for room in it while no
        worker is held; `budget_key` and `budget_cost` replace what the budget says about the event of the run.
        """
        spending = step_budgets(budget, budget_key, budget_cost)
        return await self._execution.step(name, function, args, kwargs, retry=retry, timeout=timeout, spending=spending)

    @overload
    async def transaction(
        self,
        function: Callable[..., Awaitable[T]],
        /,
        *args: object,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: str | int | float | None = None,
        engine: object = None,
        **kwargs: object,
    ) -> T: ...

    @overload
    async def transaction(
        self,
        function: Callable[..., T],
        /,
        *args: object,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: str | int | float | None = None,
        engine: object = None,
        **kwargs: object,
    ) -> T: ...

    @noted("ctx")
    async def transaction(
        self,
        function: Callable[..., object],
        /,
        *args: object,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: str | int | float | None = None,
        engine: object = None,
        **kwargs: object,
    ) -> Any:
        """A step that writes to the database that Tidegate uses, exactly once: what `function(connection, *args)` wrote
        and its result are one commit.

        An `async def` function gets a connection of asyncpg; a synchronous one runs in a thread and gets a connection
        of psycopg 3, or one of `engine` (SQLAlchemy) if it leads to the same database. The function must not commit,
        roll back or close. `timeout` (default 10 s) bounds each attempt; the step is named after the function.
        """
        return await self._execution.transaction(
            function, args, kwargs, name=name, retry=retry, timeout=timeout, engine=engine
        )

    def patched(self, name: str) -> bool:
        """Whether this run takes the new way at this place: True for runs that had not passed it when the patch was
        deployed. Decided once per run and recorded, so that it stays the same when the run resumes."""
        return self._execution.patched(name)

    def tag(self, **tags: str | int | uuid.UUID) -> None:
        """Give the run tags, by which it can be found: `ctx.tag(customer="c-7")`. Stored with the run's next write."""
        self._execution.tag(tags)

    @noted("ctx")
    async def sleep(self, duration: str | int | float, *, name: str | None = None) -> None:
        """Suspend the run for a duration (`"2h"`, `"30s"`); it survives restarts and holds no worker.

        A sleep that runs beside other steps (in `asyncio.gather` or a task) needs a name of its own.
        """
        await self._execution.sleep(duration, name)

    @noted("ctx")
    async def publish(
        self,
        type: str,
        payload: Given = None,
        *,
        source: str | None = None,
        id: str | None = None,
        occurred_at: datetime | None = None,
        ttl_ms: int | None = None,
        metadata: Mapping[str, object] | None = None,
        priority: int | None = None,
        name: str | None = None,
    ) -> Accepted:
        """Publish an event, once: it is stored in the same commit as this step, with the run's correlation id.

        A payload is a dict, a dataclass, a Struct or a pydantic model. `source` defaults to `workflow.<slug>`. With an
        `id` that the source has used before, the first event is returned (status `duplicate`); with another body this
        raises StepFailed. Raises InvalidInput, which names each invalid field. Beside other steps it needs a `name`.
        """
        fields = event_fields(type, payload, source, id, occurred_at, ttl_ms, metadata, priority)
        return await self._execution.publish(name, fields)

    @noted("ctx")
    async def wait_for(
        self,
        type: str,
        *,
        timeout: Duration,
        where: str | None = None,
        match: dict[str, Any] | None = None,
        source: str = "*",
        since: datetime | Duration | None = None,
        name: str | None = None,
    ) -> Event | None:
        """Suspend the run until an event of this type has passed the gate; None after `timeout` ("3d").

        Which event: `match` (fields of the payload with their values) and `where` (CEL over `event` and `run`), both if
        both are given, and `source`. Events count that came after the one that launched the run; `since` (a time, or a
        duration before now) changes that. The run is given each event once. Beside other steps it needs a `name`.
        """
        on = On(type, where, match, source)
        return event_of(await self._execution.wait(WaitCall("wait_for", "event", [on], timeout, since, name)))

    @noted("ctx")
    async def wait_any(
        self, *patterns: On | str, timeout: Duration, since: datetime | Duration | None = None, name: str | None = None
    ) -> FirstEvent | None:
        """Wait for the first event of several patterns (types, or `On(…)`): which one (from 0), and the event; None
        after the timeout. See `wait_for`."""
        return first_event_of(await self._execution.wait(WaitCall("wait_any", "first", patterns, timeout, since, name)))

    @noted("ctx")
    async def wait_all(
        self, *patterns: On | str, timeout: Duration, since: datetime | Duration | None = None, name: str | None = None
    ) -> list[Event] | None:
        """Wait until each of several patterns has an event of its own: the events in the order of the patterns; None
        after the timeout, whichever came. See `wait_for`."""
        return events_of(await self._execution.wait(WaitCall("wait_all", "all", patterns, timeout, since, name)))

    @noted("ctx")
    async def approval(
        self, name: str, *, timeout: Duration, to: str | None = None, note: str | None = None
    ) -> ApprovalHandle:
        """Ask a person to approve something: send them `approval.link`, then `await approval.decision()`.

        The link can be used once, until `timeout` ("3d"), by whoever has it; an operator can decide, too. `to` (whom it
        is sent to) and `note` (what it is about) are shown to those who decide. `name` is the step's.
        """
        return await self._execution.approval(ApprovalCall(name, timeout, to, note))


def step_budgets(budget: BudgetUse | None, key: BudgetKey, cost: BudgetCost) -> Spending | None:
    """What a step spends of budgets. NonRetryable names the invalid argument."""
    try:
        if budget is not None:
            return step_spending(budget, key, cost)
        if key is not None or cost is not None:
            raise ValueError(f"budget_{'key' if cost is None else 'cost'}: needs budget=, whose it is")
    except ValueError as exc:
        raise NonRetryable(f"ctx.step: {exc}") from exc
    return None


def event_fields(
    type: str,
    payload: Given,
    source: str | None,
    id: str | None,
    occurred_at: datetime | None,
    ttl_ms: int | None,
    metadata: Mapping[str, object] | None,
    priority: int | None,
) -> Fields:
    at = occurred_at.isoformat() if occurred_at else None
    return {"type": type, "payload": payload, "source": source, "id": id, "occurred_at": at, "ttl_ms": ttl_ms,
            "metadata": metadata, "priority": priority}  # fmt: skip
