"""An order as one typed argument: a pydantic model from the event to the output, checked by mypy.

Run it: tidegate dev examples/typed_orders.py, then
tidegate publish order.placed --source shop --data '{"id": 7, "customer": "c-7", "lines": [{"sku": "a", "price": "9"}]}'
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from pydantic import BaseModel

from tidegate import Context, Tidegate

app = Tidegate()


class Line(BaseModel):
    sku: str
    price: Decimal
    count: int = 1


class Order(BaseModel):
    id: int
    customer: str
    lines: list[Line]


@dataclass
class Receipt:
    order: Order
    total: Decimal
    paid_at: datetime


async def charge(order: Order) -> Receipt:
    total = sum((line.price * line.count for line in order.lines), Decimal(0))
    return Receipt(order, total, datetime.now(UTC))


@app.workflow(on="order.placed")
async def pay(ctx: Context, order: Order) -> Receipt:
    """The whole payload is the order. After the wait the receipt is a Receipt again, from its stored JSON."""
    receipt = await ctx.step("charge", charge, order)
    await ctx.sleep("1h")
    ctx.log.info("paid", total=receipt.total, day=receipt.paid_at.date())
    return receipt
