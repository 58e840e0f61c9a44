"""`tidegate top`: a live view of the cluster in a terminal. Reads the API and nothing else."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tidegate import settings
from tidegate.cli.output import user
from tidegate.cli.top_frame import Sample, frame
from tidegate.cli.wording import parsed
from tidegate.client import Client
from tidegate.clock import monotonic, utc_now
from tidegate.errors import RequestRefused, TidegateError, Unavailable
from tidegate.model import units

# Rates are over so many looks: one that falls between two batches says little.
LOOKS = 5
DECISIONS = 30
MIN_INTERVAL_MS = 100
QUIT = "q"
# So often a key or another size of the terminal is noticed.
_NOTICE_SECONDS = 0.1
_REQUEST_SECONDS = 10.0


@click.command()
@click.option("--interval", default="2s", show_default=True, metavar="DURATION", help="How often to look.")
@click.option("--once", is_flag=True, help="Look twice, print one frame and end.")
def top(interval: str, once: bool) -> None:
    """Watch rates, queues, what is held and why, pauses, breakers and decisions. Leave with q or Ctrl-C."""
    interval_ms = parsed(units.duration_ms, interval, "--interval")
    if interval_ms < MIN_INTERVAL_MS:
        raise click.UsageError(f"--interval must be at least {MIN_INTERVAL_MS}ms")
    given = settings.load()
    with Client(given.url, given.token, _REQUEST_SECONDS, actor=user()) as api:
        view = View(api, given.url)
        if once:
            view.look()
            time.sleep(interval_ms / 1000)
            view.look()
            _print_plain(view)
            return
        with contextlib.suppress(KeyboardInterrupt):
            _watch(view, interval_ms / 1000)


class View:
    """The last looks, and since when there was none."""

    def __init__(self, api: Client, url: str) -> None:
        self._api = api
        self._url = url
        self._looks: deque[Sample] = deque(maxlen=LOOKS)
        self._trouble: str | None = None

    def look(self) -> None:
        """Ask the API. Raises what it refuses with."""
        health = self._api.request("GET", "/admin/event-health")
        if "totals" not in health:
            raise TidegateError("the token is bound to sources, and top shows the whole; use one that is not")
        decisions = self._api.request("GET", "/admin/decisions", limit=DECISIONS)["decisions"]
        self._looks.append(Sample(health, decisions))
        self._trouble = None

    def try_to_look(self) -> None:
        """Ask the API; when nobody answers, say since when. What a token may not see is raised."""
        try:
            self.look()
        except TidegateError as exc:
            if not isinstance(exc, Unavailable) and not (isinstance(exc, RequestRefused) and exc.status >= 500):
                raise
            if self._trouble is None:
                self._trouble = f"not reachable since {utc_now():%Y-%m-%d %H:%M:%S} UTC: {exc}"

    def lines(self, width: int, height: int | None) -> list[Text]:
        return frame(self._looks, self._url, width=width, height=height, trouble=self._trouble)


def _watch(view: View, seconds: float) -> None:
    console = Console()
    if not console.is_terminal:
        while True:
            view.try_to_look()
            _print_plain(view)
            click.echo("")
            time.sleep(seconds)
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as pressed:
        while True:
            view.try_to_look()
            next_at = monotonic() + seconds
            size = None
            while (left := next_at - monotonic()) > 0:
                if (now := os.get_terminal_size(sys.stdout.fileno())) != size:
                    # The terminal's own word: COLUMNS in the environment would stay as it was.
                    size = console.size = now
                    live.update(Group(*view.lines(now.columns, now.lines)), refresh=True)
                if set(pressed(min(left, _NOTICE_SECONDS))) & {QUIT, QUIT.upper()}:
                    return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for keys for so long at most; empty when there was none."""
    if not sys.stdin.isatty():

        def wait(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield wait
        return
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def wait_for_key(seconds: float) -> str:
        ready, _, _ = select.select([file], [], [], seconds)
        if not ready:
            return ""
        try:
            read = os.read(file, 64)
        except OSError:
            read = b""
        return read.decode(errors="replace") or QUIT  # the terminal is gone

    tty.setcbreak(file)
    try:
        yield wait_for_key
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _print_plain(view: View) -> None:
    for line in view.lines(10_000, None):
        click.echo(line.plain)
