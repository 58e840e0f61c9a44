"""Workers: which are alive, what code each has, and what each executes."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from tidegate.api.routes import Route, Services
from tidegate.store import workers
from tidegate.store.workers import WorkerRecord


class WorkerPage(msgspec.Struct, frozen=True):
    """The workers on record, the longest running first. One that is not alive is removed after a while."""

    workers: list[WorkerRecord]


async def list_workers(request: Request, services: Services) -> WorkerPage:
    alive_ms = services.settings.health.worker_degraded_ms
    async with services.database.connection() as connection:
        return WorkerPage(await workers.list_all(connection, alive_ms))


ROUTES = (
    Route("GET", "/admin/workers", list_workers, "List workers, with the runs that each executes", (WorkerPage,),
          scope="read"),
)  # fmt: skip
