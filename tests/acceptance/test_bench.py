"""The benchmark runs from start to end, and its results have the shape that later ones are compared by."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bench import aims, flat, grown, marks, neighbours, redis_server, restate_server, side, watch
from bench.__main__ import FIGURES
from bench.rate import Rate
from bench.trigger_limits import Span, most_at_once

ROOT = Path(__file__).parents[2]
# The figures that mostly wait, measured beside the others: how fast anything is does not matter here.
WAITING = (
    "commit",
    "single",
    "limit",
    "drain",
    "limit_cost",
    "budgets",
    "throttle_drain",
    "fairness",
    "recovery",
    "health",
    "history",
    "retention",
    "memory",
)

# Many real processes one after the other: slow where other tests use the machine too.
pytestmark = pytest.mark.timeout(900)


class Quick(NamedTuple):
    """A quick run of all figures: its results, the tables, what it said on the way, and where its files are."""

    found: Mapping[str, Any]
    table: str
    progress: str
    folder: Path


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Quick]:
    """Two halves at the same time, once for all tests."""
    folder = tmp_path_factory.mktemp("bench")
    halves = {"waiting": WAITING, "working": tuple(name for name in FIGURES if name not in WAITING)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "bench", "--quick", "--out", str(folder / f"{half}.json"),
             *(word for figure in figures for word in ("--only", figure))],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for half, figures in halves.items()
    ]  # fmt: skip
    try:
        said = [process.communicate() for process in started]
    finally:
        for process in started:
            process.terminate()
            process.wait()
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors
    results = [json.loads((folder / f"{half}.json").read_text()) for half in halves]
    merged = {**results[0], **{name: value for name, value in results[1].items() if value is not None}}
    merged["aims"] = [aim for one in results for aim in one["aims"]]
    yield Quick(merged, "\n".join(out for out, _ in said), "\n".join(errors for _, errors in said), folder)


def test_every_figure_is_measured_and_named_on_the_way(quick: Quick) -> None:
    for figure in FIGURES:
        assert quick.found[figure] is not None, figure
        assert f"bench: {figure} (" in quick.progress
    assert quick.found["quick"] is True
    assert quick.found["machine"]["cores"] >= 1
    assert quick.found["machine"]["python"] and quick.found["machine"]["postgres"]
    assert "asyncpg" in quick.found["machine"]["libraries"]


def test_event_figures(quick: Quick) -> None:
    found = quick.found
    assert "ratio to the floor" in quick.table
    throughput = found["throughput"]
    check_side(throughput["floor"])
    check_side(throughput["pipeline"])
    assert throughput["ratios"][0] > 0
    assert found["single"]["accepted_per_second"] > 0
    assert found["limit"]["most_in_any_interval"] <= found["limit"]["limit"]
    assert sum(found["limit"]["launches"]) == found["limit"]["events"] == 100
    assert found["limit"]["use"] > 0
    assert found["drain"]["ratio"] > 0 and found["drain"]["out_of_order"] == 0
    assert found["limit_cost"]["ratio"] > 0
    single = found["single"]
    for latency in (found["commit"], single["latency"], single["half_latency"], single["insert_latency"]):
        assert 0 < latency["p50_ms"] <= latency["p99_ms"]


def test_trigger_figures(quick: Quick) -> None:
    assert "1,000 triggers, 999 patterns" in quick.table
    cases = quick.found["triggers"]["cases"]
    assert [(case["triggers"], case["are_patterns"]) for case in cases] == [(1, False), (1000, True)]
    assert all(len(case["rates"]) == 1 and case["ratio"] > 0 for case in cases)
    assert cases[0]["ratio"] == 1 and cases[0]["cpu_ratio"] in (None, 1)
    fanout = quick.found["fanout"]
    assert fanout["triggers"] == 100
    assert fanout["deliveries_per_second"] > fanout["events_per_second"] > 0
    drain = quick.found["throttle_drain"]
    assert 0 < drain["most_in_any_window"] <= drain["limit"]
    assert drain["ratio"] > 0 and drain["attempts_per_delivery"] > 0 and drain["out_of_order"] == 0
    assert [one["workers"] for one in quick.found["concurrency"]] == [1, 2]
    for one in quick.found["concurrency"]:
        assert 0 < one["most_unfinished"] <= one["max_concurrency"]
        assert one["ratio"] > 0


def test_budget_figures(quick: Quick) -> None:
    assert "throughput with an idle budget" in quick.table and "drain of 300 over 10 keys" in quick.table
    found = quick.found["budgets"]
    assert found["cost"]["ratio"] > 0
    assert 0 < found["use"]["most_in_any_interval"] <= found["use"]["limit"] == 50
    assert found["use"]["events"] == 100 and found["attempts_per_delivery"] > 0
    assert [one["keys"] for one in found["drains"]] == [10, 300]
    for one in found["drains"]:
        assert 0 < one["most_of_a_key"] <= one["allowed_of_a_key"]
        assert one["ratio"] > 0 and one["attempts_per_delivery"] > 1 and one["out_of_order"] == 0
    wanted = [aim for aim in quick.found["aims"] if aim["figure"] == "budgets"]
    assert len(wanted) == 7 and all(aim["is_met"] for aim in wanted if "launches" in aim["name"])


def test_fairness_figures(quick: Quick) -> None:
    assert "shares of 20 sources" in quick.table
    found = quick.found["fairness"]
    for one in (found["flooded"], found["limited"]):
        assert one["flood"] == 1_000 and one["latency"]["count"] >= 2
        assert 0 < one["latency"]["p50_ms"] <= one["max_ms"]
    assert len(found["slow_ms"]) == 3 and found["slow_delay"] > 0
    assert found["share_error"] <= 0.05  # this does not depend on the machine
    assert sum(aim["figure"] == "fairness" for aim in quick.found["aims"]) == 6


def test_runs_stand_beside_the_floor_and_the_other_queues(quick: Quick) -> None:
    assert "publish until the run succeeded" in quick.table
    runs = quick.found["runs"]
    needs_redis = ("tidegate_bullmq", "bullmq") if redis_server.is_there() else ()
    for name in ("tidegate", "floor", "pgqueuer", "procrastinate", *needs_redis):
        check_side(runs[name])
    others = ("pgqueuer", "procrastinate", *needs_redis[1:])
    assert all(runs["versions"][other] and runs[f"to_{other}"][0] > 0 for other in others)
    assert runs["to_floor"][0] > 0
    workers = quick.found["workers"]
    check_side(workers["one"])
    check_side(workers["two"])
    assert workers["ratios"] == [round(workers["two"]["per_second"] / workers["one"]["per_second"], 3)]


def test_figures_of_single_runs(quick: Quick) -> None:
    assert "kill -9 until a run goes on" in quick.table
    assert [start["per_second"] for start in quick.found["start"]] == [20, 50]
    for start in quick.found["start"]:
        assert start["latency"]["count"] == start["answered"]["count"] == start["events"] == 25
        assert 0 < start["latency"]["p50_ms"] <= start["latency"]["p99_ms"]
        assert 0 < start["p50_commits"] <= start["p99_commits"]
        assert start["p99_to_p50"] >= 1
        assert (start["restate"] is not None) == restate_server.is_there()
        assert start["parts"]["received_to_launched_ms"] > 0
        assert start["parts"]["launched_to_claimed_ms"] >= 0  # claimed as they are created
    steps = quick.found["step_overhead"]
    assert steps["latency"]["count"] == (steps["runs"] - 1) * (steps["steps_per_run"] - 1)
    assert 0 < steps["p50_commits"] <= steps["p99_commits"]
    assert steps["runs_at_once"] == 5 and steps["steps_per_second"] > 0
    recovery = quick.found["recovery"]
    assert (recovery["lease_ms"], recovery["rounds"], recovery["runs"]) == (3000, 1, 5)
    assert 0 < recovery["min_seconds"] <= recovery["p50_seconds"] <= recovery["max_seconds"]


def test_figures_beside_a_history(quick: Quick) -> None:
    assert "just written, not yet vacuumed" in quick.table
    health = quick.found["health"]
    assert (health["events"], health["retries"], health["turns"]) == (2000, 200, 2)
    for state in (health["written"], health["settled"]):
        for look in (state["snapshot"], state["scrape"]):
            assert look["statements"] > 10
            assert 0 < look["least_ms"] <= look["database_ms"]
    history = quick.found["history"]
    assert (history["events"], history["retries"]) == (2000, 200)
    for work in (history["launched"], history["succeeded"]):
        check_side(work["empty"])
        check_side(work["grown"])
        assert work["ratios"][0] > 0
    assert history["days"] == 5
    assert {"workflow_events", "workflow_runs"} <= set(history["whole_table_reads"])


def test_old_days_are_removed_alone_and_beside_load(quick: Quick) -> None:
    assert "removed: 1,000 events of 2 days" in quick.table
    found = quick.found["retention"]
    removal = found["removal"]
    assert (removal["events"], removal["days"], len(removal["launched"])) == (1000, 2, 2)
    assert removal["per_second"] > 0 and removal["ratio"] > 0
    assert [turn["dropped_days"] for turn in found["quiet"] + found["dropping"]] == [0, 2]
    assert all(turn["per_second"] > 0 and turn["latency"]["p99_ms"] > 0 for turn in found["quiet"] + found["dropping"])
    assert found["p99_ratios"][0] > 0 and found["rate_ratios"][0] > 0


def test_memory_of_a_line_that_is_worked_off(quick: Quick) -> None:
    for line in (quick.found["memory"]["inbox"], quick.found["memory"]["held"]):
        assert line["events"] == 500
        assert line["is_worked_off"] is True
        if sys.platform == "linux":
            assert 20 < line["worker_mb"] < 200
            assert 20 < line["api_mb"] < 200


def test_the_table_ends_with_every_aim(quick: Quick) -> None:
    named = [aim["name"] for aim in quick.found["aims"]]
    assert len(named) == len(set(named)) > 15
    assert {"launched, of its floor", "succeeded, of its floor", "succeeded, of pgqueuer's rate"} <= set(named)
    for aim in quick.found["aims"]:
        reached, wanted = aim["found"], aim["wanted"]
        assert aim["is_met"] is (reached >= wanted if aim["is_at_least"] else reached <= wanted)
        assert f"aim: {aim['name']}" in quick.table


def test_the_pictures_are_drawn_from_the_results(quick: Quick) -> None:
    drawn = {path.name for path in quick.folder.glob("*.png")}
    assert {"working-rates.png", "working-ratios.png", "waiting-latencies.png", "waiting-limit.png"} <= drawn
    assert "working-limit.png" not in drawn  # not measured in that half
    for name in drawn:
        content = (quick.folder / name).read_bytes()
        assert content.startswith(b"\x89PNG") and 5_000 < len(content) < 150_000, name


def test_a_soak_of_days_that_pass_quickly(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "bench.soak", "--minutes", "0.35", "--rate", "20", "--out", str(out)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode in (0, 1) and out.exists(), done.stderr  # how flat it is, says the machine too
    found = json.loads(out.read_text())
    assert (done.returncode == 0) is all(verdict["is_flat"] for verdict in found["verdicts"])
    assert found["events"] == found["days"] * 40 > 0
    last = found["samples"][-1]
    # Today, what is kept, three days ahead; no more, however many days have passed. And each event went to its day.
    assert last["days_stored"] <= 3 + found["retention_days"] + 2
    assert last["sizes"]["default"]["table_bytes"] == found["samples"][0]["sizes"]["default"]["table_bytes"]
    assert any(sample["publish"] and sample["start"] for sample in found["samples"])
    assert min(found["bytes_per_event"].values()) > 0
    assert {verdict["name"] for verdict in found["verdicts"]} >= {"succeeded per second", "size of all tables, MB"}
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "soak-rates.png", "soak-latencies.png", "soak-sizes.png", "soak-processes.png",
    }  # fmt: skip


def test_what_changes_by_more_than_a_tenth_is_not_flat() -> None:
    samples = [sample(at, megabytes) for at, megabytes in enumerate([1, 5, 9, 10, 10, 10, 10, 11, 12, 13])]

    found = {verdict.name: verdict for verdict in flat.judge(samples)}

    assert found["succeeded per second"].is_flat and found["succeeded per second"].ratio == 1
    assert not found["size of all tables, MB"].is_flat
    assert (found["size of all tables, MB"].middle, found["size of all tables, MB"].last) == (10, 11.5)
    assert "publish p50, ms" not in found  # was not measured


def sample(at: int, megabytes: int) -> flat.Sample:
    """A look at steady work."""
    return flat.Sample(
        at=at, day=1, days_stored=6, accepted=at * 100, launched=at * 100, succeeded=at * 100, wal_bytes=0,
        sizes={"days": watch.Size(tables=1, table_bytes=megabytes * 1_000_000, index_bytes=0)},
        processes={"api": watch.Process(memory_mb=60, open_files=30, cpu_seconds=1)},
    )  # fmt: skip


def check_side(found: Mapping[str, Any]) -> None:
    """One turn, with a rate."""
    assert found["turns"] == [found["per_second"]]
    assert found["per_second"] > 0
    assert len(found["cpu_us"]) == len(found["neighbours"]) == 1


def test_an_aim_that_is_missed_is_said_to_be() -> None:
    missed = aims.Aim(figure="runs", name="a rate", found=0.5, is_at_least=True, wanted=0.6, is_met=False)
    assert aims.lines([missed]) == [("aim: a rate", "NOT MET: 0.5, wanted at least 0.6")]


async def test_every_side_is_first_in_some_turn() -> None:
    order: list[str] = []

    async def way(name: str) -> Rate:
        order.append(name)
        return Rate(per_second=float(len(order)), cpu_us=None, neighbours=0.5)

    found = await side.in_turns({name: partial(way, name) for name in "abc"}, 3)

    assert "".join(order) == "abcbcacab"
    assert found["a"].turns == [1, 6, 8] and found["a"].per_second == 6
    assert side.ratios(found["b"], found["a"]) == [2.0, 0.667, 1.125]
    assert side.cpu_ratio(found["b"], found["a"]) is None


def test_reads_of_whole_tables_are_summed_over_partitions_that_have_rows() -> None:
    before = {1: ("workflow_runs", 5, 100), 2: ("workflow_runs", 1, 10), 3: ("workflow_events", 0, 0)}
    after = {
        1: ("workflow_runs", 7, 300), 2: ("workflow_runs", 2, 20), 3: ("workflow_events", 4, 0),
        4: ("workflow_events", 1, 30),  # a partition that is new
    }  # fmt: skip

    found = grown.reads(before, after)

    assert (found["workflow_runs"], found["workflow_events"], found["workflow_run_steps"]) == (3, 1, 0)


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
