"""The command that `tidegate dev` proposes fits the application's own first trigger."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Literal
from uuid import UUID

import msgspec
import pydantic
import pytest

from tidegate import Context, Tidegate
from tidegate.cli.try_it import example


class Order(msgspec.Struct):
    id: int
    customer: str


class Tier(Enum):
    GOLD = "gold"
    BASIC = "basic"


class Account(pydantic.BaseModel):
    tier: Tier
    at: datetime
    on: date
    key: UUID
    seats: int = pydantic.Field(gt=100)
    name: str = pydantic.Field(min_length=3)
    plan: Literal["monthly"]
    owner: Owner
    more: dict[str, int] = {}
    price: Decimal
    maybe: int | None


class Owner(pydantic.BaseModel):
    email: str


@dataclass
class Member:
    account: Account
    tier: Tier
    pair: tuple[int, str]


def of_model(ctx: Context, account: Account) -> None: ...


def of_member(ctx: Context, member: Member, tier: Tier = Tier.BASIC) -> None: ...


def of_only_member(ctx: Context, member: Member) -> None: ...


@pytest.mark.parametrize("function", [of_model, of_member, of_only_member])
def test_the_values_fit_what_is_declared(function: Callable[..., None]) -> None:
    app = Tidegate()
    app.workflow(on="account.opened")(function)
    command = example(app.workflows.values())
    assert command is not None
    payload = msgspec.json.decode(shlex.split(command)[-1])
    assert app.workflows[function.__name__].bind(payload)


def of_payload(ctx: Context, order: Order) -> None: ...


def of_parameters(ctx: Context, id: int, amount: float, who: str = "", is_gift: bool = False) -> None: ...


def of_anything(ctx: Context, **order: object) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (of_parameters, {"on": "order.created", "source": "shop.*"},
         """publish order.created --source shop.api --data '{"id": 7, "amount": 120, "who": "a", "is_gift": true}'"""),
        (of_payload, {"on": "order.created"},
         """publish order.created --source my.program --data '{"id": 7, "customer": "a"}'"""),
        (of_anything, {"on": "order.*", "where": "event.payload.amount > 100"},
         """publish order.example --source my.program --data '{"amount": 120}'"""),
        (of_anything, {"on": "order.created", "params": {"id": "{{ event.payload.order }}"}},
         """publish order.created --source my.program --data '{"order": 7}'"""),
        (of_anything, {"on": "tidegate.run.failed"}, None),
        (of_anything, {"every": "15m"}, None),
        (of_anything, {}, None),
    ],
)  # fmt: skip
def test_the_example_is_made_from_the_first_trigger(function: object, options: dict[str, object], told: str) -> None:
    app = Tidegate()
    app.workflow(**options)(function)  # type: ignore[arg-type]
    assert example(app.workflows.values()) == told
