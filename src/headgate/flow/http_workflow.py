"""Workflows of kind `http`: a run is posted to a URL, signed by Standard Webhooks, and the answer is its output.

Their definitions are rows that operators write (the verbs are here); any worker runs them, as a workflow with one step.
"""

from __future__ import annotations

import base64
import re
import secrets
import uuid
from typing import Any

import httpx
import msgspec
from msgspec import UNSET, UnsetType

from headgate.errors import Conflict, FieldError, InvalidInput, NotFound
from headgate.flow.http_guard import DEFAULT_TIMEOUT_MS, SECRET_PREFIX, HttpConfig, post
from headgate.flow.workflow import Context, Workflow
from headgate.model.addresses import url_problem
from headgate.model.conversion import convert
from headgate.model.trigger import WorkflowDefinition
from headgate.store import audit, trigger_gates, triggers
from headgate.store.db import Connection, Database
from headgate.telemetry.logs import logger

KIND = "http"
MIN_TIMEOUT_MS, MAX_TIMEOUT_MS = 100, 600_000
MAX_HEADERS, MAX_HEADER_VALUE = 20, 4000

_SLUG = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_|~-]{1,100}", re.ASCII)
_HEADER_VALUE = re.compile(rf"[!-~](?:[ -~]{{0,{MAX_HEADER_VALUE - 2}}}[!-~])?", re.ASCII)
# What we or the connection decide.
_OUR_HEADERS = (
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "idempotency-key", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "user-agent",
)  # fmt: skip
_OUR_PREFIXES = ("webhook-", "proxy-")

_log = logger("http")


class HttpWorkflowPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be changed. Null has its default; a `secret` of null is made anew."""

    url: str | UnsetType = UNSET
    secret: str | UnsetType | None = UNSET
    timeout_ms: int | UnsetType | None = UNSET
    headers: dict[str, str] | UnsetType | None = UNSET
    allow_private: bool | UnsetType | None = UNSET


class HttpWorkflowBody(HttpWorkflowPatch, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new workflow that posts its runs to `url`. Without a `secret`, one is made and shown once."""

    slug: str
    kind: str
    url: str


class Changed(msgspec.Struct, frozen=True):
    """A definition as it is now; `secret` when one was made for it, `is_written` when the call changed it."""

    definition: WorkflowDefinition
    secret: str | None = None
    is_written: bool = False


def shown(definition: WorkflowDefinition) -> WorkflowDefinition:
    """The definition without its secret and the values of its headers, which often are secrets too."""
    if definition.kind != KIND:
        return definition
    return msgspec.structs.replace(definition, config=_described(msgspec.convert(definition.config, HttpConfig)))


async def create(database: Database, given: Any, *, allow_private: bool, actor: str) -> Changed:
    """A new definition from decoded JSON; the same again is no error. Conflict when another has the slug."""
    body = convert(given, HttpWorkflowBody, "the workflow is not valid")
    errors = [] if _SLUG.fullmatch(body.slug) else [FieldError("slug", "must be 1 to 100 of A-Z a-z 0-9 . _ -")]
    if body.kind != KIND:
        errors.append(FieldError("kind", "must be http; workflows in Python are declared by their worker"))
    made = _new_secret()
    config = _checked(HttpConfig(url=body.url, secret=made), body, allow_private, errors)

    async def change(connection: Connection) -> Changed:
        await trigger_gates.exclude(connection)
        before = await triggers.get_definition(connection, body.slug)
        if before is not None:
            # Without a secret of its own, the request leaves open which one it is.
            same = before.config if config.secret != made else before.config | {"secret": made}
            if before.kind == KIND and same == msgspec.to_builtins(config):
                return Changed(before)
            raise Conflict(
                f"workflow {body.slug} exists already", [FieldError("slug", f"is taken, by a {before.kind} workflow")]
            )
        after = await _write(connection, body.slug, config, actor)
        await audit.insert(
            connection, actor=actor, action="workflow.create", subject=body.slug, after=_described(config)
        )
        return Changed(after, made if config.secret == made else None, is_written=True)

    done = await database.run(change)
    if done.is_written:
        _log.info("workflow.created", workflow=body.slug, kind=KIND, actor=actor)
    return done


