"""The page of commands and routes has every command and route there is, with its scope, and no other. No command has an
option twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from tidegate.api.server import ROUTES
from tidegate.cli import cli

PAGE = (Path(__file__).parent.parent.parent / "docs" / "commands.md").read_text()
# Served beside the table of routes.
PAGES = {"GET /docs", "GET /openapi.json"}


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[str]:
    """The names of the commands below one, as they are typed."""
    if not isinstance(command, click.Group):
        yield " ".join(path)
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from commands(found, (*path, name))


def test_every_command_is_there_and_every_command_there_exists() -> None:
    known = set(commands(cli, ("tidegate",)))
    tables = "\n".join(line for line in PAGE.split("## Routes")[0].splitlines() if line.startswith("|"))
    told = {" ".join(re.findall(r"[a-z-]+", words)) for words in re.findall(r"`(tidegate(?: [a-z][a-z-]*)+)", tables)}
    assert told == known


def test_no_command_has_an_option_twice() -> None:
    """It would print a warning with every call."""

    def twice(command: click.Command, path: tuple[str, ...]) -> Iterator[str]:
        context = click.Context(command)
        options = [name for one in command.params if isinstance(one, click.Option) for name in one.opts]
        yield from (f"{' '.join(path)} {name}" for name in set(options) if options.count(name) > 1)
        for name in command.list_commands(context) if isinstance(command, click.Group) else ():
            found = command.get_command(context, name)
            assert found is not None
            yield from twice(found, (*path, name))

    assert list(twice(cli, ("tidegate",))) == []


def test_every_route_is_there_with_its_scope_and_every_route_there_exists() -> None:
    known = {f"{route.method} {re.sub(r':[a-z]+}', '}', route.path)}": route.scope for route in ROUTES}
    told: dict[str, str] = {}
    for line in PAGE.split("## Routes")[1].splitlines():
        scope = re.search(r"\((publish|read|operate|admin)\) \|$", line)
        told |= dict.fromkeys(re.findall(r"`([A-Z]+ /[^`]+)`", line), scope[1] if scope else "public")
    assert {route: scope for route, scope in told.items() if route not in PAGES} == known
    assert told.keys() >= PAGES
