"""The addresses that settings give: of the database, of Redis, and where to listen."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit

from tidegate.errors import SettingsError


def check_database_url(name: str, url: str | None) -> None:
    """SettingsError without the value: it may contain a password."""
    if url is None:
        return
    if not url.startswith(("postgresql://", "postgres://")):
        scheme, found, _ = url.partition("://")
        given = f"{scheme[:20]}://" if found else "text without a scheme"
        raise SettingsError(f"{name} must start with postgresql://, not {given}")
    if not _has_readable_port(url):
        raise SettingsError(
            f"{name} must be an address such as postgresql://user:password@host:5432/database; "
            "characters such as / : @ # in a password are written %2F %3A %40 %23"
        )


def check_public_url(name: str, url: str) -> None:
    """SettingsError unless links can begin with it. Without the value where it may contain a password."""
    try:
        parts = urlsplit(url)
        is_base = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        is_base = is_base and parts.port != 0 and "@" not in parts.netloc and url.isprintable() and " " not in url
    except ValueError:
        is_base = False
    if not is_base:
        given = "one with a user name or password" if "@" in url else repr(url)
        raise SettingsError(f"{name} must be an address such as https://tidegate.example.com, not {given}")


def split_database_url(url: str) -> tuple[str, SplitResult]:
    """The login and hosts, and the rest without them. Apart, since `urlsplit` refuses several hosts of which one is an
    IPv6 address; some versions of Python do."""
    scheme, _, rest = url.partition("://")
    end = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
    return rest[:end], urlsplit(f"{scheme}://{rest[end:]}")


def _has_readable_port(text: str) -> bool:
    """Whether the port is a number. If not, the password most likely contains a / or # that is not encoded."""
    place = split_database_url(text)[0].rpartition("@")[2]
    ports = [host.rpartition("]")[2].partition(":")[2] for host in place.split(",")]  # a URL may name several hosts
    return all(port == "" or port.isdecimal() for port in ports)


def is_redis_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # not a number: most likely a password with a / or # that is not encoded
    except ValueError:
        return False
    return bool(parts.path) if parts.scheme == "unix" else parts.scheme in ("redis", "rediss") and bool(parts.hostname)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
