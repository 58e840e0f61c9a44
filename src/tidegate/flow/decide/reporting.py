"""Reporting: counts, metrics, log lines and decision rows, the same for every stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from tidegate.errors import first_line
from tidegate.flow.decide.source_failures import SourceMove
from tidegate.flow.decide.waits import Meeting
from tidegate.model.approval import APPROVAL_DECIDED
from tidegate.model.event import Event
from tidegate.model.ids import TriggerId
from tidegate.model.run import ClaimedRun, FinishedRun
from tidegate.model.trigger import CompiledTrigger
from tidegate.model.trigger_gate import TriggerMove
from tidegate.store.decisions import NewDecision
from tidegate.store.deliveries import Decided
from tidegate.store.sources import SourceMetrics
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("deliver")
_of_runs = logger("run")


def trigger_name(trigger: CompiledTrigger) -> str:
    """The trigger's name in metrics and logs."""
    return f"{trigger.trigger.workflow}/{trigger.trigger.name}"


def measure(
    now: datetime,
    *,
    newcomers: Sequence[Event],
    lags: Mapping[str, Sequence[float]],
    throttled: Counter[str],
    dropped: Counter[str],
    failures: Mapping[str, int] | None = None,
) -> list[SourceMetrics]:
    """The counts of a batch by source, for the totals; `lags` are those of admitted events."""
    total = Counter(event.source for event in newcomers)
    return [
        SourceMetrics(
            source=source,
            total=total[source],
            passed=len(lags.get(source, ())),
            throttled=throttled[source],
            dropped=dropped[source],
            failures=(failures or {}).get(source, 0),
            total_lag_ms=round(sum(lags.get(source, ())) * 1000),
            last_lag_ms=round(lags[source][-1] * 1000) if source in lags else 0,
            max_lag_ms=round(max(lags.get(source, (0.0,))) * 1000),
            last_event_at=now,
        )
        for source in sorted({*total, *lags, *throttled, *dropped})
    ]


def lags(now: datetime, passed: Sequence[Event]) -> dict[str, list[float]]:
    """Seconds since receipt of each admitted event, by source."""
    found: dict[str, list[float]] = {}
    for event in passed:
        seconds = (now - event.counted_from).total_seconds()
        found.setdefault(event.source, []).append(seconds if seconds > 0 else 0.0)
    return found


def held_line(one: Decided, now: datetime) -> NewDecision:
    """The decision row of a delivery that waits, or has stopped waiting."""
    decision = "rescheduled" if one.retry_state == "scheduled" and one.retry_attempts > 1 else one.status
    return NewDecision(
        one.event_id,
        now,
        "deliver",
        decision,
        one.last_error,
        one.next_attempt_at,
        one.retry_attempts or None,
        trigger_id=one.trigger_id,
    )


def report_deliveries(decided: Sequence[Decided], names: Mapping[TriggerId, str], *, are_newcomers: bool) -> None:
    """Count and log, after the commit, what was decided about deliveries."""
    for (trigger_id, status), count in Counter((d.trigger_id, d.status) for d in decided).items():
        name = names.get(trigger_id, str(trigger_id))
        metrics.evaluated(name, status, count)
        if are_newcomers:
            metrics.evaluated(name, "matched", count)
    if are_newcomers and not _log.is_debug:  # the run of an immediate launch has its own log lines
        decided = [d for d in decided if d.status != "launched"]
    outcomes = Counter(_outcome(d, are_newcomers) for d in decided)
    for outcome, count in outcomes.items():
        if outcome is not None:
            metrics.DELIVERY_RETRIES.labels(outcome).inc(count)
    for one in decided:
        if one.reason == "budget" and (held := one.metadata.get("waits_for", {}).get("budget")):
            metrics.held_by_budget(held["name"], held["why"])
        log = _log.warning if one.status in ("failed", "exhausted") else _log.info
        if are_newcomers and one.status == "launched":
            log = _log.debug
        log(
            f"delivery.{one.status}",
            delivery_id=one.id,
            event_id=one.event_id,
            trigger_id=one.trigger_id,
            trigger=names.get(one.trigger_id),
            run_id=one.run_id,
            correlation_id=one.correlation_id,
            source=one.source,
            attempt=one.retry_attempts,
            next_attempt_at=one.next_attempt_at,
            reason=one.last_error,
        )


def log_nothing(events: Sequence[Event], decided: Sequence[Decided], meetings: Sequence[Meeting]) -> None:
    """Log, after the commit, the events that neither fired a trigger nor met a waiting run."""
    if not _log.is_debug:
        return
    effective = {one.event_id for one in decided} | {one.event.id for one in meetings}
    for event in events:
        # The decision of an approval has met its run in the commit that published it.
        if event.id not in effective and event.replayed_at is None and event.type != APPROVAL_DECIDED:
            _log.debug("event.launched_nothing", event_id=event.id, correlation_id=event.correlation_id,
                       source=event.source, type=event.type)  # fmt: skip


def log_trigger_moves(moves: Iterable[TriggerMove]) -> None:
    """Log, after the commit, the triggers whose breaker moved, and the delivery or run that moved it."""
    for one in moves:
        log = _level(one.move)
        log(f"trigger.breaker_{one.move}", trigger_id=one.trigger_id, event_id=one.event_id,
                         correlation_id=one.correlation_id, run_id=one.run_id, reason=one.reason)  # fmt: skip


def log_source_moves(moves: Iterable[SourceMove]) -> None:
    """Log, after the commit, the sources whose breaker moved, and the event or run that moved it."""
    for one in moves:
        log = _level(one.move)
        log(f"source.breaker_{one.move}", source=one.source, event_id=one.event_id,
                         correlation_id=one.correlation_id, trigger_id=one.trigger_id, run_id=one.run_id,
                         reason=one.reason)  # fmt: skip


def _level(move: str) -> Callable[..., None]:
    return {"closed": _log.info, "probe_void": _log.info, "probe_failed": _log.warning}.get(move, _log.error)


def run_fields(run: ClaimedRun, event: Event | None) -> dict[str, Any]:
    """The fields of every log line about a run."""
    source = None if event is None else event.source
    return {"run_id": run.id, "workflow": run.workflow, "event_id": run.event_id, "correlation_id": run.correlation_id,
            "source": source, "attempt": run.attempts}  # fmt: skip


def report_ended(run: ClaimedRun, event: Event | None, ended: FinishedRun, held_seconds: float) -> None:
    """Count and log, after the commit, how a run ended; its worker held it for `held_seconds`."""
    metrics.ran(run.workflow, ended.status, (run.now - run.started_at).total_seconds() + held_seconds)
    if ended.status == "succeeded" and not _of_runs.is_info:
        return
    log = _of_runs.info if ended.status == "succeeded" else _of_runs.warning
    reason = {"reason": first_line(ended.error)} if ended.error else {}
    log(f"run.{ended.status}", **run_fields(run, event), **reason)


def log_left(run: ClaimedRun, event: Event | None, error: BaseException) -> None:
    """Log that this worker writes no outcome for a run, through no fault of the run."""
    log = _of_runs.error
    log("run.left", **run_fields(run, event), error=error, exc_info=error)


def _outcome(one: Decided, is_newcomer: bool) -> str | None:
    if one.retry_state == "scheduled":
        return "scheduled" if is_newcomer else "rescheduled"
    if is_newcomer:
        return None
    return "completed" if one.status == "launched" else one.status
