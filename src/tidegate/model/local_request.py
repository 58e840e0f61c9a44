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
_FORWARDED = frozenset((b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"))
_TELLING = _FORWARDED | {b"host", b"origin"}


def why_foreign(headers: Headers, hosts: Collection[str]) -> str | None:
    """Why a request may come from elsewhere; None when it was made here, for one of our names or one of `hosts`."""
    telling = [header for header in headers if header[0] in _TELLING]
    given = [value.decode("latin-1") for name, value in telling if name == b"host"]
    if len(telling) > len(given):
        proxied = next((name.decode() for name, _ in telling if name in _FORWARDED), None)
        if proxied is not None:
            return f"it came through a proxy ({proxied})"
    if len(given) != 1:
        return "it has no Host header" if not given else "it has several Host headers"
    host = host_name(given[0])
    if host is None or not (is_local_name(host) or host in hosts):
        return f"its Host header {given[0][:60]!r} is not a name of this machine"
    for name, value in telling:
        if name == b"origin" and _authority(value.decode("latin-1")) != given[0].lower():
            return f"it was made by a page of {value.decode('latin-1')[:60]!r}"
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
