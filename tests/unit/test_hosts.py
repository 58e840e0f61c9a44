"""The address of each host of a URL."""

from __future__ import annotations

import asyncpg
import pytest

from tidegate.store.connect import hosts


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("postgresql://u:p%2C@h/d?sslmode=require", ["postgresql://u:p%2C@h/d?sslmode=require"]),
        ("postgresql:///d?host=/run/pg", ["postgresql:///d?host=/run/pg"]),
        (
            "postgresql://u:p%40@h1:1,[::1]:2,h3/d",
            [f"postgresql://u:p%40@{host}/d?target_session_attrs=read-write" for host in ("h1:1", "[::1]:2", "h3")],
        ),
        (
            "postgresql://u@h1,h2/d?target_session_attrs=primary&sslmode=require",
            [f"postgresql://u@{host}/d?target_session_attrs=primary&sslmode=require" for host in ("h1", "h2")],
        ),
        (
            "postgresql://u@/d?host=/a,/b",
            [f"postgresql://u@/d?target_session_attrs=read-write&host=%2F{folder}" for folder in "ab"],
        ),
        (
            "postgresql://u@/d?host=h1,h2&port=1,2",
            [f"postgresql://u@/d?target_session_attrs=read-write&host=h{n}&port={n}" for n in (1, 2)],
        ),
    ],
)
def test_each_host_has_its_address(url: str, found: list[str]) -> None:
    assert hosts(url) == found


def test_a_port_for_each_host_or_for_all() -> None:
    assert all("port=7" in url for url in hosts("postgresql://u@/d?host=h1,h2&port=7"))
    with pytest.raises(asyncpg.ClientConfigurationError, match="3 hosts and 2 ports"):
        hosts("postgresql://u@/d?host=h1,h2,h3&port=1,2")
