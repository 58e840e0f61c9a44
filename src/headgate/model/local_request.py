"""Whether a request was made on this machine, for it: what an API without tokens may believe.

A browser sends whatever a page tells it to, also to 127.0.0.1. A page of another site is known by its `Origin`; one
whose name was made to resolve to 127.0.0.1 (DNS rebinding) by the `Host` that it asks for.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from urllib.parse import urlsplit

Headers = Iterable[tuple[bytes, bytes]]

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z._-]{1,253})(:[0-9]{1,5})?", re.ASCII)
# What a proxy adds: whoever asked it may be anywhere.
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")


def why_foreign(headers: Headers, hosts: Collection[str], *, by_proxy: bool) -> str | None:
    """Why a request may come from elsewhere; None when it was made here, for one of our names or one of `hosts`.

    `by_proxy` takes those that a proxy passed on.
    """
    given: list[str] = []
    origins: list[str] = []
    for name, value in headers:
        if name == b"host":
            given.append(value.decode("latin-1"))
        elif name == b"origin":
            origins.append(value.decode("latin-1"))
        elif not by_proxy and name in _FORWARDED:
            return f"it came through a proxy ({name.decode()})"
    if len(given) != 1:
        return "it has no Host header" if not given else "it has several Host headers"
    host = host_name(given[0])
    if host is None or not (is_local_name(host) or host in hosts):
        return f"its Host header {given[0][:60]!r} is not a name of this machine"
    if any(_authority(origin) != given[0].lower() for origin in origins):
        return f"it was made by a page of {origins[0][:60]!r}"
    return None


@lru_cache(256)
def host_name(given: str) -> str | None:
    """The name or address in a Host header, without port and brackets; None when it has another form."""
    found = _HOST.fullmatch(given)
    return found[1].strip("[]").lower().removesuffix(".") if found else None


@lru_cache(256)
def is_local_name(name: str) -> bool:
    """Whether every browser takes the name for this machine, whatever name servers say."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
