"""`tidegate top` and `tidegate health` as people see them: piped, in a terminal, and while the API is away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.processes import PATIENCE_SECONDS, TIDEGATE, api, run, tidegate, worker
from tests.store.builders import make_events
from tidegate import Client, RequestRefused
from tidegate.store import decisions
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision

APP = """
from tidegate import Tidegate

app = Tidegate()


@app.workflow(on="seen")
async def see(ctx):
    return "ok"
"""


class Terminal:
    """A `tidegate` command in a terminal of a size; what it has drawn since the last look at it."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **env: str) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, rows)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
        self._popen = subprocess.Popen(
            [TIDEGATE, *arguments], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env=clean | {"TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"} | env,
        )  # fmt: skip
        os.close(slave)
        self._drawn = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, is_there: Callable[[list[str]], bool]) -> list[str]:
        """The lines of the first whole screen of which this is true."""
        for _ in range(PATIENCE_SECONDS * 10):
            *whole, _ = self._drawn.split("\x1b[H")
            for drawn in whole:
                lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn).replace("\r", "").split("\n")
                if is_there(lines):
                    return lines
            self._read()
        raise AssertionError(f"it was never there:\n{self._drawn[-3000:]}")

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def signal(self, signum: signal.Signals) -> None:
        self._popen.send_signal(signum)

    def wait(self) -> tuple[int, str]:
        """The exit status, and everything drawn."""
        for _ in range(PATIENCE_SECONDS * 10):
            if self._popen.poll() is not None:
                break
            self._read()
        self._read()
        return self._popen.wait(PATIENCE_SECONDS), self._drawn

    def end(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait(PATIENCE_SECONDS)
        os.close(self._master)

    def _read(self) -> None:
        ready, _, _ = select.select([self._master], [], [], 0.1)
        if ready:
            with contextlib.suppress(OSError):  # it has ended
                self._drawn += os.read(self._master, 65_536).decode(errors="replace")


@contextlib.contextmanager
def terminal(*arguments: str, columns: int = 80, rows: int = 24, **env: str) -> Iterator[Terminal]:
    made = Terminal(*arguments, columns=columns, rows=rows, **env)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    file = tmp_path / "seen.py"
    file.write_text(APP)
    return file


def test_one_frame_for_a_pipe(database_url: str, app: Path) -> None:
    with api(database_url) as (_, url), worker(database_url, app), Client(url) as client:
        client.request("POST", "/admin/sources/shop.b/pause", {"reason": "moving house"})
        client.publish("seen", source="shop.a")
        client.publish("seen", source="shop.b", id="b-1")
        held = None
        for _ in range(PATIENCE_SECONDS * 10):
            held = client.request("GET", "/admin/event-health")
            if held["totals"] == {"received": 2, "decided": 2, "launched": 1, "ended": 1}:
                break
            select.select([], [], [], 0.1)
        assert held is not None and held["totals"] == {"received": 2, "decided": 2, "launched": 1, "ended": 1}
        [decision] = client.request("GET", "/admin/decisions")["decisions"]
        assert (decision["stage"], decision["decision"], decision["external_id"]) == ("gate", "held", "b-1")
        assert "payload" not in decision
        done = run("top", "--once", "--interval", "100ms", env={"TIDEGATE_URL": url})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for part in ("degraded  tidegate at", "events/s   received 0.0  decided 0.0", "runs/s     launched 0.0  ended 0.0",
                 "  events            1  paused 1", "moving house", "gate    held         shop.b b-1"):  # fmt: skip
        assert part in done.stdout, done.stdout


async def test_decisions_are_paged(database_url: str, connection: Connection) -> None:
    [event_id] = await make_events(connection)
    await decisions.insert(connection, [NewDecision(event_id, None, "gate", f"d{n}") for n in range(5)])
    with api(database_url) as (_, url), Client(url) as client:
        found: list[str] = []
        cursor = None
        while cursor is not None or not found:
            page = client.request("GET", "/admin/decisions", limit=2, cursor=cursor)
            found += [one["decision"] for one in page["decisions"]]
            cursor = page["next_cursor"]
        assert found == ["d4", "d3", "d2", "d1", "d0"]
        for wrong in ({"limit": "0"}, {"cursor": "x"}, {"cursor": "9" * 30}, {"nonsense": "1"}):
            with pytest.raises(RequestRefused) as refused:
                client.request("GET", "/admin/decisions", **wrong)
            assert refused.value.status == 422, wrong


def test_a_live_view_fits_follows_and_ends(database_url: str) -> None:
    with api(database_url) as (_, url), terminal("top", "--interval", "200ms", TIDEGATE_URL=url) as shown:
        first = shown.until(lambda lines: any("DECISIONS" in line for line in lines))
        assert len(first) <= 24 and all(len(line) <= 80 for line in first)
        with Client(url) as client:
            client.request("POST", "/admin/sources/shop.c/pause", {"reason": "r" * 200})
        paused = shown.until(lambda lines: any("source shop.c by" in line and "…" in line for line in lines))
        assert any(line.startswith("degraded") for line in paused) and all(len(line) <= 80 for line in paused)
        shown.resize(40, 12)
        small = shown.until(lambda lines: "QUEUE" in "".join(lines) and max(map(len, lines)) <= 40)
        assert len(small) <= 12
        shown.press("xq")
        status, drawn = shown.wait()
    assert status == 0 and drawn.rstrip().endswith("\x1b[?1049l")  # the screen is as it was before


def test_a_restarting_api_is_survived(database_url: str) -> None:
    with api(database_url) as (process, url):
        port = url.rsplit(":", 1)[1]
        with terminal("top", "--interval", "200ms", TIDEGATE_URL=url) as shown:
            shown.until(lambda lines: any("DECISIONS" in line for line in lines))
            process.end()
            away = shown.until(lambda lines: any(line.startswith("not reachable since") for line in lines))
            assert any("QUEUE" in line for line in away)  # the last look stays
            env = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_AUTH": "off"}
            with tidegate("serve", "--port", port, **env) as again:
                again.wait_for_line("API on")
                with Client(url) as client:
                    client.request("POST", "/admin/sources/shop.d/pause", {})
                back = shown.until(lambda lines: any("source shop.d" in line for line in lines))
                assert not any("not reachable" in line for line in back)
                shown.signal(signal.SIGINT)
                assert shown.wait()[0] == 0


def test_top_without_an_api_or_with_wrong_options() -> None:
    nobody = {"TIDEGATE_URL": "http://127.0.0.1:9"}
    done = run("top", "--once", env=nobody)
    assert done.returncode == 1 and "no answer from Tidegate" in done.stderr
    for interval in ("50ms", "soon", "0s"):
        done = run("top", "--interval", interval, env=nobody)
        assert done.returncode == 2, interval


def test_a_verdict_is_readable_at_80_columns(database_url: str) -> None:
    with api(database_url) as (_, url), Client(url) as client:
        until = datetime.fromisoformat(client.request("GET", "/admin/event-health")["generated_at"]) + timedelta(days=1)
        reason = "the shop is moving house and nobody is there to take any orders until tomorrow morning"
        client.request("POST", "/admin/sources/shop.e/pause", {"reason": reason, "until": until.isoformat()})
        with terminal("health", TIDEGATE_URL=url) as shown:
            status, drawn = shown.wait()
        piped = run("health", env={"TIDEGATE_URL": url})
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn).replace("\r", "").split("\n")
    assert status == piped.returncode == 1 and all(len(line) <= 80 for line in lines), lines
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    [cause] = [text for text in paragraphs if "source_paused" in text]
    assert cause.startswith("degraded: source_paused shop.e, since ") and reason in " ".join(cause.split())
    assert "do:  tidegate sources resume shop.e" in cause
    assert "see: docs/operations/event-scheduler.md#source-paused" in cause
    assert any("no_worker" in text and "tidegate worker APP" in text for text in paragraphs)
    assert reason in piped.stdout  # a pipe gets whole lines


def test_lists_are_whole_at_80_columns(database_url: str) -> None:
    with api(database_url) as (_, url), Client(url) as client:
        client.publish("order.created", source="shop.e", payload={"text": "x" * 50}, id="order-" + "7" * 30)
        event_id = client.request("GET", "/v1/events")["events"][0]["id"]
        client.request("POST", "/admin/sources/shop.e/pause", {"reason": "the shop is moving house " * 3})
        for command in (("events", "list"), ("sources", "list"), ("audit", "list")):
            with terminal(*command, TIDEGATE_URL=url) as shown:
                status, drawn = shown.wait()
            lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn).replace("\r", "").split("\n")
            assert status == 0 and all(len(line) <= 80 for line in lines), lines
            told = " ".join(" ".join(lines).split())
            assert "shop.e" in told
            if command[0] == "events":
                assert event_id in told and "order-" + "7" * 30 in told
            else:
                assert "moving house" in told
