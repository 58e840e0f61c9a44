"""The code in docs/starting.md runs, and does what is said."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tidegate.testing import Harness

TEXT = (Path(__file__).parent.parent.parent / "docs" / "starting.md").read_text()
APP = "\n\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture
def app() -> Iterator[ModuleType]:
    """The document's workflows, as a module that hints can be looked up in."""
    module = ModuleType("start_docs")
    sys.modules["start_docs"] = module
    exec(compile(APP, "docs/starting.md", "exec"), module.__dict__)
    yield module
    del sys.modules["start_docs"]


async def test_runs_publish(app: ModuleType) -> None:
    async with Harness(app.app) as harness:
        await harness.publish("order.paid", source="shop", payload={"id": 7})
        await harness.publish("order.paid", source="shop", payload={"id": "seven"})
        await harness.run_until_idle()
        assert (await harness.only_run("notify")).parameters == {"id": 7, "parcel": "parcel 7"}
        assert [run.status for run in await harness.runs("fulfil")] == ["succeeded", "failed"]
        alarm = await harness.only_run("alarm")
        assert alarm.status == "succeeded" and "parameter 'id'" in alarm.parameters["error"]


async def test_workflows_are_started(app: ModuleType) -> None:
    async with Harness(app.app) as harness:
        started = await harness.start("price", {"amount": 7}, id="quote-7")
        await harness.run_until_idle()
        assert await started.result() == {"price": 14, "currency": "EUR"}
        assert await app.ask(app.app) == {"price": 14, "currency": "EUR"}
        assert (await harness.only_run("price")).id == started.run_id


async def test_children(app: ModuleType) -> None:
    async with Harness(app.app) as harness:
        await harness.publish("order.packed", source="shop", payload={"order_id": 7, "skus": ["a", "b"]})
        await harness.advance("2h")
        assert (await harness.only_run("send")).output == {
            "parcel": "parcel 7", "labels": ["label for a", "label for b"], "price": 10,
        }  # fmt: skip
