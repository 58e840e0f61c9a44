"""What `RetryAfter` takes: seconds, texts of HTTP headers, durations."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate import RetryAfter
from tidegate.flow.code.user_calls import retry_after_ms


@pytest.mark.parametrize(
    ("given", "ms"),
    [
        (5, 5000), (0.25, 250), ("5", 5000), ("5s", 5000), ("2m", 120_000), (-5, 1), ("in a while", 1000), (None, 1000),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 1000), (float("nan"), 1000),
    ],
)  # fmt: skip
def test_the_delay(given: Any, ms: int) -> None:
    assert retry_after_ms(RetryAfter(given)) == ms


def test_everyone_is_a_name() -> None:
    wrong: Any = 3
    with pytest.raises(TypeError, match='everyone: must be "trigger", "key" or the name of a budget, not 3'):
        RetryAfter(1, everyone=wrong)
