"""Whether the process lives, whether it can do its work, and whether everything that should move moves."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies, bound_tokens
from tidegate.api.bound_tokens import OwnHealth
from tidegate.api.routes import Query, Route, Services, json_response, parameters
from tidegate.flow.look.health import Snapshot
from tidegate.flow.look.ready import Ready
from tidegate.telemetry import metrics

HEALTH_QUERY = (
    Query("probe", "string", "1: answer 503 when the status is critical, for load balancers and probes", ("0", "1")),
)


class Live(msgspec.Struct, frozen=True):
    """The process answers."""

    status: str


async def livez(_: Request, __: Services) -> Live:
    return Live("ok")


async def readyz(_: Request, services: Services) -> Response:
    found = await services.readiness.look()
    return json_response(found, 503 if found.status == "unavailable" else 200)


async def event_health(request: Request, services: Services) -> Response:
    probe = parameters(request, HEALTH_QUERY).get("probe") == "1"
    asking = bodies.principal(request)
    snapshot = await services.snapshots.read()
    found: Snapshot | OwnHealth = snapshot
    if asking is not None and asking.sources is not None:
        found = bound_tokens.narrowed(snapshot, asking)
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
        (Snapshot, OwnHealth),
        scope="read",
        query=HEALTH_QUERY,
        also=(503,),
        errors=(422,),
    ),
    Route("GET", "/metrics", metrics_text, "Prometheus metrics", (str,), scope="read", media="text/plain"),
)
