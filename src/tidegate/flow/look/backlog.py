"""Backlog: queue depths and waiting rows. A row that is held on purpose counts as neither due nor late. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from tidegate.store.health import Depths, Group, QueueDepth, RetrySummary

Kind = Literal["events", "deliveries", "steps"]
KINDS: tuple[Kind, ...] = ("events", "deliveries", "steps")


def retries(groups: Sequence[Group]) -> dict[str, RetrySummary]:
    """Waiting rows, summarized by kind."""
    return {kind: _summary([group for group in groups if group.kind == kind]) for kind in KINDS}


def queues(groups: Sequence[Group], depths: Depths, now: datetime) -> dict[str, QueueDepth]:
    """The depths of `ingress`, `triggers` and `runs`."""
    events, deliveries = _due(groups, "events"), _due(groups, "deliveries")
    runs = _Due(depths.runs_due, depths.runs_total, depths.runs_since)
    undecided = _Due(depths.inbox, depths.inbox, depths.inbox_since)
    return {
        "ingress": _depth([undecided, events], 0, now),  # events and deliveries are decided in one transaction
        "triggers": _depth([deliveries], 0, now),
        "runs": _depth([runs], depths.active_runs, now),
    }


class _Due(NamedTuple):
    ready: int
    total: int
    oldest: datetime | None


def _summary(groups: Sequence[Group]) -> RetrySummary:
    late = [group for group in groups if group.overdue and not group.is_held]
    by_reason: dict[str, int] = {}
    for group in sorted(groups, key=lambda group: group.reason):
        by_reason[group.reason] = by_reason.get(group.reason, 0) + group.total
    return RetrySummary(
        total=sum(by_reason.values()),
        overdue=sum(rows.overdue for rows in late),
        overdue_since=min((rows.next_attempt_at for rows in late), default=None),
        next_attempt_at=min((group.next_attempt_at for group in groups), default=None),
        by_reason=by_reason,
    )


def _due(groups: Sequence[Group], kind: Kind) -> _Due:
    rows = [group for group in groups if group.kind == kind]
    due = [group for group in groups if group.kind == kind and group.due and not group.is_held]
    oldest = min((one.next_attempt_at for one in due), default=None)
    return _Due(sum(one.due for one in due), sum(one.total for one in rows), oldest)


def _depth(parts: Sequence[_Due], active: int, now: datetime) -> QueueDepth:
    ready, oldest = sum(part.ready for part in parts), min((part.oldest for part in parts if part.oldest), default=None)
    return QueueDepth(
        ready=ready,
        delayed=sum(part.total for part in parts) - ready,
        active=active,
        oldest_due_age_seconds=max(0.0, (now - oldest) / timedelta(seconds=1)) if oldest else 0.0,
    )
