"""A process that the tests fork is what the command would be."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import fork_server
from tests.processes import TIDEGATE, api, run

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="processes are forked on Linux only")

COMMANDS = [
    ("--version",),
    ("--help",),
    ("token", "--help"),
    ("nothing",),
    ("publish",),
    ("serve", "--port", "x"),
    ("worker", "missing.py"),
    ("events", "list"),  # nobody listens there
    ("migrate",),  # nor there
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_it_says_and_ends_as_a_started_one(arguments: tuple[str, ...], tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
    env = {"TIDEGATE_URL": "http://127.0.0.1:9", "TIDEGATE_DATABASE_URL": "postgresql://nobody@127.0.0.1:9/none"}
    assert fork_server.is_for(arguments, clean | env)
    started = subprocess.run(
        [TIDEGATE, *arguments], capture_output=True, text=True, env=clean | env, cwd=tmp_path, check=False
    )
    forked = run(*arguments, env=env, cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)


def test_it_is_a_process_of_its_own(database_url: str) -> None:
    with api(database_url, TIDEGATE_LOG_LEVEL="warning") as (process, _):
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
        assert Path(f"/proc/{process.pid}/fd/0").readlink() == Path(os.devnull)
        process.signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    with api(database_url) as (process, _):
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def test_what_is_read_before_a_fork_needs_a_start() -> None:
    same = dict(os.environ)
    assert fork_server.is_for(("serve",), same)
    assert not fork_server.is_for(("dev",), same)
    assert not fork_server.is_for(("serve",), same | {"PYTHONPATH": "elsewhere"})
    assert not fork_server.is_for(("serve",), same | {"OTEL_SERVICE_NAME": "gate"})
