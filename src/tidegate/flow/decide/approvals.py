"""Approvals: a person's decision becomes an event and the result of the step that waits for it, in one commit.

Under the run's lock the approval is open or it is not: of two people who decide at once, one does. A decision that was
accepted counts, whatever time it is when the run resumes.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec

from tidegate import failpoints
from tidegate.clock import uuid7
from tidegate.errors import NotFound
from tidegate.flow.decide import waits
from tidegate.flow.decide.waits import Meeting
from tidegate.model.approval import APPROVAL_DECIDED, Approval, ApprovalVerdict
from tidegate.model.event import OF_END, NewEvent, source_of
from tidegate.model.ids import EventId, RunId, StepId, wait_id
from tidegate.store import approvals, audit, events, locks, runs
from tidegate.store.db import Connection, Database
from tidegate.telemetry.logs import logger

# The actor of a decision that was made with a link.
LINK = "approval-link"

_log = logger("approval")


class DecidedApproval(NamedTuple):
    """The approval as it is now, and whether this call has decided it."""

    approval: Approval
    is_new: bool
    meetings: list[Meeting]


async def decide(database: Database, approval_id: StepId, verdict: ApprovalVerdict) -> DecidedApproval:
    """Approve or reject, if it is open; after that, hint the queue. NotFound: there is no such approval."""
    done = await database.run(partial(_decide, approval_id=approval_id, verdict=verdict))
    if done.is_new:
        decision = done.approval.decision
        assert decision is not None, "it has been decided here"
        _log.info(
            "approval.decided", run_id=done.approval.run_id, workflow=done.approval.workflow, step=done.approval.name,
            approved=decision.approved, via=decision.via, actor=verdict.by or LINK,
        )  # fmt: skip
        waits.report(done.meetings)
    return done


async def find(connection: Connection, approval_id: StepId) -> Approval:
    """One approval; NotFound when there is none. If the id is that of a run, it names the run's approvals."""
    found = await approvals.get(connection, approval_id)
    if found is not None:
        return found
    of_run = await approvals.list_of_run(connection, RunId(approval_id))
    if of_run:
        named = ", ".join(f"{id} ({name})" for id, name in of_run)
        raise NotFound(f"{approval_id} is a run, not an approval; its approvals: {named}")
    raise NotFound(f"no approval {approval_id}")


async def _decide(connection: Connection, approval_id: StepId, verdict: ApprovalVerdict) -> DecidedApproval:
    await runs.lock(connection, [(await find(connection, approval_id)).run_id])
    approval = await find(connection, approval_id)
    if approval.state != "open":
        return DecidedApproval(approval, False, [])
    now = await locks.now(connection)
    payload = {
        "approval_id": approval_id, "run_id": approval.run_id, "workflow": approval.workflow, "name": approval.name,
        "approved": verdict.approved, "by": verdict.by or approval.to or "link",
        "via": "operator" if verdict.by else "link", "comment": verdict.comment or None, "at": now,
    }  # fmt: skip
    event = _event(approval, msgspec.json.encode(payload).decode())
    await events.insert(connection, [event])
    failpoints.hit("approval.before_result")
    stored = (await events.get_many(connection, [event.id]))[event.id]
    offers = {approval.run_id: [(stored, {wait_id(approval_id, 0)})]}
    meetings = await waits.hand_over(connection, offers, now, wakes=True)
    await audit.insert(
        connection, actor=verdict.by or LINK, action="approval.approve" if verdict.approved else "approval.reject",
        subject=str(approval_id), before={"state": approval.state, "until": approval.until},
        after={"run_id": approval.run_id, "name": approval.name, "event_id": event.id, "by": payload["by"],
               "comment": payload["comment"]},
    )  # fmt: skip
    failpoints.hit("approval.before_commit")
    return DecidedApproval(await find(connection, approval_id), True, meetings)


def _event(approval: Approval, payload: str) -> NewEvent:
    origin: dict[str, object] = {"run_id": approval.run_id, "event_id": approval.event_id}
    if approval.is_of_end:
        origin[OF_END] = True
    return NewEvent(
        id=EventId(uuid7()), external_id=None, type=APPROVAL_DECIDED, source=source_of(approval.workflow),
        occurred_at=None, payload=payload, correlation_id=approval.correlation_id, ttl_ms=None, metadata="{}",
        traceparent=approval.traceparent, origin=msgspec.json.encode(origin).decode(),
    )  # fmt: skip
