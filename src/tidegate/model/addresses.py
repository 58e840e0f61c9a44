"""The allowed destinations of outgoing requests: which addresses are public, and which URLs are valid. No I/O."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_URL = 2000

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# The first matching network names the kind of an address. The lists in `ipaddress` differ between Python versions.
_KINDS_V4 = [
    (ipaddress.IPv4Network(network), kind)
    for network, kind in (
        ("169.254.169.254/32", "a metadata service"),
        ("100.100.100.200/32", "a metadata service"),
        ("192.0.0.192/32", "a metadata service"),
        ("168.63.129.16/32", "a metadata service"),
        ("0.0.0.0/8", "an unspecified address"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "a carrier's private address"),
        ("127.0.0.0/8", "a loopback address"),
        ("169.254.0.0/16", "a link-local address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "a reserved address"),
        ("192.0.2.0/24", "a reserved address"),
        ("192.88.99.0/24", "a reserved address"),
        ("192.168.0.0/16", "a private address"),
        ("198.18.0.0/15", "a private address"),
        ("198.51.100.0/24", "a reserved address"),
        ("203.0.113.0/24", "a reserved address"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved address"),
    )
]
_KINDS_V6 = [
    (ipaddress.IPv6Network(network), kind)
    for network, kind in (
        ("fd00:ec2::254/128", "a metadata service"),
        ("fd20:ce::254/128", "a metadata service"),
        ("::/128", "an unspecified address"),
        ("::1/128", "a loopback address"),
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a private address"),
        ("ff00::/8", "a multicast address"),
        ("2001::/23", "a reserved address"),
        ("2001:db8::/32", "a reserved address"),
        ("3fff::/20", "a reserved address"),
    )
]
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
# IPv6 networks that embed an IPv4 address, and its offset in bits from the right.
_EMBEDDING = [
    (ipaddress.IPv6Network(network), shift)
    for network, shift in (
        ("::ffff:0:0/96", 0),
        ("::ffff:0:0:0/96", 0),
        ("64:ff9b::/96", 0),
        ("2002::/16", 80),
    )
]
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)


class Allowed(NamedTuple):
    """An allowed destination that is not public: a host name or a network, with one port or (None) any."""

    host: str | None
    network: ipaddress.IPv4Network | ipaddress.IPv6Network | None
    port: int | None


def parse_allowed(text: str) -> tuple[Allowed, ...]:
    """A list such as `10.0.0.0/8:8080, hooks.internal:443, [fd00::/8]:443`. ValueError names the entry."""
    return tuple(_allowed(part.strip()) for part in text.split(",") if part.strip())


def is_allowed(allowed: Sequence[Allowed], host: str, address: Address, port: int) -> bool:
    """Whether an entry matches the port, and the host name or the network of the address."""
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    name = host.lower().removesuffix(".")
    return any(
        entry.port in (None, port) and (entry.host == name if entry.network is None else address in entry.network)
        for entry in allowed
    )


def private_kind(address: Address) -> str | None:
    """The kind of an address that is not public ("a loopback address"); None for a public one."""
    if isinstance(address, ipaddress.IPv4Address):
        return next((kind for network, kind in _KINDS_V4 if address in network), None)
    for network, shift in _EMBEDDING:
        if address in network:
            return private_kind(ipaddress.IPv4Address(int(address) >> shift & 0xFFFF_FFFF))
    kind = next((kind for network, kind in _KINDS_V6 if address in network), None)
    return kind or (None if address in _PUBLIC_V6 else "a reserved address")


def parse_address(text: str) -> Address:
    """An address as a resolver returns it (including `fe80::1%eth0`). ValueError if it is not valid."""
    return ipaddress.ip_address(text.partition("%")[0])


def literal_address(host: str) -> Address | None:
    """The address, if the host is a literal one; also `127.1`, `0x7f000001`, `017700000001`."""
    try:
        return parse_address(host.strip("[]"))
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host.removesuffix(".")))
    except (OSError, UnicodeEncodeError, ValueError):
        return None


def _allowed(entry: str) -> Allowed:
    place, colon, port = entry, "", ""
    if entry.startswith("["):  # an IPv6 network with a port
        place, _, rest = entry[1:].partition("]:")
        colon, port = ":", rest
    elif entry.count(":") == 1:
        place, colon, port = entry.partition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535
    if (colon == ":" and is_port) or (colon == port == ""):
        number = int(port) if port else None
        try:
            return Allowed(None, ipaddress.ip_network(place), number)
        except ValueError:
            if _NAME.fullmatch(place) and literal_address(place) is None and not entry.startswith("["):
                return Allowed(place.lower().removesuffix("."), None, number)
    example = "10.0.0.0/8:8080, [fd00::/8]:443 or hooks.internal"
    raise ValueError(f"must be a network or host, with or without a port, as in {example}, not {entry!r}")


def url_problem(url: str, *, allow_private: bool) -> str | None:
    """Why requests cannot be sent to `url`, or None. The addresses of a host name are checked when it is resolved."""
    if not 1 <= len(url) <= MAX_URL or not all("!" <= c <= "~" and c not in '\\"<>^`{|}' for c in url):
        return f"must be 1 to {MAX_URL} ASCII characters without spaces; encode others (%20, xn--…)"
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        return "is not a URL such as https://example.com/hook"
    if parts.scheme not in ("http", "https") or not host:
        return "must start with http:// or https:// and name a host"
    if "@" in parts.netloc:
        return "must not contain a user or password; send them in a header"
    if "#" in url:
        return "must not contain a fragment (#…)"
    if port == 0:
        return "has port 0, which nothing listens on"
    address = literal_address(host)
    if address is None and not _NAME.fullmatch(host):
        return "has a host name that is not valid"
    kind = private_kind(address) if address is not None else None
    if kind is not None and not allow_private:
        return f"points to {kind}; requests to it are refused unless `allow_private` is true"
    return None
