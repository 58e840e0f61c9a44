"""Whether the process lives, whether it can do its work, and whether everything that should move moves."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api.routes import Query, Route, Services, json_response, parameters
from headgate.errors import HeadgateError
from headgate.flow.health import Snapshot, snapshot
from headgate.store import durability, migrate
from headgate.telemetry import metrics

HEALTH_QUERY = (
    Query("probe", "string", "1: answer 503 when the status is critical, for load balancers and probes", ("0", "1")),
)


class Live(msgspec.Struct, frozen=True):
    """The process answers."""

    status: str


class Ready(msgspec.Struct, frozen=True):
    """What readiness depends on: `ok`, or what is wrong."""

    status: str
    checks: dict[str, str]


async def livez(_: Request, __: Services) -> Live:
    return Live("ok")


async def readyz(_: Request, services: Services) -> Response:
    checks: dict[str, str] = {}
    try:
        await migrate.require_current(services.database)
        checks["database"] = checks["schema"] = "ok"
        allow = services.settings.allow_unsafe_durability
        await durability.require_safe(services.database, allow_unsafe=allow)
        checks["durability"] = "ok"
    except HeadgateError as exc:
        failing = ("database", "schema", "durability")[len(checks) and 2]
        checks[failing] = str(exc)
        return json_response(Ready("unavailable", checks), 503)
    return json_response(Ready("ok", checks))


async def event_health(request: Request, services: Services) -> Response:
    probe = parameters(request, HEALTH_QUERY).get("probe") == "1"
    async with services.database.transaction() as connection:
        found = await snapshot(connection, services.settings.health)
    return json_response(found, 503 if probe and found.status == "critical" else 200)


async def metrics_text(_: Request, services: Services) -> Response:
    return Response(await services.exposition.text(), media_type=metrics.CONTENT_TYPE)


ROUTES = (
    Route("GET", "/livez", livez, "The process lives", (Live,), scope="public"),
    Route("GET", "/readyz", readyz, "The process can do its work", (Ready,), scope="public", also=(503,)),
    Route(
        "GET",
        "/admin/event-health",
        event_health,
        "The state of the whole cluster, and what is wrong",
        (Snapshot,),
        scope="read",
        query=HEALTH_QUERY,
        also=(503,),
        errors=(422,),
    ),
    Route("GET", "/metrics", metrics_text, "Prometheus metrics", (str,), scope="read", media="text/plain"),
)
