"""The API as an ASGI application, and the server that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial
from importlib import resources
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate.api import admin, bodies, bound_tokens, connections, health, openapi, problems, v1
from tidegate.api.admission import Admission
from tidegate.api.connection_limits import ConnectionLimits, raise_file_limit
from tidegate.api.problems import Problem
from tidegate.api.routes import Route, Services, json_response
from tidegate.api.v1 import publish
from tidegate.errors import NotFound, SettingsError
from tidegate.flow import control
from tidegate.flow.accept.access import Access
from tidegate.flow.accept.approvals import ApprovalLinks
from tidegate.flow.accept.ingest import LOCK_TIMEOUT_MS, STATEMENT_SECONDS, Ingest
from tidegate.flow.accept.refusals import PublishRefusals
from tidegate.flow.accept.starts import Starts
from tidegate.flow.accept.webhooks import Webhooks
from tidegate.flow.keep import secrets
from tidegate.flow.look import notices
from tidegate.flow.look.ends import RunEnds
from tidegate.flow.look.health import Exposition, Snapshots
from tidegate.flow.look.ready import Readiness
from tidegate.flow.predict.turn import PredictionTurn
from tidegate.flow.presence import Presence
from tidegate.model.client_address import parse_networks
from tidegate.model.secrets import SecretKeys
from tidegate.queue.choose import open_queue
from tidegate.settings import Settings
from tidegate.store import durability
from tidegate.store.db import Database
from tidegate.telemetry import metrics, traces
from tidegate.telemetry.logs import logger

_log = logger("api")

_PAGES = {"/": ("console.html", "text/html"), "/docs": ("docs.html", "text/html")} | {
    f"/static/{name}": (name, media)
    for name, media in (
        ("icon.svg", "image/svg+xml"),
        ("console.js", "text/javascript"),
        ("panels.js", "text/javascript"),
        ("parts.js", "text/javascript"),
        ("docs.js", "text/javascript"),
        ("style.css", "text/css"),
    )
}
# What a browser sends with a request from a page of another site.
CROSS_SITE = (b"sec-fetch-site", b"cross-site")
# Probes and scrapes: they come every few seconds and concern no event.
_UNTRACED = {"/livez", "/readyz", "/metrics"}
_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


ROUTES: tuple[Route, ...] = (*v1.ROUTES, *admin.ROUTES, *health.ROUTES)


class Api:
    """The API of one process: its connection pools, its ingest, and the ASGI application."""

    def __init__(self, settings: Settings) -> None:
        url = settings.require_database_url()
        self._settings = settings
        ingesting = settings.serve_connections // 3  # events share commits, so few are needed
        size, keys = settings.serve_connections - ingesting, SecretKeys(settings.secrets_key)
        self._database = Database(url, "api", size=size, keys=keys)
        self._ingest_database = Database(
            url,
            "ingest",
            size=ingesting,
            lock_timeout_ms=LOCK_TIMEOUT_MS,
            statement_seconds=STATEMENT_SECONDS,
            direct_url=settings.database_direct_url,
        )
        # Hints use the connection that has just stored the events: the backend of another may have to wake up first.
        self._queue = open_queue(settings, self._ingest_database)
        ingest = Ingest(
            self._ingest_database,
            max_waiting=settings.ingest_max_waiting,
            after_commit=lambda: self._queue.hint("inbox"),
            after_later=lambda: self._queue.hint("retries"),
        )
        access = Access(settings, self._database)
        exposition = Exposition(self._database, settings.health)
        snapshots = Snapshots(
            self._database,
            settings.health,
            settings.runbook_url,
            notices.notices(settings),
            settings.retention,
        )
        readiness = Readiness(settings, self._database, self._queue, self._ingest_database)
        received = Webhooks(self._database, ingest)
        self.services = Services(
            settings, self._database, ingest, self._queue, exposition, snapshots, readiness, access, received,
            Admission(settings.ingest_max_waiting), PublishRefusals(self._database),
            Starts(self._database, ingest, settings.limits), RunEnds(self._database), PredictionTurn(),
            ApprovalLinks(self._database),
        )  # fmt: skip
        self.app = _application(self.services)
        self._presence = Presence("api", retention=settings.retention)  # once it is unfit, `/readyz` says so
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Check the database before anything is accepted: its schema version and its durability settings."""
        await self._presence.join(self._database)
        self._beating = asyncio.create_task(self._presence.keep(self._database))
        await durability.require_safe(self._database, allow_unsafe=self._settings.allow_unsafe_durability)
        await control.seed_limits(self._database, self._settings.source_rate_limits)
        await control.seed_breakers(self._database, self._settings.source_breakers)
        await secrets.log_notices(self._database)

    async def publish(self, headers: list[tuple[bytes, bytes]], body: bytes, peer: str | None) -> bytes | Response:
        """Answer a publish request that has arrived completely, bypassing the framework."""
        if CROSS_SITE in headers:
            metrics.answered(metrics.OTHER, 403)
            return _cross_site()
        found = await publish.answer_whole(self.services, headers, body, peer)
        metrics.answered("/v1/events", found.status_code if isinstance(found, Response) else 202)
        return found

    async def close(self) -> None:
        await self.services.ingest.close()
        await self.services.refusals.close()
        await self._queue.close()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            await self._presence.leave(self._database)
        await self._ingest_database.close()
        await self._database.close()