async def update(database: Database, slug: str, given: Any, *, allow_private: bool, actor: str) -> Changed:
    """Change the fields in `given`; requests that begin after the call use them. Nothing new, no version."""
    body = convert(given, HttpWorkflowPatch, "the workflow is not valid")

    async def change(connection: Connection) -> Changed:
        await trigger_gates.exclude(connection)
        before = await _found(connection, slug)
        old = msgspec.convert(before.config, HttpConfig)
        new = _checked(old, body, allow_private, [])
        if new == old:
            return Changed(before)
        after = await _write(connection, slug, new, actor)
        has_new_secret = new.secret != old.secret
        await audit.insert(
            connection, actor=actor, action="workflow.update", subject=slug, before=_described(old),
            after=_described(new) | ({"secret": "changed"} if has_new_secret else {}),
        )  # fmt: skip
        return Changed(after, new.secret if body.secret is None else None, is_written=True)

    done = await database.run(change)
    if done.is_written:
        _log.info("workflow.changed", workflow=slug, version=done.definition.version, actor=actor)
    return done


async def delete(database: Database, slug: str, *, actor: str) -> WorkflowDefinition:
    """Delete a definition that nothing refers to. Conflict says what does: triggers, or runs on record."""

    async def change(connection: Connection) -> WorkflowDefinition:
        await trigger_gates.exclude(connection)
        before = await _found(connection, slug)
        live = await triggers.list_of_workflow(connection, slug)
        if live:
            names = ", ".join(trigger.name for trigger in live[:5])
            raise Conflict(f"workflow {slug} has {len(live)} triggers ({names}); delete them first")
        if not await triggers.delete_definition(connection, before.id):
            raise Conflict(f"workflow {slug} has runs or deleted triggers on record, which name it; it stays")
        config = msgspec.convert(before.config, HttpConfig)
        await audit.insert(connection, actor=actor, action="workflow.delete", subject=slug, before=_described(config))
        return before

    gone = await database.run(change)
    _log.warning("workflow.deleted", workflow=slug, actor=actor)
    return gone


class HttpWorkflow(Workflow):
    """Runs as a workflow with the step `request`; so it is retried, fenced, cancelled and buried like any other."""

    def __init__(self, slug: str, database: Database, *, allow_private: bool) -> None:
        async def request(message_id: str, body: bytes) -> Any:
            async with database.connection() as connection:  # as it is now, whatever it was when the run was launched
                config = msgspec.convert((await _found(connection, slug)).config, HttpConfig)
            return await post(config, message_id, body, allow_private=allow_private)

        async def call(ctx: Context, parameters: dict[str, Any]) -> Any:
            body = {
                "run_id": ctx.run_id,
                "workflow": slug,
                "attempt": ctx.attempt,
                "event": ctx.event.envelope() if ctx.event else None,
                "parameters": parameters,
            }
            return await ctx.step("request", request, ctx.idempotency_key, msgspec.json.encode(body))

        super().__init__(slug, call, [])

    def bind(self, given: dict[str, Any]) -> dict[str, Any]:
        """Whatever the trigger gave, as it is."""
        return {"parameters": given}


class HttpWorkflows:
    """The http definitions that there are, for a worker; it needs no code for them."""

    def __init__(self, database: Database, *, allow_private: bool) -> None:
        self._database = database
        self._allow_private = allow_private
        self._version = -1

    async def refresh(self, workflows: dict[str, Workflow]) -> list[uuid.UUID] | None:
        """Add new ones to `workflows`. The ids of all, or None when the registry is as it was."""
        async with self._database.connection() as connection:
            version = await triggers.registry_version(connection)
            if version == self._version:
                return None
            found = await triggers.list_of_kind(connection, KIND)
        for slug in found.values():
            if not isinstance(workflows.get(slug), HttpWorkflow):
                workflows[slug] = HttpWorkflow(slug, self._database, allow_private=self._allow_private)
        self._version = version
        return list(found)


