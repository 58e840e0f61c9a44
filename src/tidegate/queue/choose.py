"""Opens the queue that the settings choose."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tidegate.errors import SettingsError
from tidegate.queue.port import Queue
from tidegate.queue.postgres import PostgresQueue
from tidegate.settings import Settings
from tidegate.store.db import Database


def open_queue(settings: Settings, database: Database) -> Queue:
    """The queue of this process. SettingsError if a required package is not installed."""
    if settings.queue == "postgres":
        return PostgresQueue(database)
    queue: Queue = _bullmq().BullmqQueue(settings.require_redis_url(), database)
    return queue


async def eviction_policy(settings: Settings) -> str:
    """The eviction policy of Redis. OSError if it does not answer; SettingsError if a package is not installed."""
    found: str = await _bullmq().eviction_policy(settings.require_redis_url())
    return found


def _bullmq() -> Any:
    try:
        return import_module("tidegate.queue.bullmq")
    except ImportError as exc:
        raise SettingsError(
            f"TIDEGATE_QUEUE=bullmq needs packages that are not installed ({exc.name}): "
            "install Tidegate with the extra `bullmq` (docs/installing.md)"
        ) from exc
