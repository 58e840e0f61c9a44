"""Requests that are repeated while the API or its database is away, because repeating them is harmless."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import click
import httpx

from tidegate.errors import Unavailable

# How long a request is repeated after the first one without an answer.
PATIENCE_SECONDS = 60.0

T = TypeVar("T")


def patiently(send: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """What a request returns, repeated after an answer that was lost, 429 or 503 (as `Retry-After` says). Unavailable
    after `seconds`; at once if nobody is there to begin with."""
    deadline: float | None = None
    while True:
        try:
            return send()
        except Unavailable as exc:
            if deadline is None and isinstance(exc.__cause__, httpx.ConnectError):
                raise
            now = time.monotonic()
            deadline = deadline or now + seconds
            if now + exc.retry_after_seconds > deadline:
                raise
            click.echo(f"tidegate: {exc}; trying again in {exc.retry_after_seconds} s", err=True)
            time.sleep(exc.retry_after_seconds)
