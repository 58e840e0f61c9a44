"""History: how long it is kept by all processes together, and whether what is too old goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta

import msgspec

from tidegate.model.health import Notice
from tidegate.model.retention import Retention, longest
from tidegate.model.units import written_duration
from tidegate.store.processes import KeepingProcess
from tidegate.store.retention import HistorySpan

# A day goes once all of it is old enough, with the next pass of a worker.
GRACE = timedelta(days=2)
_KINDS = (("events_seconds", "EVENTS"), ("dead_letters_seconds", "DEAD_LETTERS"), ("audit_seconds", "AUDIT"))


class HistoryHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How long events are kept (0: for ever; the longest time by the settings of any living process), and the days that
    have partitions."""

    retention_events_seconds: int
    oldest_day: date | None
    newest_day: date | None
    events_without_a_day: int


def history_health(own: Retention, kept: Sequence[KeepingProcess], span: HistorySpan) -> HistoryHealth:
    """The history by the settings of this process and of those that live."""
    agreed = longest([own, *(one.retention for one in kept)])
    return HistoryHealth(retention_events_seconds=agreed.events_seconds, **span._asdict())


def overdue_seconds(keeping: Sequence[KeepingProcess], span: HistorySpan, now: datetime) -> int:
    """How long ago the oldest day of history should have gone; 0 if it need not have, or nothing says when."""
    seconds = longest([one.retention for one in keeping]).events_seconds if keeping else 0
    if not seconds or span.oldest_day is None:
        return 0
    return max(0, ((now - timedelta(seconds=seconds) - GRACE).date() - span.oldest_day).days) * 86_400


def history_notices(kept: Sequence[KeepingProcess], found: HistoryHealth, now: datetime) -> Iterator[Notice]:
    """Settings that differ, and history that does not go."""
    for field, name in _KINDS:
        by_time: dict[int, list[KeepingProcess]] = {}
        for one in kept:
            by_time.setdefault(getattr(one.retention, field), []).append(one)
        if len(by_time) > 1:
            texts = [f"{_text(seconds)} ({_who(processes)})" for seconds, processes in sorted(by_time.items())]
            yield Notice(
                code="retention_differs",
                message=f"processes have different TIDEGATE_RETENTION_{name}_SECONDS, and the longest applies: "
                + ", ".join(texts),
            )
    seconds, oldest = found.retention_events_seconds, found.oldest_day
    if seconds and oldest is not None and oldest < (now - timedelta(seconds=seconds) - GRACE).date():
        yield Notice(
            code="history_overdue",
            message=f"the history of {oldest} is still there although events are kept for {_text(seconds)}: either no "
            "worker removes it, or too much of that day is still needed (dead letters, unfinished runs); the workers' "
            "logs say which (prune.day_kept, prune.day_busy)",
        )


def _text(seconds: int) -> str:
    return written_duration(seconds * 1000) if seconds else "for ever"


def _who(processes: Sequence[KeepingProcess]) -> str:
    first = f"{processes[0].kind} {processes[0].name}"
    return first if len(processes) == 1 else f"{first} and {len(processes) - 1} more"
