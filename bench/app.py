"""The application that is measured, and one without workflows, whose worker creates runs but executes none."""

from __future__ import annotations

from headgate import Context, Headgate

hg = Headgate()
nothing = Headgate()


@hg.workflow(
    on="order.created",
    predicates=[
        {"path": "$.payload.amount", "operator": "gt", "value": 100},
        {"path": "$.payload.currency", "operator": "in", "values": ["EUR", "USD"]},
    ],
)
async def fulfil(ctx: Context, id: int, amount: float) -> int:
    """As little as a workflow can do."""
    return id
