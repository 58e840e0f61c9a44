"""What is published, by number: the same seed and number are always the same event."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

# How many of a hundred events are of which kind.
MIX = {
    "plain": 28,
    "steps": 16,
    "nap": 8,
    "long": 6,
    "throttled": 10,
    "narrow": 10,
    "keyed": 8,
    "limited": 6,
    "paused": 4,
    "stopped": 2,
    "broken": 2,
}
SOURCES = {"limited": "limited", "paused": "pausable"}
CUSTOMERS = 5
# So many events share an idempotency key.
REPEATS = 3


class Event(NamedTuple):
    """An event to publish; `is_once`: it is sent a single time, whatever the answer."""

    key: str
    body: dict[str, Any]
    is_once: bool

    @property
    def has_id(self) -> bool:
        return "id" in self.body


def event(seed: int, n: int) -> Event:
    """The event with this number."""
    chance = random.Random(seed * 1_000_003 + n)
    kind = chance.choices(list(MIX), weights=list(MIX.values()))[0]
    key = f"{seed}-{n}"
    payload: dict[str, Any] = {"key": key}
    if kind == "steps":
        payload["fails"] = chance.choice([0, 0, 1, 2])
    elif kind == "narrow":
        payload["customer"] = f"c{chance.randrange(CUSTOMERS)}"
    elif kind == "keyed":
        payload["order"] = f"o{n // (REPEATS * 100 // MIX['keyed'])}"
    elif kind == "broken":
        payload["is_bad"] = chance.random() < 0.5
    body: dict[str, Any] = {
        "type": f"chaos.{kind}",
        "source": SOURCES.get(kind, f"shop.{chance.randrange(4)}"),
        "payload": payload,
    }
    fate = chance.random()
    if fate >= 0.05:  # the others have no id: nobody may send them twice
        body["id"] = key
    return Event(key, body, is_once=fate < 0.10)
