"""The operator's verbs for workflows of kind `http`. Workflows in Python are declared by their worker; one whose code
is gone can be deleted, too.

Each excludes the batches that use triggers until it commits, like the verbs for triggers: no trigger is created and no
run launched for a workflow that is being deleted. A secret is only in the answer that created it.
"""

from __future__ import annotations

import base64
import secrets
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
from tidegate.model.ids import RunId
from tidegate.model.secrets import NO_KEYS, SecretKeys, require_readable
from tidegate.model.trigger import Trigger, WorkflowDefinition
from tidegate.store import audit, locks, schedules, workers
from tidegate.store import triggers as store
from tidegate.store.db import Connection, Database
from tidegate.store.processes import ALIVE_MS
from tidegate.telemetry.logs import logger

MAX_NAMED = 5

_log = logger("control")


class WorkflowChanged(msgspec.Struct, frozen=True):
    """A definition as it is now; `secret` when this call created one, `is_written` when the call changed it."""

    definition: WorkflowDefinition
    secret: str | None = None
    is_written: bool = False


def shown_workflow(definition: WorkflowDefinition) -> WorkflowDefinition:
    """The definition without its secrets, to be shown."""
    if definition.kind != KIND:
        return definition
    config, now = _config(definition), utc_now()
    kept = [old for old in config.old_secrets if old.until > now]
    shown = rules.described(msgspec.structs.replace(config, old_secrets=kept))
    return msgspec.structs.replace(definition, config=shown)


async def create_workflow(database: Database, given: Any, *, allowed: Sequence[Allowed], actor: str) -> WorkflowChanged:
    """Create a definition from decoded JSON; repeating it is no error. Conflict when the slug is taken."""
    body = convert(given, HttpWorkflowBody, "the workflow is not valid")
    errors = rules.slug_errors(body.slug)
    if body.kind != KIND:
        errors.append(FieldError("kind", "must be http; workflows in Python are declared by their worker"))
    created = None if isinstance(body.secret, str) else _new_secret()
    config = rules.changed(HttpConfig(url=body.url, secret=created or str(body.secret)), body)
    _check(config, errors, asks_for_private=body.allow_private is True, allowed=allowed)

    async def change(connection: Connection) -> WorkflowChanged:
        await locks.exclude_triggers(connection)
        before = await store.get_definition(connection, body.slug)
        if before is not None:
            return WorkflowChanged(_same(before, config, database.keys, has_secret=created is None))
        after = await _write(connection, body.slug, config, actor, database.keys)
        await audit.insert(
            connection, actor=actor, action="workflow.create", subject=body.slug, after=rules.described(config)
        )
        return WorkflowChanged(after, created, is_written=True)

    done = await database.run(change)
    if done.is_written:
        _log.info("workflow.created", workflow=body.slug, kind=KIND, actor=actor)
    return done


async def update_workflow(
    database: Database, slug: str, given: Any, *, allowed: Sequence[Allowed], actor: str
) -> WorkflowChanged:
    """Change the fields in `given`; requests that begin after the call use them. Without a change the version stays.

    A new secret replaces the old one as `rotate_secret` does, with its default.
    """
    body = convert(given, HttpWorkflowPatch, "the workflow is not valid")
    created = _new_secret() if body.secret is None else None

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
            new = rules.rotated(new, created or str(body.secret), DEFAULT_KEEP_MS, await locks.now(connection))
        _check(new, [], asks_for_private=body.allow_private is True, allowed=allowed)
        return before, new

    async def change(connection: Connection) -> WorkflowChanged:
        await locks.exclude_triggers(connection)
        before, new = await asked(connection)
        return await _replace(connection, before, new, "workflow.update", actor, created, database.keys)

    async with database.connection() as connection:  # an invalid request, or one without a change, delays no batch
        before, new = await asked(connection)
    if rules.is_same(_config(before, database.keys), new):
        return WorkflowChanged(before)
    return _logged(await database.run(change), actor)


async def rotate_secret(database: Database, slug: str, given: Any, *, actor: str) -> WorkflowChanged:
    """Sign with a new secret, and for `keep_ms` with the old one too, so that receivers can switch meanwhile."""
    body = convert(given, SecretRotation, "the rotation is not valid")
    keep_ms = DEFAULT_KEEP_MS if body.keep_ms is None else body.keep_ms
    if not 0 <= keep_ms <= MAX_KEEP_MS:
        problem = FieldError("keep_ms", f"must lie between 0 and {MAX_KEEP_MS} (30 days)")
        raise InvalidInput("the rotation is not valid", [problem])
    created = _new_secret() if body.secret is None else None

    async def asked(connection: Connection) -> tuple[WorkflowDefinition, HttpConfig]:
        before = await _found(connection, slug)
        new = rules.rotated(
            _config(before, database.keys), created or str(body.secret), keep_ms, await locks.now(connection)
        )
        errors = [error for error in rules.config_errors(new) if error.field == "secret"]
        if errors:
            raise InvalidInput("the rotation is not valid", errors)
        return before, new

    async def change(connection: Connection) -> WorkflowChanged:
        await locks.exclude_triggers(connection)
        before, new = await asked(connection)
        return await _replace(connection, before, new, "workflow.rotate", actor, created, database.keys)

    async with database.connection() as connection:
        await asked(connection)
    return _logged(await database.run(change), actor)


