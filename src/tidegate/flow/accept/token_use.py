"""Token use: rate limits of tokens, and the log of refused ones; for one process."""

from __future__ import annotations

import asyncio

from tidegate.errors import TooManyRequests, Unauthorized
from tidegate.model.ids import TokenId
from tidegate.telemetry.logs import logger

# Unauthenticated clients may send any number of requests: in QUIET_SECONDS the log gets at most one line per address,
# and MAX_LINES in all.
QUIET_SECONDS = 1.0
MAX_LINES = 20
MAX_KEPT = 1000

_log = logger("access")


class Rates:
    """A token bucket per API token: it holds as many requests as the rate allows in its window, and refills evenly."""

    def __init__(self) -> None:
        # When the bucket of each token will be full again.
        self._full_at: dict[TokenId, float] = {}

    def take(self, token_id: TokenId, name: str, count: int, window_ms: int) -> None:
        """Count one request. Raises TooManyRequests when the bucket is empty; a refused request is not counted."""
        now, window = asyncio.get_running_loop().time(), window_ms / 1000
        full_at = max(self._full_at.get(token_id, 0.0), now) + window / count
        late = full_at - now - window
        if late > 1e-6:
            text = f"the token {name} has reached its rate limit ({count} requests in {window:g} s)"
            raise TooManyRequests(text, max(1, int(late + 0.999)))
        if len(self._full_at) >= MAX_KEPT:
            self._full_at = {one: at for one, at in self._full_at.items() if at > now}
        self._full_at[token_id] = full_at


class Refusals:
    """Logs refused tokens, at a bounded rate."""

    def __init__(self) -> None:
        self._logged: set[str | None] = set()
        self._until = 0.0
        self._suppressed = 0

    def log(self, error: Unauthorized, address: str | None) -> None:
        """Log one line, unless this address or MAX_LINES others were logged within QUIET_SECONDS."""
        now = asyncio.get_running_loop().time()
        if now >= self._until:
            self._logged.clear()
            self._until = now + QUIET_SECONDS
        if address in self._logged or len(self._logged) >= MAX_LINES:
            self._suppressed += 1
            return
        self._logged.add(address)
        suppressed, self._suppressed = self._suppressed, 0
        reason = str(error).partition(";")[0]  # without the instructions for the client
        _log.warning("access.refused", address=address, reason=reason, name=error.token, suppressed=suppressed)
