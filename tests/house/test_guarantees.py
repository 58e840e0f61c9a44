"""Every promise names a test, and each of those tests exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "guarantees.md").read_text()
PROMISES = [line for line in TEXT.splitlines() if line.startswith("| **")]
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def test_every_promise_is_tried_by_a_test() -> None:
    assert len(PROMISES) > 15
    for promise in PROMISES:
        assert NAMED.findall(promise.split("|")[3]), promise


def test_the_named_tests_exist() -> None:
    for file, test in NAMED.findall(TEXT):
        found = list((ROOT / "tests").rglob(file))
        assert len(found) == 1, file
        assert re.search(rf"^(async )?def {test}\(", found[0].read_text(), re.MULTILINE), f"{file} has no {test}"
