"""Your application: replace it."""

from typing import Any

from tidegate import Context, Tidegate

app = Tidegate()


async def charge(order: int, amount: float) -> str:
    return f"r-{order}"


@app.workflow(on="order.created", source="shop.*", where="event.payload.amount > 100")
async def fulfil(ctx: Context, id: int, amount: float) -> dict[str, Any]:
    receipt = await ctx.step("charge", charge, id, amount)
    return {"charged": amount, "receipt": receipt}
