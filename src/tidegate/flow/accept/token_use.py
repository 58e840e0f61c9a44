"""How often tokens are used, and what is told of those that are refused; for one process."""

from __future__ import annotations

import asyncio
import uuid

from tidegate.errors import TooManyRequests, Unauthorized
from tidegate.telemetry.logs import logger

# Strangers may knock as often as they like: in so many seconds the log has one line for each address, and so many
# lines in all.
QUIET_SECONDS = 1.0
MAX_LINES = 20
MAX_KEPT = 1000

_log = logger("access")


class Rates:
    """Each token has a bucket that holds as many requests as its rate allows in its window, and fills up evenly."""

    def __init__(self) -> None:
        # When the bucket of each token will be full again.
        self._full_at: dict[uuid.UUID, float] = {}

    def take(self, token_id: uuid.UUID, name: str, count: int, window_ms: int) -> None:
        """Count one request. TooManyRequests when the bucket is empty; that one is not counted."""
        now, window = asyncio.get_running_loop().time(), window_ms / 1000
        full_at = max(self._full_at.get(token_id, 0.0), now) + window / count
        late = full_at - now - window
        if late > 1e-6:
            text = f"the token {name} has been used as often as its rate allows ({count} in {window:g} s)"
            raise TooManyRequests(text, max(1, int(late + 0.999)))
        if len(self._full_at) >= MAX_KEPT:
            self._full_at = {one: at for one, at in self._full_at.items() if at > now}
        self._full_at[token_id] = full_at


class Refusals:
    """Tells of tokens that were refused, a bounded number of times."""

    def __init__(self) -> None:
        self._told: set[str | None] = set()
        self._until = 0.0
        self._untold = 0

    def tell(self, error: Unauthorized, address: str | None) -> None:
        """One line, unless this address has had its own just now, or too many others have."""
        now = asyncio.get_running_loop().time()
        if now >= self._until:
            self._told.clear()
            self._until = now + QUIET_SECONDS
        if address in self._told or len(self._told) >= MAX_LINES:
            self._untold += 1
            return
        self._told.add(address)
        untold, self._untold = self._untold, 0
        reason = str(error).partition(";")[0]  # without what to do, which is for whoever asked
        _log.warning("access.refused", address=address, reason=reason, name=error.token, untold=untold)
