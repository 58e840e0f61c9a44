"""Every route names its scope; what needs no token is listed here, one by one."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from tidegate.api import bound_tokens, openapi, server
from tidegate.api.routes import Route
from tidegate.model.token import SCOPES, Scope

# Nothing here says anything about anyone's events.
PUBLIC = {"/livez", "/readyz"}
# Whoever sends here has no token: the signature is checked instead.
SIGNED = {"/v1/webhooks/{source:path}", "/approvals/{token}"}
PUBLIC_PAGES = {
    "/", "/docs", "/static/icon.svg", "/static/console.js", "/static/panels.js", "/static/parts.js", "/static/docs.js",
    "/static/style.css",
}  # fmt: skip


async def handler(*_: Any) -> None: ...


def test_a_route_without_a_scope_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="scope"):
        Route("GET", "/v1/new", handler, "New", (str,))  # type: ignore[call-arg]


def test_every_route_has_a_scope() -> None:
    assert {route.path for route in server.ROUTES if route.scope not in SCOPES} == PUBLIC | SIGNED
    assert set(server._PAGES) == PUBLIC_PAGES
    assert get_args(Scope) == SCOPES


def test_what_changes_something_cannot_be_done_by_readers() -> None:
    harmless = {"/v1/workflows/{slug}/triggers/{trigger_id}/test"}  # it stores nothing
    for route in server.ROUTES:
        if route.method != "GET" and route.path not in harmless | SIGNED:
            assert route.scope in ("publish", "operate", "admin"), (route.method, route.path)


# What is about more than single sources, and so not for tokens that are bound to some.
WHOLE = {
    "/v1/workflows", "/v1/workflows/{slug}", "/v1/schedules", "/v1/workflows/{slug}/triggers",
    "/v1/workflows/{slug}/triggers/{trigger_id}", "/v1/workflows/{slug}/triggers/{trigger_id}/test",
    "/v1/workflows/{slug}/triggers/{trigger_id}/deliveries", "/v1/workflows/{slug}/triggers/{trigger_id}/versions",
    "/admin/triggers", "/admin/triggers/{trigger_id}", "/admin/triggers/{trigger_id}/pause",
    "/admin/budgets", "/admin/budgets/{name}", "/admin/budgets/{name}/pause", "/admin/budgets/{name}/resume",
    "/admin/triggers/{trigger_id}/resume", "/admin/schedules", "/admin/schedules/{workflow}",
    "/admin/schedules/{workflow}/pause", "/admin/schedules/{workflow}/resume", "/admin/schedules/{workflow}/run-now",
    "/admin/schedules/{workflow}/backfill", "/admin/dead-letters/stop", "/admin/audit", "/metrics", "/admin/workers",
    "/v1/runs/cancel", "/v1/runs/retry", "/v1/runs/rerun", "/admin/event-replays/stop",
}  # fmt: skip


def test_every_route_says_what_a_token_for_some_sources_may() -> None:
    scoped = {(r.method, r.path) for r in server.ROUTES if r.scope in ("publish", "read", "operate")}
    assert bound_tokens.RULES.keys() <= scoped
    assert {path for _, path in scoped - bound_tokens.RULES.keys()} == WHOLE
    rules = bound_tokens.RULES
    rows = {r.path: r.returns[0] for r in server.ROUTES if (own := rules.get((r.method, r.path))) and own.rows}
    for path, answer in rows.items():
        assert rules["GET", path].rows in answer.__struct_fields__, path


def test_the_document_names_the_scopes() -> None:
    document = openapi.document(server.ROUTES)
    scheme = document["components"]["securitySchemes"]["token"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    for operations in document["paths"].values():
        for operation in operations.values():
            scoped = [scope for entry in operation["security"] for scope in entry["token"]]
            assert all(scope in SCOPES for scope in scoped) and len(scoped) <= 1
            assert ({"401", "403", "429"} <= operation["responses"].keys()) is bool(scoped)
