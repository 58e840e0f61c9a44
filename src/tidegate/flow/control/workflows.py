"""The operator's verbs about workflows of kind `http`. (Those in Python are declared by their worker.)

Each keeps out whoever decides by triggers until it commits, like the verbs about triggers: a trigger is not made for a
workflow that is being deleted, nor a run launched. Secrets are in no answer but the one that made them.
"""

from __future__ import annotations

import base64
import secrets
import uuid
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
from msgspec import UNSET

from tidegate.clock import utc_now
from tidegate.errors import Conflict, FieldError, InvalidInput, NotFound
from tidegate.model import http_workflow as rules
from tidegate.model.addresses import Allowed
from tidegate.model.conversion import convert
from tidegate.model.http_workflow import (
    DEFAULT_KEEP_MS,
    KIND,
    MAX_KEEP_MS,
    SECRET_PREFIX,
    HttpConfig,
    HttpWorkflowBody,
    HttpWorkflowPatch,
    SecretRotation,
)
from tidegate.model.secrets import NO_KEYS, SecretKeys, require_readable
from tidegate.model.trigger import Trigger, WorkflowDefinition
from tidegate.store import audit, locks
from tidegate.store import triggers as store
from tidegate.store.db import Connection, Database
from tidegate.telemetry.logs import logger

MAX_NAMED = 5

_log = logger("control")


class WorkflowChanged(msgspec.Struct, frozen=True):
    """A definition as it is now; `secret` when one was made for it, `is_written` when the call changed it."""

    definition: WorkflowDefinition
    secret: str | None = None
    is_written: bool = False


def shown_workflow(definition: WorkflowDefinition) -> WorkflowDefinition:
    """The definition for others to see, without its secrets."""
    if definition.kind != KIND:
        return definition
    config, now = _config(definition), utc_now()
    kept = [old for old in config.old_secrets if old.until > now]
    shown = rules.described(msgspec.structs.replace(config, old_secrets=kept))
    return msgspec.structs.replace(definition, config=shown)


async def create_workflow(database: Database, given: Any, *, allowed: Sequence[Allowed], actor: str) -> WorkflowChanged:
    """A new definition from decoded JSON; the same again is no error. Conflict when another has the slug."""
    body = convert(given, HttpWorkflowBody, "the workflow is not valid")
    errors = rules.slug_errors(body.slug)
    if body.kind != KIND:
        errors.append(FieldError("kind", "must be http; workflows in Python are declared by their worker"))
    made = None if isinstance(body.secret, str) else _new_secret()
    config = rules.changed(HttpConfig(url=body.url, secret=made or str(body.secret)), body)
    _check(config, errors, asks_for_private=body.allow_private is True, allowed=allowed)

    async def change(connection: Connection) -> WorkflowChanged:
        await locks.exclude_triggers(connection)
        before = await store.get_definition(connection, body.slug)
        if before is not None:
            return WorkflowChanged(_same(before, config, database.keys, has_secret=made is None))
        after = await _write(connection, body.slug, config, actor, database.keys)
        await audit.insert(
            connection, actor=actor, action="workflow.create", subject=body.slug, after=rules.described(config)
        )
        return WorkflowChanged(after, made, is_written=True)

    done = await database.run(change)
    if done.is_written:
        _log.info("workflow.created", workflow=body.slug, kind=KIND, actor=actor)
    return done


