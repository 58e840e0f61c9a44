"""The operator's verbs for webhooks. A secret is in no log line or audit row, and only in the answer that created
it."""

from __future__ import annotations

import base64
import secrets
from typing import Any

import msgspec

from tidegate.clock import utc_now
from tidegate.errors import Conflict, FieldError, InvalidInput, NotFound
from tidegate.model import webhook as rules
from tidegate.model.conversion import convert
from tidegate.model.event import RESERVED, is_name
from tidegate.model.secrets import SecretKeys
from tidegate.model.webhook import (
    DEFAULT_KEEP_MS,
    DEFAULT_TOLERANCE_SECONDS,
    MAX_KEEP_MS,
    SECRET_PREFIX,
    Scheme,
    ShownWebhook,
    Webhook,
    WebhookBody,
    WebhookConfig,
    WebhookRotation,
    WebhookSecret,
)
from tidegate.store import audit, locks
from tidegate.store import webhooks as store
from tidegate.store.db import Connection, Database
from tidegate.telemetry.logs import logger

_log = logger("control")


class WebhookWritten(ShownWebhook, frozen=True, kw_only=True):
    """A webhook as it is now; `secret` is set only when this call created one, `changed` when the call changed it."""

    secret: str | None
    changed: bool


async def set_webhook(database: Database, source: str, given: Any, *, actor: str) -> WebhookWritten:
    """Set the whole configuration from decoded JSON; existing secrets are kept. The same configuration changes nothing.

    A change of the scheme ends the secrets of the old one.
    """
    body = convert(given, WebhookBody, "the webhook is not valid")
    errors = rules.body_errors(body)
    if not is_name(source):
        errors.append(FieldError("source", rules.NAME_RULE))
    if source.startswith(RESERVED):
        errors.append(FieldError("source", f"must not begin with {RESERVED}, which is reserved"))
    if errors:
        raise InvalidInput("the webhook is not valid", errors)
    tolerance = None if body.scheme == "github" else body.tolerance_seconds or DEFAULT_TOLERANCE_SECONDS

    async def change(connection: Connection) -> WebhookWritten:
        await store.lock(connection)
        before, now = await store.get(connection, source, database.keys), await locks.now(connection)
        held = before.config.secrets if before is not None and before.config.scheme == body.scheme else []
        created = _new_secret(body.scheme) if body.secret is None and not held else None
        secret = created or body.secret
        if secret is not None and [one.secret for one in held] != [secret]:
            held = [WebhookSecret(secret=secret, added_at=now)]
        new = WebhookConfig(scheme=body.scheme, event_type=body.event_type, tolerance_seconds=tolerance, secrets=held)
        return await _write(connection, "webhook.set", source, before, new, actor, created, database.keys)

    return _logged(await database.run(change), "set", actor)


async def rotate_webhook(database: Database, source: str, given: Any, *, actor: str) -> WebhookWritten:
    """Set a new current secret; the previous one stays valid for `keep_ms`, so that the sender can be changed
    meanwhile."""
    body = convert(given, WebhookRotation, "the rotation is not valid")
    keep_ms = DEFAULT_KEEP_MS if body.keep_ms is None else body.keep_ms
    if not 0 <= keep_ms <= MAX_KEEP_MS:
        error = FieldError("keep_ms", f"must lie between 0 and {MAX_KEEP_MS} (30 days)")
        raise InvalidInput("the rotation is not valid", [error])

    async def change(connection: Connection) -> WebhookWritten:
        await store.lock(connection)
        before, now = await _found(connection, source, database.keys), await locks.now(connection)
        old = before.config
        errors = rules.secret_errors(old.scheme, body.secret) if body.secret is not None else []
        if errors:
            raise InvalidInput("the rotation is not valid", errors)
        created = _new_secret(old.scheme) if body.secret is None else None
        kept = rules.rotated(old.secrets, created or str(body.secret), keep_ms, now)
        new = msgspec.structs.replace(old, secrets=kept)
        return await _write(connection, "webhook.rotate", source, before, new, actor, created, database.keys)

    return _logged(await database.run(change), "rotated", actor)


async def retire_webhook_secret(database: Database, source: str, fingerprint: str, *, actor: str) -> WebhookWritten:
    """End a replaced secret now. Conflict for the current one: it has to be replaced first."""

    async def change(connection: Connection) -> WebhookWritten:
        await store.lock(connection)
        before, now = await _found(connection, source, database.keys), await locks.now(connection)
        held = rules.holding(before.config.secrets, now)
        kept = [secret for secret in held if rules.fingerprint(secret.secret) != fingerprint]
        if len(kept) == len(held):
            raise NotFound("no secret of this webhook has that fingerprint")
        if kept[:1] != held[:1]:
            raise Conflict("this is the current secret; rotate first, or delete the webhook")
        new = msgspec.structs.replace(before.config, secrets=kept)
        return await _write(connection, "webhook.retire", source, before, new, actor, None, database.keys)

    return _logged(await database.run(change), "retired", actor)


async def delete_webhook(database: Database, source: str, *, actor: str) -> ShownWebhook:
    """Take no more requests for this source; its events stay."""

    async def change(connection: Connection) -> ShownWebhook:
        await store.lock(connection)
        before = await _found(connection, source, database.keys)
        await store.delete(connection, source)
        described = rules.described(before.config, utc_now())
        await audit.insert(connection, actor=actor, action="webhook.delete", subject=source, before=described)
        return rules.shown(before, utc_now())

    gone = await database.run(change)
    _log.warning("webhook.deleted", source=source, scheme=gone.scheme, actor=actor)
    return gone


async def _found(connection: Connection, source: str, keys: SecretKeys) -> Webhook:
    found = await store.get(connection, source, keys)
    if found is None:
        raise NotFound(rules.no_webhook(source))
    return found


async def _write(
    connection: Connection,
    action: str,
    source: str,
    before: Webhook | None,
    new: WebhookConfig,
    actor: str,
    created: str | None,
    keys: SecretKeys,
) -> WebhookWritten:
    """Write a configuration that differs, with its audit row; `created` is the new secret to return, if one was
    created."""
    now = utc_now()
    if before is not None and before.config == new:
        return _written(before, None, changed=False)
    after = await store.put(connection, source, new, actor, keys)
    old = None if before is None else rules.described(before.config, now)
    await audit.insert(
        connection, actor=actor, action=action, subject=source, before=old, after=rules.described(new, now)
    )
    return _written(after, created, changed=True)


def _written(webhook: Webhook, created: str | None, *, changed: bool) -> WebhookWritten:
    shown = msgspec.structs.asdict(rules.shown(webhook, utc_now()))
    return WebhookWritten(**shown, secret=created, changed=changed)


def _new_secret(scheme: Scheme) -> str:
    if scheme == "stripe":
        message = "is required: Stripe creates it and shows it with the endpoint"
        raise InvalidInput("the webhook is not valid", [FieldError("secret", message)])
    key = secrets.token_bytes(32)
    return SECRET_PREFIX + base64.b64encode(key).decode() if scheme == "standard" else key.hex()


def _logged(done: WebhookWritten, verb: str, actor: str) -> WebhookWritten:
    if done.changed:
        fingerprints = [secret.fingerprint for secret in done.secrets]
        _log.warning(f"webhook.{verb}", source=done.source, scheme=done.scheme, secrets=fingerprints, actor=actor)
    return done
