"""The code in docs/workflows.md runs, and its numbers are true."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tidegate.flow.code import user_calls
from tidegate.flow.run import quarantine
from tidegate.model.retry import STEP_RETRY
from tidegate.model.run import MAX_TRIALS, SUSPECT_CRASHES
from tidegate.model.units import MAX_DURATION_MS
from tidegate.settings import Settings
from tidegate.testing import Harness

TEXT = (Path(__file__).parent.parent.parent / "docs" / "workflows.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
APP = "\n\n".join(BLOCKS)


@pytest.fixture
def app() -> Iterator[ModuleType]:
    """The document's workflows, as a module that hints can be looked up in."""
    module = ModuleType("workflow_docs")
    sys.modules["workflow_docs"] = module
    exec(compile(APP, "docs/workflows.md", "exec"), module.__dict__)
    yield module
    del sys.modules["workflow_docs"]


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) < 190


async def test_the_workflows_do_what_is_said(app: ModuleType) -> None:
    assert sorted(app.app.workflows) == ["book", "compare", "fulfil", "report"]
    async with Harness(app.app) as harness:
        await harness.publish("order.created", source="shop.api", payload={"id": 7})
        await harness.publish("report.wanted", source="any", payload={"name": "May", "rows": 3})
        await harness.publish("city.asked", source="any", payload={"cities": ["Rome", "Paris"]})
        await harness.publish("trip.booked", source="any", payload={"hotel": "Astoria"})
        await harness.advance("119s")
        assert app.calls == ["Astoria"]
        await harness.advance("1h")
        assert (await harness.only_run("book")).output == "room 5"
        assert (await harness.only_run("report")).output == "May: 3 rows"
        assert (await harness.only_run("compare")).output == {"Rome": 4, "Paris": 5}
        await harness.publish("trip.booked", source="any", payload={"hotel": "Ritz"})
        await harness.advance("1h")
        assert (await harness.runs("book"))[1].output == "not booked: NonRetryable: no such hotel here"
        run = await harness.only_run("fulfil")
        assert run.output == {"order": 7, "receipt": f"receipt for 10, key {run.id}:charge"}


async def test_wrong_parameters_fail_the_run_at_once(app: ModuleType) -> None:
    async with Harness(app.app) as harness:
        for payload in ({}, {"id": "seven"}, {"id": 7, "more": 1}):
            await harness.publish("order.created", source="shop.api", payload=payload)
        await harness.run_until_idle()
        errors = [run.error or "" for run in await harness.runs("fulfil")]
    assert ["'id'" in error for error in errors] == [True, True, False]


def test_numbers() -> None:
    policy = STEP_RETRY
    assert (policy.max_attempts, policy.base_ms, policy.factor, policy.max_ms, policy.jitter_ratio) == (
        5, 1000, 2, 300_000, 0.2,
    )  # fmt: skip
    assert "5 attempts, 1 s, doubled up to 5 min, ± 20 %" in TEXT
    assert user_calls.MAX_OUTPUT_BYTES == 1024 * 1024 and "at most 1 MiB" in TEXT
    assert f"1 to {user_calls.MAX_STEP_NAME} characters" in TEXT
    assert f"up to {MAX_DURATION_MS // 86_400_000} days" in TEXT
    assert f"(`TIDEGATE_LEASE_MS`, {Settings().lease_ms // 1000} s)" in TEXT
    assert f"whose worker died {SUSPECT_CRASHES} times in a row is a suspect" in TEXT
    assert f"its worker dies {MAX_TRIALS} times in a row then" in TEXT
    assert f"alone for {quarantine.ALONE_SECONDS:g} s at most" in TEXT and quarantine.ALONE_FACTOR == 4
