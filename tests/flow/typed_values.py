"""Values of every kind of type that is kept, and an application whose steps return them, for worker processes."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import asyncpg
import msgspec
import pydantic

from tidegate import Context, Tidegate

T = TypeVar("T")


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Size(StrEnum):
    LARGE = "L"


class Line(msgspec.Struct, frozen=True):
    sku: str
    price: Decimal
    tags: frozenset[str] = frozenset()


class Customer(pydantic.BaseModel):
    id: uuid.UUID
    since: date
    level: Level = Level.HIGH
    roles: set[str] = set()
    note: str | None = pydantic.Field(default=None, alias="Note")


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, frozen=True)
    at: datetime
    of: tuple[int, ...]


class Card(pydantic.BaseModel):
    kind: Literal["card"] = "card"
    number: str


class Cash(pydantic.BaseModel):
    kind: Literal["cash"] = "cash"
    amount: Decimal


class Tree(pydantic.BaseModel):
    name: str
    inner: list[Tree] = []


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Circle(msgspec.Struct, tag="circle"):
    radius: float


class Square(msgspec.Struct, tag="square"):
    side: float


@dataclasses.dataclass
class Order:
    id: int
    customer: Customer
    lines: list[Line]
    placed_at: datetime
    colour: Colour = Colour.RED
    before: Order | None = None


@dataclasses.dataclass
class Visit:
    at: datetime
    of: Customer


class Basket(pydantic.BaseModel):
    visit: Visit | None
    lines: dict[str, Customer]


class Point(NamedTuple):
    x: int
    y: float


class Record(TypedDict):
    at: datetime
    of: Customer


ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
AT = datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=UTC)
CUSTOMER = Customer(id=ID, since=date(2020, 2, 29), roles={"buyer", "admin", "guest"}, Note="vip")
ORDER = Order(7, CUSTOMER, [Line("a", Decimal("1.10"), frozenset({"x", "y", "z"}))], AT)
AWAY = datetime(2026, 5, 4, tzinfo=timezone(timedelta(hours=5, minutes=30)))

# Name, declared type, value.
CASES: list[tuple[str, Any, Any]] = [
    ("str", str, "ä"),
    ("int", int, 7),
    ("float", float, 1e20),
    ("bool", bool, True),
    ("none", None, None),
    ("dict", dict, {"b": 1, "a": [None, 1.5]}),
    ("list", list[int], [1, 2]),
    ("dataclass", Order, dataclasses.replace(ORDER, before=ORDER)),
    ("struct", Line, Line("b", Decimal("0.30"))),
    ("tagged-union", Circle | Square, Square(2.0)),
    ("pydantic", Customer, CUSTOMER),
    ("pydantic-strict", Strict, Strict(at=AT, of=(1, 2))),
    ("pydantic-recursive", Tree, Tree(name="a", inner=[Tree(name="b")])),
    ("pydantic-generic", Page[Customer], Page[Customer](items=[CUSTOMER])),
    ("pydantic-in-list", list[Customer], [CUSTOMER]),
    ("pydantic-optional", Customer | None, CUSTOMER),
    ("pydantic-union", Card | Cash, Cash(amount=Decimal("5.00"))),
    ("pydantic-unions-in-dict", dict[str, list[Card | Cash]], {"a": [Card(number="4"), Cash(amount=Decimal(1))]}),
    ("dataclass-in-pydantic", Basket, Basket(visit=Visit(AT, CUSTOMER), lines={"x": CUSTOMER})),
    ("named-tuple", Point, Point(1, 2.0)),
    ("typed-dict", Record, {"at": AT, "of": CUSTOMER}),
    ("enum", Colour, Colour.RED),
    ("int-enum", Level, Level.HIGH),
    ("str-enum", Size, Size.LARGE),
    ("decimal", Decimal, Decimal("10.00")),
    ("datetime", datetime, AT),
    ("datetime-offset", datetime, AWAY),
    ("datetime-naive", datetime, datetime(2026, 1, 1, 12)),  # noqa: DTZ001
    ("date", date, date(2026, 5, 4)),
    ("time", time, time(12, 30, 1, 5)),
    ("timedelta", timedelta, timedelta(days=-1, seconds=5, microseconds=7)),
    ("uuid", uuid.UUID, ID),
    ("set", set[int], {3, 1, 2}),
    ("set-of-uuids", frozenset[uuid.UUID], frozenset({ID})),
    ("tuple", tuple[int, str, Decimal], (1, "a", Decimal("0.1"))),
    ("tuple-of-any-length", tuple[date, ...], (date(2026, 1, 1), date(2026, 1, 2))),
    ("bytes", bytes, b"\x00\xff"),
    ("literal", Literal["a", 1], "a"),
    ("optional", datetime | None, None),
    ("union", int | datetime, AT),
    ("keys-int", dict[int, str], {1: "a"}),
    ("keys-uuid", dict[uuid.UUID, Decimal], {ID: Decimal("1.0")}),
    ("keys-enum", dict[Colour, int], {Colour.RED: 1}),
]


def same(found: object, value: object) -> bool:
    """Equal, and of the same types all the way down."""
    if type(found) is not type(value) or found != value:
        return False
    if isinstance(value, dict) and isinstance(found, dict):
        kinds = [{key: type(key) for key in one} for one in (found, value)]
        return kinds[0] == kinds[1] and all(same(found[key], value[key]) for key in value)
    if isinstance(value, list | tuple) and isinstance(found, list | tuple):
        return all(same(a, b) for a, b in zip(found, value, strict=True))
    if isinstance(value, set | frozenset) and isinstance(found, set | frozenset):
        return {type(one) for one in found} == {type(one) for one in value}
    names = getattr(type(value), "__struct_fields__", None) or getattr(type(value), "model_fields", None)
    names = names or getattr(type(value), "__dataclass_fields__", None) or ()
    return all(same(getattr(found, name), getattr(value, name)) for name in names)


def maker(kind: Any, value: Any) -> Callable[[], Any]:
    """A function that declares to return that type, and returns the value."""

    def make() -> Any:
        return value

    make.__annotations__["return"] = kind
    return make


app = Tidegate()


async def note(run_id: uuid.UUID, what: str) -> None:
    connection = await asyncpg.connect(os.environ["TIDEGATE_DATABASE_URL"])
    try:
        await connection.execute("insert into effects (run_id, what) values ($1, $2)", run_id, what)
    finally:
        await connection.close()


@app.workflow(on="typed.all")
async def every_type(ctx: Context) -> int:
    """One step for each type; what it gets is noted at each attempt, also from replayed steps."""
    right = 0
    for name, kind, value in CASES:
        found = await ctx.step(name, maker(kind, value))
        if not same(found, value):
            await note(ctx.run_id, f"{name}: {found!r}")
        right += 1
    await note(ctx.run_id, f"attempt {ctx.attempt}")
    await ctx.sleep("100ms")
    await note(ctx.run_id, f"attempt {ctx.attempt} after the sleep")
    return right
