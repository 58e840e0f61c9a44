"""Typed values to and from children, and published by runs: what is declared is what arrives."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from typing import Any

import pydantic

from tidegate import Context, SyncContext, Tidegate
from tidegate.testing import Harness


class Order(pydantic.BaseModel):
    id: int
    amount: Decimal


@dataclasses.dataclass
class Packed:
    order: Order
    weights: set[int]


ORDER = Order(id=7, amount=Decimal("1.50"))


async def test_models_go_to_children_and_their_results_come_back_as_declared() -> None:
    app, seen = Tidegate(), []

    @app.workflow()
    async def pack(ctx: Context, order: Order) -> Packed:
        return Packed(order, {1})

    @app.workflow(on="pack.whole")
    async def whole(ctx: Context, order: Order) -> Packed:
        return Packed(order, {2})

    @app.workflow()
    async def again(ctx: Context, packed: Packed, more: list[Order]) -> Order:
        assert packed.order == more[0]
        return more[0]

    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        ran = await ctx.run(pack, order=ORDER)
        by_dict = await ctx.run(pack, {"order": ORDER})
        started = await ctx.start(whole, ORDER)
        mapped = await ctx.map(pack, [ORDER, {"order": ORDER}])
        wholes = await ctx.map(whole, [ORDER], return_exceptions=True)
        nested = await ctx.run(again, packed=ran, more=[ORDER])
        await ctx.sleep("1h")
        seen.append((ran, by_dict, await started.result(), mapped, wholes, nested, await ctx.run("pack", order=ORDER)))

    @app.workflow(on="go")
    def synchronous(ctx: SyncContext) -> None:
        seen.append((ctx.run(pack, order=ORDER), ctx.start(pack, order=ORDER).result(), ctx.map(pack, [ORDER])))

    async with Harness(app) as harness:
        await harness.publish("go", source="t", payload={})
        await harness.advance("1h")
        await harness.run_until_idle()
        assert {run.status for run in await harness.runs()} == {"succeeded"}
    packed, other = Packed(ORDER, {1}), Packed(ORDER, {2})
    as_json = {"order": {"id": 7, "amount": "1.50"}, "weights": [1]}
    assert sorted(seen, key=len) == [
        (packed, packed, [packed]),
        (packed, packed, other, [packed, packed], [other], ORDER, as_json),
    ]


async def test_a_run_publishes_models() -> None:
    app, seen = Tidegate(), []

    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.publish("order.placed", ORDER)
        await ctx.publish("order.nested", {"order": ORDER})
        await ctx.publish("order.packed", Packed(ORDER, {1}))

    @app.workflow(on="order.placed")
    async def placed(ctx: Context, order: Order) -> None:
        seen.append(order)

    @app.workflow(on="order.nested")
    async def nested(ctx: Context, order: Order) -> None:
        seen.append(order)

    @app.workflow(on="order.packed")
    async def done(ctx: Context, packed: Packed) -> None:
        seen.append(packed.order)

    async with Harness(app) as harness:
        await harness.publish("go", source="t", payload={})
        await harness.run_until_idle()
    assert seen == [ORDER] * 3


async def test_a_wrong_item_of_a_map_is_named() -> None:
    app = Tidegate()

    @app.workflow()
    async def pack(ctx: Context, a: int, b: int = 0) -> int:
        return a

    @app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        told = []
        for wrong in ({"b": 1}, {"a": object()}, 5):
            try:
                await ctx.map(pack, [{"a": 1}, wrong])
            except Exception as exc:
                told.append(str(exc))
        return told

    async with Harness(app) as harness:
        await harness.publish("go", source="t", payload={})
        await harness.run_until_idle()
        missing, no_json, number = (await harness.only_run("work")).output
    assert "items[1].parameters.a: is required" in missing
    assert "items[1].parameters.a: is of type object, which is not JSON" in no_json
    assert number.startswith("items[1]: pack takes a, b; an item must be an object with these, not int")


async def test_a_result_that_is_not_what_the_child_declares_fails_the_parent() -> None:
    app = Tidegate()

    @app.workflow()
    async def pack(ctx: Context, n: int) -> int:
        return "text"  # type: ignore[return-value]

    @app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        return await ctx.map(pack, [1])

    async with Harness(app) as harness:
        await harness.publish("go", source="t", payload={})
        await harness.run_until_idle()
        run = await harness.only_run("work")
    assert run.error is not None
    assert "the stored result of step 'map-1' is not the int that its function declares now" in run.error
