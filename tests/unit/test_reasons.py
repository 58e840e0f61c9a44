"""Why something failed, in one line: the exception's type, and the first line of what it says."""

from __future__ import annotations

import pytest

from tidegate.errors import NonRetryable, RetryAfter, StepFailed, first_line
from tidegate.flow.code.user_calls import MAX_ERROR_CHARACTERS, error_text, reason_of


class HTTPStatusError(Exception):
    """Says what httpx says."""


class StolenCard(NonRetryable):
    """A refusal of a user's own."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


NOT_FOUND = """Client error '404 Not Found' for url 'https://shop.example/orders/7'
For more information check: https://developer.mozilla.org/en-US/docs/Web/HTTP/Status/404"""


def raised(exc: BaseException) -> BaseException:
    """With a traceback, as it is caught."""
    try:
        raise exc
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("exc", "reason"),
    [
        (
            HTTPStatusError(NOT_FOUND),
            f"{__name__}.HTTPStatusError: Client error '404 Not Found' for url 'https://shop.example/orders/7'",
        ),
        (ValueError("no"), "ValueError: no"),
        (ValueError("\n\n  the second line\nthe third"), "ValueError: the second line"),
        (ValueError(), "ValueError"),
        (KeyError("amount"), "KeyError: 'amount'"),
        (Mute(), f"{__name__}.Mute"),
        (NonRetryable("no such hotel\nask again"), "NonRetryable: no such hotel"),
        (NonRetryable(), "NonRetryable"),
        (StolenCard("call the bank"), f"{__name__}.StolenCard: call the bank"),
        (RetryAfter(5, "429\nslow down"), "RetryAfter: 429"),
        (RetryAfter(5), "RetryAfter: retry after 5 s"),
        (
            ValueError("Traceback (most recent call last):\n  x\nOSError: inner"),
            "ValueError: Traceback (most recent call last):",
        ),
        (
            ExceptionGroup("2 tasks", [ValueError("first\nmore"), OSError("second")]),
            "ExceptionGroup: 2 tasks (2 sub-exceptions): ValueError: first",
        ),
        (ValueError("x" * 100_000), f"ValueError: {'x' * 1000}"),
    ],
)
def test_the_reason_is_the_type_and_the_first_line(exc: BaseException, reason: str) -> None:
    text = error_text(raised(exc))
    assert first_line(text) == reason_of(exc) == reason
    assert len(text) < MAX_ERROR_CHARACTERS + 1200
    assert first_line(str(StepFailed("charge", text))) == f"step 'charge' failed: {reason}"


def test_the_traceback_and_what_else_it_says_are_kept() -> None:
    text = error_text(raised(HTTPStatusError(NOT_FOUND)))
    assert "Traceback (most recent call last):" in text and "in raised" in text
    assert text.rstrip().endswith(NOT_FOUND.splitlines()[1])


def test_a_refusal_says_all_that_it_has_to_say_and_has_no_traceback() -> None:
    assert error_text(raised(NonRetryable("no such hotel\nask again"))) == "NonRetryable: no such hotel\nask again"


def test_no_text_has_no_reason() -> None:
    assert first_line("") == first_line(" \n ") == ""
