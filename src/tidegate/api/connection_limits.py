"""Limits on the number of connections, in total and per address. Idle connections are closed to admit new ones.

When a limit is reached, the connections that have been idle for longest are closed, so that idle clients cannot lock
others out. A new connection is refused only when all of them have a request in progress.
"""

from __future__ import annotations

import heapq
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tidegate.clock import monotonic
from tidegate.model.client_address import Network, is_in, parse_networks
from tidegate.telemetry.logs import logger

# File descriptors reserved for everything other than client connections.
OTHER_FILES = 128
# The limit where the system sets none.
MOST_FILES = 65_536
# The share of the idle connections that is closed at once: finding one takes as long as finding many.
ENDED_SHARE = 1 / 32
# Refused connections are logged at most once in this time.
LOG_SECONDS = 10.0

_LOOPBACK = parse_networks("127.0.0.0/8, ::1")
_log = logger("api")


class LimitedConnection(Protocol):
    """What the limits need to know of a connection."""

    @property
    def is_idle(self) -> bool:
        """Whether it has sent no more than the head of a request, and no answer is due."""

    @property
    def idle_since(self) -> float: ...

    @property
    def end(self) -> Callable[[], None]:
        """Closes it at once."""


class ConnectionLimits:
    """The connections of one process. `max_per_address` 0 means no limit; loopback and trusted proxies have none."""

    def __init__(self, max_total: int, max_per_address: int = 0, proxies: Sequence[Network] = ()) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._exempt = (*_LOOPBACK, *proxies)
        self._connections: dict[LimitedConnection, str] = {}
        self._counts = Counter[str]()
        self._logged_at = -LOG_SECONDS
        self._unlogged = 0

    def add(self, connection: LimitedConnection, address: str) -> bool:
        """Add a connection, closing idle ones if a limit is reached. False: it must be refused."""
        is_over = self._is_bounded(address) and self._counts[address] >= self._max_per_address
        if is_over and not self._make_room([one for one, at in self._connections.items() if at == address]):
            self._log_refusal(address, self._counts[address])
            return False
        if len(self._connections) >= self._max_total and not self._make_room(self._connections):
            self._log_refusal(address, self._counts[address])
            return False
        self._connections[connection] = address
        self._counts[address] += 1
        return True

    def remove(self, connection: LimitedConnection) -> None:
        """Remove a connection that has ended; one that was never added is ignored."""
        address = self._connections.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _make_room(self, among: Iterable[LimitedConnection]) -> bool:
        idle = [connection for connection in among if connection.is_idle]
        for connection in heapq.nsmallest(max(1, int(len(idle) * ENDED_SHARE)), idle, key=lambda one: one.idle_since):
            self.remove(connection)
            connection.end()
        return bool(idle)

    def _is_bounded(self, address: str) -> bool:
        return bool(self._max_per_address and address) and not is_in(address, self._exempt)

    def _log_refusal(self, address: str, here: int) -> None:
        now = monotonic()
        if now < self._logged_at + LOG_SECONDS:
            self._unlogged += 1
            return
        _log.warning(
            "connection.refused",
            address=address,
            of_address=here,
            connections=len(self._connections),
            suppressed=self._unlogged,
        )
        self._logged_at, self._unlogged = now, 0


def raise_file_limit() -> int:
    """Raise the limit on open files to the maximum allowed; returns how many of them can be client connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else MOST_FILES
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(soft - OTHER_FILES, OTHER_FILES) if soft != resource.RLIM_INFINITY else MOST_FILES
