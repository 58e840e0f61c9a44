"""`examples/order_system.py` as it is, with services that keep their effects in Postgres, so that they outlive a
process that is killed. A call has an effect only the first time that its key is used."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path

import asyncpg

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

import order_system
from order_system import Parcel, Sale, app

assert app is order_system.app, "what `tidegate worker` looks for"
order_system.PACKING = "100ms"
STORE = "insert into effects (what, key, amount) values ($1, $2, $3) on conflict do nothing"


class StoredServices(order_system.Services):
    async def pay(self, card: str, amount: int, *, key: str) -> str:
        receipt = await super().pay(card, amount, key=key)
        await store("payment", key, amount)
        return receipt

    async def send_parcel(self, order_id: int, *, key: str) -> Parcel:
        parcel = await super().send_parcel(order_id, key=key)
        await store("parcel", key, order_id)
        return parcel

    async def mail(self, to: str, text: str) -> None:
        await store("mail", text, 0)

    async def book(self, sale: Sale, at: datetime) -> None:
        await store("sale", str(sale.order_id), sale.amount)

    async def sold(self, since: datetime, until: datetime) -> list[int]:
        connection = await asyncpg.connect(os.environ["TIDEGATE_DATABASE_URL"])
        try:
            return [row[0] for row in await connection.fetch("select amount from effects where what = 'sale'")]
        finally:
            await connection.close()


async def store(what: str, key: str, amount: int) -> None:
    connection = await asyncpg.connect(os.environ["TIDEGATE_DATABASE_URL"])
    try:
        await connection.execute(STORE, what, key, amount)
    finally:
        await connection.close()


order_system.services = StoredServices()
