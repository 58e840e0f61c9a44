"""An upgrade from outside: real processes of this version and of the next, the commands, `/readyz`, and load."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from chaos import effects_app, releases

import tidegate
from tests.processes import Process, api, run, worker
from tidegate.store import migrate

LATEST = migrate.latest()
PATIENCE_SECONDS = 120


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of processes of the next release."""
    yield releases.next_release(tmp_path_factory.mktemp("next")).environment({})


def until(question: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline, question
        time.sleep(0.05)
    return answer


def execute(url: str, statement: str) -> None:
    async def go() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(statement)
        await connection.close()

    asyncio.run(go())


def schema_check(address: str) -> str:
    response = httpx.get(f"{address}/readyz", timeout=30)
    found: str = response.json()["checks"]["schema"]
    assert (response.status_code == 200) == (found == "ok")
    return found


def ended(process: Process) -> int:
    process.signal(signal.SIGTERM)
    return process.wait()


def test_what_waits_is_named_and_applied_later(database_url: str, newer: dict[str, str]) -> None:
    old = {"TIDEGATE_DATABASE_URL": database_url}
    new = old | newer
    with (
        api(database_url) as (serving, address),
        worker(database_url, effects_app.__file__, CHAOS_EFFECTS="/dev/null") as working,
    ):
        done = run("migrate", env=new)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line.split(":")[0] for line in lines[:5]] == [
            f"applied  {LATEST + 1:04}_columns",
            f"applied  {LATEST + 2:04}_run_column",
            f"applied  {LATEST + 3:04}_constraint",
            f"applied  {LATEST + 4:04}_indexes",
            f"waiting  {LATEST + 5:04}_without_tier",
        ]
        for kind, process in (("api", serving), ("worker", working)):
            name = f"{kind} {socket.gethostname()}:{process.pid}"
            assert f"{name} (version {tidegate.__version__}, schema {LATEST}, last seen 20" in lines[4]
        assert "run `tidegate migrate` again" in lines[4]
        assert lines[5:] == [f"schema version {LATEST + 4}"]
        told = run("migrate", "--status", env=new)
        assert told.returncode == 0
        assert f"waiting  {LATEST + 5:04}_without_tier: waits for processes" in told.stdout
        assert [line.split()[1] for line in told.stdout.splitlines() if line.startswith("alive ")] == ["api", "worker"]
        assert schema_check(address) == "ok"

        done = run("migrate", env=old)  # of the version before
        assert done.returncode == 0 and done.stdout.startswith(
            f"nothing to do: schema version {LATEST + 4}, applied by a newer"
        )
        with api(database_url) as (again, restarted):  # and it may be started
            assert schema_check(restarted) == "ok"
            assert ended(again) == 0
        assert ended(serving) == 0 and ended(working) == 0

    done = run("migrate", env=new)
    assert done.stdout.splitlines() == [f"applied  {LATEST + 5:04}_without_tier", f"schema version {LATEST + 5}"]
    for command in (("serve", "--port", "0"), ("worker", effects_app.__file__), ("migrate",)):
        done = run(*command, env=old | {"TIDEGATE_AUTH": "off"})
        assert done.returncode == 2, done.stdout
        assert (
            f"at version {LATEST + 5}, which only programs can use that know version {LATEST + 4} or newer"
            in done.stderr
        )
        assert "upgrade this process" in done.stderr
    with api(database_url, **newer) as (_, address):
        assert schema_check(address) == "ok"


def test_processes_that_the_schema_leaves_behind_say_so(database_url: str) -> None:
    """As when they were cut off for so long that nobody waited for them."""
    with (
        api(database_url) as (_, address),
        worker(database_url, effects_app.__file__, CHAOS_EFFECTS="/dev/null") as working,
    ):
        assert schema_check(address) == "ok"
        execute(
            database_url,
            f"insert into tidegate.schema_migrations values (9999, '9999_future', 'x', now(), {LATEST + 1})",
        )
        until(lambda: "upgrade this process" in schema_check(address))
        assert working.wait() == 2
        assert "process.unfit" in working.output and "upgrade this process" in working.lines[-1]


class Producer(threading.Thread):
    """Publishes one event after the other to the address that it is told, and keeps every answer that is not 202."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name=name, daemon=True)
        self.address = address
        self.accepted: list[str] = []
        self.refused: list[str] = []
        self._stopping = threading.Event()

    def run(self) -> None:
        client = httpx.Client(timeout=60)
        while not self._stopping.wait(0.01):
            key = f"{self.name}-{len(self.accepted)}"
            event = {"type": "chaos.effect", "source": "chaos", "id": key, "payload": {"key": key}}
            try:
                response = client.post(f"{self.address}/v1/events", json=event)
            except httpx.HTTPError as exc:
                self.refused.append(repr(exc))
                continue
            if response.status_code == 202:
                self.accepted.append(key)
            else:
                self.refused.append(f"{response.status_code} {response.text}")
        client.close()

    def stop(self) -> None:
        self._stopping.set()
        self.join(PATIENCE_SECONDS)


def test_an_upgrade_under_load_refuses_loses_and_repeats_nothing(
    database_url: str, newer: dict[str, str], tmp_path: Path
) -> None:
    sink, env = tmp_path / "effects", newer | {"TIDEGATE_DATABASE_URL": database_url}

    def effects() -> list[str]:
        return sink.read_text().split() if sink.exists() else []

    def goes_on() -> None:
        seen = len(effects())
        until(lambda: len(effects()) > seen + 50)

    def migrates(*last: str) -> None:
        done = run("migrate", env=env)
        assert done.returncode == 0, done.stderr
        assert [line.split(":")[0].split()[0] for line in done.stdout.splitlines()] == [*last]
        goes_on()

    worker_settings = {"CHAOS_EFFECTS": str(sink)}
    with api(database_url) as (serving, old), worker(database_url, effects_app.__file__, **worker_settings) as working:
        producers = [Producer(f"p{n}", old) for n in range(4)]
        for producer in producers:
            producer.start()
        goes_on()
        migrates("applied", "applied", "applied", "applied", "waiting", "schema")
        with (
            api(database_url, **newer) as (_, new),
            worker(database_url, effects_app.__file__, **newer, **worker_settings),
        ):
            goes_on()
            for producer in producers:
                producer.address = new
            goes_on()
            assert ended(working) == 0
            goes_on()
            assert ended(serving) == 0
            migrates("applied", "schema")
            for producer in producers:
                producer.stop()
            keys = [key for producer in producers for key in producer.accepted]
            until(lambda: set(keys) <= set(effects()))
    assert [text for producer in producers for text in producer.refused] == []
    assert {key: count for key, count in Counter(effects()).items() if count > 1} == {}
    assert sorted(effects()) == sorted(keys)
