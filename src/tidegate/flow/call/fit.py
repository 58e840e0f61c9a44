"""Fit: does the code that a run resumes on fit the steps that it has recorded on other code?

Whatever is recorded was reached before any step finished that is not recorded. So as long as recorded steps are left
that the code has not asked for, nothing else may begin:

- A function that runs its steps one after another (`async def`, and no task that it began is running) must ask for the
  recorded steps in their order, before any other step, and before it ends. Otherwise it does not fit, and that is
  known at once.
- Where tasks or threads run side by side, their order says nothing. A step that is not finished waits until all
  recorded ones were asked for. The code does not fit if none was asked for within PATIENCE_SECONDS and some are left,
  or if some are left when the function and all its tasks have ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import ClassVar, cast

from tidegate.model.run import Step

# How long steps that are side by side wait for recorded ones. Branches reach these without a step in between: only what
# they await outside of steps takes time. A synchronous function may have threads of its own, which nobody can list.
PATIENCE_SECONDS, THREAD_PATIENCE_SECONDS = 30.0, 2.0

# Steps one after another are in different transactions; those recorded closer to each other have no order.
TOGETHER = timedelta(microseconds=50)

PATCH_PREFIX = "patched:"

_current: contextvars.ContextVar[Fit | None] = contextvars.ContextVar("tidegate_fit", default=None)


class Fit:
    """The recorded steps of one run that its code has not asked for yet, in their order. `since`: earlier ones do not
    count, since an operator has resumed the run all the same."""

    def __init__(self, steps: Iterable[Step], since: datetime | None) -> None:
        recorded = [(step.name, step.created_at, step) for step in steps if step.created_at is not None]
        self._left = {
            name: at
            for name, at, step in sorted(recorded, key=lambda one: one[1])
            if not name.startswith(PATCH_PREFIX) and (since is None or at > since) and not step.is_to_be_asked_again
        }
        self._free = {name for name, *_ in recorded if name not in self._left}  # they may be asked for at any place
        self._asked = asyncio.Event()
        self._tasks: weakref.WeakSet[asyncio.Task[object]] = weakref.WeakSet()
        self._has_tasks = self._was_cut = False
        self._factory: _Factory | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all recorded steps were asked for."""
        return not self._left

    @property
    def has_tasks(self) -> bool:
        """Whether tasks that the function has begun are still running."""
        return any(not task.done() for task in self._tasks)

    def watch(self) -> None:
        """From now on, count the tasks that are begun in this context."""
        if self._left:
            self._factory = _Factory.of(asyncio.get_running_loop())
            self._factory.users += 1
            _current.set(self)

    def close(self) -> None:
        """Count no more."""
        factory, self._factory = self._factory, None
        if factory is not None:
            factory.leave()

    def add(self, task: asyncio.Task[object]) -> None:
        self._has_tasks = True
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._was_cut |= task.cancelled()
        self._asked.set()

    def ask(self, name: str, *, in_order: bool) -> str | None:
        """The code asks for a step. Why it does not fit, or None; `in_order`: nothing else runs beside it."""
        if not self._left or name in self._free:
            return None
        first, first_at = next(iter(self._left.items()))
        at = self._left.get(name)
        if at is None:
            return f"it reaches {name!r} before {first!r}, which is recorded" if in_order else None
        if in_order and at - first_at > TOGETHER:
            return f"it reaches {name!r} before {first!r}, which is recorded as earlier"
        del self._left[name]
        self._asked.set()
        if not self._left:
            self.close()
        return None

    async def wait(self, patience_seconds: float) -> str | None:
        """Wait until all recorded steps were asked for; why that does not happen, or None."""
        while self._left:
            self._asked.clear()
            try:
                async with asyncio.timeout(patience_seconds):
                    await self._asked.wait()
            except TimeoutError:
                break
        return self._missing("it goes on")

    async def at_end(self, *, has_failed: bool) -> str | None:
        """The function has ended; why it does not fit, or None. Tasks that it does not wait for may still ask."""
        while self._left and self.has_tasks:
            self._asked.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._asked.wait()
                    continue
            break
        if self._was_cut or (has_failed and self._has_tasks):  # a branch may have been stopped before it asked
            return None
        return self._missing("it fails" if has_failed else "it ends")

    def _missing(self, what: str) -> str | None:
        first = next(iter(self._left), None)
        return None if first is None else f"{what} without {first!r}, which is recorded"


class _Factory:
    """The task factory of an event loop while executions watch their tasks."""

    _by_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Factory]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.users = 0
        self._loop = weakref.ref(loop)
        self._before = loop.get_task_factory()
        make: Callable[..., asyncio.Task[object]] = self._before or _new_task  # type: ignore[assignment]
        self._own = partial(_watched, make)
        loop.set_task_factory(self._own)  # type: ignore[arg-type]

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Factory:
        if loop not in cls._by_loop:
            cls._by_loop[loop] = cls(loop)
        return cls._by_loop[loop]

    def leave(self) -> None:
        self.users -= 1
        loop = self._loop()
        if self.users == 0 and loop is not None:
            del self._by_loop[loop]
            if cast(object, loop.get_task_factory()) is self._own:
                loop.set_task_factory(self._before)


def _new_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[None, None, object], **options: object
) -> asyncio.Task[object]:
    return asyncio.Task(work, loop=loop, **options)  # type: ignore[arg-type]


def _watched(
    make: Callable[..., asyncio.Task[object]],
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[None, None, object],
    **options: object,
) -> asyncio.Task[object]:
    task = make(loop, work, **options)
    fit = _current.get()
    if fit is not None:
        fit.add(task)
    return task