def _checked(old: HttpConfig, body: HttpWorkflowPatch, allow_private: bool, errors: list[FieldError]) -> HttpConfig:
    """`old` with what `body` says. InvalidInput names each field that breaks a rule."""
    said = {name: value for name in HttpConfig.__struct_fields__ if (value := getattr(body, name)) is not UNSET}
    defaults = {"secret": _new_secret(), "timeout_ms": DEFAULT_TIMEOUT_MS, "headers": {}, "allow_private": False}
    if said.get("secret", "") is None and isinstance(body, HttpWorkflowBody):
        del said["secret"]  # a new workflow has a new one already
    new = msgspec.structs.replace(old, **{n: defaults[n] if v is None else v for n, v in said.items()})
    if new.allow_private and not allow_private and said.get("allow_private"):
        errors.append(FieldError("allow_private", "needs the setting HEADGATE_HTTP_ALLOW_PRIVATE=true"))
    problem = url_problem(new.url, allow_private=new.allow_private)
    if problem is None:
        try:
            httpx.URL(new.url)
        except httpx.InvalidURL as exc:
            problem = f"is not a URL: {exc}"
    if problem is not None:
        errors.append(FieldError("url", problem))
    if not _is_secret(new.secret):
        errors.append(FieldError("secret", f"must be {SECRET_PREFIX} and the base64 of 24 to 64 bytes"))
    if not MIN_TIMEOUT_MS <= new.timeout_ms <= MAX_TIMEOUT_MS:
        errors.append(FieldError("timeout_ms", f"must lie between {MIN_TIMEOUT_MS} and {MAX_TIMEOUT_MS}"))
    _check_headers(new.headers, errors)
    if errors:
        raise InvalidInput("the workflow is not valid", errors)
    return new


def _check_headers(headers: dict[str, str], errors: list[FieldError]) -> None:
    if len(headers) > MAX_HEADERS or len({name.lower() for name in headers}) < len(headers):
        errors.append(FieldError("headers", f"must be at most {MAX_HEADERS}, each name once"))
    for name, value in headers.items():
        place = f"headers.{name[:60]}"
        if not _HEADER_NAME.fullmatch(name):
            errors.append(FieldError(place, "is not a header's name"))
        elif name.lower() in _OUR_HEADERS or name.lower().startswith(_OUR_PREFIXES):
            errors.append(FieldError(place, "is decided by Headgate"))
        if not _HEADER_VALUE.fullmatch(value):
            errors.append(FieldError(place, f"must have a value of 1 to {MAX_HEADER_VALUE} printable ASCII characters"))


def _new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def _is_secret(text: str) -> bool:
    try:
        return text.startswith(SECRET_PREFIX) and 24 <= len(base64.b64decode(text[6:], validate=True)) <= 64
    except ValueError:
        return False


def _described(config: HttpConfig) -> dict[str, Any]:
    return {
        "url": config.url,
        "timeout_ms": config.timeout_ms,
        "header_names": sorted(config.headers),
        "allow_private": config.allow_private,
        "has_secret": True,
    }


async def _found(connection: Connection, slug: str) -> WorkflowDefinition:
    found = await triggers.get_definition(connection, slug)
    if found is None:
        raise NotFound(f"no workflow {slug!r}")
    if found.kind != KIND:
        raise Conflict(f"workflow {slug} is declared in code; it is changed there")
    return found


async def _write(connection: Connection, slug: str, config: HttpConfig, actor: str) -> WorkflowDefinition:
    plain = msgspec.to_builtins(config)
    await triggers.upsert_definition(connection, slug=slug, kind=KIND, parameters=["*"], config=plain, actor=actor)
    return await _found(connection, slug)
