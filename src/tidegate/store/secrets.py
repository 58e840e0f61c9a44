"""Secrets in `webhooks`, `workflow_definitions` and `installation`: to encrypt them again, and how they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from tidegate.model import http_workflow
from tidegate.model.http_workflow import KIND, HttpConfig
from tidegate.model.secrets import SEALED, SecretKeys
from tidegate.model.webhook import WebhookSecret, with_secrets
from tidegate.store.db import Connection
from tidegate.store.sql import load

Table = Literal["webhooks", "workflows", "keys"]

_sql = load("secrets")


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """How many webhooks, workflows and keys of links are in plain, encrypted with an old key, and with none that the
    process has; some of the last by name."""

    plain: int
    old: int
    unreadable: int
    examples: list[str] | None


async def list_held(connection: Connection, table: Table, after: str, limit: int) -> dict[str, Any]:
    """A page of what rows hold, by name."""
    kinds = (KIND,) if table == "workflows" else ()
    rows = await connection.fetch(_sql[f"list_{table}"], after, limit, *kinds)
    return {row["name"]: row["held"] for row in rows}


async def replace(connection: Connection, table: Table, held: Mapping[str, tuple[Any, Any]]) -> set[str]:
    """Write what rows are to hold, where they still hold what they did; which were written."""
    before = [msgspec.json.encode(one).decode() for one, _ in held.values()]
    after = [msgspec.json.encode(other).decode() for _, other in held.values()]
    rows = await connection.fetch(_sql[f"replace_{table}"], list(held), before, after)
    return {row["name"] for row in rows}


def changed(table: Table, held: Any, change: Callable[[str], str]) -> Any:
    """What a row holds, each secret as `change` makes it."""
    if table == "keys":
        return change(held)
    if table == "webhooks":
        return msgspec.to_builtins(with_secrets(msgspec.convert(held, list[WebhookSecret]), change))
    return msgspec.to_builtins(http_workflow.with_secrets(msgspec.convert(held, HttpConfig), change))


async def survey(connection: Connection, keys: SecretKeys) -> Survey:
    """How secrets are stored, as a process with these keys sees it."""
    names: Sequence[str] = keys.names
    return Survey(**dict(await connection.fetchrow(_sql["survey"], names, KIND, SEALED) or {}))
