"""Completion as a shell asks for it, against a real server, and against none."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.acceptance.test_sources import eventually
from tests.processes import TIDEGATE, run, worker
from tidegate.client import Client

APP = """
from tidegate import Tidegate

app = Tidegate()


@app.workflow(on="order.created")
async def fulfil(ctx, id: int = 0):
    return None


@app.workflow(every="1h")
async def nightly(ctx):
    return None
"""


@pytest.fixture(scope="module")
def server(shared_url: str, address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("completion") / "app.py"
    file.write_text(APP)
    with worker(shared_url, file), Client(address) as client:
        client.publish("order.created", source="shop.api", payload={"id": 7})
        client.request("PUT", "/admin/sources/store/limit", {"limit": 5, "interval_ms": 1000})
        eventually(lambda: client.request("GET", "/v1/runs")["runs"], "it is launched")
        yield address


def completed(address: str, *words: str) -> list[str]:
    """What bash is told for the last word."""
    line = {"_TIDEGATE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(("tidegate", *words))}
    done = run(env={"TIDEGATE_URL": address, **line, "COMP_CWORD": str(len(words))})
    assert (done.returncode, done.stderr) == (0, "")
    return [text.partition(",")[2] for text in done.stdout.splitlines() if text]


def expect(names: list[str], address: str, *words: str) -> None:
    """On a busy machine the answer may come after the deadline: a shell asks again, too."""
    eventually(lambda: completed(address, *words) == names, f"{' '.join(words)} completes {names}")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("run", ""), ["fulfil", "nightly"]),
        (("run", "ful"), ["fulfil"]),
        (("workflows", "show", ""), ["fulfil", "nightly"]),
        (("runs", "list", "--workflow", "n"), ["nightly"]),
        (("schedules", "pause", ""), ["nightly"]),
        (("sources", "limit", ""), ["shop.api", "store"]),
        (("events", "list", "--source", "sh"), ["shop.api"]),
        (("publish", "order"), ["order.created"]),
        (("triggers", "test", "fulfil/"), ["fulfil/code"]),
        (("deliveries", "list", "--trigger", "ful"), ["fulfil/code"]),
        (("runs", "show", "no-such"), []),
        (("sources", "lim"), ["limit"]),
        (("completion", "b"), ["bash"]),
    ],
)
def test_names_are_completed(server: str, words: tuple[str, ...], names: list[str]) -> None:
    expect(names, server, *words)


def test_the_newest_runs_and_events_are_completed(server: str) -> None:
    with Client(server) as client:
        [run_id] = [one["id"] for one in client.request("GET", "/v1/runs", workflow="fulfil")["runs"]]
        [event_id] = [one["id"] for one in client.request("GET", "/v1/events", source="shop.api")["events"]]
    expect([run_id], server, "runs", "show", run_id[:13])
    expect([run_id], server, "runs", "cancel", run_id[:30])
    expect([event_id], server, "events", "show", event_id)
    expect([run_id], server, "explain", run_id)
    expect([event_id], server, "explain", event_id)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_works_in_a_shell(server: str) -> None:
    bin_folder = str(Path(TIDEGATE).parent)
    script = (
        'eval "$(tidegate completion bash)"; COMP_WORDS=(tidegate sources pause ""); COMP_CWORD=3; '
        '_tidegate_completion tidegate; printf "%s\\n" "${COMPREPLY[@]}"; complete -p tidegate'
    )
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "TIDEGATE_URL": server, "HOME": "/nonexistent"}

    def told() -> bool:
        done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, env=env, check=True)
        assert done.stderr == "" and "_tidegate_completion tidegate" in done.stdout
        return done.stdout.splitlines()[:2] == ["shop.api", "store"]

    eventually(told, "bash knows the sources")


def test_every_shell_has_a_script() -> None:
    for shell in ("bash", "zsh", "fish"):
        done = run("completion", shell)
        assert done.returncode == 0 and "_TIDEGATE_COMPLETE" in done.stdout and done.stderr == ""
    assert run("completion", "csh").returncode == 2


def test_without_a_server_it_is_silent() -> None:
    assert completed("http://127.0.0.1:1", "run", "") == []
    assert completed("not a url", "run", "") == []


def test_a_slow_server_is_not_waited_for() -> None:
    """It sends a byte now and then, so that the client alone would wait for ever."""
    is_done = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            while not is_done.wait(0.2):
                connection.sendall(b"x")

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        dripping = threading.Thread(target=drip, args=[listening])
        dripping.start()
        try:
            assert completed(f"http://127.0.0.1:{listening.getsockname()[1]}", "runs", "show", "") == []
        finally:
            is_done.set()
            dripping.join()
