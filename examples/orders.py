"""Order fulfilment: charge the card, wait two hours in which the customer may cancel, ship; refund the charge if
shipping fails.

    tidegate dev examples/orders.py
    tidegate publish order.created --source shop.api --data '{"id": 7, "amount": 120, "card": "visa"}'

Other cards: `flaky` (the bank fails twice), `stolen` (refused). Order 13 cannot be shipped: it is refunded. Suspended
runs are listed by `tidegate runs list` and cancelled with `tidegate runs cancel ID`.
"""

from typing import Any

from tidegate import Context, NonRetryable, Retry, StepFailed, Tidegate

app = Tidegate()


class Bank:
    """Simulates a payment service that is idempotent by key."""

    def __init__(self) -> None:
        self.payments: dict[str, float] = {}
        self.calls = 0

    async def pay(self, card: str, amount: float, *, key: str) -> str:
        """Charge the card, or refund it if the amount is negative."""
        self.calls += 1
        if card == "stolen":
            raise NonRetryable("the card is reported stolen")
        if card == "flaky" and self.calls % 3:
            raise ConnectionError("the bank is away")
        self.payments.setdefault(key, amount)
        return f"receipt {sorted(self.payments).index(key) + 1}"


bank = Bank()


async def pay(ctx: Context, card: str, amount: float) -> str:
    """A step. The key is the same in each attempt, even after a crash: the bank executes them once."""
    return await bank.pay(card, amount, key=ctx.idempotency_key)


async def ship(order: int) -> str:
    """A step that may fail permanently."""
    if order == 13:
        raise ConnectionError("the carrier does not answer")
    return f"parcel {order}"


@app.workflow(on="order.created", source="shop.*", idempotency_key="{{ event.payload.id }}")
async def fulfil(ctx: Context, id: int, amount: float, card: str) -> dict[str, Any]:
    """Step results are stored: after a crash, or the two hours, the run resumes after the last completed step."""
    receipt: str = await ctx.step("charge", pay, ctx, card, amount, retry=Retry(max_attempts=10, base="2s", cap="5m"))
    await ctx.sleep("2h")
    try:
        parcel: str = await ctx.step("ship", ship, id, retry=Retry(max_attempts=4, base="1m", cap="10m"))
    except StepFailed as exc:
        refund: str = await ctx.step("refund", pay, ctx, card, -amount)
        return {"order": id, "refund": refund, "reason": str(exc)}
    return {"order": id, "receipt": receipt, "parcel": parcel}
