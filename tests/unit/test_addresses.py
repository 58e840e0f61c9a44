"""Which destinations are allowed, in every notation of an address; which URLs are valid."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import NonRetryable
from tidegate.flow.code.http import check, resolve
from tidegate.model.addresses import (
    is_allowed,
    literal_address,
    parse_address,
    parse_allowed,
    private_kind,
    url_problem,
)

PRIVATE = [
    ("127.0.0.1", "loopback"),
    ("127.255.255.254", "loopback"),
    ("0.0.0.0", "unspecified"),
    ("0.1.2.3", "unspecified"),
    ("10.0.0.1", "private"),
    ("172.16.0.1", "private"),
    ("172.31.255.255", "private"),
    ("192.168.1.1", "private"),
    ("100.64.0.1", "carrier"),
    ("100.127.255.255", "carrier"),
    ("169.254.1.1", "link-local"),
    ("169.254.169.254", "metadata"),
    ("100.100.100.200", "metadata"),
    ("192.0.0.192", "metadata"),
    ("168.63.129.16", "metadata"),
    ("192.0.0.1", "reserved"),
    ("192.0.2.1", "reserved"),
    ("198.18.0.1", "private"),
    ("198.51.100.1", "reserved"),
    ("203.0.113.1", "reserved"),
    ("224.0.0.1", "multicast"),
    ("239.255.255.255", "multicast"),
    ("240.0.0.1", "reserved"),
    ("255.255.255.255", "reserved"),
    ("::", "unspecified"),
    ("::1", "loopback"),
    ("::ffff:127.0.0.1", "loopback"),
    ("::ffff:7f00:1", "loopback"),
    ("::ffff:169.254.169.254", "metadata"),
    ("::ffff:0:10.0.0.1", "private"),
    ("::127.0.0.1", "reserved"),
    ("64:ff9b::7f00:1", "loopback"),
    ("64:ff9b::a9fe:a9fe", "metadata"),
    ("64:ff9b:1::1", "reserved"),
    ("2002:7f00:1::", "loopback"),
    ("2002:a00:1::1", "private"),
    ("2001:0:7f00:1::", "reserved"),
    ("2001:db8::1", "reserved"),
    ("3fff::1", "reserved"),
    ("fc00::1", "private"),
    ("fd00:ec2::254", "metadata"),
    ("fd20:ce::254", "metadata"),
    ("fdff::1", "private"),
    ("fe80::1", "link-local"),
    ("fe80::1%eth0", "link-local"),
    ("fec0::1", "private"),
    ("ff02::1", "multicast"),
    ("100::1", "reserved"),
    ("5f00::1", "reserved"),
]
PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "172.15.255.255",
    "172.32.0.0",
    "192.167.255.255",
    "192.0.1.0",
    "223.255.255.255",
    "2606:4700::1111",
    "2a00:1450:4001::1",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
]
# Loopback and metadata, as libc's resolver understands them.
NUMERIC = [
    "2130706433",
    "0x7f000001",
    "0X7F000001",
    "017700000001",
    "127.1",
    "127.0.1",
    "0177.0.0.1",
    "0x7f.0.0.1",
    "0x7f.1",
    "127.0.0.1.",
    "0",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "169.254.43518",
]


@pytest.mark.parametrize(("text", "word"), PRIVATE)
def test_private_addresses_are_named(text: str, word: str) -> None:
    kind = private_kind(parse_address(text))
    assert kind is not None and word in kind
    with pytest.raises(NonRetryable, match=word):
        check("example.com", 80, ["8.8.8.8", text], ())  # one is enough
    host = text.partition("%")[0]
    url = f"http://[{host}]/x" if ":" in host else f"http://{host}/x"
    assert word in str(url_problem(url, allow_private=False))
    assert url_problem(url, allow_private=True) is None


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_pass(text: str) -> None:
    assert private_kind(parse_address(text)) is None
    check("example.com", 80, [text], ())


@pytest.mark.parametrize("host", NUMERIC)
def test_numbers_are_addresses(host: str) -> None:
    address = literal_address(host)
    assert address is not None and private_kind(address) is not None
    assert url_problem(f"http://{host}/", allow_private=False) is not None


@pytest.mark.parametrize("host", [h for h in NUMERIC if not h.endswith(".")])
async def test_the_resolver_agrees_about_numbers(host: str) -> None:
    assert [parse_address(a) for a in await resolve(host, 80)] == [literal_address(host)]


@pytest.mark.parametrize("host", ["localhost", "ip6-localhost"])
async def test_names_that_lead_to_loopback(host: str) -> None:
    try:
        socket.getaddrinfo(host, 80)
    except OSError:
        pytest.skip(f"{host} is not known here")
    assert url_problem(f"http://{host}/", allow_private=False) is None  # only the resolver knows
    with pytest.raises(NonRetryable, match=f"{host} is a loopback address"):
        check(host, 80, await resolve(host, 80), ())


async def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(ConnectionError, match=r"the name nothing\.invalid cannot be resolved"):
        await resolve("nothing.invalid", 80)


@given(st.ip_addresses(v=4))
def test_every_way_to_embed_an_address_is_judged_as_the_address(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    for embedded in (0xFFFF << 32 | number, 0x64FF9B << 96 | number, 0x2002 << 112 | number << 80):
        assert private_kind(ipaddress.IPv6Address(embedded)) == private_kind(address)


@given(st.ip_addresses())
def test_nothing_that_python_calls_private_passes(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    # Of what embeds another address the one inside is judged; Python's own opinion of it differs between versions.
    embeds = any(address in ipaddress.ip_network(network) for network in ("64:ff9b::/96", "2002::/16"))
    if private_kind(address) is None and not embeds:
        mapped = getattr(address, "ipv4_mapped", None) or address
        assert not (mapped.is_private or mapped.is_loopback or mapped.is_link_local or mapped.is_multicast)


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("", "1 to 2000"),
        ("https://e.com/" + "a" * 2000, "1 to 2000"),
        ("https://e.com/a b", "without spaces"),
        ("https://e.com/\n", "without spaces"),
        ("https://e.com\\@127.0.0.1/", "without spaces"),
        ("https://ⓔxample.com/", "ASCII"),
        ("ftp://e.com/", "http:// or https://"),
        ("file:///etc/passwd", "http:// or https://"),
        ("gopher://e.com/", "http:// or https://"),
        ("javascript:alert(1)", "http:// or https://"),
        ("//e.com/", "http:// or https://"),
        ("e.com", "http:// or https://"),
        ("https://", "http:// or https://"),
        ("https:///path", "http:// or https://"),
        ("https://user@e.com/", "user or password"),
        ("https://user:pass@e.com/", "user or password"),
        ("https://e.com@127.0.0.1/", "user or password"),
        ("https://e.com/#x", "fragment"),
        ("https://e.com:99999/", "not a URL"),
        ("https://e.com:x/", "not a URL"),
        ("https://e.com:0/", "port 0"),
        ("https://[::1/", "not a URL"),
        ("https://[fe80::1%25eth0]/", "not|link-local"),
        ("https://e..com/", "is not valid"),
        ("https://-e.com/", "is not valid"),
        ("https://e,com/", "is not valid"),
        ("https://%6cocalhost/", "is not valid"),
        (f"https://{'a' * 64}.com/", "is not valid"),
    ],
)
def test_urls_that_are_refused(url: str, word: str) -> None:
    problem = url_problem(url, allow_private=False)
    assert problem is not None and any(w in problem for w in word.split("|")), problem


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "https://example.com./hook?a=1&b=%20",
        "http://sub.example.com:8080/hook",
        "https://xn--mnchen-3ya.de/",
        "http://my_service:80/",
        "https://8.8.8.8/x",
        "https://[2606:4700::1111]:443/x",
    ],
)
def test_urls_that_are_taken(url: str) -> None:
    assert url_problem(url, allow_private=False) is None


@pytest.mark.parametrize(
    ("text", "host", "address", "port", "expected"),
    [
        ("10.0.0.0/8:8080, hooks.internal:443", "x.example", "10.1.2.3", 8080, True),
        ("10.0.0.0/8:8080, hooks.internal:443", "x.example", "10.1.2.3", 80, False),
        ("10.0.0.0/8:8080, hooks.internal:443", "Hooks.Internal.", "192.168.0.1", 443, True),
        ("10.0.0.0/8:8080, hooks.internal:443", "hooks.internal.evil.example", "192.168.0.1", 443, False),
        ("10.0.0.0/8", "x", "::ffff:10.0.0.1", 1, True),
        ("192.168.7.5", "x", "192.168.7.5", 1, True),
        ("192.168.7.5", "x", "192.168.7.6", 1, False),
        ("fd00::/8", "x", "fd00::1", 443, True),
        ("[fd00::/8]:443", "x", "fd00::1", 443, True),
        ("[fd00::/8]:443", "x", "fd00::1", 80, False),
        ("::1", "x", "::1", 80, True),
        ("", "x", "10.0.0.1", 80, False),
    ],
)
def test_what_is_allowed(text: str, host: str, address: str, port: int, expected: bool) -> None:
    assert is_allowed(parse_allowed(text), host, parse_address(address), port) is expected


@pytest.mark.parametrize(
    "text",
    ["10.0.0.1/8", "10.0.0.0/8:0", "10.0.0.0/8:99999", "10.0.0.0/8:", "http://x", "x:y", "[hooks.internal]:1", "a b",
     "0x7f.1", "127.1", "[::1", "[::1]x"],
)  # fmt: skip
def test_what_cannot_be_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="must be a network or host"):
        parse_allowed(text)
