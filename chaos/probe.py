"""`python -m chaos.probe URL`: a few clients with one connection each, in a process of their own.

Each publishes a small event every few milliseconds until the input ends; printed is how long each answer took. The load
generator measures its own queue too; this is what somebody else sees. Where it may, it runs before the others do.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import sys
import threading
import time
from typing import NamedTuple

import msgspec

EVERY_SECONDS = 0.02
CLIENTS = 8
WAIT_SECONDS = 60.0
_BODY = b'{"type":"overload.none","source":"overload.probe","payload":{}}'


class Probed(NamedTuple):
    """One answer: when it was asked for, how long it took, its status (0: none)."""

    at: float
    seconds: float
    status: int


def probe(url: str, is_over: threading.Event, found: list[Probed]) -> None:
    """One client, until it is over."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_SECONDS)
    while not is_over.wait(EVERY_SECONDS):
        at = time.monotonic()
        status = 0
        try:
            connection.request("POST", "/v1/events", _BODY, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, http.client.HTTPException):
            connection.close()
        found.append(Probed(at, time.monotonic() - at, status))
    connection.close()


def main() -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    is_over, found = threading.Event(), list[Probed]()
    clients = [threading.Thread(target=probe, args=(sys.argv[1], is_over, found)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    sys.stdin.read()
    is_over.set()
    for client in clients:
        client.join()
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
