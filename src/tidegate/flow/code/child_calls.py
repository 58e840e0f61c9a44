"""`ctx.run`, `ctx.start` and `ctx.map`: their results have the types that the children's functions declare."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from tidegate.flow.code.calls import noted
from tidegate.model.start import plain_fields
from tidegate.model.typed import Payload, has_fields

if TYPE_CHECKING:
    from tidegate.errors import ChildFailed
    from tidegate.flow.code.context import StepRunner

T = TypeVar("T")
# A workflow: its function, or its slug.
Child = str | Callable[..., object]
AsyncChild = Callable[..., Coroutine[object, object, T]]
# Parameters as an object, or as a value with fields.
Given = Mapping[str, object] | Payload | None


def parameters_of(parameters: Given, given: Mapping[str, object]) -> Mapping[str, object]:
    """The parameters of a child, given as one object, by name, or both."""
    if parameters is not None and has_fields(type(parameters)):
        parameters = plain_fields(parameters)
    return {**(parameters or {}), **given}  # type: ignore[dict-item]


class ChildHandle(Generic[T]):
    """A child that was started; `name` is that of its step."""

    __slots__ = ("_child", "_execution", "name")

    def __init__(self, execution: StepRunner, name: str, child: Child) -> None:
        self._execution = execution
        self._child = child
        self.name = name

    @noted("child")
    async def result(self) -> T:
        """Wait for the child's end; its output. ChildFailed when it failed or was cancelled."""
        found: T = await self._execution.child_result(self.name, self._child)
        return found


class SyncChildHandle(Generic[T]):
    """`ChildHandle` for synchronous workflows."""

    __slots__ = ("_handle", "_loop", "name")

    def __init__(self, handle: ChildHandle[T], loop: asyncio.AbstractEventLoop) -> None:
        self._handle, self._loop, self.name = handle, loop, handle.name

    def result(self) -> T:
        """Wait for the child's end; its output. ChildFailed when it failed or was cancelled."""
        return asyncio.run_coroutine_threadsafe(self._handle.result(), self._loop).result()


