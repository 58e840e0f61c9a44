"""Approvals: steps that wait for a person's decision, and the key that their links are signed with."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidegate.model.approval import APPROVAL_DECIDED, Approval, ApprovalDecision, ApprovalState, OpenApproval
from tidegate.model.ids import RunId, StepId
from tidegate.store.db import Connection, Row
from tidegate.store.sql import load

_sql = load("approvals")


async def key(connection: Connection) -> str | None:
    """The key as it is stored; None: no approval was asked for yet."""
    found: str | None = await connection.fetchval(_sql["key"])
    return found


async def make_key(connection: Connection, new: str) -> str:
    """The key as it is stored: `new`, unless another process was earlier."""
    found: str = await connection.fetchval(_sql["make_key"], new)
    return found


async def replace_key(connection: Connection, new: str) -> None:
    """Set another key."""
    await connection.execute(_sql["replace_key"], new)


async def get(connection: Connection, approval_id: StepId) -> Approval | None:
    """One approval. Its state stays only if this transaction has locked its run."""
    row = await connection.fetchrow(_sql["get"], approval_id)
    if row is None:
        return None
    decision, asked = _decision(row), row["asked"]
    return Approval(
        id=row["id"], run_id=row["run_id"], workflow=row["workflow"], name=row["name"], to=asked.get("to"),
        note=asked.get("note"), until=row["until"], state=_state(row, decision), decision=decision,
        event_id=row["event_id"], correlation_id=row["correlation_id"], traceparent=row["traceparent"],
        is_of_end=row["is_of_end"],
    )  # fmt: skip


async def list_page(connection: Connection, *, after: StepId | None, limit: int) -> list[OpenApproval]:
    """Approvals that can be decided, in the order of their runs."""
    rows = await connection.fetch(_sql["list"], APPROVAL_DECIDED, after, limit)
    return [OpenApproval(**dict(row)) for row in rows]


def _decision(row: Row) -> ApprovalDecision | None:
    """The result of the step is the event that decided it; null after the timeout. One that was decided and then cut
    off keeps it."""
    result: Mapping[str, object] | None = row["result"]
    return None if result is None else msgspec.convert(result["payload"], ApprovalDecision)


def _state(row: Row, decision: ApprovalDecision | None) -> ApprovalState:
    if decision is not None:
        return "decided"
    is_over = row["until"] is not None and row["until"] <= row["now"]
    if row["asked"].get("timed_out") or (is_over and row["is_open"]):
        return "expired"
    is_awaited = row["run_status"] in ("pending", "running") and row["cancel_requested_at"] is None
    return "open" if row["is_open"] and is_awaited else "ended"


async def list_of_run(connection: Connection, run_id: RunId) -> list[tuple[StepId, str]]:
    """The approvals of a run: ids and names."""
    return [(row[0], row[1]) for row in await connection.fetch(_sql["list_of_run"], run_id)]
