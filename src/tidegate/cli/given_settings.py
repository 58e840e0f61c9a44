"""The settings of commands that end by themselves; a variable that is probably misspelt is named on standard error."""

from __future__ import annotations

from functools import cache

import click

from tidegate import settings
from tidegate.settings import Settings


def load_settings() -> Settings:
    """The settings. Once in a process, warns about variables TIDEGATE_… that are not settings."""
    _warn()
    return settings.load()


@cache
def _warn() -> None:
    for variable, meant in settings.unknown_variables():
        click.echo(f"tidegate: {variable} is not a setting, and is ignored; {advice(meant)}", err=True)


def advice(meant: str) -> str:
    """What to do about a variable that is not known, given the name that was probably meant, or an empty one."""
    return f"did you mean {meant}?" if meant else "see docs/settings.md"
