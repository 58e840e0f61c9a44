"""`python -m chaos.order`: four workers decide one burst, again and again; who came first goes first.

Launches of a throttled trigger are in the order of arrival, by the rows; what the runs of a trigger with one slot do is
in that order too, by what user code wrote to the sink. Every effect happens once, and the throttle is not exceeded.
"""

from __future__ import annotations

from pathlib import Path

from chaos.judge import most_in_any_interval
from chaos.line import Found, main, out_of_order, running
from chaos.line_app import THROTTLE

BURST = {"throttled": 150, "single": 40}


async def run(folder: Path, trials: int, seed: int) -> Found:
    """On a cluster of its own."""
    complaints: list[str] = []
    async with running(folder) as line:
        for _ in range(trials):
            for workflow, count in BURST.items():
                await line.burst(workflow, count)
            for workflow in BURST:
                await line.until_done(workflow)
        limit, window_ms = THROTTLE
        launched = {workflow: await line.launched(workflow) for workflow in BURST}
        for workflow, launches in launched.items():
            complaints += out_of_order(workflow, [one.n for one in launches], "launches")
            complaints += line.complaints(workflow)
        complaints += out_of_order("single", line.effects("single"), "effects")
        most = most_in_any_interval([one.at for one in launched["throttled"]], window_ms)
        if most > limit:
            complaints.append(f"throttled: {most} launches within {window_ms} ms where {limit} are allowed")
    return Found(seed=seed, trials=trials, complaints=complaints)


if __name__ == "__main__":
    main("order", __doc__, run, trials=25)
