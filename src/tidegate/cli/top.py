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

from tidegate.cli.given_settings import load_settings
from tidegate.cli.output import local_option, local_text, user
from tidegate.cli.top_frame import Sample, frame
from tidegate.cli.wording import parsed
from tidegate.client import Client
from tidegate.clock import monotonic, utc_now
from tidegate.errors import RequestRefused, TidegateError, Unavailable
from tidegate.model import units

# Rates are averages over this many samples: a single interval may fall between two batches.
SAMPLES = 5
DECISIONS = 30
MIN_INTERVAL_MS = 100
QUIT = "q"
# How often key presses and changes of the terminal's size are checked.
_NOTICE_SECONDS = 0.1
_REQUEST_SECONDS = 10.0


@click.command()
@click.option("--interval", default="2s", show_default=True, metavar="DURATION", help="Refresh interval.")
@click.option("--once", is_flag=True, help="Take two samples, print one frame and exit.")
@local_option
def top(interval: str, once: bool) -> None:
    """Watch rates, queues, held work and its reasons, pauses, breakers and decisions. Quit with q or Ctrl-C."""
    interval_ms = parsed(units.duration_ms, interval, "--interval")
    if interval_ms < MIN_INTERVAL_MS:
        raise click.UsageError(f"--interval must be at least {MIN_INTERVAL_MS}ms")
    given = load_settings()
    with Client(given.url, given.token, _REQUEST_SECONDS, actor=user(), ca_file=given.ca_file) as api:
        view = View(api, given.url)
        if once:
            view.sample()
            time.sleep(interval_ms / 1000)
            view.sample()
            _print_lines(view)
            return
        with contextlib.suppress(KeyboardInterrupt):
            _watch(view, interval_ms / 1000)


class View:
    """The last samples, and since when the API has not answered."""

    def __init__(self, api: Client, url: str) -> None:
        self._api = api
        self._url = url
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._problem: str | None = None

    def sample(self) -> None:
        """Read the API once. Raises its errors."""
        health = self._api.request("GET", "/admin/event-health")
        if "totals" not in health:
            raise TidegateError(
                "the token is bound to sources, and top shows the whole cluster; use a token that is not bound"
            )
        decisions = self._api.request("GET", "/admin/decisions", limit=DECISIONS)["decisions"]
        self._samples.append(Sample(health, decisions))
        self._problem = None

    def try_to_sample(self) -> None:
        """Read the API once; if it does not answer, note since when. Errors such as a missing scope are raised."""
        try:
            self.sample()
        except TidegateError as exc:
            if not isinstance(exc, Unavailable) and not (isinstance(exc, RequestRefused) and exc.status >= 500):
                raise
            if self._problem is None:
                self._problem = local_text(f"not reachable since {utc_now():%Y-%m-%d %H:%M:%S} UTC: {exc}")

    def lines(self, width: int, height: int | None) -> list[Text]:
        return frame(self._samples, self._url, width=width, height=height, problem=self._problem)


def _watch(view: View, seconds: float) -> None:
    console = Console()
    if not console.is_terminal:
        while True:
            view.try_to_sample()
            _print_lines(view)
            click.echo("")
            time.sleep(seconds)
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as pressed:
        while True:
            view.try_to_sample()
            next_at = monotonic() + seconds
            size = None
            while (left := next_at - monotonic()) > 0:
                if (now := os.get_terminal_size(sys.stdout.fileno())) != size:
                    # Asked of the terminal itself: COLUMNS in the environment does not follow a resize.
                    size = console.size = now
                    live.update(Group(*view.lines(now.columns, now.lines)), refresh=True)
                if set(pressed(min(left, _NOTICE_SECONDS))) & {QUIT, QUIT.upper()}:
                    return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits for key presses up to the given seconds; returns an empty string if there were none."""
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


def _print_lines(view: View) -> None:
    for line in view.lines(10_000, None):
        click.echo(line.plain)
