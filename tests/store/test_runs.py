"""`workflow_runs`: claims with leases, fenced by a generation; final is final."""

import asyncio
import uuid
from datetime import datetime
from typing import Any

import asyncpg
import pytest

from tidegate.clock import uuid7
from tidegate.model.run import FINAL_RUN_STATUSES, RUN_STATUSES, ClaimedRun, FinishedRun, RunStatus
from tidegate.store import runs
from tidegate.store.db import Connection, Database

from .builders import HOUR, MINUTE, NOW, SECOND, make_definition, make_events, make_runs, set_clock


async def claim(
    connection: Connection, limit: int = 100, slug: str = "fulfil", worker: str = "w1", lease_ms: int = 15_000
) -> list[ClaimedRun]:
    definition = await make_definition(connection, slug)
    return await runs.claim_due(connection, definitions=[definition], limit=limit, worker=worker, lease_ms=lease_ms)


def finished(run: ClaimedRun, status: RunStatus = "succeeded", **changes: Any) -> FinishedRun:
    return FinishedRun(**{"id": run.id, "claim_generation": run.claim_generation, "status": status} | changes)


async def row(connection: Connection, run_id: uuid.UUID) -> dict[str, Any]:
    found = await connection.fetchrow("select * from tidegate.workflow_runs where id = $1", run_id)
    assert found is not None
    return dict(found)


async def test_due_is_what_the_databases_own_clock_says(connection: Connection) -> None:
    now = await connection.fetchval("select tidegate.now()")
    past, _future = await make_runs(connection, [now - SECOND, now + HOUR])
    assert [r.id for r in await claim(connection)] == [past]


async def test_due_moves_with_the_databases_clock(connection: Connection) -> None:
    await set_clock(connection)
    now, later = await make_runs(connection, [NOW, NOW + HOUR])
    assert [r.id for r in await claim(connection)] == [now]
    await set_clock(connection, NOW + HOUR - SECOND)
    assert await claim(connection) == []
    await set_clock(connection, NOW + HOUR)
    assert [r.id for r in await claim(connection)] == [later]


async def test_oldest_first_and_never_more_than_the_limit(connection: Connection) -> None:
    await set_clock(connection)
    due = [NOW - n * MINUTE for n in (3, 9, 1, 7, 5)]
    ids = dict(zip(due, await make_runs(connection, due), strict=True))
    batches = [await claim(connection, limit=2) for _ in range(4)]
    oldest = [ids[at] for at in sorted(due)]
    assert [{r.id for r in batch} for batch in batches] == [set(oldest[:2]), set(oldest[2:4]), set(oldest[4:]), set()]


async def test_only_runs_of_the_workers_own_workflows(connection: Connection) -> None:
    await set_clock(connection)
    [mine] = await make_runs(connection, [NOW], "mine")
    await make_runs(connection, [NOW], "other")
    assert [(r.id, r.workflow) for r in await claim(connection, slug="mine")] == [(mine, "mine")]
    assert await runs.claim_due(connection, definitions=[], limit=9, worker="w", lease_ms=1000) == []


async def test_claim_is_written_down(connection: Connection) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW])
    [held] = await claim(connection, worker="w7", lease_ms=5000)
    assert (held.attempts, held.claim_generation) == (1, 1)
    found = await row(connection, run_id)
    assert (found["status"], found["claimed_by"], found["started_at"]) == ("running", "w7", NOW)
    assert found["claim_expires_at"] == NOW + 5 * SECOND


async def test_two_open_transactions_claim_disjoint_runs(database: Database) -> None:
    async with database.transaction() as connection:
        await set_clock(connection)
        ids = await make_runs(connection, [NOW] * 10)
        definition = await make_definition(connection)

    async def take(connection: Connection, worker: str) -> list[uuid.UUID]:
        taken = await runs.claim_due(connection, definitions=[definition], limit=6, worker=worker, lease_ms=1000)
        return [r.id for r in taken]

    async with database.transaction() as one, database.transaction() as two:
        first, second = await asyncio.gather(take(one, "w1"), take(two, "w2"))
        assert sorted([*first, *second]) == sorted(ids)
        async with database.transaction() as three:
            assert await take(three, "w3") == []


async def test_many_workers_claim_every_run_once(database: Database) -> None:
    async with database.transaction() as connection:
        await set_clock(connection)
        ids = await make_runs(connection, [NOW] * 60)
        definition = await make_definition(connection)

    async def work(name: str) -> list[uuid.UUID]:
        mine: list[uuid.UUID] = []
        while True:
            async with database.transaction() as connection:
                batch = await runs.claim_due(connection, definitions=[definition], limit=4, worker=name, lease_ms=1000)
            if not batch:
                return mine
            mine += [r.id for r in batch]

    taken = await asyncio.gather(*(work(f"w{n}") for n in range(8)))
    assert sorted(run_id for mine in taken for run_id in mine) == sorted(ids)


