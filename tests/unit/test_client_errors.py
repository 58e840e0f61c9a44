"""Over HTTP the same exceptions as on the app object: what the API answers, the clients raise again."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

import tidegate
from tidegate import AsyncClient, Client
from tidegate.api import problems
from tidegate.api.problems import Problem
from tidegate.errors import (
    Conflict,
    FieldError,
    Forbidden,
    InvalidInput,
    NotFound,
    Overloaded,
    RequestRefused,
    SecretsUnreadable,
    TidegateError,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)

FIELD = FieldError("payload.n", "must be a number")
LARGE = FieldError("payload", "at most 256 KiB", too_large=True)
# What the server raises, the status of its answer, and what a client raises.
RAISED: list[tuple[TidegateError, int, type[TidegateError]]] = [
    (InvalidInput("not valid", [FIELD]), 422, InvalidInput),
    (InvalidInput("not valid", [LARGE]), 413, InvalidInput),
    (Problem(400, "not JSON", [FIELD]), 400, InvalidInput),
    (Problem(415, "the content type is not supported"), 415, InvalidInput),
    (NotFound("no run"), 404, NotFound),
    (Conflict("another body", [FIELD]), 409, Conflict),
    (Unauthorized("no token"), 401, Unauthorized),
    (Unauthorized("an expired token", is_given=True), 401, Unauthorized),
    (Forbidden("needs operate", "operate", [FIELD]), 403, Forbidden),
    (Problem(403, "from another site"), 403, Forbidden),
    (TooManyRequests("the rate", 7), 429, TooManyRequests),
    (Unavailable("the database", 3), 503, Unavailable),
    (Overloaded("too much", 2), 503, Overloaded),
    (SecretsUnreadable("another key", 5), 503, Unavailable),
    (Problem(405, "not possible here"), 405, RequestRefused),
    (Problem(408, "too slow"), 408, RequestRefused),
    (Problem(431, "too large a head"), 431, RequestRefused),
]
SHARED = ("errors", "needed", "is_given", "retry_after_seconds")


def serving(answer: httpx.Response) -> httpx.MockTransport:
    return httpx.MockTransport(
        lambda _: httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)
    )


async def raised_by_clients(answer: httpx.Response) -> list[TidegateError]:
    """What the blocking and the async client raise for one answer."""
    found = []
    with Client("http://server") as client:
        client._http = httpx.Client(base_url="http://server", transport=serving(answer))
        with pytest.raises(TidegateError) as caught:
            client.publish("a.b", source="s")
        found.append(caught.value)
    async with AsyncClient("http://server") as other:
        other._http = httpx.AsyncClient(base_url="http://server", transport=serving(answer))
        with pytest.raises(TidegateError) as caught:
            await other.publish("a.b", source="s")
        found.append(caught.value)
    return found


@pytest.mark.parametrize(
    ("given", "status", "expected"), RAISED, ids=lambda value: getattr(value, "__name__", str(value))
)
async def test_a_client_raises_what_the_server_raised(
    given: TidegateError, status: int, expected: type[TidegateError]
) -> None:
    answer = problems.response(given)
    assert answer.status_code == status
    sent = httpx.Response(status, headers=answer.headers.items(), content=bytes(answer.body))
    for found in await raised_by_clients(sent):
        assert isinstance(found, expected) and str(given.args[0]) in str(found)
        assert isinstance(found, RequestRefused) == (status not in (429, 503))
        if isinstance(given, expected):
            for name in SHARED:
                assert getattr(found, name, None) == getattr(given, name, None) or name == "errors", name
        if isinstance(found, RequestRefused):
            assert (found.status, found.problem["status"]) == (status, status)
            assert found.errors == getattr(given, "errors", [])
        else:
            assert type(found) is expected


@pytest.mark.parametrize(
    ("status", "body", "expected", "text"),
    [
        (502, b"<html>bad gateway</html>", RequestRefused, "<html>bad gateway</html>"),
        (503, b"", Unavailable, "HTTP 503"),
        (503, b'{"status": "critical"}', Unavailable, "HTTP 503"),
        (404, b"[]", NotFound, "[]"),
        (403, b"{}", Forbidden, "HTTP 403"),
        (422, b'{"detail": "no", "errors": {"field": "x"}}', InvalidInput, "no"),
        (422, b'{"detail": "no", "errors": ["x", {"field": "f"}]}', InvalidInput, "no (f: None)"),
        (500, b'{"title": "Internal error"}', RequestRefused, "Internal error"),
    ],
)
async def test_answers_of_others_on_the_way(status: int, body: bytes, expected: type[TidegateError], text: str) -> None:
    for found in await raised_by_clients(httpx.Response(status, headers={"retry-after": "soon"}, content=body)):
        assert isinstance(found, expected) and str(found) == text
        assert getattr(found, "retry_after_seconds", 1) == 1


def test_all_of_them_are_exported() -> None:
    for _, _, kind in RAISED:
        assert getattr(tidegate, kind.__name__) is kind


def test_only_overload_has_a_type_of_its_own() -> None:
    def type_of(exc: Exception) -> Any:
        return msgspec.json.decode(bytes(problems.response(exc).body))["type"]

    assert type_of(Overloaded("x")) == "urn:tidegate:overloaded"
    assert {type_of(exc) for exc, _, _ in RAISED if not isinstance(exc, Overloaded)} == {"about:blank"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_does_not_have_are_refused_before_they_are_sent(value: float) -> None:
    """They would arrive as null."""
    with Client("http://127.0.0.1:9") as client:
        with pytest.raises(InvalidInput, match=r"payload\.lines\[1\]\.price: is not a finite number"):
            client.publish("a.b", source="s", payload={"lines": [{"price": None}, {"price": value}]})
        with pytest.raises(InvalidInput, match=r"\[1\]\.payload\.x: is not a finite number"):
            client.publish_many([{"type": "a", "source": "s"}, {"type": "a", "source": "s", "payload": {"x": value}}])
