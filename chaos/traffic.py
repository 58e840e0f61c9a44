"""What is published, by number: the same seed and number are always the same event."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

# How many of a hundred events are of which kind.
MIX = {
    "plain": 24,
    "steps": 16,
    "nap": 8,
    "long": 6,
    "throttled": 10,
    "narrow": 10,
    "keyed": 8,
    "fan": 4,
    "limited": 6,
    "paused": 4,
    "stopped": 2,
    "broken": 2,
}
# What each kind of event sets going: the steps of each workflow, in order. `broken` has none.
STEPS: dict[str, dict[str, tuple[str, ...]]] = {
    "plain": {"plain": ("only",)},
    "steps": {"steps": ("first", "second", "third")},
    "nap": {"nap": ("before", "after")},
    "long": {"long": ("only",)},
    "throttled": {"throttled": ("only",)},
    "narrow": {"narrow": ("only",)},
    "keyed": {"keyed": ("only",), "keyed_narrow": ("only",), "each": ("only",)},
    "fan": {"fan_free": ("only",), "fan_narrow": ("first", "second"), "fan_throttled": ("only",)},
    "limited": {"limited": ("only",)},
    "paused": {"paused": ("only",)},
    "stopped": {"stopped": ("only",)},
}
# Workflows that run once for each order, however many events tell of it.
KEYED = {"keyed", "keyed_narrow"}
SOURCES = {"limited": "limited", "paused": "pausable"}
CUSTOMERS = 5
# So many requests share an idempotency key, and a request has up to so many events with it.
REPEATS = 3
TOGETHER = 4


class Event(NamedTuple):
    """An event to publish; `is_once`: it is sent a single time, whatever the answer."""

    key: str
    body: dict[str, Any]
    is_once: bool

    @property
    def has_id(self) -> bool:
        return "id" in self.body


def events(seed: int, n: int) -> list[Event]:
    """What the request with this number publishes: one event, or several that share an idempotency key."""
    first = event(seed, n)
    if "order" not in first.body["payload"]:
        return [first]
    made = [first]
    for i in range(1, random.Random(f"{seed}:{n}").randint(1, TOGETHER)):
        key = f"{first.key}.{i}"
        body = first.body | {"payload": first.body["payload"] | {"key": key}}
        made.append(Event(key, body | {"id": key} if first.has_id else body, first.is_once))
    return made


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
