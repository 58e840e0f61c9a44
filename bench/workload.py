"""The events that every figure writes: the same payload over HTTP and in plain SQL."""

from __future__ import annotations

from typing import Any

import msgspec

TYPE = "order.created"
SOURCE = "shop.api"


def payload(number: int) -> dict[str, Any]:
    """An order of about 250 bytes that both predicates of `bench.app` let through."""
    return {
        "id": number,
        "amount": 120.5,
        "currency": "EUR",
        "customer": {"id": f"c-{number % 997}", "country": "DE", "email": f"customer{number % 997}@example.com"},
        "lines": [{"sku": "A-1001", "quantity": 2, "price": 40.25}, {"sku": "B-2002", "quantity": 1, "price": 40.0}],
    }


def parameters(number: int) -> dict[str, Any]:
    """The arguments that the workflow of `bench.app` takes from the payload."""
    return {"id": number, "amount": 120.5}


def external_id(number: int) -> str:
    return f"order-{number}"


def event(number: int, type: str = TYPE, source: str = SOURCE) -> dict[str, Any]:
    """An event as a producer sends it."""
    return {"id": external_id(number), "type": type, "source": source, "payload": payload(number)}


def bodies(first: int, count: int, batch: int, type: str = TYPE, source: str = SOURCE) -> list[bytes]:
    """Request bodies for `count` events from number `first`, `batch` to a request; one event goes without a list."""
    numbers = range(first, first + count)
    if batch == 1:
        return [msgspec.json.encode(event(n, type, source)) for n in numbers]
    return [
        msgspec.json.encode([event(n, type, source) for n in numbers[i : i + batch]]) for i in range(0, count, batch)
    ]
