"""What commands that talk to the API share: the client from the settings, tables for people, JSON for programs."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Sequence
from typing import Any

import click
import msgspec

from headgate import settings
from headgate.client import Client


def client() -> Client:
    """A client for the API at `HEADGATE_URL`."""
    given = settings.load()
    return Client(given.url, given.token, actor=user())


def user() -> str | None:
    """Who acts, for the audit log."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return None
    return name if name.isascii() and name.isprintable() else None


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """A table; the width is the terminal's, or all that is needed when piped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        click.echo(empty)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="ellipsis", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    lines = [line.rstrip() for line in _rendered(console, table)]
    click.echo("\n".join(lines))


def _rendered(console: Any, table: Any) -> list[str]:
    with console.capture() as capture:
        console.print(table)
    text: str = capture.get()
    return text.splitlines()


def plain(cell: str) -> str:
    """Event text may hold anything; a terminal gets no control characters of it."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cell)


def short_json(value: Any, width: int = 60) -> str:
    if value is None:
        return ""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= width else f"{text[: width - 1]}…"


def short_duration(ms: float) -> str:
    """`90s`, `5m`, `2h`: as durations are written on the command line, in the largest unit that is whole."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms >= size and ms % size == 0:
            return f"{ms // size:.0f}{unit}"
    return f"{ms:.0f}ms" if ms < 1000 else f"{ms / 1000:.1f}s"


def short_rate(count: int, window_ms: int) -> str:
    """`20/s`, `500/min`, `20/10s`: as rates are written."""
    window = short_duration(window_ms)
    return f"{count}/{ {'1s': 's', '1m': 'min', '1h': 'h', '1d': 'd'}.get(window, window) }"


def short_eta(seconds: float | None) -> str:
    """How long from now, for people; empty when nobody can say."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 120:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 120 else f"{minutes // 60}h {minutes % 60}m"


def short_time(text: str | None) -> str:
    return text[:19].replace("T", " ") if text else ""
