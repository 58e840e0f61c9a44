"""Where a request comes from, behind proxies that are trusted and those that are not."""

from __future__ import annotations

import pytest

from tidegate.model.client_address import client_address, is_in, parse_network, parse_networks

PROXIES = parse_networks("10.0.0.0/8, 2001:db8:1::/48")


def found(peer: str | None, *headers: tuple[str, str], trusted: str | None = None) -> str | None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return client_address(peer, raw, PROXIES if trusted is None else parse_networks(trusted))


@pytest.mark.parametrize(
    ("peer", "listed", "expected"),
    [
        ("192.0.2.1", "198.51.100.9", "192.0.2.1"),  # no trusted proxy: anyone can send the header
        ("10.0.0.1", "198.51.100.9", "198.51.100.9"),
        ("10.0.0.1", "203.0.113.1, 198.51.100.9", "198.51.100.9"),  # left of it may be invented
        ("10.0.0.1", "203.0.113.1, 198.51.100.9, 10.9.9.9", "198.51.100.9"),
        ("10.0.0.1", "10.1.1.1, 10.2.2.2", "10.1.1.1"),
        ("::ffff:10.0.0.1", "::ffff:198.51.100.9", "198.51.100.9"),
        ("10.0.0.1", "198.51.100.9:4711", "198.51.100.9"),
        ("10.0.0.1", "[2001:db8::7]:4711", "2001:db8::7"),
        ("2001:db8:1::5", "2001:db8::7", "2001:db8::7"),
        ("10.0.0.1", "198.51.100.9, unknown", None),
        ("10.0.0.1", "198.51.100.9, ", None),
        ("10.0.0.1", "198.51.100.9, 10.0.0.256", None),
        ("not an address", "198.51.100.9", None),
    ],
)  # fmt: skip
def test_x_forwarded_for(peer: str, listed: str, expected: str | None) -> None:
    assert found(peer, ("x-forwarded-for", listed)) == expected


def test_no_header() -> None:
    assert (found("10.0.0.1"), found("192.0.2.1"), found(None)) == ("10.0.0.1", "192.0.2.1", None)
    assert found("10.0.0.1", ("x-forwarded-for", "192.0.2.1"), trusted="") == "10.0.0.1"


def test_several_headers_are_one_list() -> None:
    headers = ("x-forwarded-for", "203.0.113.1"), ("x-forwarded-for", "198.51.100.9"), ("x-forwarded-for", "10.1.1.1")
    assert found("10.0.0.1", *headers) == "198.51.100.9"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("for=198.51.100.9", "198.51.100.9"),
        ("For=198.51.100.9;proto=https;by=10.0.0.1", "198.51.100.9"),
        ('proto=https;for="[2001:db8::7]:4711"', "2001:db8::7"),
        ("for=203.0.113.1, for=198.51.100.9;by=x, for=10.2.2.2", "198.51.100.9"),
        ("for=203.0.113.1, for=_hidden", None),
        ("for=unknown", None),
        ("proto=https", "10.0.0.1"),
        ('host="a;for=203.0.113.1";for=198.51.100.9', "198.51.100.9"),
    ],
)
def test_forwarded(value: str, expected: str | None) -> None:
    seen = found("10.0.0.1", ("forwarded", value))
    assert seen == expected


def test_two_accounts_that_differ() -> None:
    """A proxy that writes one of the headers passes the other on as it came."""
    listed = ("x-forwarded-for", "198.51.100.9")
    assert found("10.0.0.1", listed, ("forwarded", "for=10.7.7.7")) is None
    assert found("10.0.0.1", listed, ("forwarded", "for=198.51.100.9")) == "198.51.100.9"


def test_networks() -> None:
    networks = parse_networks("10.0.0.0/8,2001:db8::/32, 192.0.2.7,")
    for address, expected in (
        ("10.1.2.3", True), ("11.0.0.1", False), ("2001:db8::1", True), ("192.0.2.7", True), ("192.0.2.8", False),
        ("::ffff:10.1.2.3", True), (None, False), ("", False), ("x", False),
    ):  # fmt: skip
        assert is_in(address, networks) is expected, address
    for text in ("10.0.0.1/8", "here", "10.0.0.0/33", ""):
        with pytest.raises(ValueError, match="a network is written like"):
            parse_network(text)
