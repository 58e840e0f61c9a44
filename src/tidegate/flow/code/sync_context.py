"""What a synchronous workflow is given: the same `ctx` without `await`. The function runs in a thread."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from tidegate.flow.code.approval_call import ApprovalCall, SyncApprovalHandle
from tidegate.flow.code.child_calls import Given, SyncChildCalls
from tidegate.flow.code.context import Duration, RunContext, StepRunner, event_fields, step_budgets
from tidegate.flow.code.wait_call import FirstEvent, WaitCall, event_of, events_of, first_event_of
from tidegate.model.budget import BudgetCost, BudgetKey, BudgetUse
from tidegate.model.event import Accepted, Event
from tidegate.model.retry import RetryPolicy
from tidegate.model.wait import On

T = TypeVar("T")


class SyncContext(SyncChildCalls, RunContext):
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
        budget: BudgetUse | None = None,
        budget_key: BudgetKey = None,
        budget_cost: BudgetCost = None,
        **kwargs: Any,
    ) -> T:
        """Call a function and store its result; see `Context.step`."""
        spending = step_budgets(budget, budget_key, budget_cost)
        work = self._execution.step(name, function, args, kwargs, retry=retry, timeout=timeout, spending=spending)
        found: T = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return found

    def transaction(
        self,
        function: Callable[..., T],
        /,
        *args: object,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: str | int | float | None = None,
        engine: object = None,
        **kwargs: object,
    ) -> T:
        """A step that writes to the database that Tidegate uses, exactly once; see `Context.transaction`."""
        work = self._execution.transaction(
            function, args, kwargs, name=name, retry=retry, timeout=timeout, engine=engine
        )
        found: T = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return found

    def patched(self, name: str) -> bool:
        """Whether this run takes the new way at this place; see `Context.patched`."""
        return self._in_loop(partial(self._execution.patched, name))

    def tag(self, **tags: str | int | uuid.UUID) -> None:
        """Give the run tags, by which it can be found; see `Context.tag`."""
        self._in_loop(partial(self._execution.tag, tags))

    def _in_loop(self, call: Callable[[], T]) -> T:
        async def inside() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result()

    def sleep(self, duration: str | int | float, *, name: str | None = None) -> None:
        """Suspend the run for a duration; it survives restarts and holds no worker. In a thread of your own it needs a
        name."""
        work = self._execution.sleep(duration, name, is_alone=self._is_alone)
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def wait_for(
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
        """Suspend the run until an event comes, or the timeout; see `Context.wait_for`."""
        on = On(type, where, match, source)
        return event_of(self._wait(WaitCall("wait_for", "event", [on], timeout, since, name)))

    def wait_any(
        self, *patterns: On | str, timeout: Duration, since: datetime | Duration | None = None, name: str | None = None
    ) -> FirstEvent | None:
        """Wait for the first event of several patterns; see `Context.wait_any`."""
        return first_event_of(self._wait(WaitCall("wait_any", "first", patterns, timeout, since, name)))

    def wait_all(
        self, *patterns: On | str, timeout: Duration, since: datetime | Duration | None = None, name: str | None = None
    ) -> list[Event] | None:
        """Wait until each of several patterns has an event; see `Context.wait_all`."""
        return events_of(self._wait(WaitCall("wait_all", "all", patterns, timeout, since, name)))

    def _wait(self, call: WaitCall) -> Any:
        work = self._execution.wait(call._replace(is_alone=self._is_alone))
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def approval(
        self, name: str, *, timeout: Duration, to: str | None = None, note: str | None = None
    ) -> SyncApprovalHandle:
        """Ask a person to approve something; see `Context.approval`."""
        work = self._execution.approval(ApprovalCall(name, timeout, to, note))
        handle = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return SyncApprovalHandle(handle, self._loop)

    def publish(
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
        """Publish an event, once, in the commit of this step; see `Context.publish`."""
        fields = event_fields(type, payload, source, id, occurred_at, ttl_ms, metadata, priority)
        work = self._execution.publish(name, fields, is_alone=self._is_alone)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def _is_alone(self) -> bool:
        """Whether this is the thread of the workflow's function, in which steps have an order."""
        return self._thread in (None, threading.get_ident())
