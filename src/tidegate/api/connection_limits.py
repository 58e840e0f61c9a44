"""How many connections there may be, in all and from one address. Whoever does nothing makes room for whoever comes.

Connections that have no request under way cost little and are worth little: where there are too many, those that have
been quiet for longest are ended, so that nobody is shut out by silence. Only when all are busy is one refused.
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

# Of the files that a process may open, those that are no connections of clients.
OTHER_FILES = 128
# Where the system sets no bound.
MOST_FILES = 65_536
# Of the connections, how many are ended at once: to look for them takes as long for one as for all.
ENDED_SHARE = 1 / 32
# The log has one line in so many seconds about those who were refused.
LOG_SECONDS = 10.0

_LOOPBACK = parse_networks("127.0.0.0/8, ::1")
_log = logger("api")


class LimitedConnection(Protocol):
    """A connection."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a request but its head has come, and no answer is due."""

    @property
    def idle_since(self) -> float: ...

    @property
    def end(self) -> Callable[[], None]:
        """Ends it at once."""


class ConnectionLimits:
    """The connections of one process. `max_per_address` 0: no bound; it is none for loopback and trusted proxies."""

    def __init__(self, max_total: int, max_per_address: int = 0, proxies: Sequence[Network] = ()) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._exempt = (*_LOOPBACK, *proxies)
        self._connections: dict[LimitedConnection, str] = {}
        self._counts = Counter[str]()
        self._logged_at = -LOG_SECONDS
        self._unlogged = 0

    def add(self, connection: LimitedConnection, address: str) -> bool:
        """Whether there is room, if need be made by ending quiet connections."""
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
        """It is over; one that never entered may leave too."""
        address = self._connections.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _make_room(self, among: Iterable[LimitedConnection]) -> bool:
        quiet = [connection for connection in among if connection.is_idle]
        for connection in heapq.nsmallest(max(1, int(len(quiet) * ENDED_SHARE)), quiet, key=lambda one: one.idle_since):
            self.remove(connection)
            connection.end()
        return bool(quiet)

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
            untold=self._unlogged,
        )
        self._logged_at, self._unlogged = now, 0


def raise_file_limit() -> int:
    """Let this process open as many files as it may; how many of them connections can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else MOST_FILES
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return max(soft - OTHER_FILES, OTHER_FILES) if soft != resource.RLIM_INFINITY else MOST_FILES
