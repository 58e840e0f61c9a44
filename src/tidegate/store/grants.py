"""Rights for roles that do not own the schema."""

from __future__ import annotations

from tidegate.errors import SettingsError
from tidegate.store.db import Connection

# Everything that an API or a worker does; no DDL.
WORK = (
    "grant usage on schema tidegate to {role}",
    "grant select, insert, update, delete on all tables in schema tidegate to {role}",
    "revoke insert, update, delete on tidegate.schema_migrations from {role}",
    "revoke update on tidegate.audit_log from {role}",
    "grant usage, select on all sequences in schema tidegate to {role}",
    "grant execute on all functions in schema tidegate to {role}",
)
# `select tidegate.publish(…)`, which runs with its owner's rights, and nothing else.
PUBLISH = (
    "grant usage on schema tidegate to {role}",
    "grant execute on function tidegate.publish to {role}",
)


async def grant(connection: Connection, rights: tuple[str, ...], role: str) -> None:
    """Give a role these rights, in a transaction. SettingsError when there is no such role."""
    quoted = await connection.fetchval("select quote_ident(rolname) from pg_roles where rolname = $1", role)
    if quoted is None:
        raise SettingsError(f"the database has no role {role!r}: make it first (`create role … login`)")
    is_owner = "select pg_has_role(nspowner, 'usage') from pg_namespace where nspname = 'tidegate'"
    if not await connection.fetchval(is_owner):
        raise SettingsError("only the owner of the schema can grant rights: use the role that ran `tidegate migrate`")
    for right in rights:
        await connection.execute(right.format(role=quoted))
