"""A minute of the chaos suite: a small cluster is broken while it works, and every verdict is 0.

It judges what happened, never how fast; `make chaos` is the long version.
"""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chaos import fences, redis_server, run
from chaos.records import Answer, Writer, read

from tidegate.store import sql

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)

CHOICES = {
    "postgres": run.Choice(
        seed=20, seconds=22, per_second=40, queue="postgres", workers=2,
        faults=["kill", "freeze", "postgres", "clocks", "rolling"],
    ),
    "bullmq": run.Choice(
        seed=21, seconds=14, per_second=40, queue="bullmq", workers=2, faults=["kill", "flush", "redis", "clocks"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CHOICES)
def broken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What came of a run, and the folder with all that it left."""
    if request.param == "bullmq" and redis_server.binary() is None:
        pytest.skip("no redis-server: put one on the PATH")
    choice = CHOICES[request.param]
    folder = tmp_path_factory.mktemp("chaos")
    only = [argument for fault in choice.faults for argument in ("--only", fault)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "chaos", "--seed", str(choice.seed), "--seconds", str(choice.seconds)),
            *("--rate", str(choice.per_second), "--queue", choice.queue, "--workers", str(choice.workers)),
            *("--folder", str(folder), *only),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = folder / choice.queue
    return msgspec.json.decode((left / "result.json").read_bytes(), type=run.Result), left


def test_nothing_promised_is_broken(broken: tuple[run.Result, Path]) -> None:
    result, _ = broken
    assert result.is_clean, run.table(result)
    found = result.figures
    assert found.acknowledged > 100 and found.launched > 100  # it has worked
    assert found.faults["kill"] >= 1  # while it was broken
    assert found.faults["postgres" if result.choice.queue == "postgres" else "redis"] == 1


def test_a_broken_promise_fails_and_says_where(broken: tuple[run.Result, Path]) -> None:
    """The same evidence with one answer too many: an acknowledged event that is not there."""
    _, folder = broken
    ledger = folder / "ledger.jsonl"
    before = ledger.read_bytes()
    one = next(answer for answer in read(ledger, Answer) if answer.status == 202)
    writer = Writer(ledger)
    writer.write(msgspec.structs.replace(one, key="lost", event_id="00000000-0000-0000-0000-000000000000"))
    writer.close()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "chaos", "--check", str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        ledger.write_bytes(before)
    assert done.returncode == 1, done.stderr
    assert "BROKEN acknowledged events lost" in done.stdout
    assert "lost was answered 202" in done.stdout and str(folder) in done.stdout


def test_a_fence_that_is_taken_out_is_noticed() -> None:
    """Two at once, to save time; `make chaos` has each of them by itself."""
    names = ["claim", "idempotency"]
    for seed in range(1, 6):  # a race is not lost every time
        folder = Path(tempfile.mkdtemp(prefix="tidegate-fence-"))
        try:
            result = fences.without(names, folder, seed)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found = {name: fences.noticed(name, result) for name in names}
        assert found["idempotency"], run.table(result)  # no race: it is lost at once
        if found["claim"]:
            return
    raise AssertionError(run.table(result))


@pytest.mark.parametrize("queue", ["postgres", "bullmq"])
def test_an_execution_too_many_is_noticed(queue: str) -> None:
    """By its effects alone: no row tells of it."""
    if queue == "bullmq" and redis_server.binary() is None:
        pytest.skip("no redis-server: put one on the PATH")
    folder = Path(tempfile.mkdtemp(prefix="tidegate-fence-"))
    try:
        result = fences.without(["one execution"], folder, seed=1, queue=queue)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    broken = {verdict.name for verdict in result.verdicts if verdict.count}
    assert {"effects repeated without a reason", "executions side by side"} <= broken, run.table(result)
    assert broken <= {"effects repeated without a reason", "executions side by side"}, run.table(result)


@pytest.mark.parametrize("name", fences.FENCES)
def test_every_fence_is_where_it_is_taken_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "blocks", sql.blocks)  # put back afterwards
    functions = {}
    for module, place, _ in fences.FENCES[name].functions:
        owner = f"{module}.{place}".rpartition(".")[0]
        functions[f"{module}.{place}"] = found = pkgutil.resolve_name(f"{module}:{place}")
        monkeypatch.setattr(pkgutil.resolve_name(owner), place.rpartition(".")[2], found)
    before = {aggregate: sql.blocks(aggregate) for aggregate, *_ in fences.FENCES[name].edits}
    fences.take_out([name])
    for aggregate, blocks in before.items():
        assert sql.blocks(aggregate) != blocks
        assert [block.name for block in sql.blocks(aggregate)] == [block.name for block in blocks]
    assert all(pkgutil.resolve_name(place) is not original for place, original in functions.items())
    assert before or functions
