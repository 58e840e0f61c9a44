"""Which connections are admitted, and which idle ones are closed for them."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from tidegate.api import connection_limits
from tidegate.api.connection_limits import ConnectionLimits


class LimitedConnection:
    def __init__(self, limits: ConnectionLimits, idle_since: float = 0.0, *, is_idle: bool = True) -> None:
        self._limits = limits
        self.idle_since = idle_since
        self.is_idle = is_idle
        self.is_ended = False

    def end(self) -> None:
        self.is_ended = True
        self._limits.remove(self)


def test_the_connection_idle_for_longest_is_closed() -> None:
    here = ConnectionLimits(3)
    connections = [LimitedConnection(here, since) for since in (2.0, 1.0, 3.0)]
    assert all(here.add(connection, "192.0.2.1") for connection in connections)
    assert here.add(LimitedConnection(here), "192.0.2.2")
    assert [connection.is_ended for connection in connections] == [False, True, False]


def test_a_busy_connection_is_never_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []
    monkeypatch.setattr(
        connection_limits._log, "_lines", type("Lines", (), {"warning": lambda _, __, **fields: told.append(fields)})()
    )
    here = ConnectionLimits(3)
    busy = [LimitedConnection(here, is_idle=False) for _ in range(3)]
    assert all(here.add(connection, "192.0.2.1") for connection in busy)
    assert not any(here.add(LimitedConnection(here), "192.0.2.2") for _ in range(10))
    assert not any(connection.is_ended for connection in busy)
    assert [line["connections"] for line in told] == [3]  # one line for all of them
    here.remove(busy[0])
    assert here.add(LimitedConnection(here), "192.0.2.2")


def test_an_address_makes_room_for_itself() -> None:
    here = ConnectionLimits(100, 2)
    other, first, second = LimitedConnection(here, 0.0), LimitedConnection(here, 5.0), LimitedConnection(here, 6.0)
    assert here.add(other, "192.0.2.2") and here.add(first, "192.0.2.1") and here.add(second, "192.0.2.1")
    assert here.add(LimitedConnection(here, is_idle=False), "192.0.2.1")
    assert (other.is_ended, first.is_ended, second.is_ended) == (False, True, False)
    assert here.add(LimitedConnection(here, is_idle=False), "192.0.2.1") and second.is_ended
    assert not here.add(LimitedConnection(here), "192.0.2.1")
    assert here.add(LimitedConnection(here), "192.0.2.3")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.2.3", ""])
def test_proxies_and_this_machine_are_not_bounded(address: str) -> None:
    here = ConnectionLimits(100, 1, [ip_network("10.0.0.0/8")])
    assert all(here.add(LimitedConnection(here, is_idle=False), address) for _ in range(50))
