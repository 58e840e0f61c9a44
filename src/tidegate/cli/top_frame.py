"""One frame of `tidegate top`: lines of text from samples of the cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from rich.text import Text

from tidegate.cli.output import printable, short_eta, short_time, zoned_time

STATUS_STYLES = {"ok": "bold green", "degraded": "bold yellow", "critical": "bold red"}
# Maximum number of lines for long lists; the rest is counted.
MAX_PAUSED, MAX_CAUSES = 6, 8
_HAS_ITS_OWN = ("source_paused", "trigger_paused")
_BREAKERS = ("source_breaker_open", "trigger_breaker_open")
_RATES = (("events/s", ("received", "decided")), ("runs/s", ("launched", "ended")))


class Sample(NamedTuple):
    """What one read of the API returned."""

    health: dict[str, Any]
    decisions: list[dict[str, Any]]

    @property
    def at(self) -> datetime:
        """When it was taken, by the database's clock."""
        return datetime.fromisoformat(self.health["generated_at"])


def frame(
    samples: Sequence[Sample], url: str, *, width: int, height: int | None, problem: str | None = None
) -> list[Text]:
    """The lines, within the width and height of the terminal; `problem` says why the last sample is old."""
    if not samples:
        lines = [Text.assemble(("tidegate", "bold"), f"  {url}"), Text(problem or "…", "bold red")]
        return _fitted(lines, width, height)
    last = samples[-1]
    found = last.health
    lines = [
        Text.assemble((found["status"], STATUS_STYLES[found["status"]]), f"  tidegate at {url}"),
        Text(f"{zoned_time(found['generated_at'])}, {_last_event(found, last.at)}"),
    ]
    if problem:
        lines.append(Text(problem, "bold red"))
    lines += [Text(), *_rates(samples), Text(), *_queues(found), Text(), *_held(found)]
    lines += _paused(found, last.at)
    lines += _causes("BREAKERS", [c for c in found["causes"] if c["code"] in _BREAKERS], last.at)
    others = [c for c in found["causes"] if c["code"] not in (*_HAS_ITS_OWN, *_BREAKERS)]
    lines += _causes("CAUSES", others, last.at)
    lines += [Text(), _title("DECISIONS"), *[_decision(one) for one in last.decisions]]
    if not last.decisions:
        lines.append(Text("  none yet (events launched at once are not listed)"))
    return _fitted(lines, width, height)


def rates(samples: Sequence[Sample]) -> dict[str, float] | None:
    """Growth of the totals per second over the samples; None while there are fewer than two."""
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    seconds = (last.at - first.at).total_seconds()
    if seconds <= 0:
        return None
    before, after = first.health["totals"], last.health["totals"]
    return {name: max(0.0, (after[name] - before[name]) / seconds) for name in after}


def _last_event(found: dict[str, Any], now: datetime) -> str:
    at = found["last_processed_event_at"]
    return f"last event {_apart(at, now)} ago" if at else "no event yet"


def _rates(samples: Sequence[Sample]) -> list[Text]:
    found = rates(samples)
    lines = []
    for unit, names in _RATES:
        shown = [f"  {name} {found[name]:.1f}" if found else f"  {name} –" for name in names]
        lines.append(Text.assemble((f"{unit:<9}", "bold"), *shown))
    return lines


def _queues(found: dict[str, Any]) -> list[Text]:
    lines = [_title(f"{'QUEUE':<9}{'READY':>8}{'DELAYED':>9}{'ACTIVE':>8}  OLDEST DUE")]
    for name, depth in found["queues"].items():
        age = depth["oldest_due_age_seconds"]
        numbers = f"{depth['ready']:>8}{depth['delayed']:>9}{depth['active']:>8}"
        lines.append(Text(f"{name:<9}{numbers}  {short_eta(age) if depth['ready'] else ''}".rstrip()))
    return lines


def _held(found: dict[str, Any]) -> list[Text]:
    lines = [_title("HELD")]
    for kind, summary in found["retries"].items():
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(summary["by_reason"].items()))
        overdue = f"  ({summary['overdue']} overdue)" if summary["overdue"] else ""
        lines.append(Text(printable(f"  {kind:<13}{summary['total']:>6}  {reasons}{overdue}").rstrip()))
    letters = found["dead_letters"]
    lines.append(Text(f"  {'dead letters':<13}{letters['total']:>6}  {letters['last_24h']} in the last 24 h"))
    return lines


def _paused(found: dict[str, Any], now: datetime) -> list[Text]:
    rows = [(one, f"source {one['source']}") for one in found["paused_sources"]]
    rows += [(one, f"trigger {one['workflow']}/{one['name']}") for one in found["paused_triggers"]]
    if not rows:
        return []
    lines = [Text(), _title("PAUSED")]
    for one, name in rows[:MAX_PAUSED]:
        by = f" by {one['paused_by']}" if one["paused_by"] else ""
        left = f", {_apart(one['until'], now)} left" if one["until"] else ""
        why = f": {one['reason']}" if one["reason"] else ""
        lines.append(Text(printable(f"  {name}{by} for {_apart(one['since'], now)}{left}{why}")))
    return [*lines, *_more(len(rows) - MAX_PAUSED)]


def _causes(title: str, causes: Sequence[dict[str, Any]], now: datetime) -> list[Text]:
    if not causes:
        return []
    lines = [Text(), _title(title)]
    for one in causes[:MAX_CAUSES]:
        # The message about a trigger begins with its name, which replaces its id.
        name = "" if one["code"] == "trigger_breaker_open" else f"{one['subject']}: "
        code = "" if one["code"] in _BREAKERS else f"{one['code']} "
        since = f" (for {_apart(one['since'], now)})" if one["since"] else ""
        severity = (one["severity"], STATUS_STYLES[one["severity"]])
        lines.append(Text.assemble("  ", severity, printable(f"{since} {code}{name}{one['message']}")))
    return [*lines, *_more(len(causes) - MAX_CAUSES)]


def _decision(one: dict[str, Any]) -> Text:
    who = f"{one['workflow']}/{one['trigger']}" if one["trigger"] else one["source"] or ""
    event = one["external_id"] or one["event_id"]
    reason = f": {one['reason']}" if one["reason"] else ""
    by = f" by {one['actor']}" if one["actor"] and not reason.endswith(f"by {one['actor']}") else ""
    what = f"{one['stage']:<8}{one['decision']:<12}"
    return Text(printable(f"  {short_time(one['at'])[11:]} {what} {who} {event}{by}{reason}"))


def _title(text: str) -> Text:
    return Text(text, "bold")


def _more(count: int) -> list[Text]:
    return [Text(f"  … and {count} more", "dim")] if count > 0 else []


def _apart(at: str, now: datetime) -> str:
    return short_eta(abs((now - datetime.fromisoformat(at)).total_seconds()))


def _fitted(lines: Sequence[Text], width: int, height: int | None) -> list[Text]:
    shown = list(lines)
    if height is not None and len(shown) > height:  # drop blank lines first, then the last lines
        shown = [text for text in shown if text.plain][: max(1, height)]
    for text in shown:
        text.truncate(max(1, width), overflow="ellipsis")
        text.no_wrap = True
    return shown
