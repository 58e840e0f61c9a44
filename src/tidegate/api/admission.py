"""Admission control: how much an API process accepts at once. Above it, requests are refused before their body is read.

Refusing must cost next to nothing, or an overloaded process spends its time on the requests that it refuses. The
refusal must also leave at once, so nothing may block the event loop for long: an iteration of the loop stops parsing
after TURN_BYTES, and so parses large bodies one at a time.

Unauthenticated clients, such as the sender of a webhook until its signature is checked, have a pool of their own:
however many there are, they take no capacity from authenticated clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from tidegate.clock import monotonic
from tidegate.errors import Overloaded

# How long an accepted event may wait for its commit. The limit in events follows from how many the process stores in
# that time, measured while at least ENOUGH_EVENTS are in progress.
WAIT_SECONDS = 1.0
# Events in progress that keep the database busy: two full commits, the current one and the next.
ENOUGH_EVENTS = 2000
MEASURE_SECONDS = 0.5
# Memory for bodies, from their first byte until their request is answered: authenticated and unauthenticated clients.
MAX_HELD_BYTES = 64 * 1024 * 1024
MAX_UNAUTHENTICATED_BYTES = 16 * 1024 * 1024
# Bytes of bodies parsed in one iteration of the event loop (about ten milliseconds), and bytes that may wait to be
# parsed (about a second). Each body counts REQUEST_BYTES more, since an empty one has a cost too.
TURN_BYTES = 64 * 1024
MAX_WAITING_BYTES = 4 * 1024 * 1024
REQUEST_BYTES = 256


def overloaded() -> Overloaded:
    """The answer to a request for which there is no capacity."""
    return Overloaded("the server has more requests in progress than it can store at once; try again in a second")


class BodyPool:
    """The bodies of a group of requests: the memory they hold, and the order in which they are parsed."""

    def __init__(self, max_held_bytes: int) -> None:
        self.max_held_bytes = max_held_bytes
        self.held_bytes = 0
        self._parsed_bytes = 0
        self._waiting_bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def is_full(self) -> bool:
        return self._waiting_bytes >= MAX_WAITING_BYTES or self.held_bytes >= self.max_held_bytes

    async def parse_turn(self, size: int) -> None:
        """Return when a body of this size may be parsed. Overloaded when too many bytes wait or are held."""
        if self.is_full:
            raise overloaded()
        cost = size + REQUEST_BYTES
        if self._waiting or self._parsed_bytes >= TURN_BYTES:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, cost))
            self._waiting_bytes += cost
            await turn
        else:
            self._take(cost)

    def _take(self, cost: int) -> None:
        if self._parsed_bytes == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._parsed_bytes += cost

    def _next_turn(self) -> None:
        self._parsed_bytes = 0
        while self._waiting and self._parsed_bytes < TURN_BYTES:
            future, cost = self._waiting.popleft()
            self._waiting_bytes -= cost
            if not future.done():  # otherwise its request was cancelled
                future.set_result(None)
                self._take(cost)


class Admission:
    """What one process has in progress. `max_events` is the limit until a rate is measured, then its upper bound."""

    def __init__(self, max_events: int, *, clock: Callable[[], float] = monotonic) -> None:
        self._max_events = max_events
        self._clock = clock
        self.limit_events = max_events
        self._events = 0
        self.authenticated = BodyPool(MAX_HELD_BYTES)
        self.unauthenticated = BodyPool(MAX_UNAUTHENTICATED_BYTES)
        self._is_measuring_since: float | None = None
        self._stored = 0

    @property
    def is_full(self) -> bool:
        """Whether a request of an authenticated client must be refused."""
        return self._events >= self.limit_events or self.authenticated.is_full

    @property
    def is_full_for_unauthenticated(self) -> bool:
        """Whether a request of an unauthenticated client must be refused."""
        return self._events >= self.limit_events or self.unauthenticated.is_full

    @contextlib.contextmanager
    def request(self, *, is_authenticated: bool = True) -> Iterator[AdmittedRequest]:
        """A request in progress; what it holds is released when the context ends."""
        admitted = AdmittedRequest(self, self.authenticated if is_authenticated else self.unauthenticated)
        try:
            yield admitted
        finally:
            admitted.pool.held_bytes -= admitted.bytes
            if admitted.events:
                self._events -= admitted.events
                self._measure(admitted.events)

    def _measure(self, stored: int) -> None:
        """Measure events stored per second, only under load: otherwise it would measure how many are sent."""
        now = self._clock()
        if self._events < ENOUGH_EVENTS:
            self._is_measuring_since = None
        elif self._is_measuring_since is None:
            self._is_measuring_since, self._stored = now, 0
        else:
            self._stored += stored
            elapsed = now - self._is_measuring_since
            if elapsed >= MEASURE_SECONDS:
                found = self._stored / elapsed * WAIT_SECONDS
                if found > self.limit_events:
                    found = (found + self.limit_events) / 2  # down at once, up gradually
                self.limit_events = round(min(max(found, ENOUGH_EVENTS), self._max_events))
                self._is_measuring_since, self._stored = now, 0


class AdmittedRequest:
    """What one request holds, and in which pool."""

    def __init__(self, admission: Admission, pool: BodyPool) -> None:
        self._admission = admission
        self.pool = pool
        self.bytes = 0
        self.events = 0

    def hold_bytes(self, count: int) -> None:
        """More of its body has arrived. Overloaded when the bodies of its pool together hold too much."""
        self.bytes += count
        self.pool.held_bytes += count
        if self.pool.held_bytes > self.pool.max_held_bytes:
            raise overloaded()

    async def parse_turn(self) -> None:
        """Return when its body may be parsed. Overloaded when too many events are in progress by now."""
        if self._admission._events >= self._admission.limit_events:
            raise overloaded()
        await self.pool.parse_turn(self.bytes)

    def mark_authenticated(self) -> None:
        """Move the request to the pool of authenticated clients: its signature is valid."""
        self.pool.held_bytes -= self.bytes
        self.pool = self._admission.authenticated
        self.pool.held_bytes += self.bytes

    def hold_events(self, count: int) -> None:
        """Count its events, which are about to be stored."""
        self.events += count
        self._admission._events += count
