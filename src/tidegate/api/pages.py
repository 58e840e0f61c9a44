"""Lists in pages: read `limit` and `cursor`, fetch one row more than asked, cut it off, name the next page.

The extra row says whether another page follows, without a count. A cursor is what identifies the last row of a page:
its id, its name, or a position encoded by the list itself (`encode`, `decode`).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from tidegate.api.routes import Query, parameters
from tidegate.errors import FieldError, InvalidInput

DEFAULT_LIMIT = 50
_MAX_NUMBER = 2**63 - 1

T = TypeVar("T")


def page_query(cursor: Literal["string", "uuid"] = "string") -> tuple[Query, Query]:
    """The query parameters of every list that comes in pages."""
    return (
        Query("limit", "integer", f"Maximum number of results (default {DEFAULT_LIMIT})."),
        Query("cursor", cursor, "`next_cursor` of the previous page."),
    )


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The page that a request asks for: its checked query parameters, and its limit."""

    given: dict[str, Any]
    limit: int

    def get(self, name: str) -> Any:
        """A filter; None when it was not given."""
        return self.given.get(name)

    @property
    def cursor(self) -> Any:
        """The cursor, as the type that the list's query declares; None for the first page."""
        return self.given.get("cursor")

    @property
    def fetch_limit(self) -> int:
        """How many rows to read: one more than the page holds."""
        return self.limit + 1

    def number_cursor(self) -> int | None:
        """The cursor of a list whose rows are numbered. InvalidInput when it is not a number."""
        text: str | None = self.cursor
        if text is None:
            return None
        if not (len(text) <= 20 and text.isascii() and text.isdigit() and int(text) <= _MAX_NUMBER):
            raise invalid_cursor()
        return int(text)

    def cut(self, found: Sequence[T], cursor: Callable[[T], object]) -> tuple[list[T], str | None]:
        """The rows of this page, and the cursor of the next; `found` holds up to `fetch_limit` rows."""
        rows = list(found[: self.limit])
        return rows, str(cursor(rows[-1])) if len(found) > self.limit else None


def read(request: Request, query: tuple[Query, ...]) -> PageRequest:
    """The page that is asked for. InvalidInput names a parameter that is unknown or malformed."""
    given = parameters(request, query)
    return PageRequest(given, given.get("limit", DEFAULT_LIMIT))


def encode(position: bytes) -> str:
    """A position in a list as a cursor."""
    return base64.urlsafe_b64encode(position).decode().rstrip("=")


def decode(cursor: str) -> bytes:
    """The position in a cursor. ValueError when `encode` did not create it."""
    return base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4))


def invalid_cursor() -> InvalidInput:
    """For a cursor that the list did not hand out."""
    message = "is not a cursor of this list; pass `next_cursor` of the previous page"
    return InvalidInput("a query parameter is not valid", [FieldError("cursor", message)])
