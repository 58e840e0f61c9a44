"""`workflow_run_steps`: the shared suite, and a result that is recorded once."""

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import asyncpg
import pytest

from tidegate.clock import uuid7
from tidegate.model.run import STEP_STATUSES, Step
from tidegate.store import steps
from tidegate.store.db import Connection

from .builders import NOW, make_runs, set_clock
from .retry_suite import RetryTable


def step(run_id: uuid.UUID, name: str = "charge", **changes: Any) -> Step:
    return Step(**{"id": uuid7(), "workflow_run_id": run_id, "name": name} | changes)


class TestSteps(RetryTable):
    store = steps
    table = "workflow_run_steps"

    async def schedule(self, connection: Connection, due: Sequence[datetime]) -> list[uuid.UUID]:
        [run_id] = await make_runs(connection, [NOW])
        rows = [
            step(run_id, f"s{number}", retry_state="scheduled", next_attempt_at=at) for number, at in enumerate(due)
        ]
        assert await steps.insert(connection, rows) == {r.id for r in rows}
        return [r.id for r in rows]

    @pytest.mark.parametrize("result", [None, 0, False, "", [], {"receipt": [1, "x"]}])
    async def test_insert_writes_what_is_given(self, connection: Connection, result: Any) -> None:
        await set_clock(connection)
        [run_id] = await make_runs(connection, [NOW])
        given = step(
            run_id,
            status="succeeded",
            result=result,
            error="late",
            retry_state="scheduled",
            next_attempt_at=NOW,
            retry_attempts=3,
            retry_metadata={"n": 1},
            created_at=NOW,
            updated_at=NOW,
        )
        await steps.insert(connection, [given])
        assert await steps.list_of_run(connection, run_id) == [given]

    async def test_name_is_unique_in_its_run_only(self, connection: Connection) -> None:
        one, two = await make_runs(connection, [NOW, NOW])
        first = step(one, "charge")
        await steps.insert(connection, [first])
        again, other_name, other_run = step(one, "charge"), step(one, "ship"), step(two, "charge")
        new = await steps.insert(connection, [again, other_name, other_run])
        assert new == {other_name.id, other_run.id}
        assert {s.id for s in await steps.list_of_run(connection, one)} == {first.id, other_name.id}
        with pytest.raises(asyncpg.UniqueViolationError, match="name_key"):
            await connection.execute("update tidegate.workflow_run_steps set name = 'charge'")

    async def test_result_and_status_are_set_or_left(self, connection: Connection) -> None:
        await set_clock(connection)
        await self.schedule(connection, [NOW] * 2)
        first, second = await self.claim(connection)
        changes = [self.change(first), self.change(second, "scheduled", next_attempt_at=NOW)]
        await steps.update(connection, changes, ["succeeded", None], ['{"ok":true}', None])
        rows = [await self.row(connection, s.id) for s in (first, second)]
        assert [(r["status"], r["result"]) for r in rows] == [("succeeded", {"ok": True}), ("pending", None)]

        [second] = await self.claim(connection)
        await steps.update(connection, [self.change(second)], ["succeeded"], ["1"])
        late = self.change(second, claim_generation=second.claim_generation)
        assert await steps.update(connection, [late], ["failed"], ["2"]) == set()
        row = await self.row(connection, second.id)
        assert (row["status"], row["result"]) == ("succeeded", 1)

    async def test_steps_of_a_run_are_listed_in_order(self, connection: Connection) -> None:
        await set_clock(connection)
        [run_id, other] = await make_runs(connection, [NOW, NOW])
        rows = [step(run_id, name) for name in ("c", "a", "b")]
        await steps.insert(connection, [*rows, step(other)])
        assert [s.name for s in await steps.list_of_run(connection, run_id)] == ["c", "a", "b"]

    async def test_list_of_one_run(self, connection: Connection) -> None:
        one, two = await make_runs(connection, [NOW, NOW])
        rows = [step(run_id, retry_state="scheduled", next_attempt_at=NOW) for run_id in (one, two)]
        await steps.insert(connection, rows)
        assert [s.workflow_run_id for s in await steps.list_scheduled(connection, run_id=two)] == [two]

    @pytest.mark.parametrize("status", ["bogus", "", "completed"])
    async def test_illegal_status_is_refused(self, connection: Connection, status: str) -> None:
        await self.schedule(connection, [NOW])
        with pytest.raises(asyncpg.CheckViolationError, match="status_check"):
            await connection.execute("update tidegate.workflow_run_steps set status = $1", status)

    async def test_every_status_of_the_model_is_legal(self, connection: Connection) -> None:
        await self.schedule(connection, [NOW])
        for status in STEP_STATUSES:
            await connection.execute("update tidegate.workflow_run_steps set status = $1", status)
        assert await connection.fetchval("select status from tidegate.workflow_run_steps") == status

    @pytest.mark.parametrize("name", ["", "x" * 201])
    async def test_bad_name_is_refused(self, connection: Connection, name: str) -> None:
        [run_id] = await make_runs(connection, [NOW])
        with pytest.raises(asyncpg.CheckViolationError, match="name_check"):
            await steps.insert(connection, [step(run_id, name)])
