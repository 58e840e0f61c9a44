"""What mypy says of a user's program is what arrives at run time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import dataclasses
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any, assert_type

import msgspec
import pydantic

from tidegate import ChildFailed, Context, SyncContext, Tidegate

app = Tidegate()


class Order(pydantic.BaseModel):
    id: int


@dataclasses.dataclass
class Receipt:
    total: Decimal


class Line(msgspec.Struct):
    sku: str


async def charge(order: Order) -> Receipt:
    return Receipt(Decimal(order.id))


def look_up(sku: str) -> Line | None:
    return Line(sku)


@app.workflow(on="order.placed")
async def pay(ctx: Context, order: Order) -> Receipt:
    receipt = await ctx.step("charge", charge, order)
    assert_type(receipt, Receipt)
    assert_type(await ctx.step("look up", look_up, "a"), Line | None)
    assert_type(await ctx.step("line", Line, "a"), Line)
    assert_type(await ctx.step("part", partial(look_up, "a")), Line | None)
    return receipt


@app.workflow()
async def pack(ctx: Context, order: Order) -> Receipt:
    return Receipt(Decimal(order.id))


@app.workflow()
def label(ctx: SyncContext, sku: str) -> Line:
    return Line(sku)


@app.workflow(on="order.placed")
async def parent(ctx: Context, order: Order) -> None:
    assert_type(await ctx.run(pack, order=order), Receipt)
    assert_type(await ctx.run(label, {"sku": "a"}), Line)
    assert_type(await (await ctx.start(pack, order)).result(), Receipt)
    assert_type(await ctx.map(pack, [order]), list[Receipt])
    assert_type(await ctx.map(label, ["a"], return_exceptions=True), list[Line | ChildFailed])
    assert_type(await ctx.run("label", sku="a"), Any)
    await ctx.publish("order.packed", order)


@app.workflow(on="order.placed")
def sync_parent(ctx: SyncContext, order: Order) -> None:
    assert_type(ctx.run(pack, order=order), Receipt)
    assert_type(ctx.start(label, sku="a").result(), Line)
    assert_type(ctx.map(pack, [order]), list[Receipt])
    ctx.publish("order.packed", order)


@app.workflow(on="order.placed")
def plain(ctx: SyncContext, order: Order) -> None:
    assert_type(ctx.step("look up", look_up, "a"), Line | None)


async def publish() -> None:
    await app.publish("order.placed", source="shop", payload=Order(id=1))
    await app.publish("order.placed", source="shop", payload=Receipt(Decimal(1)))
    await app.publish("order.placed", source="shop", payload=Line("a"))
    await app.publish("order.placed", source="shop", payload={"id": 1})
    await app.publish("order.placed", source="shop", payload=7)  # type: ignore[arg-type]
"""


def test_mypy_infers_the_declared_types(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--no-incremental", "program.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
