"""Schedules: periods, cron in time zones, and the event of a tick."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate import Tidegate
from tidegate.errors import AppError
from tidegate.model.schedule import ScheduleSpec, declared, latest, next_after, tick_event

BERLIN = "Europe/Berlin"
# Clocks skip 02:00 to 03:00 on 29 March 2026 (01:00Z) and show it twice on 25 October 2026 (00:00Z to 02:00Z).
SPRING, AUTUMN = datetime(2026, 3, 29, tzinfo=UTC), datetime(2026, 10, 25, tzinfo=UTC)


def cron(expression: str, zone: str = BERLIN) -> ScheduleSpec:
    made = declared(None, expression, zone)
    assert made is not None
    return made


def every(period: str | float) -> ScheduleSpec:
    made = declared(period, None, None)
    assert made is not None
    return made


def ticks(spec: ScheduleSpec, begin: datetime, end: datetime) -> list[datetime]:
    """The ticks in (begin, end]."""
    found = []
    while (begin := next_after(spec, begin)) <= end:
        found.append(begin)
    return found


def on_the_day(spec: ScheduleSpec, day: datetime) -> list[str]:
    """The ticks of the UTC hours 00:00 to 04:00, as UTC times of day."""
    begin = day - timedelta(seconds=1)
    return [f"{at:%H:%M}" for at in ticks(spec, begin, day + timedelta(hours=3, minutes=59))]


# Periods ------------------------------------------------------------------------------------------------------------


def test_periods_are_aligned_to_the_epoch() -> None:
    after = datetime(2026, 6, 1, 12, 7, 30, 5, tzinfo=UTC)
    assert next_after(every("15m"), after) == datetime(2026, 6, 1, 12, 15, tzinfo=UTC)
    assert next_after(every("1d"), after) == datetime(2026, 6, 2, tzinfo=UTC)
    assert next_after(every(90), after) == datetime(2026, 6, 1, 12, 9, tzinfo=UTC)


def test_a_tick_is_later_than_the_time_asked_for() -> None:
    on_time = datetime(2026, 6, 1, 12, 15, tzinfo=UTC)
    assert next_after(every("15m"), on_time) == on_time + timedelta(minutes=15)
    assert next_after(cron("*/15 * * * *"), on_time) == on_time + timedelta(minutes=15)
    assert next_after(cron("*/15 * * * *"), on_time - timedelta(microseconds=1)) == on_time


# Cron and the clocks on the wall ------------------------------------------------------------------------------------


def test_cron_is_read_in_its_zone() -> None:
    after = datetime(2026, 6, 1, tzinfo=UTC)
    assert next_after(cron("0 3 * * *"), after) == datetime(2026, 6, 1, 1, tzinfo=UTC)
    assert next_after(cron("0 3 * * *", "UTC"), after) == datetime(2026, 6, 1, 3, tzinfo=UTC)
    assert next_after(cron("30 9 * * MON", "Asia/Kolkata"), after) == datetime(2026, 6, 1, 4, tzinfo=UTC)
    assert next_after(cron("0 0 29 2 *", "UTC"), after) == datetime(2028, 2, 29, tzinfo=UTC)
    # A day of the month or a day of the week, when both are given.
    assert next_after(cron("0 0 13 * FRI", "UTC"), after) == datetime(2026, 6, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 2 * * *", ["01:00"]),  # 02:30 is skipped: at 03:00 CEST instead
        ("0,30 2 * * *", ["01:00"]),
        ("*/15 2 * * *", ["01:00"]),
        ("0 2,3 * * *", ["01:00"]),  # and 03:00 is the same tick
        ("30 1-3 * * *", ["00:30", "01:00", "01:30"]),
        ("0 */2 * * *", ["01:00", "02:00"]),
        ("30 * * * *", ["00:30", "01:30", "02:30", "03:30"]),
        ("*/30 * * * *", ["00:00", "00:30", "01:00", "01:30", "02:00", "02:30", "03:00", "03:30"]),
    ],
)
def test_a_time_that_does_not_exist_happens_once(expression: str, expected: list[str]) -> None:
    assert on_the_day(cron(expression), SPRING) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 2 * * *", ["00:30"]),  # the first 02:30, not the second
        ("*/15 2 * * *", ["00:00", "00:15", "00:30", "00:45"]),
        ("0 2,3 * * *", ["00:00", "02:00"]),
        ("0 */2 * * *", ["00:00", "03:00"]),
        ("30 * * * *", ["00:30", "01:30", "02:30", "03:30"]),
        ("*/30 * * * *", ["00:00", "00:30", "01:00", "01:30", "02:00", "02:30", "03:00", "03:30"]),
    ],
)
def test_a_time_that_exists_twice_happens_once(expression: str, expected: list[str]) -> None:
    assert on_the_day(cron(expression), AUTUMN) == expected


def test_a_day_without_midnight() -> None:
    """In Santiago the clocks go from 24:00 to 01:00 on 6 September 2026."""
    spec = cron("0 0 * * *", "America/Santiago")
    found = ticks(spec, datetime(2026, 9, 5, tzinfo=UTC), datetime(2026, 9, 8, tzinfo=UTC))
    zone = ZoneInfo("America/Santiago")
    assert [f"{at.astimezone(zone):%d %H:%M}" for at in found] == ["05 00:00", "06 01:00", "07 00:00"]


# Properties ---------------------------------------------------------------------------------------------------------

FIELDS = (
    st.sampled_from(["*", "0", "30", "*/15", "59", "5-10", "0,45", "7/20"]),
    st.sampled_from(["*", "0", "2", "*/2", "1-3", "2,23", "*/1"]),
    st.sampled_from(["*", "*", "1", "29", "25-31", "L"]),
    st.sampled_from(["*", "*", "3", "10", "3,10"]),
    st.sampled_from(["*", "*", "SUN", "1-5", "0#2"]),
)
CRONS = st.tuples(*FIELDS).map(" ".join)
ZONES = st.sampled_from(["UTC", BERLIN, "America/New_York", "America/Santiago", "Australia/Lord_Howe", "Asia/Kolkata",
                         "Africa/Casablanca", "Antarctica/Troll"])  # fmt: skip
SPECS = st.one_of(
    st.builds(cron, CRONS, ZONES),
    st.integers(1000, 10_000_000).map(lambda ms: ScheduleSpec(every_ms=ms)),
)
NEAR_A_CHANGE = st.sampled_from([SPRING, AUTUMN]).flatmap(
    lambda day: st.integers(-86_400_000, 86_400_000).map(lambda ms: day + timedelta(milliseconds=ms))
)
TIMES = st.one_of(
    NEAR_A_CHANGE,
    st.integers(0, 20 * 366 * 86_400).map(lambda s: datetime(2020, 1, 1, tzinfo=UTC) + timedelta(seconds=s)),
)


@given(SPECS, TIMES, st.integers(0, 10**9))
@example(cron("30 2 * * *"), AUTUMN, 0)
def test_whenever_it_is_asked_the_next_tick_is_the_same(spec: ScheduleSpec, at: datetime, part: int) -> None:
    """No restart or late check between two ticks moves or repeats a tick."""
    tick = next_after(spec, at)
    assert tick > at and tick.tzinfo is UTC
    between = at + (tick - at) * (part / 10**9)
    if between < tick:
        assert next_after(spec, between) == tick
    assert next_after(spec, tick) > tick


@given(SPECS, TIMES, st.integers(0, 4 * 86_400))
@settings(max_examples=60)
def test_the_latest_tick_is_the_last_of_all(spec: ScheduleSpec, at: datetime, seconds: int) -> None:
    first = next_after(spec, at)
    now = first + timedelta(seconds=min(seconds, 500 * (spec.every_ms or 10**9) / 1000))
    assert latest(spec, first, now) == [first, *ticks(spec, first, now)][-1]


def test_the_latest_of_a_year_of_minutes_is_found_at_once() -> None:
    spec, first = cron("* * * * *"), datetime(2025, 1, 1, tzinfo=UTC)
    assert latest(spec, first, datetime(2026, 1, 1, 0, 0, 59, tzinfo=UTC)) == datetime(2026, 1, 1, tzinfo=UTC)


@given(CRONS, ZONES, NEAR_A_CHANGE)
@settings(max_examples=60)
def test_a_wall_time_with_its_hour_named_never_comes_twice(expression: str, zone: str, at: datetime) -> None:
    if expression.split()[1] in ("*", "*/1"):
        return
    found = ticks(cron(expression, zone), at, at + timedelta(days=3))
    shown = [tick.astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0) for tick in found]
    assert len(shown) == len(set(shown))


@given(ZONES, NEAR_A_CHANGE)
def test_every_hour_means_every_hour(zone: str, at: datetime) -> None:
    found = ticks(cron("30 * * * *", zone), at, at + timedelta(hours=30))
    # Lord Howe moves by half an hour, so once a year half past comes half an hour sooner or later.
    steps = {later - earlier for earlier, later in pairwise(found)}
    half = timedelta(minutes=30)
    assert steps <= ({2 * half} if zone != "Australia/Lord_Howe" else {half, 2 * half, 3 * half})


# Declarations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": "0s"}, "every: must be at least 1s"),
        ({"every": "999ms"}, "every: must be at least 1s"),
        ({"every": "soon"}, "every: a duration is written like"),
        ({"every": "1h", "cron": "* * * * *"}, "cron: cannot be combined with every"),
        ({"every": "1h", "timezone": BERLIN}, "timezone: requires cron"),
        ({"timezone": BERLIN}, "timezone: requires cron"),
        ({"cron": "61 * * * *"}, "cron: Bad minute in '61 "),
        ({"cron": "0 0 30 2 *"}, "cron: Bad day-of-month"),
        ({"cron": "0 0 * 2 MON#5,TUE#9"}, "cron: Bad day-of-week"),
        ({"cron": "* * * * MON#1/2"}, "cron: Bad day-of-week"),
        ({"cron": ""}, "cron: expected five fields"),
        ({"cron": "@daily"}, "cron: expected five fields"),
        ({"cron": "0 0 3 * * *"}, "cron: expected five fields: .*; seconds are not supported"),
        ({"cron": "* " * 300}, "cron: expected five fields"),
        ({"cron": 5}, "cron: expected five fields"),
        ({"cron": "0 3 * * *", "timezone": "Mars/Olympus"}, "timezone: expected an IANA time zone .* 'Mars/Olympus'"),
        ({"cron": "0 3 * * *", "timezone": "Europe"}, "timezone: expected"),
        ({"cron": "0 3 * * *", "timezone": ""}, "timezone: expected"),
        ({"cron": "0 3 * * *", "timezone": "../../etc/passwd"}, "timezone: expected"),
        ({"cron": "0 3 * * *", "timezone": "localtime"}, "timezone: expected"),
        ({"cron": "0 3 * * *", "on": "a.b"}, "on: cannot be combined with every or cron"),
        ({"every": "1h", "on": "a.b"}, "on: cannot be combined with every or cron"),
        ({"every": "1h", "source": "shop"}, "source: requires on"),
    ],
)
def test_a_wrong_schedule_is_refused_by_its_field(arguments: dict[str, object], message: str) -> None:
    app = Tidegate()
    with pytest.raises(AppError, match=f"workflow nightly: .*{message}"):

        @app.workflow(**arguments)  # type: ignore[arg-type]
        async def nightly(ctx: object) -> None: ...

    assert app.workflows == {} and app.schedules == {}


TERMS = st.lists(st.sampled_from([*"0123456789*/-,#L", "LW", "MON", "JAN", "60"]), min_size=1, max_size=6).map("".join)


@given(st.one_of(st.text(max_size=40), st.lists(TERMS, min_size=5, max_size=5).map(" ".join)), st.text(max_size=20))
@settings(max_examples=300)
def test_any_text_is_a_schedule_or_refused(expression: str, zone: str) -> None:
    for arguments in ({"cron": expression}, {"cron": "* * * * *", "timezone": zone}):
        app = Tidegate()
        try:
            app.workflow(**arguments)(lambda ctx: None)  # type: ignore[arg-type]
        except AppError:
            assert app.schedules == {}


def test_a_schedule_gives_its_workflow_a_trigger_for_its_own_events() -> None:
    app = Tidegate()

    @app.workflow(cron=" 0  3 * * * ", timezone=BERLIN, max_concurrency=1)
    async def nightly(ctx: object, scheduled_at: datetime) -> None: ...

    @app.workflow(on="a.b")
    async def plain(ctx: object) -> None: ...

    assert app.schedules == {"nightly": ScheduleSpec(cron="0 3 * * *", timezone=BERLIN)}
    [spec] = app.workflows["nightly"].triggers
    assert (spec.name, spec.event_type, spec.event_source) == ("schedule", "schedule.nightly", "tidegate.schedule")
    assert spec.max_concurrency == 1
    [other] = app.workflows["plain"].triggers
    assert (other.name, other.event_type, other.event_source) == ("code", "a.b", "*")


def test_the_event_of_a_tick() -> None:
    event = tick_event("nightly", datetime(2026, 6, 1, 3, tzinfo=UTC), uuid.UUID(int=7))
    assert (event.external_id, event.type, event.source, event.occurred_at) == (
        "nightly:2026-06-01T03:00:00Z",
        "schedule.nightly",
        "tidegate.schedule",
        datetime(2026, 6, 1, 3, tzinfo=UTC),
    )
    assert msgspec.json.decode(event.payload) == {"scheduled_at": "2026-06-01T03:00:00Z", "workflow": "nightly"}
    half = tick_event("nightly", datetime(2026, 6, 1, 3, 0, 1, 500_000, tzinfo=UTC), uuid.UUID(int=7))
    assert half.external_id == "nightly:2026-06-01T03:00:01.500Z"
