from headgate.store import migrate
from headgate.store.db import Database


async def test_fresh_database_is_current(database: Database) -> None:
    status = await migrate.status(database)
    assert status.version == migrate.latest()
    assert status.pending == []
