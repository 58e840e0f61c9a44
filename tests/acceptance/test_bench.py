"""The benchmark runs from start to end, and its results have the shape that later ones are compared by."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from bench import marks, neighbours
from bench.__main__ import EVENT_FIGURES, OPERATION_FIGURES, RUN_FIGURES, TRIGGER_FIGURES
from bench.trigger_limits import Span, most_at_once

ROOT = Path(__file__).parents[2]

# Many real processes one after the other: slow where other tests use the machine too.
pytestmark = [pytest.mark.timeout(900), pytest.mark.alone]


def quick(out: Path, figures: Sequence[str]) -> tuple[dict[str, Any], str]:
    """A quick run of these figures: its results, and the table."""
    only = [argument for figure in figures for argument in ("--only", figure)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--out", str(out), *only],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_quick_run_of_the_event_figures(tmp_path: Path) -> None:
    found, table = quick(tmp_path / "results.json", EVENT_FIGURES)

    assert "ratio to the floor" in table
    assert found["quick"] is True
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["python"] and found["machine"]["postgres"]
    assert "asyncpg" in found["machine"]["libraries"]
    throughput = found["throughput"]
    assert len(throughput["turns"]) == 1
    assert 0 <= throughput["quiet_turns"] <= 1
    assert throughput["turns"][0]["ratio"] > 0
    assert throughput["floor_median"] > 0
    assert throughput["pipeline_median"] > 0
    assert throughput["ratio"] > 0
    assert found["single"]["accepted_per_second"] > 0
    assert found["limit"]["most_in_any_interval"] <= found["limit"]["limit"]
    assert found["limit"]["use"] > 0
    assert found["drain"]["ratio"] > 0 and found["drain"]["out_of_order"] == 0
    assert found["limit_cost"]["ratio"] > 0
    for latency in (found["commit"], found["single"]["latency"]):
        assert 0 < latency["p50_ms"] <= latency["p99_ms"]


def test_quick_run_of_the_trigger_figures(tmp_path: Path) -> None:
    found, table = quick(tmp_path / "results.json", TRIGGER_FIGURES)

    assert "1,000 triggers, 999 patterns" in table
    assert found["commit"] is None
    cases = found["triggers"]["cases"]
    assert [(case["triggers"], case["are_patterns"]) for case in cases] == [
        (1, False), (100, False), (1000, False), (1000, True)
    ]  # fmt: skip
    assert all(len(case["rates"]) == 1 and case["ratio"] > 0 for case in cases)
    assert cases[0]["ratio"] == 1 and cases[0]["cpu_ratio"] in (None, 1)
    fanout = found["fanout"]
    assert fanout["triggers"] == 100
    assert fanout["deliveries_per_second"] > fanout["events_per_second"] > 0
    drain = found["throttle_drain"]
    assert 0 < drain["most_in_any_window"] <= drain["limit"]
    assert drain["ratio"] > 0 and drain["attempts_per_delivery"] > 0 and drain["out_of_order"] == 0
    assert [one["workers"] for one in found["concurrency"]] == [1, 2]
    for one in found["concurrency"]:
        assert 0 < one["most_unfinished"] <= one["max_concurrency"]
        assert one["ratio"] > 0


def test_quick_run_of_the_run_figures(tmp_path: Path) -> None:
    found, table = quick(tmp_path / "results.json", RUN_FIGURES)

    assert "publish until the run succeeded" in table
    assert "kill -9 until a run goes on" in table
    runs = found["runs"]
    assert runs["runs"] == 500 and runs["pgqueuer_version"]
    for side in ("headgate", "pgqueuer", "floor"):
        assert runs[side]["turns"] == [runs[side]["per_second"]]
        assert runs[side]["per_second"] > 0
    assert runs["to_pgqueuer"][0] > 0 and runs["to_floor"][0] > 0
    start = found["start"]
    assert start["latency"]["count"] == start["answered"]["count"] == start["events"] == 50
    assert 0 < start["latency"]["p50_ms"] <= start["latency"]["p99_ms"]
    assert 0 < start["p50_commits"] <= start["p99_commits"]
    assert start["parts"]["received_to_launched_ms"] > 0
    assert start["parts"]["launched_to_claimed_ms"] >= 0  # claimed as they are created
    steps = found["step_overhead"]
    assert steps["latency"]["count"] == (steps["runs"] - 1) * (steps["steps_per_run"] - 1)
    assert 0 < steps["p50_commits"] <= steps["p99_commits"]
    assert steps["runs_at_once"] == 5 and steps["steps_per_second"] > 0
    recovery = found["recovery"]
    assert (recovery["lease_ms"], recovery["rounds"], recovery["runs"]) == (1500, 3, 15)
    assert 0 < recovery["min_seconds"] <= recovery["p50_seconds"] <= recovery["max_seconds"]


def test_quick_run_of_the_operation_figures(tmp_path: Path) -> None:
    found, table = quick(tmp_path / "results.json", OPERATION_FIGURES)

    assert "just written, not yet vacuumed" in table
    health = found["health"]
    assert (health["events"], health["retries"], health["turns"]) == (2000, 200, 2)
    for state in (health["written"], health["settled"]):
        for look in (state["snapshot"], state["scrape"]):
            assert look["statements"] > 10
            assert 0 < look["least_ms"] <= look["database_ms"]


def test_marks_are_read_as_they_were_left(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    assert marks.read(path) == []

    path.write_text("7 4711 1.5 2.25\n8 4712 3.0\n")
    assert marks.read(path) == [marks.Mark(7, 4711, [1.5, 2.25]), marks.Mark(8, 4712, [3.0])]


def test_a_figure_is_not_comparable_when_others_used_the_machine_in_any_turn() -> None:
    assert neighbours.disturbed("runs", [0.1, None]) == neighbours.disturbed("runs", []) == []
    assert neighbours.disturbed("runs", [0.1, 0.5]) == [("NOT COMPARABLE", "runs: others used 0.50 cores")]


def test_a_run_that_ends_when_another_is_created_does_not_count_beside_it() -> None:
    at = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=n) for n in range(4)]

    assert most_at_once([Span(at[0], at[0], at[1]), Span(at[1], at[1], at[2])]) == 1
    assert most_at_once([Span(at[0], at[0], at[2]), Span(at[1], at[2], at[3])]) == 2
