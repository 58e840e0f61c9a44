"""Query parameters: each is given once, unless it may be repeated."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from starlette.requests import Request

from tidegate.api.routes import Query, parameters
from tidegate.api.v1 import runs
from tidegate.errors import InvalidInput

QUERY = (Query("status", "string", "", ("failed", "pending")), Query("tag", "string", "", repeats=True))


def asked(text: str) -> Request:
    return Request({"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": text.encode()})


def test_a_parameter_that_is_given_twice_is_refused_by_name() -> None:
    assert parameters(asked("status=failed"), QUERY) == {"status": "failed"}
    for text in ("status=failed&status=pending", "status=failed&status=failed", "status=failed&tag=a:1&status=pending"):
        with pytest.raises(InvalidInput) as refused:
            parameters(asked(text), QUERY)
        assert [(one.field, one.message) for one in refused.value.errors] == [("status", "is given more than once")]


def test_one_that_may_be_repeated_has_all_its_values() -> None:
    assert parameters(asked("tag=a:1&tag=b:2"), QUERY) == {"tag": ["a:1", "b:2"]}
    assert [query.name for query in runs.LIST_QUERY if query.repeats] == ["tag"]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [([], None), (["a:1"], '{"a":"1"}'), (["a:1", "b:2:3"], '{"a":"1","b":"2:3"}'), (["a:1", "a:1"], '{"a":"1"}')],
)
def test_runs_have_all_of_the_tags(tags: Sequence[str], expected: str | None) -> None:
    assert runs._filters({"tag": tags}, None).tags == expected


@pytest.mark.parametrize(
    ("tags", "told"), [(["a"], "must be a name and a value"), (["a:1", "a:2"], "asks for two values of 'a'")]
)
def test_a_tag_that_no_run_can_have_is_refused(tags: Sequence[str], told: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        runs._filters({"tag": tags}, None)
    assert [error.field for error in refused.value.errors] == ["tag"] and told in refused.value.errors[0].message
