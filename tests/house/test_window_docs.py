"""The code in docs/windows.md runs, and its numbers are true."""

from __future__ import annotations

import re
from pathlib import Path

from tidegate.model.window import DEFAULT_WAITS, MAX_EVENTS
from tidegate.testing import Harness

TEXT = (Path(__file__).parent.parent.parent / "docs" / "windows.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


async def test_its_test_passes() -> None:
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/windows.md", "exec"), names)
    passed = await names["test_digest"]()  # type: ignore[operator]
    assert passed is None


async def test_a_batch_is_given_to_one_run() -> None:
    names: dict[str, object] = {}
    exec(compile(BLOCKS[0], "docs/windows.md", "exec"), names)
    app = names["app"]
    async with Harness(app) as harness:  # type: ignore[arg-type]
        for n in range(3):
            await harness.publish("row.read", source="files", payload={"n": n})
        await harness.advance("5s")
        assert (await harness.only_run("store")).output == {"stored": 3}


def test_the_numbers() -> None:
    assert f"at most {MAX_EVENTS} events" in TEXT
    assert DEFAULT_WAITS == 10 and "default: ten times `debounce`" in TEXT
