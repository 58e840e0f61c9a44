"""What a declaration says about the events of one key: collect them, skip what is over a rate, one run at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from tidegate.model.backlog import Keep, WhenFull, declared_backlog
from tidegate.model.schedule import ScheduleSpec
from tidegate.model.units import rate
from tidegate.model.window import CollectPolicy, declared_policy

# What happens to a new delivery while a run of its key is unfinished: it is skipped, it cancels the run, or it waits.
WhileRunning = Literal["skip", "cancel", "queue"]
Duration = str | int | float | None


def declared_by_key(
    fields: Mapping[str, object],
    on: str | None,
    schedule: ScheduleSpec | None,
    window: tuple[Duration, Duration, bool, CollectPolicy | None],
    skip_over: str | None,
    while_running: WhileRunning | None,
    waiting: tuple[int | None, WhenFull | None, Keep | None] = (None, None, None),
) -> dict[str, object]:
    """The trigger's fields; `window` are `debounce`, `max_wait`, `leading` and `batch`, `waiting` are `max_waiting`,
    `when_full` and `keep`. ValueError names what is wrong."""
    debounce, max_wait, leading, batch = window
    if batch is not None and max_wait is not None:
        raise ValueError("max_wait: cannot be combined with batch, which has its own time, as in Batch(100, '5s')")
    of_window = max_wait if debounce is not None else None  # without debounce, it is how long anything may wait
    collect = declared_policy(on, debounce, of_window, leading, batch)
    given: dict[str, object] = {"collect": collect} | _one_at_a_time(schedule, fields)
    backlog = declared_backlog(on, *waiting, max_wait if debounce is None else None)
    given["backlog"] = backlog
    if skip_over is not None:
        if on is None:
            raise ValueError("skip_over: requires on: it skips events")
        try:
            given["skip_over_count"], given["skip_over_window_ms"] = rate(skip_over)
        except ValueError as exc:
            raise ValueError(f"skip_over: {exc}") from exc
    if while_running is None:
        return given
    if while_running not in get_args(WhileRunning):
        raise ValueError(f"while_running: must be skip, cancel or queue, not {while_running!r:.60}")
    if while_running == "cancel" and collect is not None:
        raise ValueError("while_running: cancel cannot be combined with debounce or batch; use queue or skip")
    for name in ("max_concurrency", "concurrency_key"):
        if fields.get(name) is not None or name in given:
            raise ValueError(f"{name}: cannot be combined with while_running, which is one run at a time, by key")
    given |= {
        "max_concurrency": 1,
        "concurrency_key": fields.get("key"),
        "overlap": "skip" if while_running == "skip" else "queue",
        "cancel_running": while_running == "cancel",
    }
    if collect is None and skip_over is None and backlog is None:
        given["key"] = None
    return given


def _one_at_a_time(schedule: ScheduleSpec | None, fields: Mapping[str, object]) -> dict[str, object]:
    """The trigger's fields by which the ticks of a schedule do not overlap."""
    if schedule is None or schedule.overlap == "allow":
        return {}
    for name in ("max_concurrency", "concurrency_key"):
        if fields[name] is not None:
            raise ValueError(f"{name}: cannot be combined with overlap={schedule.overlap!r}, which is one")
    return {"max_concurrency": 1, "overlap": schedule.overlap}
