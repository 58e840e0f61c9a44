"""The examples do what they say, in a harness; and each loads as `tidegate dev` loads it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest

from tests.acceptance.conftest import ROOT
from tidegate.cli.load import load_app
from tidegate.errors import Conflict
from tidegate.testing import Harness

EXAMPLES = ROOT / "examples"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """An example's module, fresh, as `tidegate dev` loads it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    names: list[str] = []

    def one(name: str) -> ModuleType:
        names.append(name)
        application = load_app(str(EXAMPLES / f"{name}.py"))
        module = sys.modules[name]
        assert module.app is application
        return module

    yield one
    for name in names:
        sys.modules.pop(name, None)


def test_every_example_is_tested() -> None:
    text = Path(__file__).read_text()
    for file in EXAMPLES.glob("*.py"):
        assert f'load("{file.stem}")' in text, file.name


@pytest.mark.parametrize("name", sorted(file.stem for file in EXAMPLES.glob("*.py")))
def test_it_says_what_to_publish(load: Load, name: str) -> None:
    module = load(name)
    assert module.__doc__ and "tidegate publish " in module.__doc__
    types = {spec.event_type for workflow in module.app.workflows.values() for spec in workflow.triggers}
    assert any(f"tidegate publish {one} " in module.__doc__ for one in types)


async def test_demo(load: Load) -> None:
    demo = load("demo")
    async with Harness(demo.app) as harness:
        await harness.publish("order.created", source="shop.api", payload={"id": 7, "amount": 120})
        await harness.run_until_idle()
        assert (await harness.only_run("fulfil")).output == {"order": 7, "charged": 120, "receipt": "r-7"}
        assert (await harness.only_run("audit")).output == {"seen": "order.created", "fields": ["amount", "id"]}


async def test_orders(load: Load) -> None:
    orders = load("orders")
    async with Harness(orders.app) as harness:
        for order, card in ((7, "visa"), (8, "flaky"), (9, "stolen"), (13, "visa"), (7, "visa")):
            await harness.publish("order.created", source="shop.api", payload={"id": order, "amount": 50, "card": card})
        await harness.advance("90m")
        found = {run.parameters["id"]: run for run in await harness.runs("fulfil")}
        assert len(await harness.runs("fulfil")) == 4, "the second event of order 7 launches nothing"
        assert {order: run.status for order, run in found.items()} == {
            7: "pending", 8: "pending", 9: "failed", 13: "pending",
        }  # fmt: skip
        assert found[8].steps["charge"].attempts > 1
        assert "the card is reported stolen" in (found[9].error or "")
        await harness.advance("1h")
        found = {run.parameters["id"]: run for run in await harness.runs("fulfil")}
        assert [found[order].output["parcel"] for order in (7, 8)] == ["parcel 7", "parcel 8"]
        assert "the carrier does not answer" in found[13].output["reason"]
        assert (found[13].steps["ship"].status, found[13].steps["ship"].attempts) == ("failed", 4)
        assert {kind.kind for kind in await harness.dead_letters()} == {"step"}
    assert sorted(orders.bank.payments.values()) == [-50, 50, 50, 50]
    assert f"{found[13].id}:refund" in orders.bank.payments


async def test_files(load: Load, tmp_path: Path) -> None:
    files = load("files")
    files.SPOOL = tmp_path
    late = files.REMOTE.pop("south.csv")
    async with Harness(files.app) as harness:
        await harness.publish("files.arrived", source="sftp", payload={"files": ["north.csv", "south.csv", "east.csv"]})
        await harness.run_until_idle()
        run = await harness.only_run("ingest")
        assert (run.status, list(files.WAREHOUSE)) == ("pending", ["north.csv"])
        assert (run.steps["load north.csv"].status, run.steps["download south.csv"].status) == ("succeeded", "pending")
        files.REMOTE["south.csv"] = late
        await harness.advance("5m")
        run = await harness.only_run("ingest")
    assert (run.status, run.output["north.csv"], run.output["south.csv"]) == ("succeeded", 2, 1)
    assert "invalid literal" in run.output["east.csv"]
    assert files.WAREHOUSE["south.csv"] == [{"region": "south", "amount": 5}]
    assert {name: run.steps[name].attempts for name in ("download north.csv", "download south.csv")} == {
        "download north.csv": 1, "download south.csv": 2,
    }  # fmt: skip


