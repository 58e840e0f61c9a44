"""The command that `tidegate dev` proposes fits the application's own first trigger."""

from __future__ import annotations

import msgspec
import pytest

from tidegate import Context, Tidegate
from tidegate.cli.try_it import example


class Order(msgspec.Struct):
    id: int
    customer: str


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
