"""Frames of `tidegate top`: rates from two samples, and lines that fit the terminal."""

from __future__ import annotations

from typing import Any

import pytest
from rich.cells import cell_len

from tidegate.cli.top_frame import MAX_CAUSES, MAX_PAUSED, Sample, frame, rates

DEPTH = {"ready": 0, "delayed": 0, "active": 0, "oldest_due_age_seconds": 0.0}
CAUSE = {"code": "no_worker", "severity": "critical", "subject": "workers", "message": "none was seen", "since": None}
PAUSE = {"source": "shop", "until": None, "reason": "moving", "paused_by": "ann", "since": "2026-06-01T11:00:00Z"}
DECISION = {
    "at": "2026-06-01T12:00:00Z", "stage": "gate", "decision": "held", "reason": "paused", "actor": None,
    "event_id": "0197", "external_id": "o-7", "source": "shop", "trigger": None, "workflow": None,
}  # fmt: skip


def look(second: int = 0, decisions: int = 1, **changes: Any) -> Sample:
    health = {
        "status": "ok", "causes": [], "generated_at": f"2026-06-01T12:00:{second:02}Z", "last_processed_event_at": None,
        "queues": {"ingress": DEPTH, "triggers": DEPTH, "runs": DEPTH | {"ready": 3, "oldest_due_age_seconds": 7.0}},
        "totals": {"received": 0, "decided": 0, "launched": 0, "ended": 0}, "paused_sources": [], "paused_triggers": [],
        "retries": {kind: {"total": 0, "overdue": 0, "by_reason": {}} for kind in ("events", "deliveries", "steps")},
        "dead_letters": {"total": 0, "last_24h": 0},
    }  # fmt: skip
    return Sample(health | changes, [DECISION] * decisions)


def text(*looks: Sample, width: int = 200, height: int | None = None, problem: str | None = None) -> str:
    return "\n".join(line.plain for line in frame(looks, "http://x", width=width, height=height, problem=problem))


def test_rates_are_by_the_databases_clock_and_never_negative() -> None:
    first = look(0, totals={"received": 10, "decided": 10, "launched": 5, "ended": 5})
    last = look(4, totals={"received": 50, "decided": 30, "launched": 5, "ended": 4})
    assert rates([first, look(2), last]) == {"received": 10.0, "decided": 5.0, "launched": 0.0, "ended": 0.0}
    assert rates([first]) is None and rates([first, first]) is None
    assert "received 10.0  decided 5.0" in text(first, last) and "received –" in text(first)


def test_what_is_shown() -> None:
    breaker = CAUSE | {"code": "trigger_breaker_open", "severity": "degraded", "subject": "id", "message": "f/t: open"}
    waiting = {"total": 5, "overdue": 2, "by_reason": {"throttle": 4, "paused": 1}}
    shown = text(
        look(
            status="critical", causes=[CAUSE, breaker, CAUSE | {"code": "source_paused"}], paused_sources=[PAUSE],
            paused_triggers=[PAUSE | {"workflow": "fulfil", "name": "large", "trigger_id": "0198"}],
            retries={"deliveries": waiting},
        )
    )  # fmt: skip
    for line in (
        "critical  tidegate at http://x", "runs            3        0       0  7.0s",
        "  deliveries        5  paused 1, throttle 4  (2 overdue)", "  source shop by ann for 60m: moving",
        "  trigger fulfil/large by ann for 60m: moving",
        "  critical no_worker workers: none was seen", "  degraded f/t: open",
        "  12:00:00 gate    held         shop o-7: paused",
    ):  # fmt: skip
        assert line in shown.splitlines(), line
    assert "source_paused" not in shown  # it is shown once, with the pauses
    assert "none yet" in text(look(decisions=0))


def test_long_lists_are_counted() -> None:
    shown = text(look(causes=[CAUSE] * (MAX_CAUSES + 3), paused_sources=[PAUSE] * (MAX_PAUSED + 2)))
    assert shown.count("no_worker") == MAX_CAUSES and "… and 3 more" in shown
    assert shown.count("source shop") == MAX_PAUSED and "… and 2 more" in shown


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (1, 1), (20, 60), (200, 100)])
def test_a_frame_fits_its_terminal(width: int, height: int) -> None:
    wide = DECISION | {"reason": "理由" * 100 + "\x1b[31m\n\tred", "external_id": None}
    full = Sample(look(causes=[CAUSE | {"message": "m" * 500}] * 5, paused_sources=[PAUSE]).health, [wide] * 50)
    for lines in (frame([full], "http://x" * 20, width=width, height=height, problem="t" * 300),
                  frame([], "http://x" * 20, width=width, height=height, problem="t" * 300)):  # fmt: skip
        assert 0 < len(lines) <= height
        assert all(cell_len(line.plain) <= width and line.plain.isprintable() for line in lines)


def test_a_short_terminal_loses_the_empty_lines_first() -> None:
    lines = text(look(decisions=9), height=20).splitlines()
    assert "" not in lines and len(lines) == 20 and "DECISIONS" in lines


def test_a_problem_is_shown_with_and_without_an_earlier_sample() -> None:
    assert "not reachable" in text(problem="not reachable since noon")
    shown = text(look(), problem="not reachable since noon").splitlines()
    assert shown[2] == "not reachable since noon" and "QUEUE" in shown[7]
