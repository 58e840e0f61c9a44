"""`webhooks`: how the signed requests of a source are checked. Rows hold secrets,
encrypted where there is a key; `model.webhook.shown` has none."""

from __future__ import annotations

import msgspec

from tidegate.model.secrets import SecretKeys
from tidegate.model.webhook import Webhook, WebhookConfig, with_secrets
from tidegate.store.db import Connection, Row
from tidegate.store.sql import load

_sql = load("webhooks")


async def lock(connection: Connection) -> None:
    """Only one transaction changes webhooks at a time."""
    await connection.execute(_sql["lock"])


async def get(connection: Connection, source: str, keys: SecretKeys) -> Webhook | None:
    """The webhook of a source. A secret that `keys` do not read is as it is stored."""
    row = await connection.fetchrow(_sql["get"], source)
    return _webhook(row, keys) if row else None


async def list_page(connection: Connection, keys: SecretKeys, *, after: str | None = None, limit: int) -> list[Webhook]:
    """Webhooks, by source."""
    return [_webhook(row, keys) for row in await connection.fetch(_sql["list"], after, limit)]


async def put(connection: Connection, source: str, config: WebhookConfig, actor: str, keys: SecretKeys) -> Webhook:
    """Create or replace the webhook of a source."""
    texts = msgspec.json.encode(with_secrets(config.secrets, keys.seal)).decode()
    columns = (source, config.scheme, config.event_type, config.tolerance_seconds, texts, actor)
    return _webhook(await connection.fetchrow(_sql["put"], *columns), keys)


async def delete(connection: Connection, source: str) -> None:
    """Delete the webhook of a source."""
    await connection.execute(_sql["delete"], source)


def _webhook(row: Row, keys: SecretKeys) -> Webhook:
    stored = msgspec.convert({name: row[name] for name in WebhookConfig.__struct_fields__}, WebhookConfig)
    config = msgspec.structs.replace(stored, secrets=with_secrets(stored.secrets, keys.open))
    rest = {name: row[name] for name in Webhook.__struct_fields__ if name != "config"}
    return Webhook(config=config, **rest)
