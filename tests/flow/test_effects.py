"""The effects of users' functions where they really run: `dev`, one worker, three workers, on both queues. Nothing is
broken meanwhile, so each effect that is to happen happens once, whatever the events share.

The load, the application and the judges are those of the chaos suite; the sink is a folder of plain files.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import effects, traffic
from chaos.records import Answer, Dump, Evidence, Mark, read

from tests.processes import PATIENCE_SECONDS, api, tidegate, worker
from tests.redis_server import redis_server
from tidegate.client import Client

APP = str(Path(effects.__file__).parent / "app.py")
# The application imports its neighbours in the repository.
ENV = {"PYTHONPATH": str(Path(effects.__file__).parent.parent)}
# The kinds of events that are set going: keys that are shared in a request, fan-out, limits, steps that fail, timers.
KINDS = {"keyed", "fan", "narrow", "throttled", "steps", "nap", "plain"}
REQUESTS = 60
NOTHING = Dump(
    events=[], deliveries=[], runs=[], steps=[], owned=[], waited=[], orphans={}, unfinished={}, max_concurrency={},
    throttles={}, limits={}, idempotency_windows={},
)  # fmt: skip


@contextlib.contextmanager
def workers(count: int, database_url: str, **env: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(worker(database_url, APP, **env))
        yield


def publish(client: Client, seed: int) -> list[Answer]:
    """Some requests of the chaos suite's load, and how they were answered."""
    answers = []
    for n in range(10 * REQUESTS):
        made = traffic.events(seed, n)
        if made[0].body["type"].removeprefix("chaos.") not in KINDS:
            continue
        for one, receipt in zip(made, client.publish_many([one.body for one in made]), strict=True):
            answers.append(
                Answer(
                    key=one.key, type=one.body["type"], source=one.body["source"], has_id=one.has_id,
                    dedupe_key=one.body["payload"].get("order"), sent_at=0, answered_at=0, status=202,
                    event_id=str(receipt.id),
                )
            )  # fmt: skip
        if len(answers) >= REQUESTS:
            break
    return answers


def seen(sink: Path, answers: list[Answer]) -> Evidence:
    marks = [mark for path in sorted(sink.glob("*.jsonl")) for mark in read(path, Mark)]
    marks.sort(key=lambda mark: mark.at)
    return Evidence(answers=answers, verbs=[], faults=[], marks=marks, dump=NOTHING)


def judge(sink: Path, client: Client, answers: list[Answer]) -> None:
    """Every effect comes; when nothing runs any more, none was repeated, and no run was executed twice at a time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while missing := list(effects.missing(seen(sink, answers))):
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)
    while any(client.request("GET", "/v1/runs", status=status)["runs"] for status in ("running", "pending")):
        assert time.monotonic() < deadline, "runs that do not end"
        time.sleep(0.1)
    found = seen(sink, answers)
    assert list(effects.repeated(found)) == []
    assert list(effects.overlapping(found)) == []
    runs = {(mark.workflow, mark.subject or mark.event): mark.run for mark in found.marks}
    assert len(set(runs.values())) == len({mark.run for mark in found.marks}), "two runs for one event or order"


def test_in_dev(tmp_path: Path) -> None:
    sink = tmp_path / "sink"
    sink.mkdir()
    with tidegate("dev", APP, "--port", "0", "--data", str(tmp_path / "data"), CHAOS_SINK=str(sink), **ENV) as process:
        address = process.wait_for_line(r"API and console on (http://\S+)")[1]
        with Client(address) as client:
            judge(sink, client, publish(client, seed=1))


@pytest.mark.parametrize("queue", ["postgres", "bullmq"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_late", [False, True], ids=["at work", "late"])
def test_with_workers(database_url: str, tmp_path: Path, queue: str, count: int, is_late: bool) -> None:
    """At work when the events come, or started when they have piled up."""
    sink = tmp_path / "sink"
    sink.mkdir()
    env = ENV | {"CHAOS_SINK": str(sink), "TIDEGATE_QUEUE": queue}
    with contextlib.ExitStack() as stack:
        if queue == "bullmq":
            env["TIDEGATE_REDIS_URL"] = stack.enter_context(redis_server()).url
        _, address = stack.enter_context(api(database_url, **env))
        client = stack.enter_context(Client(address))
        if is_late:
            with workers(1, database_url, **env):
                pass  # its workflows are known
            answers = publish(client, seed=2)
            stack.enter_context(workers(count, database_url, **env))
        else:
            stack.enter_context(workers(count, database_url, **env))
            answers = publish(client, seed=3)
        judge(sink, client, answers)
