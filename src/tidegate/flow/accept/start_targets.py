"""Start targets: the trigger that a start of a workflow is for, chosen when the start is accepted.

It is the workflow's own trigger, so that limits, pauses and the breaker hold for starts and events together. A workflow
that has none gets one for its starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tidegate.errors import Conflict, InvalidInput, NotFound
from tidegate.model.ids import TriggerId
from tidegate.model.start import own_trigger, spec_of, unwrapped, wrong_names
from tidegate.model.trigger import Trigger
from tidegate.store import audit, locks, triggers
from tidegate.store.db import Connection, Database

# Whoever starts a workflow that has no trigger creates one, in the name of the system.
CREATED_BY = "start"


class StartTarget(NamedTuple):
    """The trigger of a start, and the parameters that its workflow takes (`["*"]`: any) and needs."""

    trigger_id: TriggerId
    names: Sequence[str]
    required: Collection[str]
    payload_argument: str | None = None

    def checked(self, given: Mapping[str, object]) -> Mapping[str, object]:
        """The parameters of the run. InvalidInput names those that are missing or unknown."""
        parameters = unwrapped(given, self.payload_argument)
        if errors := wrong_names(parameters.keys(), self.names, self.required):
            raise InvalidInput("the parameters are not those of the workflow", errors)
        return parameters


async def find_target(database: Database, workflow: str) -> StartTarget:
    """The target of a start. NotFound without such a workflow, Conflict when its trigger is disabled."""
    async with database.connection() as connection:
        definition = await triggers.get_definition(connection, workflow)
        if definition is None:
            raise NotFound(f"no workflow {workflow!r}; tidegate workflows list shows the existing ones")
        found = own_trigger(await triggers.list_of_workflow(connection, workflow))
    if found is None:
        found = await database.run(partial(_create, workflow=workflow))
    if found.status != "active":
        raise Conflict(f"trigger {found.name} of workflow {workflow} is disabled: enable it to start the workflow")
    names = definition.parameters if definition.kind == "python" else ["*"]
    known = definition.config
    return StartTarget(found.id, names, known.get("required", ()), known.get("payload_argument"))


async def _create(connection: Connection, workflow: str) -> Trigger:
    await locks.exclude_triggers(connection)
    definition = await triggers.get_definition(connection, workflow)
    if definition is None:
        raise NotFound(f"no workflow {workflow!r}; it was deleted just now")
    created = await triggers.create(connection, definition.id, spec_of(workflow), "active", CREATED_BY)
    if created is not None:
        await audit.insert(connection, actor=CREATED_BY, action="trigger.create", subject=str(created))
    found = own_trigger(await triggers.list_of_workflow(connection, workflow))
    assert found is not None, f"the trigger of {workflow} was created just now"
    return found
