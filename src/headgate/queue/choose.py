"""Which queue the settings ask for."""

from __future__ import annotations

from headgate.errors import SettingsError
from headgate.queue.port import Queue
from headgate.queue.postgres import PostgresQueue
from headgate.settings import Settings
from headgate.store.db import Database


def open_queue(settings: Settings, database: Database) -> Queue:
    """The queue of this process. SettingsError when what it needs is not installed."""
    if settings.queue == "postgres":
        return PostgresQueue(database)
    try:
        from headgate.queue.bullmq import BullmqQueue
    except ImportError as exc:
        raise SettingsError(
            f"HEADGATE_QUEUE=bullmq needs packages that are not installed ({exc.name}): pip install 'headgate[bullmq]'"
        ) from exc
    return BullmqQueue(settings.require_redis_url(), database)
