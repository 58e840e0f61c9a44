"""Runs are claimed fairly: no workflow, and no key of one, waits for all of another's backlog."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.flow.conftest import eventually
from tests.flow.test_claims import Crew
from tests.flow.test_dispatch import publish
from tests.processes import run, tidegate
from tidegate import Context, Tidegate
from tidegate.flow.look.explain import explain_any
from tidegate.flow.run.fair_claims import FairClaims
from tidegate.model.ids import DefinitionId
from tidegate.model.run import ClaimedRun
from tidegate.model.worker_share import WorkerShare
from tidegate.store import triggers, workers
from tidegate.store.db import Connection, Database

ADD = """
insert into tidegate.workflow_runs
  (id, workflow_definition_id, correlation_id, parameters, concurrency_key, next_attempt_at)
select tidegate.uuid7(), $1, 'c', '{}', $2, tidegate.now() - interval '1 hour' + ($3 + n) * interval '1 ms'
  from generate_series(1, $4::int) n
"""


@pytest.fixture
def app() -> Tidegate:
    return Tidegate()


@pytest.fixture
async def crew(database: Database, app: Tidegate) -> AsyncIterator[Crew]:
    made = Crew(database, app, concurrency=4)
    yield made
    await made.runner.stop(0)


async def definition(connection: Connection, slug: str) -> DefinitionId:
    made = await triggers.upsert_definition(
        connection, slug=slug, kind="python", parameters=["*"], config={}, actor="test"
    )
    return made


async def add(connection: Connection, of: uuid.UUID, count: int, *, key: str | None = None, later_ms: int = 0) -> None:
    """Due runs, the first of them `later_ms` later than an hour ago."""
    await connection.execute(ADD, of, key, later_ms, count)


class Claimer:
    """A worker that claims and holds what it gets until it is told to end it."""

    def __init__(self, connection: Connection, definitions: Sequence[DefinitionId]) -> None:
        self.held: list[ClaimedRun] = []
        self._has_claimed = False
        self._connection, self._definitions = connection, definitions
        self._claims = FairClaims("w", 60_000, lambda: self.held)

    async def claim(self, room: int) -> Counter[str]:
        found = await self._claims.claim(self._connection, self._definitions, room, is_behind=self._has_claimed)
        self.held, self._has_claimed = [*self.held, *found.runs], True
        return Counter(run.workflow for run in found.runs)

    def end(self, count: int = 1) -> None:
        del self.held[:count]


async def test_another_workflow_is_next_whatever_is_due_before_it(connection: Connection) -> None:
    flood, other = await definition(connection, "flood"), await definition(connection, "other")
    await add(connection, flood, 500)
    claimer = Claimer(connection, [flood, other])
    assert await claimer.claim(10) == {"flood": 10}
    await add(connection, other, 3, later_ms=10_000)
    for _ in range(3):
        claimer.end()
        assert await claimer.claim(1) == {"other": 1}
    claimer.end()
    assert await claimer.claim(1) == {"flood": 1}  # and nothing stays free when the other has no more


async def test_a_single_slot_goes_round(connection: Connection) -> None:
    flood, other = await definition(connection, "flood"), await definition(connection, "other")
    await add(connection, flood, 100)
    claimer = Claimer(connection, [flood, other])
    await claimer.claim(1)
    await add(connection, other, 100, later_ms=10_000)
    got: Counter[str] = Counter()
    for _ in range(20):
        claimer.end()
        got += await claimer.claim(1)
    assert got == {"flood": 10, "other": 10}


async def test_keys_of_a_workflow_take_turns(connection: Connection) -> None:
    own = await definition(connection, "own")
    await connection.execute(
        "insert into tidegate.workflow_event_triggers (id, workflow_definition_id, name, event_type, concurrency_key, "
        "max_concurrency, created_by, updated_by) values (tidegate.uuid7(), $1, 'main', 'go', 'k', 100, 't', 't')",
        own,
    )
    await add(connection, own, 90, key="big")
    await add(connection, own, 5, key="small", later_ms=5000)
    await add(connection, own, 1, key="one", later_ms=9000)
    claimer = Claimer(connection, [own])
    await claimer.claim(2)  # the first claim does not know that there is more
    await claimer.claim(4)
    assert Counter(run.concurrency_key for run in claimer.held) == {"big": 3, "small": 2, "one": 1}
    while claimer.held:
        claimer.end(3)
        await claimer.claim(3)
    assert not await connection.fetchval("select count(*) from tidegate.workflow_runs where status = 'pending'")


async def test_what_is_claimed_fairly_is_claimed_once(database: Database, connection: Connection) -> None:
    """Several workers that look at the same due runs get each of them once, and all of them."""
    known = [await definition(connection, slug) for slug in ("a", "b", "c")]
    for place, one in enumerate(known):
        await add(connection, one, 60, later_ms=place * 1000)
    seen: list[uuid.UUID] = []

    async def work(name: str) -> None:
        claims = FairClaims(name, 60_000, lambda: ())
        for _ in range(200):
            async with database.transaction() as own:
                found = await claims.claim(own, known, 4, is_behind=True)
            seen.extend(run.id for run in found.runs)
            if not found.runs and not found.has_more:
                return

    await asyncio.gather(*(work(f"w{n}") for n in range(5)))
    assert len(seen) == len(set(seen)) == 180


async def test_a_worker_full_of_slow_runs_begins_another_workflow_with_the_next_free_slot(
    connection: Connection, app: Tidegate, crew: Crew
) -> None:
    began: asyncio.Queue[str] = asyncio.Queue()
    go_on = asyncio.Semaphore(0)

    @app.workflow(on="slow")
    async def slow(ctx: Context) -> None:
        began.put_nowait("slow")
        await go_on.acquire()

    @app.workflow(on="fast")
    async def fast(ctx: Context) -> None:
        began.put_nowait("fast")

    await crew.serve()
    crew.runner._prefetch.learn(10)  # nothing is claimed ahead
    for _ in range(30):
        await publish(connection, "slow")
    await crew.dispatch.run_once()
    await crew.runner.run_once()
    assert await next_begun(began, 4) == ["slow"] * 4
    await publish(connection, "fast")
    await crew.dispatch.run_once()
    assert began.empty()  # every slot is in use
    go_on.release()
    await crew.runner.wait_for_room()
    await crew.runner.run_once()
    assert await next_begun(began, 1) == ["fast"]
    for _ in range(40):
        go_on.release()
    while await crew.runner.run_once() or crew.runner.room == 0:
        await crew.runner.wait_for_room()
    await eventually(crew.database, "select count(*) = 31 from tidegate.workflow_runs where status = 'succeeded'")


async def next_begun(began: asyncio.Queue[str], count: int) -> list[str]:
    return [await asyncio.wait_for(began.get(), 30) for _ in range(count)]


async def test_prefetched_runs_of_workflows_begin_in_turns(connection: Connection, app: Tidegate, crew: Crew) -> None:
    """What was claimed ahead of a workflow with many runs does not hold up what was claimed after it."""
    began: list[str] = []
    crew.runner._prefetch.learn(0.0001)

    @app.workflow(on="many")
    async def many(ctx: Context) -> None:
        began.append("many")

    @app.workflow(on="few")
    async def few(ctx: Context) -> None:
        began.append("few")

    await crew.serve()
    for _ in range(40):
        await publish(connection, "many")
    await publish(connection, "few")
    await crew.dispatch.run_once()
    await asyncio.wait_for(crew.runner.idle(), 30)
    await crew.runner.run_once()
    await asyncio.wait_for(crew.runner.idle(), 30)
    assert len(began) == 41 and began.index("few") < 10


class Two:
    """An application with two workflows whose runs wait to be told to end."""

    def __init__(self, app: Tidegate) -> None:
        self.began: asyncio.Queue[str] = asyncio.Queue()
        self.go_on = {"slow": asyncio.Semaphore(0), "fast": asyncio.Semaphore(0)}

        @app.workflow(on="slow")
        async def slow(ctx: Context) -> None:
            self.began.put_nowait("slow")
            await self.go_on["slow"].acquire()

        @app.workflow(on="fast")
        async def fast(ctx: Context) -> None:
            self.began.put_nowait("fast")
            await self.go_on["fast"].acquire()


async def test_reserved_slots_are_kept_for_their_workflow(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    two, crew = Two(app), Crew(database, app, concurrency=4, share=WorkerShare(reserved={"fast": 2}))
    await crew.serve()
    for _ in range(10):
        await publish(connection, "slow")
    await crew.dispatch.run_once()
    assert await crew.runner.run_once() == 0  # those that are for all were claimed as they were created
    assert await next_begun(two.began, 2) == ["slow", "slow"]
    for _ in range(3):
        await publish(connection, "fast")
    await crew.dispatch.run_once()
    assert await crew.runner.run_once() == 2
    assert await next_begun(two.began, 2) == ["fast", "fast"]
    assert crew.runner.room == 0
    two.go_on["slow"].release()
    await crew.runner.wait_for_room()
    assert await crew.runner.run_once() == 1
    assert await next_begun(two.began, 1) in (["fast"], ["slow"])
    two.go_on["fast"].release()
    await crew.runner.stop(0)


async def test_a_worker_that_takes_only_some_leaves_the_others(
    database_url: str, database: Database, connection: Connection, tmp_path: Path
) -> None:
    """Real processes: one takes `fast` only; what it leaves waits with a reason until another worker comes."""
    file = tmp_path / "two.py"
    file.write_text(
        "from tidegate import Tidegate\napp = Tidegate()\n\n"
        "@app.workflow(on='slow')\nasync def slow(ctx): ...\n\n@app.workflow(on='fast')\nasync def fast(ctx): ...\n"
    )
    settings = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_POLL_MS": "100"}
    ended = "select count(*) = $2 from tidegate.workflow_runs where status = 'succeeded' and workflow_definition_id = "
    ended += "(select id from tidegate.workflow_definitions where slug = $1)"
    with tidegate("worker", str(file), "--only", "fast", "--reserve", "fast=2", **settings) as first:
        first.wait_for_line("worker.started")
        for _ in range(3):
            await publish(connection, "slow")
            await publish(connection, "fast")
        await eventually(database, ended, "fast", 3)
        waiting = await connection.fetchrow("select id, status from tidegate.workflow_runs where status <> 'succeeded'")
        assert waiting is not None and waiting["status"] == "pending"
        [seen] = await workers.list_all(connection, 60_000)
        assert (seen.workflows, seen.left_out, seen.reserved) == (["fast"], ["slow"], {"fast": 2})
        story = await explain_any(connection, str(waiting["id"]))
        assert "takes other workflows only (--only)" in story.summary
        with tidegate("worker", str(file), **settings) as second:
            second.wait_for_line("worker.started")
            await eventually(database, ended, "slow", 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--only", "fst"), "--only names 'fst', which is no workflow of this worker; it has: fast"),
        (("--reserve", "fst=1"), "--reserve names 'fst'"),
        (("--reserve", "fast=9", "--concurrency", "3"), "--reserve keeps 9 slots, but the worker has 3"),
        (("--reserve", "fast"), "TIDEGATE_WORKER_RESERVE: expected a workflow and its slots such as fulfil=4"),
    ],
)
def test_wrong_options_are_refused_at_the_start(
    database_url: str, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    file = tmp_path / "one.py"
    file.write_text(
        "from tidegate import Tidegate\napp = Tidegate()\n\n@app.workflow(on='f')\nasync def fast(ctx): ...\n"
    )
    ended = run("worker", str(file), *options, env={"TIDEGATE_DATABASE_URL": database_url})
    assert ended.returncode == 2, ended
    assert says in ended.stderr + ended.stdout


async def test_workers_that_are_killed_share_their_slots_among_workflows(
    database_url: str, database: Database, connection: Connection, tmp_path: Path
) -> None:
    """Two real workers full of slow runs, one of which is killed: another workflow's runs begin long before the rest,
    and every run ends."""
    file = tmp_path / "two.py"
    file.write_text(
        "import asyncio\nfrom tidegate import Tidegate\napp = Tidegate()\n\n"
        "@app.workflow(on='slow')\nasync def slow(ctx):\n    await asyncio.sleep(0.1)\n\n"
        "@app.workflow(on='fast')\nasync def fast(ctx): ...\n"
    )
    settings = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_POLL_MS": "100", "TIDEGATE_LEASE_MS": "1000"}
    settings["TIDEGATE_WORKER_CONCURRENCY"] = "2"
    with tidegate("worker", str(file), **settings) as first, tidegate("worker", str(file), **settings) as second:
        first.wait_for_line("worker.started")
        second.wait_for_line("worker.started")
        for _ in range(80):
            await publish(connection, "slow")
        await eventually(database, "select count(*) > 2 from tidegate.workflow_runs where status = 'running'")
        for _ in range(5):
            await publish(connection, "fast")
        second.signal(signal.SIGKILL)
        await eventually(database, "select count(*) = 85 from tidegate.workflow_runs where status = 'succeeded'")
    rows = await connection.fetch(
        "select w.slug from tidegate.workflow_runs r join tidegate.workflow_definitions w "
        "on w.id = r.workflow_definition_id order by r.finished_at"
    )
    ended = [row[0] for row in rows]
    assert max(place for place, slug in enumerate(ended) if slug == "fast") < 70, ended
