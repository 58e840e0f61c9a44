"""Short versions of the scenarios that `make chaos` runs about limits: order in a burst, and edits midway."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chaos.cluster import ROOT


@pytest.mark.parametrize("scenario", ["order", "edits"])
def test_the_scenario_finds_nothing(tmp_path: Path, scenario: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"chaos.{scenario}", "--trials", "1", "--out", str(tmp_path / "found.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well" in done.stdout
