"""Runs that a client has started: wait for their ends, in requests that the server answers within a minute."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

from tidegate.clock import monotonic
from tidegate.errors import RunFailed
from tidegate.model.units import duration_ms

# The longest time that the server is asked to wait in one request.
MAX_WAIT_SECONDS = 30.0

# What the API answers.
Answer = dict[str, Any]
Ask = Callable[[str, str, str | None], Answer]
AsyncAsk = Callable[[str, str, str | None], Awaitable[Answer]]


class Ending:
    """The wait for the end of a run, for `timeout` (`"30s"`; None: as long as it takes)."""

    def __init__(self, timeout: str | int | float | None) -> None:
        self._timeout = timeout
        self._until = math.inf if timeout is None else monotonic() + duration_ms(timeout) / 1000

    @property
    def left(self) -> float | None:
        """The seconds left; None: as long as it takes."""
        return None if self._until == math.inf else max(0.0, self._until - monotonic())

    @property
    def wait(self) -> str | None:
        """The query parameter of the next request."""
        ms = round(min(MAX_WAIT_SECONDS, MAX_WAIT_SECONDS if self.left is None else self.left) * 1000)
        return f"{ms}ms" if ms else None

    def is_over(self, answer: Answer) -> bool:
        """Whether the run has ended. TimeoutError when it has not, and time is up."""
        found = _run(answer)
        if found["status"] in ("succeeded", "failed", "cancelled", "not_launched"):
            return True
        if self.left == 0:
            raise TimeoutError(f"run {_id(found)} has not ended within {self._timeout}")
        return False

    def output(self, answer: Answer) -> Any:
        """The output of a run that has ended. RunFailed unless it succeeded."""
        found = _run(answer)
        if found["status"] != "succeeded":
            raise RunFailed(_id(found), found["status"], found["error"] or "")
        return found["output"]


class ClientRun:
    """A run that was started; `status` is `accepted`, or `duplicate` if its id was started before."""

    def __init__(self, ask: Ask, answer: Answer) -> None:
        self.run_id, self.event_id, self.status = str(answer["run_id"]), str(answer["event_id"]), str(answer["status"])
        self._ask = ask

    def result(self, timeout: str | int | float | None = None) -> Any:
        """Wait for the run's end; its output. RunFailed when it failed, was cancelled or is not launched; TimeoutError
        when it has not ended within `timeout` (`"30s"`)."""
        ending = Ending(timeout)
        while not ending.is_over(answer := self._ask("GET", f"/v1/runs/{self.run_id}", ending.wait)):
            pass
        return ending.output(answer)


class AsyncClientRun:
    """`ClientRun` for asyncio."""

    def __init__(self, ask: AsyncAsk, answer: Answer) -> None:
        self.run_id, self.event_id, self.status = str(answer["run_id"]), str(answer["event_id"]), str(answer["status"])
        self._ask = ask

    async def result(self, timeout: str | int | float | None = None) -> Any:
        """Wait for the run's end; see `ClientRun.result`."""
        ending = Ending(timeout)
        while not ending.is_over(answer := await self._ask("GET", f"/v1/runs/{self.run_id}", ending.wait)):
            pass
        return ending.output(answer)


def runs_of(workflow: str) -> str:
    """Where the runs of a workflow are started."""
    return f"/v1/workflows/{quote(workflow, safe='')}/runs"


def start_body(
    parameters: Mapping[str, object] | None, id: str | None, correlation_id: str | None = None
) -> dict[str, object]:
    """The body of a start."""
    given = {"parameters": dict(parameters or {}), "id": id, "correlation_id": correlation_id}
    return {name: value for name, value in given.items() if value is not None}


def _run(answer: Answer) -> Answer:
    """The run in an answer, or what is known of it before it is launched."""
    run: Answer | None = answer.get("run")
    return run or answer


def _id(found: Answer) -> str:
    return str(found.get("id") or found["run_id"])
