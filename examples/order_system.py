"""An order system: payment with retries, approval of large orders, a child that ships, cancellation, one mail to a
customer for several orders, a nightly report.

    tidegate dev examples/order_system.py
    tidegate publish order.placed --source shop --data '{"id": 7, "customer": "c-7", "amount": 120, "card": "visa"}'
    tidegate publish order.placed --source shop --data '{"id": 8, "customer": "c-8", "amount": 900, "card": "visa"}'

Order 8 waits for an approval: its link is printed (it would be mailed), and `tidegate approvals list` shows it.
Meanwhile `tidegate publish order.cancelled --source shop --data '{"id": 8}'` cancels it. Other cards: `flaky` (the bank
fails twice), `stolen` (refused). Order 13 is not shipped, but refunded. Report: `tidegate schedules run-now report`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from tidegate import ChildFailed, Context, NonRetryable, On, Retry, Tidegate

APPROVAL_ABOVE, MANAGER, PACKING = 500, "manager@example.com", "30s"

app = Tidegate()


@dataclass
class Order:
    """The payload of `order.placed`."""

    id: int
    customer: str
    amount: int
    card: str


@dataclass
class Parcel:
    order_id: int
    number: str


@dataclass
class Outcome:
    """What became of an order."""

    status: str
    receipt: str | None = None
    parcel: Parcel | None = None


@dataclass
class Sale:
    """The payload of `order.fulfilled`."""

    order_id: int
    amount: int
    customer: str


class Services:
    """Simulates the bank, the carrier, the mail server and the books. All but mail is idempotent by key."""

    def __init__(self) -> None:
        self.payments: dict[str, int] = {}
        self.parcels: dict[str, Parcel] = {}
        self.sales: dict[int, tuple[int, datetime]] = {}
        self.failures = 0

    async def pay(self, card: str, amount: int, *, key: str) -> str:
        """Charge the card, or refund it if the amount is negative."""
        if card == "stolen":
            raise NonRetryable("the card is reported stolen")
        if card == "flaky" and self.failures < 2:
            self.failures += 1
            raise ConnectionError("the bank is away")
        self.payments.setdefault(key, amount)
        return f"receipt {key}"

    async def send_parcel(self, order_id: int, *, key: str) -> Parcel:
        if order_id == 13:
            raise NonRetryable("the carrier does not deliver there")
        return self.parcels.setdefault(key, Parcel(order_id, f"P{order_id:06}"))

    async def mail(self, to: str, text: str) -> None:
        print(f"mail to {to}: {text}")

    async def book(self, sale: Sale, at: datetime) -> None:
        self.sales.setdefault(sale.order_id, (sale.amount, at))

    async def sold(self, since: datetime, until: datetime) -> list[int]:
        return [amount for amount, at in self.sales.values() if since <= at < until]


services = Services()


async def charge(ctx: Context, card: str, amount: int) -> str:
    """A step. Its key is the same in each attempt, also after a crash, so the bank books it once."""
    return await services.pay(card, amount, key=ctx.idempotency_key)


async def hand_over(ctx: Context, order_id: int) -> Parcel:
    return await services.send_parcel(order_id, key=ctx.idempotency_key)


async def is_approved(ctx: Context, order: Order) -> bool:
    """Ask the manager, who has three days."""
    note = f"Order {order.id} of {order.customer}: {order.amount} EUR"
    approval = await ctx.approval("manager", timeout="3d", to=MANAGER, note=note)
    await ctx.step("mail", services.mail, MANAGER, f"{note}. Please decide: {approval.link}")
    decision = await approval.decision()
    return decision is not None and decision.approved


@app.workflow(
    on="order.placed",
    source="shop*",
    idempotency_key="{{ event.payload.id }}",
    cancel_on=On("order.cancelled", where="event.payload.id == run.parameters.id"),
)
async def fulfil(ctx: Context, order: Order) -> Outcome:
    """One order, from the payload to the outcome. Each step is done once, whichever worker dies."""
    ctx.tag(customer=order.customer)
    if order.amount > APPROVAL_ABOVE and not await is_approved(ctx, order):
        return Outcome("rejected")
    receipt = await ctx.step("charge", charge, ctx, order.card, order.amount, retry=Retry(max_attempts=8, base="2s"))
    try:
        parcel = await ctx.run(ship, order_id=order.id)
    except ChildFailed:
        await ctx.step("refund", charge, ctx, order.card, -order.amount)
        return Outcome("refunded", receipt)
    await ctx.publish("order.fulfilled", {"order_id": order.id, "amount": order.amount, "customer": order.customer})
    return Outcome("fulfilled", receipt, parcel)


@app.workflow(max_concurrency=10)
async def ship(ctx: Context, order_id: int) -> Parcel:
    """A child: at most ten orders are packed at a time, in all workers together."""
    await ctx.sleep(PACKING)
    return await ctx.step("hand over", hand_over, ctx, order_id)


@app.workflow(on="order.fulfilled")
async def book(ctx: Context, sale: Sale) -> None:
    assert ctx.event is not None
    await ctx.step("book", services.book, sale, ctx.event.occurred_at)


@app.workflow(on="order.fulfilled", debounce="10m", max_wait="1h", key="{{ event.payload.customer }}")
async def digest(ctx: Context, customer: str) -> list[int]:
    """One mail to each customer for the orders that were fulfilled at about the same time."""
    orders = [event.payload["order_id"] for event in ctx.events]
    await ctx.step("mail", services.mail, customer, f"On the way to you: {', '.join(map(str, orders))}")
    return orders


@app.workflow(cron="0 2 * * *")
async def report(ctx: Context, scheduled_at: datetime) -> dict[str, int]:
    """The sales of the 24 hours before."""
    amounts = await ctx.step("read", services.sold, scheduled_at - timedelta(days=1), scheduled_at)
    return {"orders": len(amounts), "amount": sum(amounts)}
