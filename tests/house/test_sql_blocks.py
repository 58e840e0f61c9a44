"""Every SQL block is described and can be prepared on a migrated database."""

import pytest

from tidegate.store import sql
from tidegate.store.db import Connection

BLOCKS = [(aggregate, block) for aggregate in sql.aggregates() for block in sql.blocks(aggregate)]


@pytest.mark.parametrize(("aggregate", "block"), BLOCKS, ids=[f"{a}.{b.name}" for a, b in BLOCKS])
async def test_block_is_described_and_prepares(connection: Connection, aggregate: str, block: sql.Block) -> None:
    assert block.description, f"{aggregate}.{block.name} has no description"
    prepared = await connection.prepare(block.text)  # type: ignore[attr-defined]
    assert prepared.get_query() == block.text
