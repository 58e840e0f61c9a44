"""Which runs a worker takes, and which slots they may use."""

from __future__ import annotations

import pytest

from tidegate.errors import SettingsError
from tidegate.model.worker_share import ReservedSlots, WorkerShare, parse_only, parse_reserve

KNOWN = ("fulfil", "report", "notify")


def test_what_is_written_is_read() -> None:
    assert parse_only(" fulfil, report,fulfil ") == ("fulfil", "report")
    assert parse_reserve("fulfil=4, report = 2") == {"fulfil": 4, "report": 2}
    assert WorkerShare.of("", "") == ((), {})


@pytest.mark.parametrize(
    "text", ["fulfil", "=4", "fulfil=", "fulfil=x", "fulfil=-1", "fulfil=0", "fulfil=1001", "a=1,a=2"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a workflow and its slots such as fulfil=4|twice"):
        parse_reserve(text)


@pytest.mark.parametrize(
    ("only", "reserve", "expected"),
    [
        ("fulfill", "", "--only names 'fulfill', which is no workflow of this worker; it has: fulfil, notify, report"),
        ("", "fulfill=1", "--reserve names 'fulfill'"),
        ("report", "fulfil=1", "--reserve keeps slots for 'fulfil', which --only leaves out"),
        ("", "fulfil=11", "--reserve keeps 11 slots, but the worker has 10"),
        ("", "fulfil=10", "--reserve keeps all 10 slots, so 'notify' could never run"),
    ],
)
def test_what_cannot_work_is_refused(only: str, reserve: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        WorkerShare.of(only, reserve).check(KNOWN, 10)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("only", "reserve"), [("", ""), ("report", ""), ("fulfil", "fulfil=10"), ("", "fulfil=9")])
def test_what_can_work_is_accepted(only: str, reserve: str) -> None:
    share = WorkerShare.of(only, reserve)
    share.check(KNOWN, 10)
    assert share.left_out(KNOWN) == sorted(name for name in KNOWN if only and name != only)


@pytest.mark.parametrize(
    ("used", "workflow", "may"),
    [
        ({}, "report", True),
        ({"report": 5}, "report", True),
        ({"report": 6}, "report", False),
        ({"report": 6}, "fulfil", True),
        ({"report": 6, "fulfil": 4}, "fulfil", False),
        ({"report": 5, "fulfil": 4}, "fulfil", True),
        ({"report": 3, "fulfil": 7}, "report", False),
        ({"report": 2, "fulfil": 7}, "report", True),
    ],
)
def test_reserved_slots_are_kept(used: dict[str, int], workflow: str, may: bool) -> None:
    slots = ReservedSlots(10, {"fulfil": 4})
    assert slots.may_begin(workflow, used) is may
    assert slots.shared_free(used) + slots.own_free("fulfil", used) <= 10 - sum(used.values())
