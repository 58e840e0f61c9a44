"""Budgets and windows while processes are killed and stopped, and Postgres crashes. `make chaos` has more."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from chaos import fences, shared

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)


def test_no_budget_is_exceeded_and_every_event_is_in_one_run_while_processes_die(tmp_path: Path) -> None:
    out = tmp_path / "shared.json"
    command = [
        sys.executable,
        "-m",
        "chaos.shared",
        "--seed",
        "3",
        "--seconds",
        "12",
        "--rate",
        "40",
        "--out",
        str(out),
    ]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert out.exists(), done.stderr
    found = json.loads(out.read_text())
    assert found["verdicts"] == {name: [] for name in found["verdicts"]}
    assert found["events"] == 480 and found["explained"] > 0
    assert set(found["launches"]) == {"ask", "digest", "draw", "serve", "store"}
    assert done.returncode == 0, done.stdout


def test_what_holds_budgets_and_windows_is_noticed_when_it_is_taken_out() -> None:
    """Four at once, to save time; `make chaos` has each of them by itself."""
    names = ["budget cost", "budget turn", "window event", "window end"]
    missed = names
    for seed in range(1, 4):  # not every sample of what waits meets one that is forgotten
        folder = Path(tempfile.mkdtemp(prefix="tidegate-fence-"))
        try:
            found = fences.without_shared(names, folder, seed)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        missed = [name for name in names if not fences.noticed_shared(name, found)]
        if not missed:
            break
    assert missed == [], shared.table(found)
