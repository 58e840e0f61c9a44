"""Waits, children, published events and transactions while workers are killed. `make chaos` has more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)


def test_nothing_is_missed_lost_or_done_twice_while_workers_are_killed(tmp_path: Path) -> None:
    out = tmp_path / "talk.json"
    command = [sys.executable, "-m", "chaos.talk", "--seed", "18", "--orders", "40", "--kills", "3", "--out", str(out)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert out.exists(), done.stderr
    found = json.loads(out.read_text())
    assert found["verdicts"] == {name: [] for name in found["verdicts"]}
    assert found["kills"] == 3 and found["approved"] > 0 and found["approved"] + found["timed_out"] == 40
    assert done.returncode == 0, done.stdout
