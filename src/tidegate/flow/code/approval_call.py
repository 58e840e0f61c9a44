"""Calls of `ctx.approval`, and what they return: a link to send, and the decision to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from tidegate.flow.code.calls import Called, noted
from tidegate.model.approval import ApprovalDecision
from tidegate.model.event import Event


class ApprovalCall(NamedTuple):
    """A call of `ctx.approval`, as the function made it."""

    name: str
    timeout: str | int | float
    to: str | None
    note: str | None


Result = Callable[[str], Awaitable[object]]


class ApprovalHandle:
    """An approval that was asked for. Whoever has `link` can decide it, once."""

    __slots__ = ("_execution", "_result", "link", "name")

    def __init__(self, name: str, link: str, result: Result, execution: Called) -> None:
        self._execution = execution
        self.name = name
        self.link = link
        self._result = result

    @noted("approval")
    async def decision(self) -> ApprovalDecision | None:
        """Suspend the run until somebody has decided; None after the timeout."""
        return _decision_of(await self._result(self.name))


class SyncApprovalHandle:
    """`ApprovalHandle` for synchronous workflows."""

    __slots__ = ("_handle", "_loop", "link", "name")

    def __init__(self, handle: ApprovalHandle, loop: asyncio.AbstractEventLoop) -> None:
        self._handle, self._loop, self.name, self.link = handle, loop, handle.name, handle.link

    def decision(self) -> ApprovalDecision | None:
        """Suspend the run until somebody has decided; None after the timeout."""
        return asyncio.run_coroutine_threadsafe(self._handle.decision(), self._loop).result()


def _decision_of(result: object) -> ApprovalDecision | None:
    """What was decided, from the result of a step: the event that the decision published."""
    if result is None:
        return None
    return msgspec.convert(msgspec.convert(result, Event).payload, ApprovalDecision)
