"""The order system in real processes that are killed: each order is charged once and shipped once, or not at all."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.flow.conftest import eventually
from tests.processes import api, worker
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "order_system_app.py"
QUICK = {"TIDEGATE_LEASE_MS": "1000", "TIDEGATE_STEP_RETRY_BASE_MS": "50"}
PLACE = "select tidegate.publish('order.placed', 'shop', $1)"
# Where a worker dies, one after the other.
DEATHS = ["approval.registered=kill@2", "step.before_commit=kill@4", "outcome.after_commit=kill@7"]
SMALL, LARGE = range(1, 9), range(21, 29)


async def test_each_order_is_charged_and_shipped_once(
    database_url: str, database: Database, connection: Connection
) -> None:
    await connection.execute("create table effects (what text, key text, amount int, primary key (what, key))")
    for order in SMALL:
        await connection.execute(PLACE, {"id": order, "customer": "c", "amount": order, "card": "visa"})
    for order in LARGE:
        await connection.execute(PLACE, {"id": order, "customer": "c", "amount": 1000 + order, "card": "visa"})
    with api(database_url) as (_, address):
        for death in DEATHS:
            with worker(database_url, APP, TIDEGATE_FAILPOINTS=death, **QUICK) as dying:
                assert dying.wait() == 137
        with worker(database_url, APP, **QUICK) as killed:
            await eventually(database, "select count(*) = $1 from effects where what = 'mail'", len(LARGE))
            links = await mailed(connection)
            codes = await asyncio.gather(*(decide(address, link, order % 2 == 0) for order, link in links.items()))
            killed.signal(signal.SIGKILL)
            killed.wait()
        assert codes == [200] * len(LARGE)
        with worker(database_url, APP, **QUICK), worker(database_url, APP, **QUICK):
            ended = "select count(*) = $1 from tidegate.workflow_runs r join tidegate.workflow_definitions d on "
            ended += "d.id = r.workflow_definition_id where d.slug = 'fulfil' and r.status = 'succeeded'"
            await eventually(database, ended, len(SMALL) + len(LARGE))
            sold = [*SMALL, *(order for order in LARGE if order % 2 == 0)]
            await eventually(database, "select count(*) = $1 from effects where what = 'sale'", len(sold))
            await asyncio.to_thread(httpx.post, f"{address}/admin/schedules/report/run-now", trust_env=False)
            report = """select r.output from tidegate.workflow_runs r join tidegate.workflow_definitions d
                          on d.id = r.workflow_definition_id where d.slug = 'report' and r.status = 'succeeded'"""
            assert await eventually(database, report) == {
                "orders": len(sold), "amount": sum(n if n in SMALL else 1000 + n for n in sold),
            }  # fmt: skip
    assert await amounts(connection, "payment") == sorted(n if n in SMALL else 1000 + n for n in sold)
    assert await amounts(connection, "parcel") == sorted(sold)
    assert (
        len(await mailed(connection))
        == len(LARGE)
        == await connection.fetchval("select count(*) from effects where what = 'mail'")
    ), "a mail that was sent twice had the same link"


async def decide(address: str, link: str, approved: bool) -> int:
    def post() -> int:
        body = {"approved": approved}
        return httpx.post(f"{address}{urlsplit(link).path}", json=body, timeout=60, trust_env=False).status_code

    return await asyncio.to_thread(post)


async def mailed(connection: Connection) -> dict[int, str]:
    """The link that was mailed for each order."""
    texts = [row[0] for row in await connection.fetch("select key from effects where what = 'mail'")]
    found = [re.fullmatch(r"Order (\d+) .*: (http\S+)", text) for text in texts]
    return {int(one[1]): one[2] for one in found if one is not None}


async def amounts(connection: Connection, what: str) -> list[int]:
    rows = await connection.fetch("select amount from effects where what = $1 order by amount", what)
    return [row[0] for row in rows]
