"""The demo that `make dev` runs: orders worth more than 100 are fulfilled, and every order is counted.

Try it:  tidegate publish order.created --source shop.api --data '{"id": 7, "amount": 120}'
"""

import asyncio
from typing import Any

from tidegate import Context, Tidegate

app = Tidegate()


@app.workflow(on="order.created", source="shop.*", where="event.payload.amount > 100")
async def fulfil(ctx: Context, id: int, amount: float) -> dict[str, Any]:
    """Pretend to charge a card; the return value is the run's output."""
    ctx.log.info("order.charging", order=id)
    await asyncio.sleep(0.05)
    return {"order": id, "charged": amount, "receipt": f"r-{id}"}


@app.workflow(on="order.*")
def audit(ctx: Context, **order: Any) -> dict[str, Any]:
    """A synchronous function: it runs in a thread."""
    assert ctx.event is not None
    return {"seen": ctx.event.type, "fields": sorted(order)}
