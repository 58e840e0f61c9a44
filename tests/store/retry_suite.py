"""What each of the three tables with retry state must do; one subclass for each runs it all."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import asyncpg
import pytest

from tidegate.model.retry import RETRY_STATES, RetryChange, RetryState
from tidegate.store.db import Connection, Database

from .builders import HOUR, MINUTE, NOW, SECOND, set_clock

LEASE_MS = 15_000


class RetryTable:
    """The suite. `store` is the module under test; `schedule` makes waiting rows due at the given times."""

    store: Any
    table: str
    key: str = "id"
    attempts: str = "retry_attempts"

    async def schedule(self, connection: Connection, due: Sequence[datetime]) -> list[uuid.UUID]:
        raise NotImplementedError

    # Shorthand ------------------------------------------------------------------------------------------------------

    def id_of(self, row: Any) -> uuid.UUID:
        found: uuid.UUID = getattr(row, self.key)
        return found

    async def row(self, connection: Connection, row_id: uuid.UUID) -> dict[str, Any]:
        found = await connection.fetchrow(f"select * from tidegate.{self.table} where {self.key} = $1", row_id)
        assert found is not None
        return dict(found)

    async def claim(
        self, connection: Connection, limit: int = 100, worker: str = "w1", lease_ms: int = LEASE_MS
    ) -> list[Any]:
        claimed: list[Any] = await self.store.claim_due(connection, limit=limit, worker=worker, lease_ms=lease_ms)
        return claimed

    def change(self, row: Any, retry_state: RetryState = "completed", **changes: Any) -> RetryChange:
        """What a worker that holds `row` writes at the end."""
        fields: dict[str, Any] = {
            "id": self.id_of(row),
            "expected_state": row.retry_state,
            "claim_generation": row.claim_generation,
            "retry_state": retry_state,
            "attempts": getattr(row, self.attempts) + 1,
        }
        return RetryChange(**fields | changes)

    # What is due ----------------------------------------------------------------------------------------------------

    async def test_due_is_what_the_databases_own_clock_says(self, connection: Connection) -> None:
        now = await connection.fetchval("select tidegate.now()")
        past, _future = await self.schedule(connection, [now - SECOND, now + HOUR])
        assert [self.id_of(r) for r in await self.claim(connection)] == [past]

    async def test_due_moves_with_the_databases_clock(self, connection: Connection) -> None:
        await set_clock(connection, NOW)
        now, later = await self.schedule(connection, [NOW, NOW + HOUR])
        assert [self.id_of(r) for r in await self.claim(connection)] == [now]
        assert await self.claim(connection) == []
        await set_clock(connection, NOW + HOUR - SECOND)
        assert await self.claim(connection) == []
        await set_clock(connection, NOW + HOUR)
        assert [self.id_of(r) for r in await self.claim(connection)] == [later]

    async def test_clock_that_steps_back_makes_nothing_due(self, connection: Connection) -> None:
        await set_clock(connection, NOW - HOUR)
        await self.schedule(connection, [NOW])
        assert await self.claim(connection) == []

    async def test_oldest_first_and_never_more_than_the_limit(self, connection: Connection) -> None:
        await set_clock(connection)
        due = [NOW - n * MINUTE for n in (3, 9, 1, 7, 5)]
        ids = dict(zip(due, await self.schedule(connection, due), strict=True))
        batches = [await self.claim(connection, limit=2) for _ in range(4)]
        assert [len(batch) for batch in batches] == [2, 2, 1, 0]
        assert [self.id_of(r) for batch in batches for r in batch] == [ids[at] for at in sorted(due)]

    async def test_rows_due_at_the_same_instant_are_taken_by_id(self, connection: Connection) -> None:
        await set_clock(connection)
        ids = await self.schedule(connection, [NOW] * 6)
        batches = [await self.claim(connection, limit=4), await self.claim(connection, limit=4)]
        assert [self.id_of(r) for batch in batches for r in batch] == sorted(ids)

    async def test_limit_of_zero_claims_nothing(self, connection: Connection) -> None:
        await set_clock(connection)
        await self.schedule(connection, [NOW])
        assert await self.claim(connection, limit=0) == []

    # Claims ---------------------------------------------------------------------------------------------------------

    async def test_claim_is_written_down(self, connection: Connection) -> None:
        await set_clock(connection)
        [row_id] = await self.schedule(connection, [NOW])
        before = await self.row(connection, row_id)
        [claimed] = await self.claim(connection, worker="w7", lease_ms=5000)
        assert (claimed.retry_state, claimed.claimed_by) == ("running", "w7")
        assert claimed.claim_expires_at == NOW + 5 * SECOND
        assert claimed.claim_generation == before["claim_generation"] + 1
        assert getattr(claimed, self.attempts) == before[self.attempts]
        after = await self.row(connection, row_id)
        assert (after["retry_state"], after["claimed_by"]) == ("running", "w7")

    async def test_two_open_transactions_claim_disjoint_rows(self, database: Database) -> None:
        async with database.transaction() as connection:
            await set_clock(connection)
            ids = await self.schedule(connection, [NOW] * 10)
        async with database.transaction() as one, database.transaction() as two:
            first, second = await asyncio.gather(self.claim(one, 6, "w1"), self.claim(two, 6, "w2"))
            assert len(first) + len(second) == 10
            assert {self.id_of(r) for r in (*first, *second)} == set(ids)
            async with database.transaction() as three:
                assert await self.claim(three, worker="w3") == []

    async def test_many_workers_claim_every_row_once(self, database: Database) -> None:
        async with database.transaction() as connection:
            await set_clock(connection)
            ids = await self.schedule(connection, [NOW] * 60)

        async def work(name: str) -> list[uuid.UUID]:
            mine: list[uuid.UUID] = []
            while True:
                async with database.transaction() as connection:
                    batch = await self.claim(connection, 4, name)
                if not batch:
                    return mine
                mine += [self.id_of(r) for r in batch]

        taken = await asyncio.gather(*(work(f"w{n}") for n in range(8)))
        assert sorted(row_id for mine in taken for row_id in mine) == sorted(ids)

    async def test_rolled_back_claim_leaves_the_row_due(self, database: Database) -> None:
        async with database.transaction() as connection:
            await set_clock(connection)
            [row_id] = await self.schedule(connection, [NOW])

        async def crash() -> None:
            async with database.transaction() as connection:
                assert len(await self.claim(connection)) == 1
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await crash()
        async with database.transaction() as connection:
            assert [self.id_of(r) for r in await self.claim(connection)] == [row_id]

    # Compare-and-set ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", ["none", "completed", "cancelled", "exhausted"])
    async def test_holder_ends_its_row(self, connection: Connection, state: RetryState) -> None:
        await set_clock(connection)
        [row_id] = await self.schedule(connection, [NOW])
        [held] = await self.claim(connection)
        change = self.change(held, state, last_error="boom", metadata={"why": ["x", 1]})
        assert await self.store.update(connection, [change]) == {row_id}
        row = await self.row(connection, row_id)
        assert (row["retry_state"], row[self.attempts]) == (state, change.attempts)
        assert (row["claimed_by"], row["claim_expires_at"], row["next_attempt_at"]) == (None, None, None)
        assert row.get("last_error", row.get("error")) == "boom"
        assert row.get("metadata", row.get("retry_metadata")) == {"why": ["x", 1]}
        assert await self.claim(connection) == []

    async def test_holder_puts_its_row_off(self, connection: Connection) -> None:
        await set_clock(connection)
        [row_id] = await self.schedule(connection, [NOW])
        [held] = await self.claim(connection)
        change = self.change(held, "scheduled", next_attempt_at=NOW + MINUTE)
        assert await self.store.update(connection, [change]) == {row_id}
        assert await self.claim(connection) == []
        await set_clock(connection, NOW + MINUTE)
        [again] = await self.claim(connection)
        assert getattr(again, self.attempts) == change.attempts
        assert again.claim_generation > held.claim_generation

    @pytest.mark.parametrize(
        "wrong", [{"expected_state": "scheduled"}, {"expected_state": "completed"}, {"claim_generation": -1}]
    )
    async def test_wrong_state_or_generation_changes_nothing(
        self, connection: Connection, wrong: dict[str, Any]
    ) -> None:
        await set_clock(connection)
        [row_id] = await self.schedule(connection, [NOW])
        [held] = await self.claim(connection)
        before = await self.row(connection, row_id)
        assert await self.store.update(connection, [self.change(held, **wrong)]) == set()
        stale = self.change(held, claim_generation=held.claim_generation - 1)
        future = self.change(held, claim_generation=held.claim_generation + 1)
        assert await self.store.update(connection, [stale, future]) == set()
        assert await self.row(connection, row_id) == before

    async def test_same_change_twice_happens_once(self, connection: Connection) -> None:
        await set_clock(connection)
        [row_id] = await self.schedule(connection, [NOW])
        [held] = await self.claim(connection)
        change = self.change(held, "scheduled", next_attempt_at=NOW)
        assert await self.store.update(connection, [change]) == {row_id}
        assert await self.store.update(connection, [change]) == set()

    async def test_a_batch_changes_those_still_held_and_says_which(self, connection: Connection) -> None:
        await set_clock(connection)
        await self.schedule(connection, [NOW] * 3)
        kept, lost, other = await self.claim(connection)
        changes = [self.change(kept), self.change(lost, claim_generation=0), self.change(other, "cancelled")]
        assert await self.store.update(connection, changes) == {self.id_of(kept), self.id_of(other)}
        assert (await self.row(connection, self.id_of(lost)))["retry_state"] == "running"
        assert await self.store.update(connection, []) == set()

    async def test_attempts_never_decrease(self, connection: Connection) -> None:
        await set_clock(connection)
        [row_id] = await self.schedule(connection, [NOW])
        [held] = await self.claim(connection)
        await self.store.update(connection, [self.change(held, "scheduled", attempts=7, next_attempt_at=NOW)])
        [held] = await self.claim(connection)
        await self.store.update(connection, [self.change(held, "scheduled", attempts=2, next_attempt_at=NOW)])
        assert (await self.row(connection, row_id))[self.attempts] == 7

    async def test_cancel_and_claim_race_has_one_winner(self, database: Database) -> None:
        async with database.transaction() as connection:
            await set_clock(connection)
            ids = await self.schedule(connection, [NOW] * 10)
            waiting = await self.store.list_scheduled(connection)

        async def cancel() -> set[uuid.UUID]:
            async with database.transaction() as connection:
                changes = [self.change(row, "cancelled") for row in waiting]
                cancelled: set[uuid.UUID] = await self.store.update(connection, changes)
                return cancelled

        async def claim() -> set[uuid.UUID]:
            async with database.transaction() as connection:
                return {self.id_of(r) for r in await self.claim(connection, limit=5)}

        cancelled, claimed = await asyncio.gather(cancel(), claim())
        assert cancelled.isdisjoint(claimed)
        assert cancelled | claimed == set(ids)

    # Leases ---------------------------------------------------------------------------------------------------------

    async def test_lease_is_released_when_it_ends_not_before(self, connection: Connection) -> None:
        await set_clock(connection)
        [row_id] = await self.schedule(connection, [NOW])
        await self.claim(connection, lease_ms=10_000)
        await set_clock(connection, NOW + 10 * SECOND - SECOND / 1000)
        assert await self.store.release_expired(connection, 100) == []
        await set_clock(connection, NOW + 10 * SECOND)
        assert await self.store.release_expired(connection, 100) == [row_id]
        assert await self.store.release_expired(connection, 100) == []
        row = await self.row(connection, row_id)
        assert (row["retry_state"], row["claimed_by"]) == ("scheduled", None)
        assert row["next_attempt_at"] == NOW + 10 * SECOND

    async def test_release_takes_no_more_than_its_limit(self, connection: Connection) -> None:
        await set_clock(connection)
        ids = await self.schedule(connection, [NOW] * 5)
        await self.claim(connection)
        await set_clock(connection, NOW + HOUR)
        first, second = [await self.store.release_expired(connection, 3) for _ in range(2)]
        assert (len(first), len(second)) == (3, 2)
        assert {*first, *second} == set(ids)

    async def test_two_releasers_release_each_row_once(self, database: Database) -> None:
        async with database.transaction() as connection:
            await set_clock(connection)
            ids = await self.schedule(connection, [NOW] * 10)
            await self.claim(connection)
            await set_clock(connection, NOW + HOUR)
        async with database.transaction() as one, database.transaction() as two:
            released = await asyncio.gather(self.store.release_expired(one, 100), self.store.release_expired(two, 100))
        assert sorted(row_id for part in released for row_id in part) == sorted(ids)

    async def test_zombie_changes_nothing(self, connection: Connection) -> None:
        await set_clock(connection)
        [row_id] = await self.schedule(connection, [NOW])
        [zombie] = await self.claim(connection, worker="zombie")
        await set_clock(connection, NOW + HOUR)
        await self.store.release_expired(connection, 100)

        released = await self.row(connection, row_id)
        late = [self.change(zombie), self.change(zombie, expected_state="scheduled")]
        assert await self.store.update(connection, late) == set()
        assert await self.row(connection, row_id) == released

        [heir] = await self.claim(connection, worker="heir")
        claimed = await self.row(connection, row_id)
        assert await self.store.update(connection, late) == set()
        assert await self.row(connection, row_id) == claimed
        assert await self.store.update(connection, [self.change(heir)]) == {row_id}
        assert await self.store.update(connection, [self.change(zombie, "scheduled", next_attempt_at=NOW)]) == set()
        assert (await self.row(connection, row_id))["retry_state"] == "completed"

    # Lists ----------------------------------------------------------------------------------------------------------

    async def test_pages_neither_skip_nor_repeat(self, connection: Connection) -> None:
        due = [NOW + n * SECOND for n in (0, 0, 0, 1, 1, 2, 3)]
        ids = await self.schedule(connection, list(reversed(due)))
        seen: list[Any] = []
        after = None
        while page := await self.store.list_scheduled(connection, after=after, limit=2):
            assert len(page) <= 2
            seen += page
            after = (page[-1].next_attempt_at, self.id_of(page[-1]))
        assert sorted(self.id_of(r) for r in seen) == sorted(ids)
        assert [r.next_attempt_at for r in seen] == due

    async def test_list_shows_only_what_waits(self, connection: Connection) -> None:
        await set_clock(connection)
        _running, waiting = await self.schedule(connection, [NOW, NOW + HOUR])
        await self.claim(connection)
        assert [self.id_of(r) for r in await self.store.list_scheduled(connection)] == [waiting]

    # What the database itself refuses -------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("assignment", "constraint"),
        [
            ("retry_state = 'bogus'", "state_check"),
            ("retry_state = ''", "state_check"),
            ("retry_state = 'Scheduled'", "state_check"),
            ("{attempts} = -1", "attempts_check"),
            ("next_attempt_at = null", "waiting_check"),
            ("next_attempt_at = 'infinity'", "waiting_check"),
            ("next_attempt_at = '-infinity'", "waiting_check"),
            ("retry_state = 'running'", "claim_check"),
            ("claim_expires_at = now()", "claim_check"),
            ("retry_state = 'completed', claim_expires_at = now()", "claim_check"),
        ],
    )
    async def test_illegal_state_is_refused(self, connection: Connection, assignment: str, constraint: str) -> None:
        await self.schedule(connection, [NOW])
        with pytest.raises(asyncpg.CheckViolationError) as caught:
            await connection.execute(f"update tidegate.{self.table} set {assignment.format(attempts=self.attempts)}")
        assert caught.value.constraint_name == f"{self.table}_{constraint}"

    async def test_no_state_is_refused(self, connection: Connection) -> None:
        await self.schedule(connection, [NOW])
        with pytest.raises(asyncpg.NotNullViolationError):
            await connection.execute(f"update tidegate.{self.table} set retry_state = null")

    async def test_every_state_of_the_model_is_legal(self, connection: Connection) -> None:
        await self.schedule(connection, [NOW])
        for state in RETRY_STATES:
            done = await connection.execute(
                f"update tidegate.{self.table} set retry_state = $1::text, "
                "claim_expires_at = case when $1 = 'running' then now() end",
                state,
            )
            assert done == "UPDATE 1"

    async def test_counters_hold_more_than_32_bits(self, connection: Connection) -> None:
        await set_clock(connection)
        [row_id] = await self.schedule(connection, [NOW])
        [held] = await self.claim(connection)
        await self.store.update(connection, [self.change(held, attempts=2**40)])
        assert (await self.row(connection, row_id))[self.attempts] == 2**40