@contextlib.asynccontextmanager
async def serving(settings: Settings, listening: socket.socket) -> AsyncIterator[Server]:
    """The API on its socket: it accepts requests when the context is entered, and is closed when it ends."""
    traces.switch_on()
    api = Api(settings)
    server = Server(api.app, listening, api.publish, settings)
    try:
        await api.open()
        await server.start()
        notices.log_notices(settings)
        yield server
    finally:
        await api.services.ends.close()  # requests that wait are answered before the server stops
        await server.stop()
        await api.close()
        await traces.flush()


class Server:
    """uvicorn, started and stopped from here (it installs no signal handlers)."""

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        publish: connections.Publish | None = None,
        settings: Settings | None = None,
    ) -> None:
        connection = partial(
            connections.HttpConnection, publish=publish, limits=_connection_limits(settings or Settings())
        )
        self._listening = listening
        self.port: int = listening.getsockname()[1]
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app, http=cast(Any, connection), ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, date_header=False, proxy_headers=False, timeout_keep_alive=75,
                timeout_graceful_shutdown=10,
            )
        )  # fmt: skip
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[self._listening]))
        while not self._uvicorn.started:
            if self._task.done():
                self._task.result()
                raise SettingsError("the HTTP server stopped before it began to listen")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        if self._task is not None:
            self._uvicorn.should_exit = True
            await self._task
        self._listening.close()

    async def wait(self) -> None:
        """Wait until the server stops by itself, which happens only on an error."""
        assert self._task is not None
        await asyncio.shield(self._task)


