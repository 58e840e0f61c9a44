"""What commands that talk to the API share: the client from the settings, tables for people, JSON for programs."""

from __future__ import annotations

import getpass
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import click
import msgspec
from rich.cells import cell_len

from tidegate import settings
from tidegate.client import Client

# Between two columns; before the lines of a row that follow its first.
_GAP, _INDENT = "  ", "  "
_PAGE = 500


def client() -> Client:
    """A client for the API at `TIDEGATE_URL`."""
    given = settings.load()
    return Client(given.url, given.token, actor=user())


def user() -> str | None:
    """Who acts, for the audit log."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return None
    return name if name.isascii() and name.isprintable() else None


def all_pages(api: Client, path: str, name: str) -> list[Any]:
    """Everything that a list has, page by page; `name` is what the answer calls it."""
    found: list[Any] = []
    cursor: str | None = None
    while True:
        page = api.request("GET", path, limit=_PAGE, cursor=cursor)
        found += page[name]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str, page: Mapping[str, Any] | None = None
) -> None:
    """A table: one line for each row when piped, as many as it needs on a terminal that is too narrow. Of a `page` that
    has others behind it that is said, beside the output that a program may read."""
    if not rows:
        click.echo(empty)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = table_lines(columns, rows, width)
    heading, body = lines[0], lines[1:]
    click.echo("\n".join([*(click.style(line, bold=True) for line in heading), *chain.from_iterable(body)]))
    if page is not None and page["next_cursor"] is not None:
        click.echo(f"… and more than these {len(rows)}: --limit (up to 500) shows more, or narrow it down", err=True)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[list[str]]:
    """The lines of the heading and of each row. Nothing is cut: ids are to be copied, and reasons to be read."""
    cells = [[plain(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(cell_len(row[place]) for row in cells) for place in range(len(columns))]
    groups = _packed(widths, width)
    return [[line for group in groups for line in _group_lines(row, widths, group, width)] for row in cells]


def _packed(widths: Sequence[int], width: int | None) -> list[range]:
    """The columns that stand on one line together: as many as fit, in order."""
    groups: list[range] = []
    start, used = 0, 0
    for place, one in enumerate(widths):
        if width is not None and place > start and used + one > width:
            groups.append(range(start, place))
            start, used = place, len(_INDENT)
        used += one + len(_GAP)
    return [*groups, range(start, len(widths))]


def _group_lines(row: Sequence[str], widths: Sequence[int], group: range, width: int | None) -> list[str]:
    indent = _INDENT if group.start else ""
    padded = [row[place] + " " * (widths[place] - cell_len(row[place])) for place in group]
    line = (indent + _GAP.join(padded)).rstrip()
    if group.start and not line:
        return []
    if width is None or cell_len(line) <= width:
        return [line]
    # Only a cell that is longer than the terminal is wide comes here: it stands alone.
    return textwrap.wrap(row[group.start], max(20, width), initial_indent=indent, subsequent_indent=_INDENT)


def plain(cell: str) -> str:
    """Event text may hold anything; a terminal gets no control characters of it."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cell)


def short_json(value: Any, width: int = 60) -> str:
    if value is None:
        return ""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= width else f"{text[: width - 1]}…"


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
