"""The code in docs/types.md runs and does what the page says."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import pytest

from tidegate.testing import Harness

TEXT = (Path(__file__).parent.parent.parent / "docs" / "types.md").read_text()
APP = "\n\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture
def page() -> Iterator[ModuleType]:
    """The document's code, as a module that names can be looked up in."""
    module = ModuleType("type_docs")
    sys.modules["type_docs"] = module
    exec(compile(APP, "docs/types.md", "exec"), module.__dict__)
    yield module
    del sys.modules["type_docs"]


async def test_the_workflow_gets_its_types(page: ModuleType) -> None:
    async with Harness(page.app) as harness:
        await page.place(page.Order(id=7, amount=Decimal("9.90")))
        await harness.advance("1d")
        run = await harness.only_run("pay")
    assert run.status == "succeeded", run.error
    assert run.output["order"] == {"id": 7, "amount": "9.90"} and run.parameters == {"id": 7, "amount": "9.90"}
