"""Preview: what a pass of `Prune` would find to be old enough."""

from __future__ import annotations

from datetime import date

import msgspec

from tidegate.flow.keep.prune import DAYS_FROM_SECONDS, MOST_MOVED
from tidegate.model.retention import Retention
from tidegate.store import retention
from tidegate.store.db import Connection, take_time


class PrunePreview(msgspec.Struct, frozen=True, kw_only=True):
    """Days that would be dropped, with about how many events; old days that would be kept, since too much of them is
    needed; and how many rows are old enough to be deleted one by one, some of which may still be needed."""

    days: list[date] = []
    events_of_days: int = 0
    kept_days: list[date] = []
    events: int = 0
    dead_letters: int = 0
    audit_log: int = 0


async def preview(connection: Connection, kept: Retention) -> PrunePreview:
    """Read in a transaction; nothing is changed. Counts rows, so it may take its time."""
    connection = await take_time(connection)
    found = PrunePreview()
    by_days = kept.events_seconds >= DAYS_FROM_SECONDS
    if by_days:
        old = await retention.list_days(connection, older_seconds=kept.events_seconds, most_needed=MOST_MOVED + 1)
        days = [one.day for one in old if one.needed <= MOST_MOVED]
        counts = [await retention.count_rows(connection, "workflow_events", day) for day in days]
        kept_days = [one.day for one in old if one.needed > MOST_MOVED]
        found = PrunePreview(days=days, events_of_days=sum(counts), kept_days=kept_days)
    events = dead_letters = audit_log = 0
    if kept.events_seconds:
        events = await retention.count_events(connection, older_seconds=kept.events_seconds, are_all=not by_days)
    if kept.dead_letters_seconds:
        dead_letters = await retention.count_dead_letters(connection, older_seconds=kept.dead_letters_seconds)
    if kept.audit_seconds:
        audit_log = await retention.count_audit(connection, older_seconds=kept.audit_seconds)
    return msgspec.structs.replace(found, events=events, dead_letters=dead_letters, audit_log=audit_log)
