"""Roles with no more rights than they need do their work, and no more. `make chaos` runs the same."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from chaos import roles

from tests.processes import run


async def test_an_api_a_worker_and_a_producer_need_no_more_than_they_are_granted() -> None:
    with tempfile.TemporaryDirectory(prefix="tidegate-roles-", ignore_cleanup_errors=True) as folder:
        assert await asyncio.to_thread(roles.broken, Path(folder)) == []


def test_a_role_that_is_not_there_is_named(database_url: str) -> None:
    done = run("migrate", "--grant-to", "nobody_of_that_name", env={"TIDEGATE_DATABASE_URL": database_url})
    assert done.returncode == 2 and "no role 'nobody_of_that_name'" in done.stderr
