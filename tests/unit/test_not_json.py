"""What a program publishes that is not JSON: refused by name, or converted as documented, alike by clients and app."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import httpx
import msgspec
import pytest

from tidegate import AsyncClient, Client
from tidegate.app import checked
from tidegate.errors import InvalidInput
from tidegate.settings import Settings


@dataclasses.dataclass
class Basket:
    items: Any


class Order(msgspec.Struct):
    basket: Any


SET = "a set is not JSON; use a list"
BYTES = "bytes are not JSON; use text, such as base64"
REFUSED: list[tuple[Any, str]] = [
    ({"items": {1, 2}}, f"payload.items: {SET}"),
    ({"items": frozenset()}, f"payload.items: {SET}"),
    ({"orders": [{"ok": 1}, {"raw": b"\x00"}]}, f"payload.orders[1].raw: {BYTES}"),
    ({"raw": (1, bytearray(b"x"))}, f"payload.raw[1]: {BYTES}"),
    ({"raw": memoryview(b"x")}, f"payload.raw: {BYTES}"),
    ({b"raw": 1}, f"payload.b'raw': {BYTES}"),
    ({"order": Order(Basket({1}))}, f"payload.order.basket.items: {SET}"),
    ({"items": [{1}, object()]}, f"payload.items[0]: {SET}"),
    ({"thing": {"of": object()}}, "payload.thing.of: is of type object, which is not JSON"),
    ({"order": Order(range(3))}, "payload.order.basket: is of type range, which is not JSON"),
    ({(1, 2): 3}, "payload: is not JSON: Only dicts with str-like or number-like keys are supported"),
]


def echo(request: httpx.Request) -> httpx.Response:
    """An API that accepts everything and answers with what it was sent, as the producer's id."""
    return httpx.Response(202, json={"id": "e", "status": "accepted", "external_id": request.content.decode()})


def by_app(payload: Any) -> Any:
    return msgspec.json.decode(checked({"type": "a.b", "source": "s", "payload": payload}, Settings()).payload)


def by_client(payload: Any) -> Any:
    with Client("http://server") as client:
        client._http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(echo))
        return msgspec.json.decode(client.publish("a.b", source="s", payload=payload).external_id or "")["payload"]


@pytest.mark.parametrize("publish", [by_app, by_client])
@pytest.mark.parametrize(("payload", "expected"), REFUSED)
def test_refused_by_name(publish: Callable[[Any], Any], payload: Any, expected: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        publish(payload)
    [error] = refused.value.errors
    assert f"{error.field}: {error.message}" == expected


async def test_an_async_client_and_a_batch_refuse_alike() -> None:
    async with AsyncClient("http://server") as client:
        client._http = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(echo))
        with pytest.raises(InvalidInput, match=r"\[1\]\.payload\.items: a set is not JSON"):
            await client.publish_many([{"type": "a", "source": "s"}, {"type": "a", "payload": {"items": {1}}}])


def test_a_payload_that_contains_itself_is_refused() -> None:
    payload: dict[str, Any] = {}
    payload["again"] = payload
    for publish in (by_app, by_client):
        with pytest.raises(InvalidInput):
            publish(payload)


@pytest.mark.parametrize("publish", [by_app, by_client])
def test_converted_as_documented(publish: Callable[[Any], Any]) -> None:
    one = uuid.UUID(int=7)
    given = {"at": datetime(2026, 1, 31, 9, 30, tzinfo=UTC), "day": date(2026, 1, 31), "price": Decimal("1.50"),
             "id": one, "pair": (1, 2), "basket": Basket(["a"])}  # fmt: skip
    assert publish(given) == {
        "at": "2026-01-31T09:30:00Z", "day": "2026-01-31", "price": "1.50", "id": str(one), "pair": [1, 2],
        "basket": {"items": ["a"]},
    }  # fmt: skip
