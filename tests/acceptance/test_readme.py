"""README and docs run: every command and code block is executed, in order, on a real server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.acceptance.conftest import ROOT
from tests.acceptance.test_publishing import finished_run
from tests.processes import tidegate
from tidegate.client import Client

README = (ROOT / "README.md").read_text()
PUBLISHING = (ROOT / "docs" / "publishing.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The README's first workflow under `tidegate dev`; the API's address and the database's."""
    folder = tmp_path_factory.mktemp("readme")
    app = folder / "app.py"
    app.write_text(blocks(README, "python")[0])
    with tidegate("dev", str(app), "--port", "0", "--data", str(folder / "data"), cwd=folder) as process:
        address = process.wait_for_line(r"API and console on (http://\S+)")[1]
        database = process.wait_for_line(r"database: +(\S+)")[1]
        process.wait_for_line("Ctrl-C")
        yield address, database


def shell(commands: str, address: str) -> str:
    commands = commands.replace("http://127.0.0.1:8700", address)
    commands = commands.replace(".venv/bin/tidegate", "tidegate")
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TIDEGATE_URL": address}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_publish_and_list(running: tuple[str, str]) -> None:
    publish, listing = blocks(README, "bash")[0].strip().splitlines()
    event_id = shell(publish, running[0]).split()[1]
    finished_run(running[0], event_id)
    listed = shell(listing, running[0])
    assert "fulfil" in listed and "succeeded" in listed and "r-7" in listed


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_and_explain(running: tuple[str, str]) -> None:
    told = shell(blocks(README, "bash")[1], running[0])
    assert '"status":"accepted"' in told
    assert "order.created from shop.api" in told


def test_python_client(running: tuple[str, str]) -> None:
    exec(blocks(README, "python")[1].replace("http://127.0.0.1:8700", running[0]), {})
    with Client(running[0]) as client:
        assert client.request("GET", "/v1/events/o-9")["payload"] == {"id": 9, "amount": 300}


async def test_sql(running: tuple[str, str]) -> None:
    address, database = running
    connection = await asyncpg.connect(database)
    try:
        await connection.execute(blocks(README, "sql")[0])
        assert await connection.fetchval("select count(*) from tidegate.workflow_events where source = 'shop.db'") == 0
        event_id = await connection.fetchval(blocks(PUBLISHING, "sql")[0])
    finally:
        await connection.close()
    assert finished_run(address, event_id)["output"]["charged"] == 400


def test_docs_workflow_is_valid() -> None:
    namespace: dict[str, object] = {}
    exec(blocks(PUBLISHING, "python")[0], namespace)
    assert "fulfil" in namespace["app"].workflows  # type: ignore[attr-defined]


def test_make_targets_and_production_commands_exist() -> None:
    for target in re.findall(r"^make (\w+)", README + (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for command in re.findall(r"^tidegate (\w+)", README, re.MULTILINE):
        done = subprocess.run(
            [Path(sys.executable).parent / "tidegate", command, "--help"], capture_output=True, check=False
        )
        assert done.returncode == 0, command


def test_ci_runs_the_readme_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make check" in (ROOT / ".ci" / "run").read_text()
