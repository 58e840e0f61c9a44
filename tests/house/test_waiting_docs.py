"""The code in docs/waiting.md runs, and its numbers are true."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tidegate.model.approval import MAX_COMMENT, MAX_NOTE, MAX_TO
from tidegate.model.units import MAX_DURATION_MS
from tidegate.model.wait import MAX_PATTERNS
from tidegate.testing import Harness

TEXT = (Path(__file__).parent.parent.parent / "docs" / "waiting.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
APP = "\n\n".join(block for block in BLOCKS if "tidegate.testing" not in block)
TESTS = "\n\n".join(block for block in BLOCKS if "tidegate.testing" in block)


@pytest.fixture
def app() -> Iterator[ModuleType]:
    """The document's workflows, as a module that hints can be looked up in."""
    module = ModuleType("waiting_docs")
    sys.modules["waiting_docs"] = module
    exec(compile(APP, "docs/waiting.md", "exec"), module.__dict__)
    yield module
    del sys.modules["waiting_docs"]


async def test_the_workflows_do_what_is_said(app: ModuleType) -> None:
    async with Harness(app.app) as harness:
        for n in (1, 2, 3):
            await harness.publish("trip.booked", source="any", payload={"id": n})
        await harness.publish("parcel.sent", source="any", payload={"id": 5})
        await harness.publish("parcel.sent", source="any", payload={"id": 6})
        await harness.run_until_idle()
        await harness.publish("trip.paid", source="any", payload={"id": 1})
        await harness.publish("trip.refused", source="any", payload={"id": 2})
        await harness.publish("ticket.issued", source="any", payload={"id": 1})
        returned = await harness.publish("parcel.returned", source="any", payload={"id": 5})
        await harness.advance("2d")
        await harness.publish("visa.granted", source="any", payload={"id": 1})
        await harness.advance("7d")
        outputs = [run.output for run in await harness.runs("travel")]
        assert outputs == ["on the way", "cancelled", "cancelled"]
        first, second = await harness.runs("follow")
        assert (first.status, first.cancelled_by) == ("cancelled", f"event {returned.id}")
        assert (second.status, second.output) == ("succeeded", "delivered, probably")


def test_its_tests_pass(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "test_app.py").write_text(TESTS)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "asyncio_mode=auto"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), "test_app.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_numbers() -> None:
    assert f"at most {MAX_DURATION_MS // 86_400_000} days" in TEXT
    assert f"At most {MAX_PATTERNS} patterns" in TEXT
    assert f"at most {MAX_TO}, {MAX_NOTE} and {MAX_COMMENT} characters" in TEXT
