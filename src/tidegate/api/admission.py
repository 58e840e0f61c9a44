"""How much an API process takes on at once. What is over it is refused at its head, before its body is read or parsed.

Refusing must cost next to nothing, or an overloaded process spends its time on what it refuses. And whoever is refused
is to know it at once, so nothing holds the event loop for long: large bodies are parsed one in each turn of the loop.

Those who have shown nothing yet, as the sender of a webhook until its signature is checked, have a room of their own:
however many there are, they take nothing from those who are known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from tidegate.clock import monotonic
from tidegate.errors import Overloaded

# What is accepted may wait so long for its commit; more is refused. In events, once a process that has enough to do has
# shown how many it stores in that time.
WAIT_SECONDS = 1.0
# With so many events under way the database never waits for us: two full commits, one under way and the next.
ENOUGH_EVENTS = 2000
MEASURE_SECONDS = 0.5
# What bodies may occupy from their first byte until their request is answered, in all; and those of strangers.
MAX_HELD_BYTES = 64 * 1024 * 1024
MAX_UNAUTHENTICATED_BYTES = 16 * 1024 * 1024
# Of bodies that are parsed in one turn of the event loop (some ten milliseconds), and that may wait for their turn (a
# second or so); each counts for so many bytes more, since an empty one costs something too.
TURN_BYTES = 64 * 1024
MAX_WAITING_BYTES = 4 * 1024 * 1024
REQUEST_BYTES = 256


def overloaded() -> Overloaded:
    """What is said to whoever comes when there is no room."""
    return Overloaded("more is under way than can be stored at once; try again in a second")


class BodyPool:
    """The bodies of some requests: what they occupy, and which of them is parsed next."""

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
        """Returns when a body of this size may be parsed. Overloaded when too many wait, or hold too much."""
        if self.is_full:
            raise overloaded()
        cost = size + REQUEST_BYTES
        if self._waiting or self._parsed_bytes >= TURN_BYTES:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((mine, cost))
            self._waiting_bytes += cost
            await mine
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
            if not future.done():  # else its request has gone
                future.set_result(None)
                self._take(cost)


class Admission:
    """What one process has taken on. `max_events` bounds it while nothing has been measured, and ever after."""

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
        """Whether no more may be begun."""
        return self._events >= self.limit_events or self.authenticated.is_full

    @property
    def is_full_for_unauthenticated(self) -> bool:
        return self._events >= self.limit_events or self.unauthenticated.is_full

    @contextlib.contextmanager
    def request(self, *, is_authenticated: bool = True) -> Iterator[AdmittedRequest]:
        """A request that was begun; whatever it held is free again when it is left."""
        admitted = AdmittedRequest(self, self.authenticated if is_authenticated else self.unauthenticated)
        try:
            yield admitted
        finally:
            admitted.pool.held_bytes -= admitted.bytes
            if admitted.events:
                self._events -= admitted.events
                self._measure(admitted.events)

    def _measure(self, stored: int) -> None:
        """Events stored a second, while there is enough to do: otherwise it would only tell how many were sent."""
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
                    found = (found + self.limit_events) / 2  # down at once, up by and by
                self.limit_events = round(min(max(found, ENOUGH_EVENTS), self._max_events))
                self._is_measuring_since, self._stored = now, 0


class AdmittedRequest:
    """What one request holds, and in which room."""

    def __init__(self, admission: Admission, pool: BodyPool) -> None:
        self._admission = admission
        self.pool = pool
        self.bytes = 0
        self.events = 0

    def hold_bytes(self, count: int) -> None:
        """More of its body has come. Overloaded when all bodies of its room together are too much."""
        self.bytes += count
        self.pool.held_bytes += count
        if self.pool.held_bytes > self.pool.max_held_bytes:
            raise overloaded()

    async def parse_turn(self) -> None:
        """Returns when its body may be parsed. Overloaded when by now too much is under way."""
        if self._admission._events >= self._admission.limit_events:
            raise overloaded()
        await self.pool.parse_turn(self.bytes)

    def mark_authenticated(self) -> None:
        """Whose request it is has been shown."""
        self.pool.held_bytes -= self.bytes
        self.pool = self._admission.authenticated
        self.pool.held_bytes += self.bytes

    def hold_events(self, count: int) -> None:
        """Its events are about to be stored."""
        self.events += count
        self._admission._events += count
