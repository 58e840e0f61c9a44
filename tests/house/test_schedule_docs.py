"""The code in docs/schedules.md runs, and its numbers are true."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from tidegate.flow.control.schedules import MAX_TICKS
from tidegate.model.event import MAX_DELAY_MS
from tidegate.model.schedule import MAX_COUNTED
from tidegate.testing import Harness

TEXT = (Path(__file__).parent.parent.parent / "docs" / "schedules.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The document's code, as a module that hints can be looked up in."""
    module = ModuleType("schedule_docs")
    monkeypatch.setitem(__import__("sys").modules, "schedule_docs", module)
    exec(compile("\n\n".join(BLOCKS), "docs/schedules.md", "exec"), module.__dict__)
    return module


def test_its_test_passes(page: ModuleType) -> None:
    page.test_a_customer_is_reminded()
    assert {name: spec.overlap for name, spec in page.app.schedules.items()} == {
        "sync_stock": "allow", "nightly_report": "allow", "poll": "skip",
    }  # fmt: skip


async def test_its_events_wait_for_their_time(page: ModuleType) -> None:
    async with Harness(page.app) as harness:
        await page.leave("ann")
        await harness.advance("119m")
        assert await harness.runs("remind") == []
        await harness.advance("1m")
        assert (await harness.only_run("remind")).parameters == {"customer": "ann"}


def test_its_numbers_are_true() -> None:
    assert f"at most\n  {MAX_COUNTED:,} per outage" in TEXT
    assert f"at most {MAX_TICKS:,}" in TEXT
    assert f"more than {MAX_DELAY_MS // 86_400_000} days ahead" in TEXT
