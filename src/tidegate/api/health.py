"""Probes and health: is the process alive, can it do its work, and is the cluster making progress."""

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
    Query(
        "probe",
        "string",
        "With 1, the answer is 503 when the status is critical, for load balancers and probes.",
        ("0", "1"),
    ),
)


class Live(msgspec.Struct, frozen=True):
    """The process is alive."""

    status: str


async def livez(_: Request, __: Services) -> Live:
    return Live("ok")


async def readyz(_: Request, services: Services) -> Response:
    found = await services.readiness.check()
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
    Route("GET", "/livez", livez, "Liveness: the process is running", (Live,), scope="public"),
    Route("GET", "/readyz", readyz, "Readiness: the process can do its work", (Ready,), scope="public", also=(503,)),
    Route(
        "GET",
        "/admin/event-health",
        event_health,
        "The health of the whole cluster, with the cause of each problem",
        (Snapshot, OwnHealth),
        scope="read",
        query=HEALTH_QUERY,
        also=(503,),
        errors=(422,),
    ),
    Route("GET", "/metrics", metrics_text, "Prometheus metrics", (str,), scope="read", media="text/plain"),
)
