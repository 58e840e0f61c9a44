"""Triggers that skip what is over a rate, and that have one run at a time, by key. Judged by what the workflows did."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.flow.checker import milliseconds, most_in_any_interval
from tests.flow.test_windows import deliveries, is_sound, publish
from tidegate import Batch, Context, Tidegate
from tidegate.errors import AppError
from tidegate.testing import Harness

KEY = "{{ event.payload.customer }}"


def application(done: list[int], began: list[int] | None = None, sleep: str | None = None, **options: Any) -> Tidegate:
    app = Tidegate()

    @app.workflow(on="cart.changed", **options)
    async def handle(ctx: Context, n: int) -> int:
        if ctx.attempt == 1 and began is not None:
            began.append(n)
        if sleep is not None:
            await ctx.sleep(sleep)
        done.append(n)
        return n

    return app


async def test_what_is_over_the_rate_is_skipped_by_key_with_its_reason() -> None:
    done: list[int] = []
    async with Harness(application(done, skip_over="3/h", key=KEY)) as harness:
        await publish(harness, *range(5))
        await publish(harness, 10, 11, customer="bob")
        await harness.run_until_idle()
        assert sorted(done) == [0, 1, 2, 10, 11]
        skipped = [one for one in await deliveries(harness) if one.status == "skipped"]
        assert [one.reason for one in skipped] == ["skip_over"] * 2
        said = await harness.explain(skipped[0].event_id)
        assert said.summary == "handle skipped: over 3/h, and the trigger skips what is over"
        await harness.advance("59m")
        await publish(harness, 5)
        await harness.run_until_idle()
        assert 5 not in done
        await harness.advance("3m")
        await publish(harness, 6)
        await harness.run_until_idle()
        assert 6 in done
        assert await is_sound(harness)


async def test_the_rate_holds_in_every_sliding_window() -> None:
    done: list[int] = []
    async with Harness(application(done, skip_over="4/10s")) as harness:
        for n in range(60):
            await publish(harness, n)
            await harness.advance("700ms")
        launched = [one.launched_at for one in await deliveries(harness) if one.launched_at is not None]
        assert len(done) == len(launched) >= 12
        assert most_in_any_interval(milliseconds(launched), 10_000) <= 4
        async with harness.connection() as connection:
            assert await connection.fetchval("select count(*) from tidegate.trigger_rates") == 1


async def test_only_what_is_not_skipped_is_collected() -> None:
    taken: list[list[int]] = []
    app = Tidegate()

    @app.workflow(on="cart.changed", skip_over="3/h", batch=Batch(2, "5s"), key=KEY)
    async def handle(ctx: Context) -> None:
        taken.append([event.payload["n"] for event in ctx.events])

    async with Harness(app) as harness:
        await publish(harness, *range(5))
        await harness.advance("10s")
        assert taken == [[0, 1], [2]]
        assert Counter(one.status for one in await deliveries(harness)) == {"collected": 3, "skipped": 2}


async def test_a_singleton_skips_what_comes_while_it_runs() -> None:
    done: list[int] = []
    async with Harness(application(done, sleep="1m", while_running="skip", key=KEY)) as harness:
        await publish(harness, 1, 2)
        await publish(harness, 11, customer="bob")
        await harness.advance("2m")
        await publish(harness, 3)
        await harness.advance("2m")
        assert sorted(done) == [1, 3, 11]
        assert [one.reason for one in await deliveries(harness) if one.status == "skipped"] == ["overlap"]


async def test_a_singleton_queues_what_comes_while_it_runs() -> None:
    done: list[int] = []
    async with Harness(application(done, sleep="1m", while_running="queue", key=KEY)) as harness:
        await publish(harness, 1, 2, 3)
        await publish(harness, 11, customer="bob")
        await harness.advance("70s")
        assert sorted(done) == [1, 11]
        await harness.advance("5m")
        assert [n for n in done if n < 10] == [1, 2, 3]


async def test_a_singleton_cancels_the_run_before_and_what_waits() -> None:
    done: list[int] = []
    began: list[int] = []
    async with Harness(application(done, began, sleep="1m", while_running="cancel", key=KEY)) as harness:
        await publish(harness, 1)
        await publish(harness, 11, customer="bob")
        await harness.advance("10s")
        newer = (await publish(harness, 2))[0]
        await harness.advance("10s")
        assert began == [1, 11, 2] and done == []
        first = next(run for run in await harness.runs() if run.parameters["n"] == 1)
        assert (first.status, first.cancelled_by) == ("cancelled", f"event {newer}")
        await publish(harness, 3, 4, 5)
        await harness.advance("5m")
        assert sorted(done) == [5, 11], "only the newest of a key runs to its end"
        skipped = [one for one in await deliveries(harness) if one.status == "skipped"]
        assert skipped and {one.reason for one in skipped} == {"superseded"}
        assert "came later and takes its place" in (await harness.explain(skipped[0].event_id)).summary
        assert await is_sound(harness)


async def test_a_start_is_not_skipped() -> None:
    done: list[int] = []
    async with Harness(application(done, skip_over="1/h")) as harness:
        await publish(harness, 1)
        await harness.start("handle", {"n": 2})
        await harness.run_until_idle()
        assert sorted(done) == [1, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"on": "x", "debounce": "1s", "while_running": "cancel"},
            "while_running: cancel cannot be combined with debounce or batch; use queue or skip",
        ),
        ({"skip_over": "many"}, "skip_over: a rate is written like"),
        ({"while_running": "wait"}, "while_running: must be skip, cancel or queue"),
        ({"while_running": "skip", "max_concurrency": 2}, "max_concurrency: cannot be combined with while_running"),
        ({"on": None, "skip_over": "1/h"}, "skip_over: requires on"),
    ],
)
def test_a_wrong_declaration_names_what_is_wrong(options: dict[str, Any], said: str) -> None:
    with pytest.raises(AppError) as caught:
        Tidegate().workflow(**{"on": "a", "name": "handle"} | options)(lambda ctx: None)
    assert said in str(caught.value)