async def delete_workflow(database: Database, slug: str, *, actor: str) -> WorkflowDefinition:
    """Delete a definition; its secrets are erased, finished runs are kept. Conflict while it is in use, saying by
    what."""

    async def change(connection: Connection) -> WorkflowDefinition:
        await locks.exclude_triggers(connection)
        before = await _unused(connection, slug)
        is_http = before.kind == KIND
        shown = rules.described(_config(before, database.keys)) if is_http else before.config
        await schedules.delete(connection, before.id)
        await store.delete_definition(connection, before.id, {"url": shown["url"]} if is_http else shown, actor)
        await audit.insert(connection, actor=actor, action="workflow.delete", subject=slug, before=shown)
        return before

    async with database.connection() as connection:
        await _unused(connection, slug)
    gone = await database.run(change)
    _log.warning("workflow.deleted", workflow=slug, actor=actor)
    return gone


def _check(config: HttpConfig, errors: list[FieldError], *, asks_for_private: bool, allowed: Sequence[Allowed]) -> None:
    """Raises InvalidInput naming each invalid field."""
    if asks_for_private and not allowed:
        message = "needs the setting TIDEGATE_HTTP_ALLOW with the allowed addresses, for the API and the workers"
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
    """`before`, if it equals the request; a request without a secret matches any secret. Conflict otherwise."""
    if before.kind == KIND:
        known = _config(before, keys)
        wanted = config if has_secret else msgspec.structs.replace(config, secret=known.secret)
        if rules.is_same(known, wanted):
            return before
    how = "change it with PATCH" if before.kind == KIND else "change it in the worker's code"
    problem = FieldError("slug", f"is taken by a workflow of kind {before.kind}; use another name, or {how}")
    raise Conflict(f"workflow {before.slug} already exists and differs", [problem])


async def _replace(
    connection: Connection,
    before: WorkflowDefinition,
    new: HttpConfig,
    action: str,
    actor: str,
    created: str | None,
    keys: SecretKeys,
) -> WorkflowChanged:
    """Write a configuration with its audit row; `created` is the new secret to return, if one was created."""
    old = _config(before, keys)
    if old == new:
        return WorkflowChanged(before)
    after = await _write(connection, before.slug, new, actor, keys)
    note = {"secret": "changed"} if new.secret != old.secret else {}
    await audit.insert(
        connection, actor=actor, action=action, subject=before.slug, before=rules.described(old),
        after=rules.described(new) | note,
    )  # fmt: skip
    return WorkflowChanged(after, created, is_written=True)


async def _unused(connection: Connection, slug: str) -> WorkflowDefinition:
    """The definition, if no worker, trigger or unfinished run uses it. Conflict says what does."""
    found = await store.get_definition(connection, slug)
    if found is None:
        raise NotFound(f"no workflow {slug!r}")
    if found.kind != KIND:
        await _require_no_worker(connection, slug)
    errors = []
    live = await store.list_of_workflow(connection, slug)
    if live:
        errors.append(FieldError("triggers", _triggers_in_use(live)))
    unfinished = await store.list_unfinished_runs(connection, found.id, MAX_NAMED + 1)
    if unfinished:
        errors.append(FieldError("runs", _runs_in_use(unfinished)))
    if errors:
        raise Conflict(f"workflow {slug} is in use", errors)
    return found


async def _require_no_worker(connection: Connection, slug: str) -> None:
    """Conflict if a worker has the code of a workflow: it would be registered again when that worker starts anew."""
    found = await workers.list_all(connection, ALIVE_MS)
    having = [one.name for one in found if one.is_alive and slug in (*one.workflows, *one.left_out)]
    if having:
        names = ", ".join(having[:MAX_NAMED]) + (f" and {len(having) - MAX_NAMED} more" * (len(having) > MAX_NAMED))
        text = f"names a workflow whose code is on worker {names}: stop it, or remove the workflow from its code, first"
        live = await store.list_of_workflow(connection, slug)
        text += f". To launch it no more: tidegate triggers delete {slug}/{live[0].name}" if live else ""
        raise Conflict(f"workflow {slug} is declared in code: change it there", [FieldError("slug", text)])


def _triggers_in_use(live: Sequence[Trigger]) -> str:
    names = ", ".join(f"{trigger.name} ({trigger.id})" for trigger in live[:MAX_NAMED])
    more = f" and {len(live) - MAX_NAMED} more" if len(live) > MAX_NAMED else ""
    them = f"{live[0].workflow}/{live[0].name}"
    return f"{names}{more} would launch it; delete them first: tidegate triggers delete {them}"


def _runs_in_use(unfinished: Sequence[RunId]) -> str:
    ids = ", ".join(str(run_id) for run_id in unfinished[:MAX_NAMED])
    more = " and more" if len(unfinished) > MAX_NAMED else ""
    return f"{ids}{more} are unfinished; wait for them, or cancel them: tidegate runs cancel ID"


async def _found(connection: Connection, slug: str) -> WorkflowDefinition:
    found = await store.get_definition(connection, slug)
    if found is None:
        raise NotFound(f"no workflow {slug!r}")
    if found.kind != KIND:
        problem = FieldError("slug", f"names a workflow of kind {found.kind}; change it in the worker's code")
        raise Conflict(f"workflow {slug} is declared in code: change it there", [problem])
    return found


async def _write(
    connection: Connection, slug: str, config: HttpConfig, actor: str, keys: SecretKeys
) -> WorkflowDefinition:
    stored = msgspec.to_builtins(rules.with_secrets(config, keys.seal))
    await store.upsert_definition(connection, slug=slug, kind=KIND, parameters=["*"], config=stored, actor=actor)
    return await _found(connection, slug)


def _config(definition: WorkflowDefinition, keys: SecretKeys = NO_KEYS) -> HttpConfig:
    """The configuration of the definition; secrets that `keys` cannot decrypt are left as stored."""
    return rules.with_secrets(msgspec.convert(definition.config, HttpConfig), keys.open)


def _new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def _logged(done: WorkflowChanged, actor: str) -> WorkflowChanged:
    if done.is_written:
        _log.info("workflow.changed", workflow=done.definition.slug, version=done.definition.version, actor=actor)
    return done
