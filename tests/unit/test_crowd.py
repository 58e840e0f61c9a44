"""Who may come in, and who has to leave for them."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from tidegate.api import crowd
from tidegate.api.crowd import Crowd


class Guest:
    def __init__(self, crowd: Crowd, quiet_since: float = 0.0, *, is_quiet: bool = True) -> None:
        self._crowd = crowd
        self.quiet_since = quiet_since
        self.is_quiet = is_quiet
        self.has_left = False

    def end(self) -> None:
        self.has_left = True
        self._crowd.leave(self)


def test_who_has_been_quiet_for_longest_leaves() -> None:
    here = Crowd(3)
    guests = [Guest(here, since) for since in (2.0, 1.0, 3.0)]
    assert all(here.enter(guest, "192.0.2.1") for guest in guests)
    assert here.enter(Guest(here), "192.0.2.2")
    assert [guest.has_left for guest in guests] == [False, True, False]


def test_nobody_busy_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []
    monkeypatch.setattr(
        crowd._log, "_lines", type("Lines", (), {"warning": lambda _, __, **fields: told.append(fields)})()
    )
    here = Crowd(3)
    busy = [Guest(here, is_quiet=False) for _ in range(3)]
    assert all(here.enter(guest, "192.0.2.1") for guest in busy)
    assert not any(here.enter(Guest(here), "192.0.2.2") for _ in range(10))
    assert not any(guest.has_left for guest in busy)
    assert [line["connections"] for line in told] == [3]  # one line for all of them
    here.leave(busy[0])
    assert here.enter(Guest(here), "192.0.2.2")


def test_an_address_makes_room_for_itself() -> None:
    here = Crowd(100, 2)
    other, first, second = Guest(here, 0.0), Guest(here, 5.0), Guest(here, 6.0)
    assert here.enter(other, "192.0.2.2") and here.enter(first, "192.0.2.1") and here.enter(second, "192.0.2.1")
    assert here.enter(Guest(here, is_quiet=False), "192.0.2.1")
    assert (other.has_left, first.has_left, second.has_left) == (False, True, False)
    assert here.enter(Guest(here, is_quiet=False), "192.0.2.1") and second.has_left
    assert not here.enter(Guest(here), "192.0.2.1")
    assert here.enter(Guest(here), "192.0.2.3")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.2.3", ""])
def test_proxies_and_this_machine_are_not_bounded(address: str) -> None:
    here = Crowd(100, 1, [ip_network("10.0.0.0/8")])
    assert all(here.enter(Guest(here, is_quiet=False), address) for _ in range(50))
