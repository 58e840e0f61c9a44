"""The code in docs/versions.md runs, and its numbers are true."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tidegate.flow.call import fit, marks
from tidegate.testing import Harness

TEXT = (Path(__file__).parent.parent.parent / "docs" / "versions.md").read_text()
APP = "\n\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture
def page() -> Iterator[ModuleType]:
    module = ModuleType("version_docs")
    sys.modules["version_docs"] = module
    exec(compile(APP, "docs/versions.md", "exec"), module.__dict__)
    yield module
    del sys.modules["version_docs"]


async def test_a_new_run_takes_the_patch_and_has_its_tags(page: ModuleType) -> None:
    async with Harness(page.app) as harness:
        await harness.publish("order.created", source="shop", payload={"customer": "c-7", "amount": 9})
        await harness.advance("2h")
        run = await harness.only_run("fulfil")
    assert (run.output, run.tags) == ("receipt for 10", {"customer": "c-7"})
    assert set(run.steps) == {"patched:fee", "charge with fee", "sleep-1"}


def test_numbers() -> None:
    assert f"if {fit.PATIENCE_SECONDS:g} s pass ({fit.THREAD_PATIENCE_SECONDS:g} s in a synchronous function)" in TEXT
    assert f"at most {marks.MAX_TAGS}; values are text, integers or UUIDs of 1 to {marks.MAX_TAG_VALUE} char" in TEXT