class ChildCalls:
    """The calls of an `async def` workflow."""

    __slots__ = ()
    _execution: StepRunner

    @overload
    async def run(
        self, child: str, parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> Any: ...
    @overload
    async def run(
        self, child: AsyncChild[T], parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> T: ...
    @overload
    async def run(
        self, child: Callable[..., T], parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> T: ...
    @noted("ctx")
    async def run(
        self, child: Child, parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> object:
        """Run another workflow (its function or slug) and wait for its output: `await ctx.run(ship, order_id=7)`.

        The child is started once, with this step; this run is suspended until it has ended. Its output is of the type
        that its function declares; by slug it is JSON. Raises ChildFailed when it failed or was cancelled, InvalidInput
        for wrong parameters. Beside other steps it needs a `name`; a parameter that is called `name` is passed in a
        dict: `ctx.run(ship, {"name": "x"})`.
        """
        step = await self._execution.start_child(name, child, parameters_of(parameters, given))
        return await self._execution.child_result(step, child)

    @overload
    async def start(
        self, child: str, parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> ChildHandle[Any]: ...
    @overload
    async def start(
        self, child: AsyncChild[T], parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> ChildHandle[T]: ...
    @overload
    async def start(
        self, child: Callable[..., T], parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> ChildHandle[T]: ...
    @noted("ctx")
    async def start(
        self, child: Child, parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> ChildHandle[Any]:
        """Start another workflow and go on; `await handle.result()` waits for its output. Otherwise as `run`."""
        step = await self._execution.start_child(name, child, parameters_of(parameters, given))
        return ChildHandle(self._execution, step, child)

    @overload
    async def map(
        self, child: str, items: Sequence[object], *, at_once: int = 20, return_exceptions: bool = False,
        name: str | None = None,
    ) -> list[Any]: ...  # fmt: skip
    @overload
    async def map(
        self, child: AsyncChild[T], items: Sequence[object], *, at_once: int = 20,
        return_exceptions: Literal[False] = False, name: str | None = None,
    ) -> list[T]: ...  # fmt: skip
    @overload
    async def map(
        self, child: AsyncChild[T], items: Sequence[object], *, at_once: int = 20, return_exceptions: bool,
        name: str | None = None,
    ) -> list[T | ChildFailed]: ...  # fmt: skip
    @overload
    async def map(
        self, child: Callable[..., T], items: Sequence[object], *, at_once: int = 20,
        return_exceptions: Literal[False] = False, name: str | None = None,
    ) -> list[T]: ...  # fmt: skip
    @overload
    async def map(
        self, child: Callable[..., T], items: Sequence[object], *, at_once: int = 20, return_exceptions: bool,
        name: str | None = None,
    ) -> list[T | ChildFailed]: ...  # fmt: skip
    @noted("ctx")
    async def map(
        self, child: Child, items: Sequence[object], *, at_once: int = 20, return_exceptions: bool = False,
        name: str | None = None,
    ) -> list[Any]:  # fmt: skip
        """Run a workflow for each item, at most `at_once` unfinished at a time; the outputs in the order of the items.

        An item is an object with the child's parameters, or the value of its only parameter. When a child fails, no
        more are started, and ChildFailed is raised when those in progress have ended; with `return_exceptions` all
        items run, and a ChildFailed stands in the list for each that failed.
        """
        return await self._execution.map_children(name, child, items, at_once, goes_on=return_exceptions)


class SyncChildCalls:
    """The calls of a synchronous workflow."""

    __slots__ = ()
    _execution: StepRunner
    _loop: asyncio.AbstractEventLoop

    @property
    @abstractmethod
    def _is_alone(self) -> bool:
        """Whether this is the thread of the workflow's function, in which steps have an order."""

    @overload
    def run(self, child: str, parameters: Given = None, /, *, name: str | None = None, **given: object) -> Any: ...
    @overload
    def run(
        self, child: AsyncChild[T], parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> T: ...
    @overload
    def run(
        self, child: Callable[..., T], parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> T: ...
    def run(self, child: Child, parameters: Given = None, /, *, name: str | None = None, **given: object) -> object:
        """Run another workflow and wait for its output; see `Context.run`."""
        return self._start(child, parameters, name, given).result()

    @overload
    def start(
        self, child: str, parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> SyncChildHandle[Any]: ...
    @overload
    def start(
        self, child: AsyncChild[T], parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> SyncChildHandle[T]: ...
    @overload
    def start(
        self, child: Callable[..., T], parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> SyncChildHandle[T]: ...
    def start(
        self, child: Child, parameters: Given = None, /, *, name: str | None = None, **given: object
    ) -> SyncChildHandle[Any]:
        """Start another workflow and go on; see `Context.start`."""
        return self._start(child, parameters, name, given)

    def _start(
        self, child: Child, parameters: Given, name: str | None, given: Mapping[str, object]
    ) -> SyncChildHandle[Any]:
        all_given = parameters_of(parameters, given)
        work = self._execution.start_child(name, child, all_given, is_alone=self._is_alone)
        step = asyncio.run_coroutine_threadsafe(work, self._loop).result()
        return SyncChildHandle(ChildHandle(self._execution, step, child), self._loop)

    @overload
    def map(
        self, child: str, items: Sequence[object], *, at_once: int = 20, return_exceptions: bool = False,
        name: str | None = None,
    ) -> list[Any]: ...  # fmt: skip
    @overload
    def map(
        self, child: AsyncChild[T], items: Sequence[object], *, at_once: int = 20,
        return_exceptions: Literal[False] = False, name: str | None = None,
    ) -> list[T]: ...  # fmt: skip
    @overload
    def map(
        self, child: AsyncChild[T], items: Sequence[object], *, at_once: int = 20, return_exceptions: bool,
        name: str | None = None,
    ) -> list[T | ChildFailed]: ...  # fmt: skip
    @overload
    def map(
        self, child: Callable[..., T], items: Sequence[object], *, at_once: int = 20,
        return_exceptions: Literal[False] = False, name: str | None = None,
    ) -> list[T]: ...  # fmt: skip
    @overload
    def map(
        self, child: Callable[..., T], items: Sequence[object], *, at_once: int = 20, return_exceptions: bool,
        name: str | None = None,
    ) -> list[T | ChildFailed]: ...  # fmt: skip
    def map(
        self, child: Child, items: Sequence[object], *, at_once: int = 20, return_exceptions: bool = False,
        name: str | None = None,
    ) -> list[Any]:  # fmt: skip
        """Run a workflow for each item; see `Context.map`."""
        is_alone = self._is_alone
        work = self._execution.map_children(name, child, items, at_once, goes_on=return_exceptions, is_alone=is_alone)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
