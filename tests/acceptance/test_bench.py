"""The benchmark runs from start to end, and its results have the shape that later ones are compared by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_quick_run_writes_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "results.json"

    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "ratio to the floor" in done.stdout
    found = json.loads(out.read_text())
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
