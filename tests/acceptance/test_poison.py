"""One run of a batch kills the process that executes it: it is given up, and nobody else is. `make chaos` has more."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
from chaos.poison import Choice, Found

ROOT = Path(__file__).parents[2]
RUN = """
import asyncio, sys, uvloop
from pathlib import Path
import msgspec
from chaos import poison
choice = msgspec.json.decode(sys.argv[1], type=poison.Choice)
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    found = runner.run(poison.run(choice, Path(sys.argv[2])))
sys.stdout.buffer.write(msgspec.json.encode(found))
"""

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("workers", [1, 3])
def test_only_the_run_that_kills_its_process_is_given_up(workers: int) -> None:
    choice = Choice(seed=16 + workers, workers=workers, lease_ms=1500)
    with tempfile.TemporaryDirectory(prefix="tidegate-poison-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", RUN, msgspec.json.encode(choice).decode(), folder],
            cwd=ROOT,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        found = msgspec.json.decode(done.stdout, type=Found)
        assert found.complaints == [], found
        assert found.statuses == {"failed": 1, "succeeded": choice.runs - 1}
        assert found.given_up == found.poison
        assert found.deaths >= 3