@pytest.mark.parametrize("status", FINAL_RUN_STATUSES)
async def test_holder_finishes_its_run_and_final_is_final(connection: Connection, status: RunStatus) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW])
    [held] = await claim(connection)
    await set_clock(connection, NOW + SECOND)
    done = finished(held, status, output='{"receipt":1}', error="none")
    assert {r.id for r in await runs.finish(connection, [done])} == {run_id}
    run = await runs.get(connection, run_id)
    assert run is not None
    assert (run.status, run.output, run.error) == (status, {"receipt": 1}, "none")
    assert (run.started_at, run.finished_at) == (NOW, NOW + SECOND)

    before = await row(connection, run_id)
    assert {r.id for r in await runs.finish(connection, [finished(held, "failed")])} == set()
    assert set(await runs.renew(connection, [held], 1000)) == set()
    assert await runs.release(connection, [held]) == set()
    await set_clock(connection, NOW + HOUR)
    assert await runs.release_expired(connection, 100) == []
    assert await claim(connection) == []
    assert await row(connection, run_id) == before


async def test_wrong_generation_changes_nothing(connection: Connection) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW])
    [held] = await claim(connection)
    before = await row(connection, run_id)
    for generation in (held.claim_generation - 1, held.claim_generation + 1):
        wrong = ClaimedRun(
            id=held.id,
            workflow="fulfil",
            event_id=None,
            correlation_id=None,
            parameters={},
            attempts=1,
            claim_generation=generation,
            now=NOW,
            started_at=NOW,
        )
        assert {r.id for r in await runs.finish(connection, [finished(wrong)])} == set()
        assert set(await runs.renew(connection, [wrong], 60_000)) == set()
        assert await runs.release(connection, [wrong]) == set()
    assert await row(connection, run_id) == before


async def test_a_batch_finishes_those_still_held_and_says_which(connection: Connection) -> None:
    await set_clock(connection)
    await make_runs(connection, [NOW] * 3)
    kept, lost, other = await claim(connection)
    results = [finished(kept), finished(lost, claim_generation=0), finished(other, "failed", error="boom")]
    assert {r.id for r in await runs.finish(connection, results)} == {kept.id, other.id}
    assert (await row(connection, lost.id))["status"] == "running"
    assert {r.id for r in await runs.finish(connection, [])} == set()


async def test_renewing_waits_for_nobody(database: Database) -> None:
    """Ending several runs and renewing several leases, each in its own order, would wait for each other."""
    ends = "select id, claim_expires_at from tidegate.workflow_runs"
    async with database.connection() as mine, database.connection() as other:
        made = await make_runs(mine, [NOW, NOW, NOW])
        held = await claim(mine)
        before = dict(await mine.fetch(ends))
        async with other.transaction():
            await other.execute("select from tidegate.workflow_runs where id = $1 for update", held[1].id)
            kept = await runs.renew(mine, held, 60_000)  # waiting for it would fail by the lock timeout
        assert set(kept) == set(made)
        after = dict(await mine.fetch(ends))
        assert {run_id for run_id in made if after[run_id] > before[run_id]} == set(made) - {held[1].id}
        assert set(await runs.renew(mine, held, 60_000)) == set(made)


async def test_renewed_lease_lasts_longer(connection: Connection) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW])
    [held] = await claim(connection, lease_ms=10_000)
    await set_clock(connection, NOW + 9 * SECOND)
    assert set(await runs.renew(connection, [held], 10_000)) == {run_id}
    await set_clock(connection, NOW + 18 * SECOND)
    assert await runs.release_expired(connection, 100) == []
    await set_clock(connection, NOW + 19 * SECOND)
    assert await runs.release_expired(connection, 100) == [run_id]
    assert set(await runs.renew(connection, [held], 10_000)) == set()


async def test_zombie_changes_nothing(connection: Connection) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW])
    [zombie] = await claim(connection, worker="zombie")
    await set_clock(connection, NOW + HOUR)
    assert await runs.release_expired(connection, 100) == [run_id]

    async def writes_nothing() -> None:
        before = await row(connection, run_id)
        assert {r.id for r in await runs.finish(connection, [finished(zombie, output="1")])} == set()
        assert set(await runs.renew(connection, [zombie], 1000)) == set()
        assert await runs.release(connection, [zombie]) == set()
        assert await row(connection, run_id) == before

    await writes_nothing()
    [heir] = await claim(connection, worker="heir")
    assert (heir.attempts, heir.claim_generation > zombie.claim_generation) == (2, True)
    await writes_nothing()
    assert {r.id for r in await runs.finish(connection, [finished(heir, output="2")])} == {run_id}
    await writes_nothing()
    assert (await row(connection, run_id))["output"] == 2