async def test_limited_api(load: Load) -> None:
    limited = load("limited_api")
    api = limited.api
    async with Harness(limited.app) as harness:
        api.now = lambda: harness.now.timestamp()  # noqa: PLW0108 - as it is at each call
        api.calls = [api.now()] * 5  # someone else uses the API as well
        for contact in range(25):
            await harness.publish("contact.changed", source="crm", payload={"id": contact})
        await harness.run_until_idle()
        assert len(api.contacts) == 5
        assert 1 <= api.refused <= 3, "those that were under way; the others waited"
        await harness.advance("10m")
        assert {run.status for run in await harness.runs("sync")} == {"succeeded"}
    assert api.contacts == set(range(25)) and len(api.calls) == 5 + 25
    # In each of the next two minutes those that were refused come on top of the ten that are launched, three at a time.
    assert api.refused <= 9


async def test_typed_orders(load: Load) -> None:
    example = load("typed_orders")
    order = example.Order(id=7, customer="c-7", lines=[example.Line(sku="a", price=Decimal("9.90"), count=2)])
    async with Harness(example.app) as harness:
        await harness.publish("order.placed", source="shop", payload=order)
        await harness.advance("1h")
        run = await harness.only_run("pay")
    assert run.status == "succeeded", run.error
    receipt = example.app.workflows["pay"].result_rule.restored(run.output)
    assert isinstance(receipt, example.Receipt) and receipt.order == order and receipt.total == Decimal("19.80")


async def test_order_system(load: Load) -> None:
    """Judged by what the bank, the carrier and the books have: each order once, and nothing of those not approved."""
    example = load("order_system")
    services, mails = example.services, list[str]()

    async def mail(to: str, text: str) -> None:
        mails.append(text)

    services.mail = mail
    orders = {
        1: example.Order(1, "c-1", 100, "visa"),
        2: example.Order(2, "c-1", 200, "flaky"),
        3: example.Order(3, "c-3", 300, "stolen"),
        4: example.Order(4, "c-4", 900, "visa"),  # approved with the link
        5: example.Order(5, "c-5", 900, "visa"),  # rejected
        6: example.Order(6, "c-6", 900, "visa"),  # nobody decides
        7: example.Order(7, "c-7", 900, "visa"),  # cancelled by the customer, then approved
        8: example.Order(8, "c-8", 501, "visa"),  # approved on the next day
        13: example.Order(13, "c-13", 50, "visa"),  # cannot be shipped
    }
    async with Harness(example.app) as harness:
        await harness.advance(f"{(12 * 60 - harness.now.hour * 60 - harness.now.minute) % (24 * 60)}m")  # noon
        for order in (*orders.values(), orders[1]):
            await harness.publish("order.placed", source="shop", payload=order)
        await harness.advance("1h")
        runs = {run.parameters["id"]: run for run in await harness.runs("fulfil")}
        assert sorted(runs) == sorted(orders) and len(await harness.runs("fulfil")) == len(orders)
        [link] = [re.search(r"http\S+", one)[0] for one in mails if one.startswith("Order 4 ")]  # type: ignore[index]
        used = await harness.client.request("POST", urlsplit(link).path, {"approved": True})
        assert used["state"] == "decided"
        await harness.reject(runs[5], "manager", by="ann")
        await harness.publish("order.cancelled", source="shop", payload={"id": 7})
        await harness.run_until_idle()
        with pytest.raises(Conflict):
            await harness.approve(runs[7], "manager")
        await harness.advance("23h")
        await harness.approve(runs[8], "manager", by="ann")
        await harness.advance("4d")
        runs = {run.parameters["id"]: run for run in await harness.runs("fulfil")}
        reports = [run.output for run in await harness.runs("report")]
        digests = sorted(run.output for run in await harness.runs("digest"))
    assert digests == [[1, 2], [4], [8]], "one mail for the orders of one customer"
    assert mails.count("On the way to you: 1, 2") == 1
    status = {id: run.output["status"] if run.output else run.status for id, run in runs.items()}
    assert status == {
        1: "fulfilled", 2: "fulfilled", 3: "failed", 4: "fulfilled", 5: "rejected", 6: "rejected", 7: "cancelled",
        8: "fulfilled", 13: "refunded",
    }  # fmt: skip
    assert runs[2].steps["charge"].attempts == 3
    assert sorted(services.payments.values()) == [-50, 50, 100, 200, 501, 900]
    assert sorted(parcel.order_id for parcel in services.parcels.values()) == [1, 2, 4, 8]
    assert {id: amount for id, (amount, _) in services.sales.items()} == {1: 100, 2: 200, 4: 900, 8: 501}
    links = [one.rpartition("/")[2] for one in mails if one.startswith("Order ")]
    assert len(links) == len(set(links)) == 5
    assert [one for one in reports if one["orders"]] == [{"orders": 3, "amount": 1200}, {"orders": 1, "amount": 501}]
