"""`event_ingress_retries`: the shared suite, and scheduling and removing events that the gate holds back."""

import asyncio
import uuid
from collections.abc import Sequence
from datetime import datetime

import asyncpg
import pytest

from tidegate.clock import uuid7
from tidegate.model.ingress_retry import IngressRetry
from tidegate.store import ingress_retries
from tidegate.store.db import Connection, Database

from .builders import HOUR, MINUTE, NOW, make_events, set_clock
from .retry_suite import RetryTable


def retry(event_id: uuid.UUID, at: datetime | None = NOW, attempts: int = 0, **changes: object) -> IngressRetry:
    return IngressRetry(event_id=event_id, source="shop.api", next_attempt_at=at, attempts=attempts, **changes)  # type: ignore[arg-type]


class TestIngressRetries(RetryTable):
    store = ingress_retries
    table = "event_ingress_retries"
    key = "event_id"
    attempts = "attempts"

    async def schedule(self, connection: Connection, due: Sequence[datetime]) -> list[uuid.UUID]:
        ids = await make_events(connection, len(due))
        rows = [retry(event_id, at) for event_id, at in zip(ids, due, strict=True)]
        assert await ingress_retries.upsert(connection, rows) == set(ids)
        return ids

    async def test_upsert_writes_what_is_given(self, connection: Connection) -> None:
        await set_clock(connection)
        [event_id] = await make_events(connection)
        await ingress_retries.upsert(connection, [retry(event_id, NOW, 3, last_error="full", metadata={"n": 1})])
        [row] = await ingress_retries.list_scheduled(connection)
        expected = retry(event_id, NOW, 3, last_error="full", metadata={"n": 1}, created_at=NOW, updated_at=NOW)
        assert row == expected

    async def test_upsert_again_moves_a_waiting_row_and_fences_the_old_wake_up(self, connection: Connection) -> None:
        await set_clock(connection)
        [event_id] = await self.schedule(connection, [NOW])
        [first] = await ingress_retries.list_scheduled(connection)
        assert await ingress_retries.upsert(connection, [retry(event_id, NOW + HOUR, 5)]) == {event_id}
        assert await ingress_retries.upsert(connection, [retry(event_id, NOW + HOUR, 2)]) == {event_id}
        [again] = await ingress_retries.list_scheduled(connection)
        assert (again.next_attempt_at, again.attempts) == (NOW + HOUR, 5)
        assert again.claim_generation == first.claim_generation + 2
        assert await ingress_retries.update(connection, [self.change(first, "cancelled")]) == set()

    @pytest.mark.parametrize("state", ["completed", "cancelled", "exhausted"])
    async def test_upsert_leaves_final_rows_alone(self, connection: Connection, state: str) -> None:
        await set_clock(connection)
        [event_id] = await self.schedule(connection, [NOW])
        [held] = await self.claim(connection)
        await ingress_retries.update(connection, [self.change(held, state)])  # type: ignore[arg-type]
        before = await self.row(connection, event_id)
        assert await ingress_retries.upsert(connection, [retry(event_id)]) == set()
        assert await self.row(connection, event_id) == before

    async def test_upsert_leaves_a_running_row_alone(self, connection: Connection) -> None:
        await set_clock(connection)
        [event_id] = await self.schedule(connection, [NOW])
        [held] = await self.claim(connection)
        assert await ingress_retries.upsert(connection, [retry(event_id, NOW + HOUR)]) == set()
        assert await ingress_retries.update(connection, [self.change(held)]) == {event_id}

    async def test_two_upserts_of_the_same_events_in_other_orders_do_not_deadlock(self, database: Database) -> None:
        async with database.transaction() as connection:
            ids = await make_events(connection, 1000)  # enough for two statements to overlap

        async def upsert(order: list[uuid.UUID]) -> set[uuid.UUID]:
            async with database.transaction() as connection:
                return await ingress_retries.upsert(connection, [retry(event_id) for event_id in order])

        written = await asyncio.gather(*(upsert(order) for order in (ids, ids[::-1]) * 3))
        assert all(part == set(ids) for part in written)

    async def test_upsert_of_an_unknown_event_is_refused(self, connection: Connection) -> None:
        with pytest.raises(asyncpg.ForeignKeyViolationError):
            await ingress_retries.upsert(connection, [retry(uuid7())])

    async def test_upsert_without_a_time_is_refused(self, connection: Connection) -> None:
        [event_id] = await make_events(connection)
        with pytest.raises(asyncpg.CheckViolationError, match="waiting_check"):
            await ingress_retries.upsert(connection, [retry(event_id, None)])

    async def test_delete_removes_what_is_as_the_caller_knew_it(self, connection: Connection) -> None:
        await set_clock(connection)
        await self.schedule(connection, [NOW, NOW + HOUR])
        [waiting] = (await ingress_retries.list_scheduled(connection))[1:]
        [held] = await self.claim(connection)
        assert await ingress_retries.delete(connection, [held, waiting]) == {held.event_id, waiting.event_id}
        assert await ingress_retries.delete(connection, [held, waiting]) == set()
        assert await connection.fetchval("select count(*) from tidegate.event_ingress_retries") == 0

    async def test_zombie_deletes_nothing(self, connection: Connection) -> None:
        await set_clock(connection)
        [event_id] = await self.schedule(connection, [NOW])
        [zombie] = await self.claim(connection)
        await set_clock(connection, NOW + HOUR)
        await ingress_retries.release_expired(connection, 100)
        assert await ingress_retries.delete(connection, [zombie]) == set()
        [heir] = await self.claim(connection)
        assert await ingress_retries.delete(connection, [zombie]) == set()
        assert await ingress_retries.delete(connection, [heir]) == {event_id}

    async def test_list_of_one_source(self, connection: Connection) -> None:
        for source in ("shop.api", "crm"):
            [event_id] = await make_events(connection, source=source)
            row = IngressRetry(event_id=event_id, source=source, next_attempt_at=NOW)
            await ingress_retries.upsert(connection, [row])
        assert [r.source for r in await ingress_retries.list_scheduled(connection, source="crm")] == ["crm"]
        assert len(await ingress_retries.list_scheduled(connection)) == 2

    async def test_one_row_for_each_event(self, connection: Connection) -> None:
        [event_id] = await self.schedule(connection, [NOW])
        with pytest.raises(asyncpg.UniqueViolationError):
            await connection.execute(
                "insert into tidegate.event_ingress_retries (event_id, source, next_attempt_at) values ($1, 's', $2)",
                event_id,
                NOW + MINUTE,
            )
