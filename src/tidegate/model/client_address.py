"""The client address of a request: its peer, or the address that trusted proxies report.

The headers are read from the right, and only what trusted proxies added is used: everything to the left of the first
address that is not a trusted proxy may have been forged by the client.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_PAIR = re.compile(r'([^\s;,="]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;,\s"]*)')
_WITH_PORT = re.compile(r"\[([^\]]*)\](?::\d+)?|(\d+\.\d+\.\d+\.\d+):\d+", re.ASCII)


def parse_network(text: str) -> Network:
    """A network such as `10.0.0.0/8`, or one address. ValueError says what was expected."""
    try:
        return ipaddress.ip_network(text.strip())
    except ValueError as exc:
        raise ValueError(f"a network is written like 10.0.0.0/8, 192.0.2.7 or 2001:db8::/32, not {text!r}") from exc


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks separated by commas."""
    return tuple(parse_network(part) for part in text.split(",") if part.strip())


def is_in(address: str | None, networks: Sequence[Network]) -> bool:
    """Whether the address is in one of the networks; False if it is unknown."""
    found = _address(address or "")
    return found is not None and _is_in(found, networks)


def client_address(peer: str | None, headers: Iterable[tuple[bytes, bytes]], trusted: Sequence[Network]) -> str | None:
    """The address of the client; None if it cannot be determined.

    Behind a trusted proxy it is the rightmost address in `X-Forwarded-For`, or in `Forwarded`, that is not a trusted
    proxy. It is None if both headers are present and differ: then the proxy did not set one of them.
    """
    here = _address(peer or "")
    if here is None or not trusted or not _is_in(here, trusted):
        return None if here is None else str(here)
    chain = _chain(headers)
    if chain is None:
        return None
    for text in reversed(chain):
        found = _address(text)
        if found is None:
            return None
        here = found
        if not _is_in(found, trusted):
            break
    return str(here)


def _chain(headers: Iterable[tuple[bytes, bytes]]) -> list[str] | None:
    """The addresses that the proxies report, the nearest last; None if the two headers differ."""
    listed: list[str] = []
    forwarded: list[str] = []
    for name, value in headers:
        if name == b"x-forwarded-for":
            listed += [part.strip() for part in value.decode("latin-1").split(",")]
        elif name == b"forwarded":
            pairs = _PAIR.findall(value.decode("latin-1"))
            forwarded += [given.strip('"') for key, given in pairs if key.lower() == "for"]
    if listed and forwarded and [_address(text) for text in listed] != [_address(text) for text in forwarded]:
        return None
    return listed or forwarded


def _address(text: str) -> Address | None:
    """The address without its port; an IPv4-mapped IPv6 address as IPv4."""
    found = _WITH_PORT.fullmatch(text)
    try:
        address = ipaddress.ip_address((found[1] or found[2]) if found else text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
