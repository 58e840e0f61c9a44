"""The clock of this process: the only module that reads it.

It is used for ids and for the bounds of input, never for scheduling: `tidegate.now()` in the database decides what
is due.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import blake2b

_lock = threading.Lock()
_last_ms = 0
_counter = 0
_random: list[int] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random.clear)  # otherwise parent and child would use the same numbers


def utc_now() -> datetime:
    """The wall clock of this machine."""
    return datetime.now(UTC)


def has_utc(at: datetime) -> bool:
    """Whether the time can be expressed in UTC: 0001-01-01T00:00+01:00 would lie before year 1."""
    try:
        at.astimezone(UTC)
    except OverflowError:
        return False
    return True


def epoch_ns() -> int:
    """The wall clock as nanoseconds since 1970, for the times of spans."""
    return time.time_ns()


# Seconds for measuring local waits; unaffected by clock steps.
monotonic = time.monotonic


def _standard_uuid(number: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=number)


_new_uuid: Callable[[bytes], uuid.UUID] = _standard_uuid


def use_uuid_class(new_uuid: Callable[[bytes], uuid.UUID]) -> None:
    """Make `uuid7` create its ids with a faster subclass of `uuid.UUID`, called with the 16 bytes (see `store.db`)."""
    global _new_uuid
    _new_uuid = new_uuid


def uuid7() -> uuid.UUID:
    """A UUIDv7 (RFC 9562): ordered by creation within a process, even when the clock steps back."""
    global _last_ms, _counter
    with _lock:
        if not _random:
            _random.extend(struct.unpack("512Q", os.urandom(4096)))
        tail = _random.pop() & 0x3FFF_FFFF_FFFF_FFFF
        now_ms = time.time_ns() // 1_000_000
        if now_ms > _last_ms:
            _last_ms, _counter = now_ms, 0
        else:
            _counter += 1
            if _counter > 0xFFF:  # 4096 ids in one millisecond: use the next millisecond
                _last_ms, _counter = _last_ms + 1, 0
        ms, counter = _last_ms, _counter
    number = (ms << 80) | (0x7 << 76) | (counter << 64) | (0x2 << 62) | tail
    return _new_uuid(number.to_bytes(16, "big"))


def derived_uuid(parent: uuid.UUID, part: bytes) -> uuid.UUID:
    """The id of a part of something: the first 8 bytes of the whole's id, which are its time, and a hash of both."""
    whole = parent.bytes
    tail = blake2b(whole + part, digest_size=8).digest()
    return _new_uuid(whole[:8] + bytes((tail[0] & 0x3F | 0x80,)) + tail[1:])