async def update_workflow(
    database: Database, slug: str, given: Any, *, allowed: Sequence[Allowed], actor: str
) -> WorkflowChanged:
    """Change the fields in `given`; requests that begin after the call use them. Nothing new, no version.

    A new secret replaces the old one as `rotate_secret` does, with its default.
    """
    body = convert(given, HttpWorkflowPatch, "the workflow is not valid")
    made = _new_secret() if body.secret is None else None

    async def asked(connection: Connection) -> tuple[WorkflowDefinition, HttpConfig]:
        before = await _found(connection, slug)
        old = _config(before, database.keys)
        kept = [
            *([old.secret] if body.secret is UNSET else []),
            *(old.headers.values() if body.headers is UNSET else []),
        ]
        require_readable(kept, f"workflow {slug}")
        new = rules.changed(old, body)
        if body.secret is not UNSET:
            new = rules.rotated(new, made or str(body.secret), DEFAULT_KEEP_MS, await locks.now(connection))
        _check(new, [], asks_for_private=body.allow_private is True, allowed=allowed)
        return before, new

    async def change(connection: Connection) -> WorkflowChanged:
        await locks.exclude_triggers(connection)
        before, new = await asked(connection)
        return await _replace(connection, before, new, "workflow.update", actor, made, database.keys)

    async with database.connection() as connection:  # what is refused, or the same, holds nobody up
        before, new = await asked(connection)
    if rules.is_same(_config(before, database.keys), new):
        return WorkflowChanged(before)
    return _told(await database.run(change), actor)


async def rotate_secret(database: Database, slug: str, given: Any, *, actor: str) -> WorkflowChanged:
    """Sign with a new secret, and for `keep_ms` with the old one too, so that receivers can change over meanwhile."""
    body = convert(given, SecretRotation, "the rotation is not valid")
    keep_ms = DEFAULT_KEEP_MS if body.keep_ms is None else body.keep_ms
    if not 0 <= keep_ms <= MAX_KEEP_MS:
        problem = FieldError("keep_ms", f"must lie between 0 and {MAX_KEEP_MS} (30 days)")
        raise InvalidInput("the rotation is not valid", [problem])
    made = _new_secret() if body.secret is None else None

    async def asked(connection: Connection) -> tuple[WorkflowDefinition, HttpConfig]:
        before = await _found(connection, slug)
        new = rules.rotated(
            _config(before, database.keys), made or str(body.secret), keep_ms, await locks.now(connection)
        )
        errors = [error for error in rules.config_errors(new) if error.field == "secret"]
        if errors:
            raise InvalidInput("the rotation is not valid", errors)
        return before, new

    async def change(connection: Connection) -> WorkflowChanged:
        await locks.exclude_triggers(connection)
        before, new = await asked(connection)
        return await _replace(connection, before, new, "workflow.rotate", actor, made, database.keys)

    async with database.connection() as connection:
        await asked(connection)
    return _told(await database.run(change), actor)


async def delete_workflow(database: Database, slug: str, *, actor: str) -> WorkflowDefinition:
    """Delete a definition; its secrets are erased, runs on record stay. Conflict while it is in use, naming by what."""

    async def change(connection: Connection) -> WorkflowDefinition:
        await locks.exclude_triggers(connection)
        before = await _unused(connection, slug)
        shown = rules.described(_config(before, database.keys))
        await store.delete_definition(connection, before.id, {"url": shown["url"]}, actor)
        await audit.insert(connection, actor=actor, action="workflow.delete", subject=slug, before=shown)
        return before

    async with database.connection() as connection:
        await _unused(connection, slug)
    gone = await database.run(change)
    _log.warning("workflow.deleted", workflow=slug, actor=actor)
    return gone


def _check(config: HttpConfig, errors: list[FieldError], *, asks_for_private: bool, allowed: Sequence[Allowed]) -> None:
    """InvalidInput names each field that breaks a rule."""
    if asks_for_private and not allowed:
        message = "needs the setting TIDEGATE_HTTP_ALLOW, which says where to, for the API and the workers"
        errors.append(FieldError("allow_private", message))
    errors += rules.config_errors(config)
    if not any(error.field == "url" for error in errors):
        try:
            httpx.URL(config.url)
        except httpx.InvalidURL as exc:
            errors.append(FieldError("url", f"is not a URL: {exc}"))
    if errors:
        raise InvalidInput("the workflow is not valid", errors)


