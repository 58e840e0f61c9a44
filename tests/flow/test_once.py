"""An execution happens once: whatever events share, and whoever decides them, a run is begun by one claim, one time.

Judged by what the functions did, in a list or file outside of the database.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World, the_run
from tests.flow.test_dispatch import publish
from tests.processes import PATIENCE_SECONDS, api, tidegate, worker
from tidegate import Context, SyncContext, Tidegate
from tidegate.client import Client
from tidegate.flow.call import stopping
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.run import claiming
from tidegate.flow.run.runner import Runner
from tidegate.model.run import ClaimedRun
from tidegate.store.db import Connection
from tidegate.telemetry import metrics
from tidegate.testing import Harness

EVENTS = 5
WORKFLOWS = {
    "free": {},
    "limited": {"throttle": "100/s"},
    "narrow": {"max_concurrency": 3},
}
CHARGES = """
import asyncio, os
from tidegate import Context, Tidegate

app = Tidegate()


def wrote(what: str) -> None:
    sink = os.open(os.environ["SINK"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(sink, what.encode() + b"\\n")
    os.close(sink)


@app.workflow(on="order.paid", idempotency_key="{{ event.payload.order }}", idempotency_window="1h")
async def charge(ctx: Context, order: str) -> None:
    wrote(f"charge {order}")
    await asyncio.sleep(0.05)


@app.workflow(on="done")
async def done(ctx: Context) -> None:
    wrote("done")
"""


@pytest.fixture
def app_file(tmp_path: Path) -> Path:
    path = tmp_path / "charges.py"
    path.write_text(CHARGES)
    return path


@pytest.mark.parametrize("limits", WORKFLOWS.values(), ids=WORKFLOWS)
async def test_events_of_one_batch_with_one_key_are_one_execution(limits: dict[str, Any]) -> None:
    app, done = Tidegate(), []

    @app.workflow(on="order.paid", idempotency_key="{{ event.payload.order }}", idempotency_window="1h", **limits)
    async def charge(ctx: Context, order: str) -> None:
        done.append(order)

    async with Harness(app) as harness:
        for n in range(EVENTS):
            await harness.publish("order.paid", source="shop", payload={"order": "7"}, id=str(n))
        await harness.run_until_idle()
        assert (await harness.only_run()).status == "succeeded"
    assert done == ["7"]


async def test_deliveries_with_one_key_that_waited_for_a_slot_are_one_execution() -> None:
    """The transaction that ends a run decides those that stand first in line, and claims what it launches."""
    app, done, may_end = Tidegate(), [], asyncio.Event()

    @app.workflow(
        on="order.paid", idempotency_key="{{ event.payload.order }}", idempotency_window="1h", max_concurrency=2
    )
    async def charge(ctx: Context, order: str) -> None:
        done.append(order)
        await may_end.wait()

    async with Harness(app) as harness:
        for order in ("1", "2", "3", "3", "3"):  # the first two hold the slots; the others wait for them
            await harness.publish("order.paid", source="shop", payload={"order": order})
        idle = asyncio.create_task(harness.run_until_idle())
        while len(done) < 2:  # noqa: ASYNC110 - until both are begun
            await asyncio.sleep(0.01)
        may_end.set()
        await idle
        await harness.advance("1h")
    assert sorted(done) == ["1", "2", "3"]


def charges(sink: Path, client: Client) -> list[str]:
    """What was charged when everything published before is decided."""
    client.publish("done", source="shop")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not sink.exists() or "done" not in sink.read_text():
        assert time.monotonic() < deadline, "the last event did not run"
        time.sleep(0.02)
    return [line for line in sink.read_text().split("\n") if line.startswith("charge")]


def test_one_request_to_dev_with_one_key_is_one_execution(tmp_path: Path, app_file: Path) -> None:
    sink = tmp_path / "sink"
    with tidegate("dev", str(app_file), "--port", "0", "--data", str(tmp_path / "data"), SINK=str(sink)) as process:
        address = process.wait_for_line(r"API and console on (http://\S+)")[1]
        with Client(address) as client:
            orders = [{"type": "order.paid", "source": "shop", "payload": {"order": "7"}} for _ in range(EVENTS)]
            client.publish_many(orders)
            assert charges(sink, client) == ["charge 7"]


def test_events_that_piled_up_while_no_worker_was_there_are_one_execution(
    database_url: str, tmp_path: Path, app_file: Path
) -> None:
    sink = tmp_path / "sink"
    with worker(database_url, app_file, SINK=str(sink)):
        pass  # its workflows are known
    with api(database_url) as (_, address), Client(address) as client:
        for n in range(EVENTS):
            client.publish("order.paid", source="shop", payload={"order": "7"}, id=str(n))
        with worker(database_url, app_file, SINK=str(sink)):
            assert charges(sink, client) == ["charge 7"]


class Sink:
    """What the functions of a world did, and how many executions of a run were there at once at most."""

    def __init__(self) -> None:
        self.begun = self.inside = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.begun, self.inside = self.begun + 1, self.inside + 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1


async def test_a_claim_that_is_handed_over_twice_is_refused(connection: Connection, world: World) -> None:
    """Whoever does it, and whether the run is waiting ahead, begun, or has ended."""
    sink, may_end = Sink(), asyncio.Event()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        with sink:
            await may_end.wait()

    runner = await world.runner(concurrency=1)
    given: list[Any] = []
    take = runner._slots._claims.take
    runner._slots._claims.take = lambda run: given.append(run) or take(run)  # type: ignore[method-assign,func-returns-value]
    refused = metrics.EXECUTIONS_REFUSED._value.get()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    [run] = given
    runner.start([(run, None), (run, None)])
    while not sink.begun:  # noqa: ASYNC110 - until it is begun
        await asyncio.sleep(0.01)
    runner.start([(run, None)])
    may_end.set()
    await asyncio.wait_for(runner.idle(), 30)
    runner.start([(run, None)])
    await asyncio.wait_for(runner.idle(), 30)
    assert (sink.begun, (await the_run(connection))["status"]) == (1, "succeeded")
    assert metrics.EXECUTIONS_REFUSED._value.get() - refused == 4


def test_claims_are_remembered_while_they_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "RECENT", 3)
    held = _claim(1)
    mine = claiming.Claims(lambda: [held])
    assert mine.take(held)
    for _ in range(20):
        assert mine.take(_claim(1))
    assert not mine.take(held)
    assert mine.take(_claim(3, held.id)) and not mine.take(_claim(3, held.id)) and not mine.take(_claim(2, held.id))


def _claim(generation: int, run_id: uuid.UUID | None = None) -> ClaimedRun:
    now = datetime.now(UTC)
    return ClaimedRun(
        id=run_id or uuid.uuid4(), workflow="w", event_id=None, correlation_id=None, parameters={}, attempts=generation,
        claim_generation=generation, now=now, started_at=now,
    )  # fmt: skip


def _staying(world: World, sink: Sink, may_end: threading.Event) -> None:
    """Workflows that do not leave when they are told to, until they may."""

    @world.app.workflow(on="async")
    async def stays(ctx: Context) -> None:
        with sink:
            while not may_end.is_set():
                with suppress(BaseException):
                    await asyncio.sleep(0.01)

    @world.app.workflow(on="plain")
    def plain(ctx: SyncContext) -> None:
        with sink:
            may_end.wait()

    @world.app.workflow(on="step")
    async def step(ctx: Context) -> None:
        def work() -> None:
            with sink:
                may_end.wait()

        await ctx.step("work", work)


async def _taken_over(world: World, clock: Clock, runner: Runner, sink: Sink) -> None:
    """A run is begun, its lease ends, and the same worker claims it again."""
    await world.dispatch.run_once()
    await runner.run_once()
    while not sink.begun:  # noqa: ASYNC110 - until it is begun
        await asyncio.sleep(0.01)
    await clock.advance(2000)
    await Reconcile(world.database, batch_size=10).run_once()
    assert await runner.run_once() == 1


@pytest.mark.parametrize("kind", ["async", "plain", "step"])
async def test_a_worker_that_takes_its_own_run_over_begins_when_the_earlier_execution_has_left(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(stopping, "STOP_SECONDS", 0.02)
    sink, may_end = Sink(), threading.Event()
    _staying(world, sink, may_end)
    runner = await world.runner(1000)
    await publish(connection, kind)
    await _taken_over(world, clock, runner, sink)
    while kind == "async" and not runner._slots._abandoned:  # noqa: ASYNC110 - it was told often enough, and is given up
        await asyncio.sleep(0.01)
    for _ in range(100):  # what is to begin has begun
        await asyncio.sleep(0)
    assert (sink.begun, sink.most) == (1, 1)
    may_end.set()
    await asyncio.wait_for(runner.idle(), 30)
    assert (await the_run(connection))["status"] == "succeeded"
    assert (sink.begun, sink.most) == (2, 1)


async def test_a_run_that_waits_for_its_earlier_execution_can_be_cancelled(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.flow.call.stopping.WAITING_SECONDS", 0.02)
    sink, may_end = Sink(), threading.Event()
    _staying(world, sink, may_end)
    runner = await world.runner(1000)
    await publish(connection, "plain")
    await _taken_over(world, clock, runner, sink)
    runner._slots.cancelled((await the_run(connection))["id"])
    await asyncio.wait_for(runner.idle(), 30)
    assert (await the_run(connection))["status"] == "cancelled"
    may_end.set()
    assert sink.begun == 1


@pytest.mark.parametrize("kind", ["plain", "step"])
async def test_a_stopping_worker_hands_back_for_later_what_is_still_in_a_thread(
    connection: Connection, clock: Clock, world: World, kind: str
) -> None:
    sink, may_end = Sink(), threading.Event()
    _staying(world, sink, may_end)
    runner = await world.runner(30_000)
    await publish(connection, kind)
    await world.dispatch.run_once()
    await runner.run_once()
    while not sink.begun:  # noqa: ASYNC110 - until it is begun
        await asyncio.sleep(0.01)
    await runner.stop(0)
    run = await the_run(connection)
    waits = run["next_attempt_at"] - await connection.fetchval("select tidegate.now()")
    assert (run["status"], run["crashes"], waits.total_seconds()) == ("pending", 0, 30)
    may_end.set()
