"""Workflows of kind `http`: a run is posted to a URL, signed by Standard Webhooks, and the answer is its output.

Their definitions are rows that operators write (`flow/control/workflows.py`); any worker runs them, as a workflow with
one step.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from tidegate.errors import NonRetryable
from tidegate.flow.run.http_guard import Outgoing, post
from tidegate.flow.run.workflow import Context, Workflow
from tidegate.model.http_workflow import KIND, HttpConfig, signing_secrets, with_secrets
from tidegate.model.secrets import require_readable
from tidegate.store import locks, triggers
from tidegate.store.db import Database


class HttpWorkflow(Workflow):
    """Runs as a workflow with the step `request`; so it is retried, fenced, cancelled and buried like any other."""

    def __init__(self, slug: str, database: Database, by: Outgoing) -> None:
        async def request(message_id: str, body: bytes) -> Any:
            async with database.connection() as connection:  # as it is now, whatever it was when the run was launched
                found = await triggers.get_definition(connection, slug)
                if found is None or found.kind != KIND:
                    raise NonRetryable(f"workflow {slug} of kind {KIND} is not there any more")
                config = with_secrets(msgspec.convert(found.config, HttpConfig), database.keys.open)
                secrets = signing_secrets(config, await locks.now(connection))
            require_readable([*secrets, *config.headers.values()], f"workflow {slug}")
            return await post(config, secrets, message_id, body, by)

        async def call(ctx: Context, parameters: dict[str, Any]) -> Any:
            body = {
                "run_id": ctx.run_id,
                "workflow": slug,
                "attempt": ctx.attempt,
                "event": ctx.event.envelope() if ctx.event else None,
                "parameters": parameters,
            }
            return await ctx.step("request", request, ctx.idempotency_key, msgspec.json.encode(body))

        super().__init__(slug, call, [])

    def bind(self, given: dict[str, Any]) -> dict[str, Any]:
        """Whatever the trigger gave, as it is."""
        return {"parameters": given}


class HttpWorkflows:
    """The http definitions that there are, for a worker; it needs no code for them."""

    def __init__(self, database: Database, by: Outgoing) -> None:
        self._database = database
        self._by = by
        self._version = -1

    async def refresh(self, workflows: dict[str, Workflow]) -> list[uuid.UUID] | None:
        """Add new ones to `workflows`. The ids of all, or None when the registry is as it was."""
        async with self._database.connection() as connection:
            version = await triggers.registry_version(connection)
            if version == self._version:
                return None
            found = await triggers.list_of_kind(connection, KIND)
        for slug in found.values():
            if not isinstance(workflows.get(slug), HttpWorkflow):
                workflows[slug] = HttpWorkflow(slug, self._database, self._by)
        self._version = version
        return list(found)