def _same(before: WorkflowDefinition, config: HttpConfig, keys: SecretKeys, *, has_secret: bool) -> WorkflowDefinition:
    """`before`, if that is what was asked for; without a secret, the request leaves open which one it is."""
    if before.kind == KIND:
        known = _config(before, keys)
        wanted = config if has_secret else msgspec.structs.replace(config, secret=known.secret)
        if rules.is_same(known, wanted):
            return before
    how = "PATCH changes it" if before.kind == KIND else "it is declared in code"
    problem = FieldError("slug", f"is taken by a workflow of kind {before.kind}; take another name, or {how}")
    raise Conflict(f"workflow {before.slug} exists already, and differs", [problem])


async def _replace(
    connection: Connection,
    before: WorkflowDefinition,
    new: HttpConfig,
    action: str,
    actor: str,
    made: str | None,
    keys: SecretKeys,
) -> WorkflowChanged:
    """Write a config, and that it was changed; `made` is the secret to tell, if one was made."""
    old = _config(before, keys)
    if old == new:
        return WorkflowChanged(before)
    after = await _write(connection, before.slug, new, actor, keys)
    note = {"secret": "changed"} if new.secret != old.secret else {}
    await audit.insert(
        connection, actor=actor, action=action, subject=before.slug, before=rules.described(old),
        after=rules.described(new) | note,
    )  # fmt: skip
    return WorkflowChanged(after, made, is_written=True)


async def _unused(connection: Connection, slug: str) -> WorkflowDefinition:
    """The definition, if nothing that is accepted or may come would be lost with it. Conflict says what would."""
    found = await _found(connection, slug)
    errors = []
    live = await store.list_of_workflow(connection, slug)
    if live:
        errors.append(FieldError("triggers", _triggers_in_the_way(live)))
    unfinished = await store.list_unfinished_runs(connection, found.id, MAX_NAMED + 1)
    if unfinished:
        errors.append(FieldError("runs", _runs_in_the_way(unfinished)))
    if errors:
        raise Conflict(f"workflow {slug} is in use", errors)
    return found


def _triggers_in_the_way(live: Sequence[Trigger]) -> str:
    names = ", ".join(f"{trigger.name} ({trigger.id})" for trigger in live[:MAX_NAMED])
    more = f" and {len(live) - MAX_NAMED} more" if len(live) > MAX_NAMED else ""
    return f"{names}{more} would launch it; delete them first: tidegate triggers delete ID"


def _runs_in_the_way(unfinished: Sequence[uuid.UUID]) -> str:
    ids = ", ".join(str(run_id) for run_id in unfinished[:MAX_NAMED])
    more = " and more" if len(unfinished) > MAX_NAMED else ""
    return f"{ids}{more} have not ended; wait for them, or cancel them: tidegate runs cancel ID"


async def _found(connection: Connection, slug: str) -> WorkflowDefinition:
    found = await store.get_definition(connection, slug)
    if found is None:
        raise NotFound(f"no workflow {slug!r}")
    if found.kind != KIND:
        problem = FieldError("slug", f"names a workflow of kind {found.kind}; change it in the worker's code")
        raise Conflict(f"workflow {slug} is declared in code; it is changed there", [problem])
    return found


async def _write(
    connection: Connection, slug: str, config: HttpConfig, actor: str, keys: SecretKeys
) -> WorkflowDefinition:
    stored = msgspec.to_builtins(rules.with_secrets(config, keys.seal))
    await store.upsert_definition(connection, slug=slug, kind=KIND, parameters=["*"], config=stored, actor=actor)
    return await _found(connection, slug)


def _config(definition: WorkflowDefinition, keys: SecretKeys = NO_KEYS) -> HttpConfig:
    """What the definition holds; secrets that `keys` do not read are as they are stored."""
    return rules.with_secrets(msgspec.convert(definition.config, HttpConfig), keys.open)


def _new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def _told(done: WorkflowChanged, actor: str) -> WorkflowChanged:
    if done.is_written:
        _log.info("workflow.changed", workflow=done.definition.slug, version=done.definition.version, actor=actor)
    return done
