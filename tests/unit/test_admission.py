"""How much is begun at once: what fills it, what empties it, and what it learns."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.api import admission
from tidegate.api.admission import Admission
from tidegate.errors import Overloaded


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_events_fill_it_until_they_are_answered() -> None:
    gate = Admission(10)
    with gate.request() as first:
        first.hold_events(9)
        assert not gate.is_full
        with gate.request() as second:
            second.hold_events(1)
            assert gate.is_full
        assert not gate.is_full
        with gate.request() as second:
            second.hold_events(500)  # a batch is not refused because of its size, only because of others
            assert gate.is_full
    assert not gate.is_full


def test_bodies_fill_it_from_their_first_byte() -> None:
    gate = Admission(10)
    with gate.request() as first, gate.request() as second:
        first.hold_bytes(admission.MAX_HELD_BYTES)
        assert gate.is_full
        with pytest.raises(Overloaded, match="try again"):
            second.hold_bytes(1)
    assert not gate.is_full
    with gate.request() as again:
        again.hold_bytes(admission.MAX_HELD_BYTES)  # all of it is free again


def test_unauthenticated_clients_take_no_capacity_from_authenticated_ones() -> None:
    gate = Admission(10)
    with (
        gate.request(is_authenticated=False) as first,
        gate.request(is_authenticated=False) as second,
        gate.request() as known,
    ):
        first.hold_bytes(admission.MAX_UNAUTHENTICATED_BYTES)
        assert gate.is_full_for_unauthenticated and not gate.is_full
        with pytest.raises(Overloaded, match="try again"):
            second.hold_bytes(1)
        known.hold_bytes(admission.MAX_HELD_BYTES - admission.MAX_UNAUTHENTICATED_BYTES)
        first.mark_authenticated()
        assert gate.is_full and not gate.is_full_for_unauthenticated
    with gate.request() as again:
        again.hold_bytes(admission.MAX_HELD_BYTES)  # all of it is free again


def test_a_request_that_fails_leaves_nothing_behind() -> None:
    gate = Admission(1)
    with pytest.raises(ZeroDivisionError), gate.request() as admitted:
        admitted.hold_bytes(admission.MAX_HELD_BYTES)
        admitted.hold_events(1)
        raise ZeroDivisionError
    assert not gate.is_full


def _store(gate: Admission, clock: Clock, *, per_second: int, seconds: float, in_progress: int) -> None:
    """Answer `per_second` events per second for `seconds`, with `in_progress` others in progress."""
    with gate.request() as others:
        others.hold_events(in_progress)
        for _ in range(round(seconds * 10)):
            with gate.request() as admitted:
                admitted.hold_events(per_second // 10)
                clock.now += 0.1


def test_the_limit_is_what_is_stored_in_a_second_under_load() -> None:
    clock = Clock()
    gate = Admission(20_000, clock=clock)
    _store(gate, clock, per_second=1000, seconds=10, in_progress=admission.ENOUGH_EVENTS - 1000)
    assert gate.limit_events == 20_000  # so few were sent: nothing is known
    _store(gate, clock, per_second=5000, seconds=10, in_progress=admission.ENOUGH_EVENTS)
    assert gate.limit_events == pytest.approx(5000, rel=0.15)
    _store(gate, clock, per_second=10, seconds=10, in_progress=admission.ENOUGH_EVENTS)
    assert gate.limit_events == admission.ENOUGH_EVENTS  # never so few that the database would wait for us
    _store(gate, clock, per_second=90_000, seconds=10, in_progress=admission.ENOUGH_EVENTS)
    assert gate.limit_events == 20_000


async def test_large_bodies_are_parsed_one_in_each_turn_of_the_loop_in_order() -> None:
    gate, parsed, others = Admission(10), list[int](), list[int]()

    async def request(n: int) -> None:
        await gate.authenticated.parse_turn(admission.TURN_BYTES)
        parsed.append(n)

    async def somebody_else() -> None:
        while len(parsed) < 8:
            others.append(len(parsed))
            await asyncio.sleep(0)

    await asyncio.gather(*(request(n) for n in range(8)), somebody_else())
    assert parsed == list(range(8))
    assert set(others) == set(range(1, 8))  # had its turn after each of them


async def test_small_bodies_share_a_turn() -> None:
    gate, parsed = Admission(10), list[int]()

    async def request(n: int) -> None:
        await gate.authenticated.parse_turn(10)
        parsed.append(n)

    tasks = [asyncio.create_task(request(n)) for n in range(1000)]
    await asyncio.sleep(0)
    assert len(parsed) == 1 + admission.TURN_BYTES // (admission.REQUEST_BYTES + 10)
    await asyncio.gather(*tasks)
    assert parsed == list(range(1000))


async def test_a_burst_of_small_requests_is_taken_whole() -> None:
    gate = Admission(20_000)
    results = await asyncio.gather(*(gate.authenticated.parse_turn(100) for _ in range(10_000)), return_exceptions=True)
    assert results == [None] * 10_000, "none was refused"
    assert not gate.is_full


async def test_what_waits_for_its_turn_is_bounded_and_may_go_away() -> None:
    gate, half = Admission(10), admission.MAX_WAITING_BYTES // 2
    results = await asyncio.gather(*(gate.authenticated.parse_turn(half) for _ in range(4)), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), type(None), type(None), Overloaded]
    _, gone = (asyncio.create_task(gate.authenticated.parse_turn(admission.MAX_WAITING_BYTES)) for _ in range(2))
    await asyncio.sleep(0)
    assert gate.is_full
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await asyncio.sleep(0)  # its turn comes and passes
    assert not gate.is_full
