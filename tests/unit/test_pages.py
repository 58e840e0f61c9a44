"""Lists in pages: the limit, one row more than asked, the next cursor, and cursors that no list handed out."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from tidegate.api import pages, server
from tidegate.api.pages import DEFAULT_LIMIT, PageRequest
from tidegate.errors import InvalidInput


def asked(query: str) -> PageRequest:
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": query.encode(), "headers": []}
    return pages.read(Request(scope), pages.page_query())


@pytest.mark.parametrize(
    ("query", "rows", "shown", "cursor"),
    [
        ("limit=2", 0, 0, None),
        ("limit=2", 1, 1, None),
        ("limit=2", 2, 2, None),
        ("limit=2", 3, 2, "1"),
        ("limit=1&cursor=7", 2, 1, "0"),
        ("", DEFAULT_LIMIT, DEFAULT_LIMIT, None),
        ("", DEFAULT_LIMIT + 1, DEFAULT_LIMIT, str(DEFAULT_LIMIT - 1)),
    ],
)
def test_a_page_is_cut_and_names_the_next(query: str, rows: int, shown: int, cursor: str | None) -> None:
    page = asked(query)
    found = list(range(rows))[: page.fetch_limit]
    assert page.cut(found, lambda row: row) == (found[:shown], cursor)


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "limit=", "nonsense=1", "cursor=%00"])
def test_a_query_that_is_not_valid_is_refused(query: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        asked(query)
    assert [error.field for error in refused.value.errors] == [query.partition("=")[0]]


def test_a_number_as_cursor() -> None:
    assert asked("").number_cursor() is None
    assert asked("cursor=9223372036854775807").number_cursor() == 2**63 - 1
    for wrong in ("", "x", "-1", "1.5", "9223372036854775808", "9" * 5000, "%C2%B2"):
        with pytest.raises(InvalidInput, match="cursor: is not a cursor of this list"):
            asked(f"cursor={wrong}").number_cursor()


@pytest.mark.parametrize("position", [b"", b"a", b"ab", b"abc", bytes(range(256))])
def test_a_position_survives_as_a_cursor(position: bytes) -> None:
    cursor = pages.encode(position)
    assert pages.decode(cursor) == position and "=" not in cursor and cursor.isascii()


def test_every_list_in_pages_takes_a_limit_and_a_cursor() -> None:
    lists = [route for route in server.ROUTES if "next_cursor" in getattr(route.returns[0], "__struct_fields__", ())]
    lists = [route for route in lists if route.method == "GET"]  # those that change many name the rest in their body
    assert len(lists) > 10
    for route in lists:
        assert {"limit", "cursor"} <= {query.name for query in route.query}, route.path
