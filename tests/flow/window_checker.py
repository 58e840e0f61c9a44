"""What windows promise, judged by the runs' effects and by the rows: every event in one run, no window too large or
open for too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple


class Given(NamedTuple):
    """An event that a run was given, as the run has noted it."""

    run_id: object
    event: int


class Collected(NamedTuple):
    """A delivery that is collected in a window, and when it was."""

    window_id: object
    run_id: object
    event: int
    at: datetime


def breaches(
    published: Sequence[int], given: Sequence[Given], rows: Sequence[Collected], *, most: int, longest: timedelta
) -> list[str]:
    """What is wrong, in words; nothing if all is well. A run that is repeated after a crash is given its events
    again."""
    runs_of: dict[int, set[object]] = {}
    for one in given:
        runs_of.setdefault(one.event, set()).add(one.run_id)
    found = [f"event {event} is in no run" for event in published if event not in runs_of]
    found += [f"event {event} is in {len(runs)} runs" for event, runs in runs_of.items() if len(runs) > 1]
    said = {row.event: row.run_id for row in rows}
    found += [f"the delivery of event {e} names another run" for e, runs in runs_of.items() if said.get(e) not in runs]
    windows: dict[object, list[Collected]] = {}
    for row in rows:
        windows.setdefault(row.window_id, []).append(row)
    found += [f"window {w} has {len(mine)} events" for w, mine in windows.items() if len(mine) > most]
    found += [
        f"window {w} was open for {spent}"
        for w, mine in windows.items()
        if (spent := max(row.at for row in mine) - min(row.at for row in mine)) >= longest
    ]
    found += [f"{count} windows in run {run}" for run, count in _runs(windows).items() if run is not None and count > 1]
    return found


def _runs(windows: Mapping[object, Sequence[Collected]]) -> Counter[object]:
    return Counter(mine[0].run_id for mine in windows.values())