async def test_release_takes_no_more_than_its_limit(connection: Connection) -> None:
    await set_clock(connection)
    ids = await make_runs(connection, [NOW] * 5)
    await claim(connection)
    await set_clock(connection, NOW + HOUR)
    first, second = [await runs.release_expired(connection, 3) for _ in range(2)]
    assert (len(first), len(second), {*first, *second}) == (3, 2, set(ids))


async def test_run_handed_back_is_due_at_once(connection: Connection) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW - HOUR])
    [held] = await claim(connection)
    assert await runs.release(connection, [held]) == {run_id}
    assert {r.id for r in await runs.finish(connection, [finished(held)])} == set()
    [again] = await claim(connection)
    assert (again.attempts, again.claim_generation > held.claim_generation) == (2, True)


@pytest.mark.parametrize(("due", "seconds"), [([], None), ([NOW + MINUTE, NOW + HOUR], 60.0), ([NOW - MINUTE], -60.0)])
async def test_next_due(connection: Connection, due: list[datetime], seconds: float | None) -> None:
    await set_clock(connection)
    await make_runs(connection, due)
    await make_runs(connection, [NOW - HOUR], "other")
    definitions = [await make_definition(connection)]
    assert await runs.next_due_seconds(connection, definitions, worker="w", lease_ms=1000) == seconds


async def test_next_due_counts_only_what_waits(connection: Connection) -> None:
    await set_clock(connection)
    await make_runs(connection, [NOW])
    await claim(connection)
    definitions = [await make_definition(connection)]
    assert await runs.next_due_seconds(connection, definitions, worker="w", lease_ms=1000) is None


async def test_get_of_an_unknown_run(connection: Connection) -> None:
    assert await runs.get(connection, uuid7()) is None


async def test_pages_newest_first_neither_skip_nor_repeat(connection: Connection) -> None:
    ids = await make_runs(connection, [NOW] * 5)
    seen: list[uuid.UUID] = []
    while page := await runs.list_page(connection, before_id=seen[-1] if seen else None, limit=2):
        assert len(page) <= 2
        seen += [r.id for r in page]
    assert seen == ids[::-1]


async def test_list_filters(connection: Connection) -> None:
    await set_clock(connection)
    mine, _waiting = await make_runs(connection, [NOW - HOUR, NOW + HOUR], "mine")
    [event_id] = await make_events(connection)
    [other] = await make_runs(connection, [NOW + HOUR], "other", of=event_id)
    await claim(connection, slug="mine")

    async def listed(**filters: Any) -> set[uuid.UUID]:
        return {r.id for r in await runs.list_page(connection, **filters)}

    assert len(await listed()) == 3
    assert mine in await listed(workflow="mine")
    assert len(await listed(workflow="mine")) == 2
    assert await listed(status="running") == {mine}
    assert await listed(event_id=event_id) == {other}
    assert await listed(workflow="mine", event_id=event_id) == set()
    assert await listed(workflow="nosuch") == set()


@pytest.mark.parametrize(
    ("assignment", "constraint"),
    [
        ("status = 'bogus'", None),
        ("status = ''", None),
        ("attempts = -1", "attempts_check"),
        ("next_attempt_at = null", "waiting_check"),
        ("next_attempt_at = 'infinity'", "waiting_check"),
        ("status = 'running'", "claim_check"),
        ("claim_expires_at = now()", "claim_check"),
        ("status = 'succeeded'", "finished_check"),
        ("status = 'failed'", "finished_check"),
        ("status = 'cancelled'", "finished_check"),
        ("finished_at = now()", "finished_check"),
        ("status = 'succeeded', finished_at = now(), claim_expires_at = now()", "claim_check"),
    ],
)
async def test_illegal_state_is_refused(connection: Connection, assignment: str, constraint: str | None) -> None:
    """By a constraint; a status that there is not (None), since no partition takes it."""
    await make_runs(connection, [NOW])
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await connection.execute(f"update tidegate.workflow_runs set {assignment}")
    assert caught.value.constraint_name == (f"workflow_runs_{constraint}" if constraint else None)
    assert constraint or 'no partition of relation "workflow_runs" found for row' in str(caught.value)


async def test_every_status_of_the_model_is_legal(connection: Connection) -> None:
    await make_runs(connection, [NOW])
    for status in RUN_STATUSES:
        await connection.execute(
            "update tidegate.workflow_runs set status = $1::text, "
            "claim_expires_at = case when $1 = 'running' then now() end, "
            "finished_at = case when $1 in ('succeeded', 'failed', 'cancelled') then now() end",
            status,
        )
    assert await connection.fetchval("select status from tidegate.workflow_runs") == status
