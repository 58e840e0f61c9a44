"""Completion of names: a parameter that is called `workflow`, `source`, `run_id` … completes what the API knows.

A shell asks at each press of the tab key: only what was answered within the deadline is suggested. Producers choose
names, and click's script for bash inserts them unquoted: a name that a shell could read as more than a word is not
suggested.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from tidegate.cli.output import Json, client
from tidegate.client import Client
from tidegate.errors import TidegateError

# For the answers of the API; with the start of the program, no more than a second.
DEADLINE_SECONDS = 0.5
_NEWEST = 50
# Characters without a meaning to bash, zsh and fish; not at the start: `-` (options), `=` (zsh: commands), `%` (jobs).
_PLAIN = re.compile(r"[A-Za-z0-9._:/@+][A-Za-z0-9._:/@%+=-]*")

# A name, and what a shell may show beside it.
Names = Iterator[tuple[str, str]]


def _workflows(api: Client, context: click.Context) -> Names:
    if context.parent is not None and context.parent.info_name == "schedules":
        for one in _read(api, "/v1/schedules", "schedules", 500):
            yield one["workflow"], "schedule"
        return
    for one in _read(api, "/v1/workflows", "workflows", 500):
        yield one["slug"], one["kind"]


def _sources(api: Client, context: click.Context) -> Names:
    for one in _read(api, "/v1/events", "events", 200):
        yield one["source"], ""
    for one in _read(api, "/admin/sources", "sources", 500):
        yield one["source"], ""


def _types(api: Client, context: click.Context) -> Names:
    for one in _read(api, "/v1/events", "events", 200):
        yield one["type"], ""


def _triggers(api: Client, context: click.Context) -> Names:
    for one in _read(api, "/admin/triggers", "triggers", 500):
        name = f"{one['workflow']}/{one['name']}"
        yield name if _PLAIN.fullmatch(name) else one["id"], one["event_type"]


def _budgets(api: Client, context: click.Context) -> Names:
    for one in _read(api, "/admin/budgets", "budgets", 500):
        yield one["name"], ""


def _runs(api: Client, context: click.Context) -> Names:
    for one in _read(api, "/v1/runs", "runs", _NEWEST):
        yield one["id"], f"{one['workflow']}, {one['status']}"


def _events(api: Client, context: click.Context) -> Names:
    for one in _read(api, "/v1/events", "events", _NEWEST):
        yield one["id"], f"{one['type']} from {one['source']}"


def _approvals(api: Client, context: click.Context) -> Names:
    for one in _read(api, "/admin/approvals", "approvals", _NEWEST):
        yield one["id"], f"{one['name']} of {one['workflow']}"


def _letters(api: Client, context: click.Context) -> Names:
    for one in _read(api, "/admin/dead-letters", "dead_letters", _NEWEST):
        yield one["id"], one["kind"]


def _any(api: Client, context: click.Context) -> Names:
    yield from _runs(api, context)
    yield from _events(api, context)


# By the names of parameters.
_KNOWN: dict[str, Callable[[Client, click.Context], Names]] = {
    "workflow": _workflows, "slug": _workflows, "source": _sources, "type": _types, "event_type": _types,
    "budget": _budgets, "trigger": _triggers, "trigger_id": _triggers, "run_id": _runs, "event": _events,
    "event_id": _events, "given": _any, "approval_id": _approvals, "letter_id": _letters,
}  # fmt: skip


def complete_names(command: click.Command) -> click.Command:
    """The command, for a shell that completes it: its parameters know their names."""
    for param in command.params:
        if param.name in _KNOWN and param.type is click.STRING:
            param.type = _Named(param.name)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            complete_names(inner)
    return command


class _Named(click.ParamType[str]):
    """Text that completes what is known by the parameter's name."""

    name = "text"

    def __init__(self, known: str) -> None:
        self._known = known

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found: dict[str, str] = {}
        filling = threading.Lock()
        try:
            api = client()
        except TidegateError:  # a setting is wrong: the command itself will say so
            return []

        def read() -> None:
            with suppress(Exception):  # no server, no token, an older server: there is nothing to suggest
                for name, about in _KNOWN[self._known](api, ctx):
                    with filling:
                        found.setdefault(name, about)

        reading = threading.Thread(target=read, daemon=True)  # it does not keep the process when the time is over
        reading.start()
        reading.join(DEADLINE_SECONDS)
        with filling:  # the thread may still be at it
            items = list(found.items())
        if self._known in ("workflow", "slug", "source", "trigger"):
            items.sort()
        return [
            CompletionItem(name, help=about)
            for name, about in items
            if name.startswith(incomplete) and _PLAIN.fullmatch(name)
        ]


def _read(api: Client, path: str, name: str, limit: int) -> list[Json]:
    found: list[Json] = api.request("GET", path, limit=limit)[name]
    return found
