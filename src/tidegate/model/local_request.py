"""Whether a request was made on this machine: an API without tokens accepts no others.

A web page can make a browser send requests to 127.0.0.1. A page of another site is detected by its `Origin`, and a page
whose name resolves to 127.0.0.1 (DNS rebinding) by its `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from urllib.parse import urlsplit

Headers = Iterable[tuple[bytes, bytes]]

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[0-9A-Za-z._-]{1,253})(:[0-9]{1,5})?", re.ASCII)
# Headers that proxies add: their client may be on any machine.
_FORWARDED = frozenset((b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"))
_RELEVANT = _FORWARDED | {b"host", b"origin"}


def why_foreign(headers: Headers, hosts: Collection[str]) -> str | None:
    """Why a request may come from another machine; None if it was made here, for a loopback name or one of `hosts`."""
    relevant = [header for header in headers if header[0] in _RELEVANT]
    given = [value.decode("latin-1") for name, value in relevant if name == b"host"]
    if len(relevant) > len(given):
        proxied = next((name.decode() for name, _ in relevant if name in _FORWARDED), None)
        if proxied is not None:
            return f"it came through a proxy ({proxied})"
    if len(given) != 1:
        return "it has no Host header" if not given else "it has several Host headers"
    host = host_name(given[0])
    if host is None or not (is_local_name(host) or host in hosts):
        return f"its Host header {given[0][:60]!r} is not a name of this machine"
    for name, value in relevant:
        if name == b"origin" and _authority(value.decode("latin-1")) != given[0].lower():
            return f"it was made by a web page of {value.decode('latin-1')[:60]!r}"
    return None


@lru_cache(256)
def host_name(given: str) -> str | None:
    """The name or address in a Host header, without port and brackets; None if it is malformed."""
    found = _HOST.fullmatch(given)
    return found[1].strip("[]").lower().removesuffix(".") if found else None


@lru_cache(256)
def is_local_name(name: str) -> bool:
    """Whether browsers resolve the name to this machine without asking a name server."""
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
