"""Which requests an API without tokens accepts as made on its own machine."""

from __future__ import annotations

import pytest

from tidegate.model.local_request import why_foreign

HOSTS = {"127.0.0.1", "tidegate.example"}


def why(*headers: tuple[str, str]) -> str | None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return why_foreign(raw, HOSTS)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:8700", "127.8.9.10:1", "localhost", "LocalHost:8700", "localhost.", "a.localhost:8700",
        "[::1]", "[::1]:8700", "tidegate.example", "Tidegate.Example:443", "tidegate.example.",
    ],
)  # fmt: skip
def test_names_of_this_machine(host: str) -> None:
    assert why(("host", host)) is None
    assert why(("host", host), ("origin", f"http://{host}")) is None


@pytest.mark.parametrize(
    "host",
    [
        "", "evil.example", "evil.example:8700", "127.0.0.1.evil.example", "localhost.evil.example", "evillocalhost",
        "0.0.0.0:8700", "[::]", "::1", "[::1", "[evil.example]", "2130706433", "0x7f.1", "127.1", "192.168.0.7",
        "[fe80::1]", "localhost@evil.example", "localhost:8700@evil.example", "localhost/x", "localhost:",
        "localhost\t", " localhost", "localhost, evil.example", "x.tidegate.example", "ü",
    ],
)  # fmt: skip
def test_other_names(host: str) -> None:
    found = why(("host", host))
    assert found is not None and "Host" in found


def test_exactly_one_host() -> None:
    assert why() == "it has no Host header"
    assert why(("host", "localhost"), ("host", "evil.example")) == "it has several Host headers"
    assert why(("host", "localhost"), ("host", "localhost")) == "it has several Host headers"


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "http://evil.example",
        "http://localhost:3000",
        "http://localhost",
        "http://127.0.0.1:8700",
        "http://[",
    ],
)
def test_pages_of_other_origins(origin: str) -> None:
    found = why(("host", "localhost:8700"), ("origin", origin))
    assert found is not None and "page" in found
    assert why(("host", "localhost:8700"), ("origin", "http://localhost:8700"), ("origin", origin)) is not None


@pytest.mark.parametrize("name", ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via"])
def test_what_a_proxy_passes_on(name: str) -> None:
    found = why(("host", "localhost"), (name, "1.2.3.4"))
    assert found is not None and name in found
    assert why((name, "1.2.3.4"), ("host", "localhost")) == found
