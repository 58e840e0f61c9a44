"""Error messages of the server, with the names that the command line and files use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from tidegate.errors import InvalidInput, RequestRefused
from tidegate.model.wording import as_written


@contextmanager
def written_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields as the user wrote them, where `names` has them (`pause_ms`: `--pause`)."""
    try:
        yield
    except RequestRefused as exc:
        renamed = [as_written(error, names) for error in exc.errors]
        errors = [{"field": error.field, "message": error.message} for error in renamed]
        raise type(exc)(exc.status, exc.problem | {"errors": errors}) from exc
    except InvalidInput as exc:
        raise InvalidInput(exc.args[0], [as_written(error, names) for error in exc.errors]) from exc


def parsed(parse: Callable[[str], Any], text: str, option: str) -> Any:
    """A rate or duration as parsed by `parse`. UsageError names the option."""
    try:
        return parse(text)
    except ValueError as exc:
        raise click.UsageError(f"{option}: {exc}") from exc
