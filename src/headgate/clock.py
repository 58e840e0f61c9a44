"""The process's own clock, in one place.

It names ids and bounds input; it never schedules. What is due is decided by `headgate.now()` in the database.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from datetime import UTC, datetime

_lock = threading.Lock()
_last_ms = 0
_counter = 0


def utc_now() -> datetime:
    """The wall clock of this machine."""
    return datetime.now(UTC)


def monotonic() -> float:
    """Seconds for measuring local waits; unaffected by clock steps."""
    return time.monotonic()


def uuid7() -> uuid.UUID:
    """A UUIDv7 (RFC 9562): ordered by creation within a process, even when the clock steps back."""
    global _last_ms, _counter
    tail = int.from_bytes(os.urandom(8), "big") & 0x3FFF_FFFF_FFFF_FFFF
    with _lock:
        now_ms = time.time_ns() // 1_000_000
        if now_ms > _last_ms:
            _last_ms, _counter = now_ms, 0
        else:
            _counter += 1
            if _counter > 0xFFF:  # 4096 ids in one millisecond: borrow the next one
                _last_ms, _counter = _last_ms + 1, 0
        ms, counter = _last_ms, _counter
    return uuid.UUID(int=(ms << 80) | (0x7 << 76) | (counter << 64) | (0x2 << 62) | tail)
