"""Webhooks of sources: set, show, rotate, delete. A generated secret is only in the answer that generates it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from tidegate.api import bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Route, Services
from tidegate.clock import utc_now
from tidegate.errors import NotFound
from tidegate.flow import control
from tidegate.flow.control import WebhookWritten
from tidegate.model.webhook import ShownWebhook, WebhookBody, WebhookRotation, no_webhook, shown
from tidegate.store import webhooks

LIST_QUERY = page_query()


class WebhookPage(msgspec.Struct, frozen=True):
    """Webhooks, by source, without secrets. `next_cursor` is null on the last page."""

    webhooks: list[ShownWebhook]
    next_cursor: str | None


async def list_webhooks(request: Request, services: Services) -> WebhookPage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        found = await webhooks.list_page(connection, services.database.keys, after=page.cursor, limit=page.fetch_limit)
    rows, next_cursor = page.cut(found, lambda webhook: webhook.source)
    now = utc_now()
    return WebhookPage([shown(webhook, now) for webhook in rows], next_cursor)


async def show_webhook(request: Request, services: Services) -> ShownWebhook:
    async with services.database.connection() as connection:
        found = await webhooks.get(connection, _source(request), services.database.keys)
    if found is None:
        raise NotFound(no_webhook(_source(request)))
    return shown(found, utc_now())


async def set_webhook(request: Request, services: Services) -> WebhookWritten:
    given, actor = await bodies.read_json(request), bodies.actor(request)
    done = await control.set_webhook(services.database, _source(request), given, actor=actor)
    services.webhooks.forget()
    return done


async def rotate_webhook(request: Request, services: Services) -> WebhookWritten:
    given, actor = await bodies.read_json(request), bodies.actor(request)
    done = await control.rotate_webhook(services.database, _source(request), given, actor=actor)
    services.webhooks.forget()
    return done


async def retire_webhook_secret(request: Request, services: Services) -> WebhookWritten:
    await bodies.read(request, bodies.Nothing)
    fingerprint, actor = request.path_params["fingerprint"], bodies.actor(request)
    done = await control.retire_webhook_secret(services.database, _source(request), fingerprint, actor=actor)
    services.webhooks.forget()
    return done


async def delete_webhook(request: Request, services: Services) -> ShownWebhook:
    await bodies.read(request, bodies.Nothing)
    gone = await control.delete_webhook(services.database, _source(request), actor=bodies.actor(request))
    services.webhooks.forget()
    return gone


def _source(request: Request) -> str:
    source: str = request.path_params["source"]
    return source


_ONE = "/admin/sources/{source:path}/webhook"
_REFUSALS = (400, 408, 413, 415, 422)

ROUTES = (
    Route("GET", "/admin/webhooks", list_webhooks, "List webhooks by source, without secrets", (WebhookPage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
    Route("GET", _ONE, show_webhook, "Show a source's webhook, without secrets", (ShownWebhook,), scope="read",
          errors=(404,)),
    Route("PUT", _ONE, set_webhook, "Set a source's webhook; a generated secret is shown only once",
          (WebhookWritten,), scope="admin", body=bodies.schema(WebhookBody), errors=_REFUSALS),
    Route("POST", f"{_ONE}/rotate", rotate_webhook, "Rotate the secret; the old one stays valid for a while",
          (WebhookWritten,), scope="admin", body=bodies.schema(WebhookRotation), errors=(*_REFUSALS, 404)),
    Route("DELETE", f"{_ONE}/secrets/{{fingerprint}}", retire_webhook_secret, "Revoke a replaced secret now",
          (WebhookWritten,), scope="admin", errors=(*_REFUSALS, 404, 409)),
    Route("DELETE", _ONE, delete_webhook,
          "Delete a source's webhook: its signed requests are refused from now on", (ShownWebhook,), scope="admin",
          errors=(*_REFUSALS, 404)),
)  # fmt: skip
