"""Error messages of the server, with the names that the command line and files use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from tidegate.errors import FieldError, InvalidInput, RequestRefused
from tidegate.model.wording import as_written


@contextmanager
def written_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name the fields as the user wrote them, where `names` has them (`pause_ms`: `--pause`)."""
    try:
        yield
    except RequestRefused as exc:
        errors = [_renamed(error, names) for error in exc.problem.get("errors", [])]
        raise type(exc)(exc.status, exc.problem | {"errors": errors}) from exc
    except InvalidInput as exc:
        raise InvalidInput(exc.args[0], [as_written(error, names) for error in exc.errors]) from exc


def parsed(parse: Callable[[str], Any], text: str, option: str) -> Any:
    """A rate or duration as parsed by `parse`. UsageError names the option."""
    try:
        return parse(text)
    except ValueError as exc:
        raise click.UsageError(f"{option}: {exc}") from exc


def _renamed(error: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    found = as_written(FieldError(error["field"], error["message"]), names)
    return error | {"field": found.field, "message": found.message}
