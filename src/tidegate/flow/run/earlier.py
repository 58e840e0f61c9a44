"""Earlier: executions that were told to leave. A run is never executed twice at a time in one process."""

from __future__ import annotations

import asyncio
import uuid

from tidegate.flow.decide.reporting import run_fields
from tidegate.flow.run.execution import Execution
from tidegate.telemetry.logs import logger

# So often is said that a run waits for its earlier execution, and asked whether it is to be cancelled.
BEHIND_SECONDS = 5.0

_log = logger("run")


class Earlier:
    """The executions of one worker that have not left their functions yet, by their runs."""

    def __init__(self) -> None:
        self._leaving: dict[uuid.UUID, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._leaving)

    def add(self, execution: Execution) -> None:
        """It was told to leave. Should its run go on here, that waits until nothing is left of this."""
        run_id = execution.run.id
        self._leaving[run_id] = asyncio.create_task(self._gone(execution, self._leaving.get(run_id)))

    async def gone(self, execution: Execution) -> None:
        """Wait until the run's earlier executions have left, or this one is not to be called any more."""
        earlier = self._leaving.get(execution.run.id)
        while earlier is not None and not earlier.done() and execution.is_to_be_called:
            _log.warning("run.waits_behind", **run_fields(execution.run, execution.event),
                         reason="an earlier execution, whose lease ended, has not left its function")  # fmt: skip
            await asyncio.wait([earlier], timeout=BEHIND_SECONDS)

    async def _gone(self, execution: Execution, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await earlier
        await execution.gone()
        if self._leaving.get(execution.run.id) is asyncio.current_task():
            del self._leaving[execution.run.id]