def _connection_limits(settings: Settings) -> ConnectionLimits:
    most = min(settings.max_connections, raise_file_limit())
    return ConnectionLimits(most, settings.max_connections_per_address, parse_networks(settings.trusted_proxies))


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def bind(settings: Settings) -> socket.socket:
    """The socket to listen on. SettingsError when the port is in use, before anything else is started."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as exc:
        listening.close()
        raise SettingsError(
            f"port {settings.port} on {settings.host} cannot be used: {exc.strerror or exc}; "
            "stop the process that uses it, or choose another port with --port"
        ) from exc
    listening.listen(1024)
    listening.setblocking(False)
    return listening


def _application(services: Services) -> ASGIApp:
    document = openapi.document(ROUTES)
    routes = [StarletteRoute(route.path, _endpoint(route, services), methods=[route.method]) for route in ROUTES]
    routes.append(StarletteRoute("/openapi.json", _fixed(json_response(document))))
    for path, (name, media) in _PAGES.items():
        content = (resources.files("tidegate.api") / "static" / name).read_bytes()
        routes.append(StarletteRoute(path, _fixed(Response(content, media_type=media))))
    framework = Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _any_error})
    framework.router.redirect_slashes = False  # each path has one meaning: no redirects

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if any(name == b"expect" and value.lower() == b"100-continue" for name, value in scope["headers"]):
            receive, send = bodies.closing_unless_read(receive, send)
        if not _is_utf8(scope):
            metrics.answered(metrics.OTHER, 404)
            await problems.response(Problem(404, "the path is not valid UTF-8"))(scope, receive, send)
        elif _is_cross_site(scope):
            metrics.answered(metrics.OTHER, 403)
            await _cross_site()(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/v1/events" and scope["method"] == "POST":
            metrics.answered("/v1/events", await publish.handle(services, scope, receive, send))
        else:
            await framework(scope, receive, send)

    return application


def _is_utf8(scope: Scope) -> bool:
    """Whether the path is valid UTF-8; if not, decoding could turn two paths into one."""
    if "\ufffd" not in scope["path"]:
        return True
    with contextlib.suppress(UnicodeDecodeError):
        return "\ufffd" in unquote_to_bytes(scope["raw_path"]).decode()
    return False


def _is_cross_site(scope: Scope) -> bool:
    """Whether a browser sends this for a page of another site. Reads change nothing and pass."""
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return False
    return CROSS_SITE in scope["headers"]


def _cross_site() -> Response:
    return problems.response(Problem(403, "requests from pages of other web sites are not allowed"))


def _endpoint(route: Route, services: Services) -> Any:
    async def answer(request: Request) -> Response:
        try:
            if route.scope != "public":
                headers, peer = request.headers.raw, request.client.host if request.client else None
                authorization = request.headers.get("authorization")
                principal = await services.access.check(authorization, route.scope, headers, peer)
                bodies.set_principal(request, principal, services.access.address(headers, peer))
            if any("\x00" in value for value in request.path_params.values()):
                raise NotFound("no name or id contains the character U+0000")
            asking = bodies.principal(request)
            if asking is not None and asking.sources is not None:
                result = await bound_tokens.answer(route, request, services, asking)
            else:
                result = await route.handler(request, services)
        except Exception as exc:  # noqa: BLE001 - every error becomes an answer
            result = problems.response(exc)
        response = result if isinstance(result, Response) else json_response(result)
        response.headers.update(problems.HEADERS)
        metrics.answered(route.path, response.status_code)
        return response

    async def endpoint(request: Request) -> Response:
        if not traces.is_on or route.path in _UNTRACED:
            return await answer(request)
        with traces.Request(route.method, route.path) as traced:
            given = request.headers.getlist(
                "traceparent"
            )  # with several, it is unclear which trace to continue: none is
            traced.begin(given[0] if len(given) == 1 else None).enter()
            response = await answer(request)
            traced.status = response.status_code
        return response

    return endpoint


def _fixed(response: Response) -> Any:
    response.headers.update(_SECURITY_HEADERS)

    async def endpoint(request: Request) -> Response:
        metrics.answered(request.url.path, response.status_code)  # one of a few fixed paths, so the metric stays small
        return response

    return endpoint


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    metrics.answered(metrics.OTHER, exc.status_code)
    what = {404: f"no resource at {request.url.path[:100]}", 405: f"the method {request.method} is not allowed here"}
    response = problems.response(Problem(exc.status_code, what.get(exc.status_code, str(exc.detail))))
    if exc.status_code == 405:
        response.headers["allow"] = ", ".join(sorted(_methods(request)))
    return response


def _methods(request: Request) -> set[str]:
    """The methods allowed at a path; several routes may share it."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in routes for method in route.methods or ()}


async def _any_error(_: Request, exc: Exception) -> Response:
    metrics.answered(metrics.OTHER, 500)
    return problems.response(exc)
