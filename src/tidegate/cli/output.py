"""Shared by commands that call the API: the client from the settings, tables for people, JSON for programs."""

from __future__ import annotations

import getpass
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from itertools import chain
from typing import Any

import click
import msgspec
from rich.cells import cell_len

from tidegate.cli.given_settings import load_settings
from tidegate.client import Client

# The gap between two columns; the indent of the second and later lines of a row.
_GAP, _INDENT = "  ", "  "
_PAGE = 500

# A JSON object of the API.
Json = dict[str, Any]


def client() -> Client:
    """A client for the API at `TIDEGATE_URL`."""
    given = load_settings()
    return Client(given.url, given.token, actor=user(), ca_file=given.ca_file)


def user() -> str | None:
    """The name of the operating system's user, as the actor in the audit log."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return None
    return name if name.isascii() and name.isprintable() else None


def all_pages(api: Client, path: str, name: str) -> list[Any]:
    """All rows of a list, read page by page; `name` is its key in the answer."""
    found: list[Any] = []
    cursor: str | None = None
    while True:
        page = api.request("GET", path, limit=_PAGE, cursor=cursor)
        found += page[name]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`, and `--local` for the times in what is printed for people."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(local_option(command))


def page_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--limit` and `--cursor` of a list."""
    command = click.option("--cursor", default=None, help="Continue the list: as the note on the page before says.")(
        command
    )
    return click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 500))(command)


def require_answer(*, yes: bool, dry_run: bool) -> None:
    """Refuse a bulk command that would have to ask for confirmation where nobody can answer."""
    if not (yes or dry_run or sys.stdin.isatty()):
        raise click.UsageError(
            "this asks for confirmation, and standard input is not a terminal: add --yes to go ahead, or --dry-run to "
            "count the items"
        )


def confirm(question: str) -> None:
    """Ask on standard error, apart from the output that a program may read; Abort unless the answer is yes."""
    click.confirm(question, abort=True, err=True)


def asks(question: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """`--yes` of a command that takes something away, and the question before it on a terminal; `question` may name the
    command's arguments. Without a terminal nobody is asked, so that scripts need no option."""

    def asking(command: Callable[..., object]) -> Callable[..., object]:
        @wraps(command)
        def asked(*, yes: bool, **given: object) -> object:
            if not yes and sys.stdin.isatty():
                confirm(printable(question.format(**given)))
            return command(**given)

        return click.option("--yes", is_flag=True, help="Do not ask for confirmation on a terminal.")(asked)

    return asking


def print_json(value: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str, page: Mapping[str, Any] | None = None
) -> None:
    """Print a table: one line per row when piped, several per row on a terminal that is too narrow. If `page` is not
    the last one, a note says so on standard error, apart from the output that a program may read."""
    if not rows:
        click.echo(empty)
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lines = table_lines(columns, rows, width)
    heading, body = lines[0], lines[1:]
    click.echo("\n".join([*(click.style(line, bold=True) for line in heading), *chain.from_iterable(body)]))
    if page is not None and page["next_cursor"] is not None:
        more = f"… more than these {len(rows)} exist: use --limit (up to 500) or a narrower filter"
        context = click.get_current_context(silent=True)
        if context is not None and any(option.name == "cursor" for option in context.command.params):
            more += f", or continue with --cursor {page['next_cursor']}"
        click.echo(more, err=True)


def none_found(items: str, *filters: object) -> str:
    """What to print instead of an empty table: "No runs yet.", or "No runs match." if a filter was given."""
    return f"No {items} match." if any(one is not None for one in filters) else f"No {items} yet."


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[list[str]]:
    """The lines of the heading and of each row. Nothing is truncated: ids are copied, and reasons are read in full."""
    cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(cell_len(row[place]) for row in cells) for place in range(len(columns))]
    groups = _packed(widths, width)
    return [[line for group in groups for line in _group_lines(row, widths, group, width)] for row in cells]


def _packed(widths: Sequence[int], width: int | None) -> list[range]:
    """The groups of columns that share a line: as many as fit, in order."""
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
    # Only a cell that is wider than the terminal gets here: it has the line to itself.
    return textwrap.wrap(row[group.start], max(20, width), initial_indent=indent, subsequent_indent=_INDENT)


def printable(cell: str) -> str:
    """Text without control characters: event data may contain any, and a terminal would interpret them."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cell)


def short_json(value: Any, width: int = 60) -> str:
    if value is None:
        return ""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= width else f"{text[: width - 1]}…"


def short_eta(seconds: float | None) -> str:
    """A duration in short form; empty when it is unknown."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 120:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes}m"
    hours, rest = divmod(minutes, 60)
    return f"{hours}h {rest}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


# Whether times are printed in the zone of this machine; UTC otherwise.
_is_local: ContextVar[bool] = ContextVar("is_local", default=False)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC")


def local_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--local`: print times in the zone of this machine."""

    def chosen(_: click.Context, __: click.Parameter, value: bool) -> None:
        _is_local.set(value)

    return click.option(
        "--local", is_flag=True, expose_value=False, callback=chosen, help="Print times in this machine's time zone."
    )(command)


def short_time(text: str | None) -> str:
    """A time of the API to the second: in UTC, or with its zone in that of this machine (`--local`)."""
    if not text:
        return ""
    if not _is_local.get():
        return text[:19].replace("T", " ")
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S %Z}"


def zoned_time(text: str | None) -> str:
    """As `short_time`, with the zone in any case: for times within sentences."""
    return f"{short_time(text)} UTC" if text and not _is_local.get() else short_time(text)


def local_text(text: str) -> str:
    """A sentence of the API with its times in the zone that was asked for."""
    if not _is_local.get():
        return text
    return _TIME.sub(lambda found: short_time(f"{found[1].replace(' ', 'T')}+00:00"), text)


def kept_for(seconds: int) -> str:
    """How long events are kept, in words."""
    days, rest = divmod(seconds, 86_400)
    time = short_eta(seconds) if rest or not days else f"{days} day{'s' * (days > 1)}"
    return f"events are kept for {time}" if seconds else "events are kept for ever"
