"""Roles with no more rights than they need: the API and a worker without DDL, and a producer that may only publish.

`python -m chaos.roles` says whether they do their work, judged by the effects, and what is refused.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import asyncpg
import httpx

from chaos.members import run, served, started
from tidegate.embedded import ROLE, EmbeddedPostgres

APP = Path(__file__).parent / "effects_app.py"
PATIENCE_SECONDS = 60
REFUSED = {
    "chaos_app": (
        "create table tidegate.mine ()",
        "alter table tidegate.workflow_events add column mine text",
        "drop table tidegate.audit_log",
        "drop function tidegate.publish",
        "update tidegate.schema_migrations set checksum = ''",
        "update tidegate.audit_log set actor = 'nobody'",
    ),
    "chaos_producer": (
        "create table tidegate.mine ()",
        "select * from tidegate.workflow_events",
        "select * from tidegate.api_tokens",
        "select * from tidegate.webhooks",
        "select config from tidegate.workflow_definitions",
        "insert into tidegate.event_inbox values (1, gen_random_uuid(), 'shop')",
        "select tidegate.prune_audit(0, 1)",
    ),
}


def broken(folder: Path) -> list[str]:
    """What does not work, or is not refused; nothing when all is as promised."""
    server = EmbeddedPostgres(folder / "postgres")
    owner = server.start()
    effects = folder / "effects"
    try:
        asyncio.run(_as(server.admin_url(), *(f"create role {role} login" for role in REFUSED)))
        granted = run(owner, "migrate", "--grant-to", "chaos_app", "--grant-publish-to", "chaos_producer")
        if granted.returncode != 0:
            return [f"migrate: {granted.stderr}"]
        app, producer = (owner.replace(f"{ROLE}@", f"{role}@", 1) for role in REFUSED)
        worker = started("worker", app, folder, "worker", str(APP), TIDEGATE_POLL_MS="100", CHAOS_EFFECTS=str(effects))
        with served(app, folder) as address, worker:
            event = {"type": "chaos.effect", "source": "api", "payload": {"key": "by-api"}}
            answer = httpx.post(f"{address}/v1/events", json=event, timeout=30)
            if answer.status_code != 202:
                return [f"publishing: {answer.status_code} {answer.text}"]
            pruned = run(app, "prune", "--audit", "1d", "--events", "30d", "--yes")
            if pruned.returncode != 0:
                return [f"prune: {pruned.stderr}"]
            asyncio.run(_as(producer, """select tidegate.publish('chaos.effect', 'sql', '{"key": "by-sql"}')"""))
            missing = _missing(effects, {"by-api", "by-sql"})
        found = [f"no effect of {key}; see {folder}" for key in sorted(missing)]
        return found + [text for role, them in REFUSED.items() for text in asyncio.run(_allowed(owner, role, them))]
    finally:
        server.stop()


def _missing(effects: Path, keys: set[str]) -> set[str]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        missing = keys - set(effects.read_text().split() if effects.exists() else [])
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.1)


async def _as(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def _allowed(owner: str, role: str, statements: tuple[str, ...]) -> list[str]:
    """Those of the statements that are not refused for want of rights."""
    connection = await asyncpg.connect(owner.replace(f"{ROLE}@", f"{role}@", 1))
    found = []
    try:
        for statement in statements:
            try:
                await connection.execute(statement)
                found.append(f"{role} may: {statement}")
            except asyncpg.InsufficientPrivilegeError:
                pass
    finally:
        await connection.close()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tidegate-roles-", ignore_cleanup_errors=True) as folder:
        found = broken(Path(folder))
    print("\n".join(f"roles: BROKEN {text}" for text in found) or "roles: each does its work, and no more")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
