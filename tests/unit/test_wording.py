"""Errors name the fields as whoever reads them has written them: in code, in files, as options."""

from __future__ import annotations

from typing import Any

import click
import pytest

from tidegate import Breaker, Context, Tidegate
from tidegate.cli.trigger_files import trigger_fields
from tidegate.cli.wording import written_as
from tidegate.errors import AppError, FieldError, InvalidInput, RequestRefused
from tidegate.model.trigger_change import created
from tidegate.model.wording import as_written

KEY = "{{ event.payload.customer }}"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"throttle": "often"}, "workflow work: throttle: a rate is written like .*, not 'often'"),
        ({"throttle": "2000000000/s"}, "throttle: must be a whole number from 1 to 1000000000"),
        ({"timeout": "soon"}, "workflow work: timeout: a duration is written like .*, not 'soon'"),
        ({"idempotency_window": -1}, "workflow work: idempotency_window: a duration lies between .*, not -1"),
        ({"max_concurrency": "3"}, "max_concurrency: must be a whole number"),
        ({"concurrency_key": KEY}, "max_concurrency: is required with concurrency_key"),
        ({"on": " "}, " on: must be 1 to 200 characters"),
        ({"source": ""}, " source: must be 1 to 200 characters"),
        ({"params": {"a": "{{ event.payload.a"}}, r" params\.a: "),
    ],
)
def test_a_declaration(declared: dict[str, Any], message: str) -> None:
    async def work(ctx: Context) -> None: ...

    with pytest.raises(AppError, match=message):
        Tidegate().workflow(**{"on": "order.created"} | declared)(work)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": "0s"}, "Breaker: window must be at least 1 ms, not '0s'"),
        ({"pause": "long"}, "Breaker: pause: a duration is written like"),
        ({"threshold": 0}, "Breaker: threshold must be a number between 1 and 10000, not 0"),
        ({"threshold": "5"}, "Breaker: threshold must be a number between 1 and 10000, not '5'"),
        ({"ratio": 2}, "Breaker: ratio must be a number between 0 and 1, not 2"),
    ],
)
def test_a_breaker(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Breaker(**given)


def refused(given: dict[str, Any]) -> list[FieldError]:
    """What the server says against a trigger in a file, as its author reads it."""
    fields, names = trigger_fields({"name": "t", "event_type": "e"} | given, keep_version=False)
    with pytest.raises(InvalidInput) as exc:
        created(fields, "work", [])
    return [as_written(error, names) for error in exc.value.errors]


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"retry": {"base": "10m", "cap": "5s"}}, "retry.cap",
         "must not be below base, 600000: it is 5000 (in milliseconds)"),
        ({"retry": {"base_ms": 10, "max_ms": 5}}, "retry.max_ms", "must not be below base_ms, 10: it is 5"),
        ({"retry": {"base": "0s"}}, "retry.base", "must lie between 1 and 31622400000, not 0 (in milliseconds)"),
        ({"retry": {"jitter": 2}}, "retry.jitter", "must lie between 0 and 1, not 2.0"),
        ({"retry": {"jitter": "much"}}, "retry.jitter", "must be a number, not text"),
        ({"predicates": [{"path": "$.payload.n", "operator": "is"}]}, "predicates[0].operator",
         "must be one of contains, equals, exists, gt, gte, in, lt, lte, not_equals, not_in, regex, not 'is'"),
        ({"breaker": {"window": "0s"}}, "breaker.window",
         "must lie between 1 and 31622400000, not 0 (in milliseconds)"),
        ({"throttle": "2000000000/s"}, "throttle", "must be a whole number from 1 to 1000000000"),
        ({"throttle_count": 0, "throttle_window_ms": 1}, "throttle_count",
         "must be a whole number from 1 to 1000000000"),
    ],
)  # fmt: skip
def test_a_trigger_in_a_file(given: dict[str, Any], field: str, message: str) -> None:
    assert refused(given) == [FieldError(field, message)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"retry": {"base": "5s", "base_ms": 10}}, "retry.base and base_ms set the same field: give one of them"),
        ({"throttle": "1/s", "throttle_count": 2}, "throttle and throttle_count set the same field: give one of them"),
        ({"retry": {"cap": "late"}}, "retry.cap: a duration is written like"),
    ],
)
def test_a_trigger_that_cannot_be_sent(given: dict[str, Any], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        trigger_fields(given, keep_version=False)


def test_a_key_without_a_bound_is_refused_and_both_can_be_cleared() -> None:
    [error] = refused({"concurrency_key": KEY})
    assert error.field == "max_concurrency" and "concurrency_key" in error.message
    created({"name": "t", "event_type": "e", "concurrency_key": KEY, "max_concurrency": 1}, "work", [])


def test_what_the_server_refuses_names_the_option() -> None:
    problem = {"detail": "no", "errors": [{"field": "pause_ms", "message": "must lie between 0 and 9, not 10"}]}
    with pytest.raises(RequestRefused) as exc, written_as({"pause_ms": "--pause"}):
        raise RequestRefused(422, problem)
    assert str(exc.value) == "no (--pause: must lie between 0 and 9, not 10 (in milliseconds))"
    with pytest.raises(RequestRefused) as exc, written_as({}):
        raise RequestRefused(422, problem)
    assert str(exc.value) == "no (pause_ms: must lie between 0 and 9, not 10)"
