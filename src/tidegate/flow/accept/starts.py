"""Starts: start a workflow by its name. A start is an event, so everything that holds for events holds for it."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.clock import uuid7
from tidegate.errors import Conflict, FieldError
from tidegate.flow.accept.ingest import Ingest
from tidegate.flow.accept.start_targets import find_target
from tidegate.model.event import EventLimits
from tidegate.model.ids import EventId, RunId
from tidegate.model.start import StartedRun, run_id_of, source_of_starts, start_event
from tidegate.store import events
from tidegate.store.db import Database


class Starts:
    """Starts workflows: their runs have ids before they are launched."""

    def __init__(self, database: Database, ingest: Ingest, limits: EventLimits) -> None:
        self._database = database
        self._ingest = ingest
        self._limits = limits

    async def start(
        self,
        workflow: str,
        parameters: Mapping[str, object],
        *,
        id: str | None = None,
        correlation_id: str | None = None,
    ) -> StartedRun:
        """Start a run; returns when that is committed. With an `id` that the workflow was started with, that run.

        Raises NotFound, InvalidInput (the parameters), Conflict (the id was used with other parameters, or the
        workflow's trigger is disabled), Unavailable, Overloaded.
        """
        target = await find_target(self._database, workflow)
        given = target.checked(parameters)
        event = start_event(
            workflow, given, new_id=uuid7(), limits=self._limits, id=id, correlation_id=correlation_id,
            origin={"trigger_id": target.trigger_id},
        )  # fmt: skip
        try:
            [accepted] = await self._ingest.accept([event])
        except Conflict as exc:
            message = f"workflow {workflow} was started before with this id and other parameters"
            raise Conflict(message, [FieldError("id", f"{id!r} belongs to a run with other parameters")]) from exc
        if accepted.status == "accepted":
            run_id = run_id_of(accepted.id, target.trigger_id)
        else:
            run_id = await self._first(accepted.id)
        return StartedRun(run_id=run_id, event_id=accepted.id, status=accepted.status)

    async def _first(self, event_id: EventId) -> RunId:
        """The run of an earlier start, which may be for another trigger than a start would be now."""
        async with self._database.connection() as connection:
            event = (await events.get_many(connection, [event_id]))[event_id]
        assert event.starts is not None, f"{event_id} has the source {source_of_starts('…')}"
        return run_id_of(event_id, event.starts)
