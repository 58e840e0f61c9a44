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


@app.workflow(on="asked")
async def ask(ctx):
    approval = await ctx.approval("manager", timeout="1d")
    await approval.decision()


@app.workflow(on="broken")
async def fail(ctx):
    raise ValueError("broken")


@app.workflow(every="1h")
async def nightly(ctx):
    return None
"""

# Valid names of sources that a shell would not read as one plain word.
HOSTILE = ("shop&./evil", "shop?", "some.fil?", "#shop", "-rf", "~", "a=~/b", "=ls", "%1")


@pytest.fixture(scope="module")
def server(shared_url: str, address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("completion") / "app.py"
    file.write_text(APP)
    with worker(shared_url, file), Client(address) as client:
        client.publish("order.created", source="shop.api", payload={"id": 7})
        for kind in ("asked", "broken"):
            client.publish(kind, source="#inside")
        for source in HOSTILE:
            client.publish("other&id", source=source)
        for name in ("$(id)", "two words", "plain"):
            client.request("POST", "/v1/workflows/fulfil/triggers", {"name": name, "event_type": "never"})
        for source in ("store", "*"):
            client.request("PUT", f"/admin/sources/{source}/limit", {"limit": 50, "interval_ms": 1000})
        eventually(lambda: client.request("GET", "/v1/runs")["runs"], "it is launched")
        eventually(lambda: client.request("GET", "/admin/approvals")["approvals"], "it waits")
        eventually(lambda: client.request("GET", "/admin/dead-letters")["dead_letters"], "it has failed")
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
        (("run", ""), ["ask", "fail", "fulfil", "nightly"]),
        (("run", "ful"), ["fulfil"]),
        (("workflows", "show", ""), ["ask", "fail", "fulfil", "nightly"]),
        (("runs", "list", "--workflow", "n"), ["nightly"]),
        (("schedules", "pause", ""), ["nightly"]),
        (("sources", "limit", ""), ["shop.api", "store"]),
        (("events", "list", "--source", "sh"), ["shop.api"]),
        (("publish", ""), ["broken", "asked", "order.created"]),
        (("triggers", "test", "fulfil/"), ["fulfil/code", "fulfil/plain"]),
        (("deliveries", "list", "--trigger", "ful"), ["fulfil/code", "fulfil/plain"]),
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


def test_approvals_and_dead_letters_are_completed(server: str) -> None:
    with Client(server) as client:
        [approval_id] = [one["id"] for one in client.request("GET", "/admin/approvals")["approvals"]]
        [letter_id] = [one["id"] for one in client.request("GET", "/admin/dead-letters")["dead_letters"]]
    expect([approval_id], server, "approvals", "approve", approval_id[:13])
    expect([approval_id], server, "approvals", "reject", "")
    expect([letter_id], server, "dlq", "replay", "")


def test_a_trigger_whose_name_is_not_a_plain_word_is_completed_by_its_id(server: str) -> None:
    with Client(server) as client:
        known = {one["name"]: one["id"] for one in client.request("GET", "/admin/triggers")["triggers"]}
    expect([known["$(id)"]], server, "triggers", "show", known["$(id)"])
    expect([known["two words"]], server, "triggers", "show", known["two words"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_works_in_a_shell_and_inserts_only_plain_names(server: str, tmp_path: Path) -> None:
    """Each suggestion is executed as part of a command, as bash does when a person presses enter."""
    script = (
        'eval "$(tidegate completion bash)"; COMP_WORDS=(tidegate sources pause ""); COMP_CWORD=3; '
        '_tidegate_completion tidegate; complete -p tidegate; for one in "${COMPREPLY[@]}"; do eval "echo $one"; done'
    )
    env = {"PATH": f"{Path(TIDEGATE).parent}:/usr/bin:/bin", "TIDEGATE_URL": server, "HOME": "/nonexistent"}
    evil = tmp_path / "evil"
    evil.write_text("#!/bin/sh\ntouch it-ran\n")
    evil.chmod(0o755)
    (tmp_path / "some.file").touch()

    def told() -> bool:
        done = subprocess.run(
            ["bash", "--norc", "-c", script], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
        )
        assert not (tmp_path / "it-ran").exists()
        complete, *names = done.stdout.splitlines()
        assert "_tidegate_completion tidegate" in complete
        assert (done.returncode, done.stderr) == (0, "") and set(names) <= {"shop.api", "store"}
        return names == ["shop.api", "store"]

    eventually(told, "bash knows the sources")


def test_every_shell_has_a_script() -> None:
    for shell in ("bash", "zsh", "fish"):
        done = run("completion", shell)
        assert done.returncode == 0 and "_TIDEGATE_COMPLETE" in done.stdout and done.stderr == ""
    assert run("completion", "csh").returncode == 2


def test_without_a_server_it_is_silent() -> None:
    assert completed("http://127.0.0.1:1", "run", "") == []
    assert completed("not a url", "run", "") == []


@pytest.mark.parametrize(
    ("answers", "names"),
    [([], []), ([b'{"events": [{"source": "shop"}, {"source": "a;b"}]}'], ["shop"])],
    ids=["nothing", "a part"],
)
def test_a_slow_server_is_not_waited_for(answers: list[bytes], names: list[str]) -> None:
    eventually(lambda: completed_slowly(answers) == names, f"{names} are suggested")


def completed_slowly(answers: list[bytes]) -> list[str]:
    """What is suggested by a server that gives these answers. After them it sends a byte now and then, so that the
    client alone would wait for ever."""
    is_done = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            for answer in answers:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(answer), answer))
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
            while not is_done.wait(0.2):
                connection.sendall(b"x")

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        dripping = threading.Thread(target=drip, args=[listening])
        dripping.start()
        try:
            return completed(f"http://127.0.0.1:{listening.getsockname()[1]}", "sources", "limit", "")
        finally:
            is_done.set()
            dripping.join()
