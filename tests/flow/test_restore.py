"""A backup that is restored: what was accepted before it ends as promised, and doctor says what will happen.

The backup is taken while a run sleeps, one is being executed, events wait for their slots and a schedule ticks. What
comes after it is lost, as docs/backup.md says, and nothing of it is left to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from chaos.members import run, served, started
from chaos.replica import hand_over, until

from tidegate.embedded import EmbeddedPostgres, binaries_folder

APP = Path(__file__).parent / "restore_app.py"
ONE_EVERY_TWO_SECONDS = json.dumps([{"source": "slow", "limit": 1, "interval_ms": 2000}])
LIVE = """
select count(*) filter (where w.slug = 'nap' and r.status = 'pending' and r.next_attempt_at > now()) as sleeping,
       count(*) filter (where w.slug = 'hang' and r.status = 'running') as running,
       (select count(*) from tidegate.event_ingress_retries where retry_state = 'scheduled') as held
  from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
"""


class Place:
    """A server, and the processes that work on it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.server = EmbeddedPostgres(folder / name)
        self.effects, self.hangs = folder / f"{name}-effects", folder / f"{name}-hangs"

    @contextlib.contextmanager
    def working(self) -> Iterator[str]:
        """The address of an API, beside a worker."""
        url, short = self.server.url(), {"TIDEGATE_LEASE_MS": "2000"}
        files = {"EFFECTS": str(self.effects), "HANGS": str(self.hangs)}
        with (
            served(url, self.folder, TIDEGATE_SOURCE_RATE_LIMITS=ONE_EVERY_TWO_SECONDS) as address,
            started("worker", url, self.folder, "worker", str(APP), **files, **short),
        ):
            yield address

    def seen(self) -> Counter[str]:
        lines = self.effects.read_text().splitlines() if self.effects.exists() else []
        return Counter(line for line in lines if not line.startswith("beat"))

    def beats(self) -> int:
        return self.effects.read_text().count("beat")

    def ask(self, question: str) -> Any:
        return asyncio.run(_first_row(self.server.url(), question))

    def bad(self) -> dict[str, str]:
        """What doctor objects to, at once."""
        checks = json.loads(run(self.server.url(), "doctor", "--json", "--grace", "0").stdout)["checks"]
        return {check["name"]: check["detail"] for check in checks if not check["is_ok"]}

    def doctor(self, name: str) -> str:
        checks = json.loads(run(self.server.url(), "doctor", "--json", "--grace", "0").stdout)["checks"]
        return next(str(check["detail"]) for check in checks if check["name"] == name)


async def _first_row(url: str, question: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchrow(question)
    finally:
        await connection.close()


def publish(address: str, kind: str, source: str, key: str) -> None:
    event = {"type": kind, "source": source, "id": key, "payload": {"key": key}}
    assert httpx.post(f"{address}/v1/events", json=event, timeout=30).status_code == 202


def dumped(old: Place, new: Place) -> None:
    """pg_dump of a live server, pg_restore into an empty database by the ordinary role that owns it."""
    archive = old.folder / "tidegate.dump"
    plain = ("--schema=tidegate", "--no-owner", "--no-privileges")
    command("pg_dump", "--format=custom", *plain, f"--file={archive}", old.server.url())
    old.server.stop()
    new.server.start()
    command("pg_restore", "--exit-on-error", "--no-owner", f"--dbname={new.server.url()}", str(archive))


def copied(old: Place, new: Place) -> None:
    """A copy of the data directory of a server that crashed."""
    old.server.stop(immediate=True)
    shutil.copytree(old.server.data, new.server.data, symlinks=True)
    hand_over(new.server.pgdata)
    new.server.start()


def command(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [binaries_folder() / name, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def is_there(question: Callable[[], dict[str, int]], wanted: dict[str, int]) -> bool:
    found = question()
    return all(found[key] >= count for key, count in wanted.items())


@pytest.mark.parametrize("restored", [dumped, copied])
def test_what_was_accepted_before_a_backup_ends_as_promised(
    restored: Callable[[Place, Place], None], tmp_path: Path
) -> None:
    if not (binaries_folder() / "pg_dump").exists():
        pytest.skip("the bundled Postgres has no pg_dump")
    old, new = Place(tmp_path, "old"), Place(tmp_path, "new")
    old.server.start()
    try:
        old.hangs.touch()
        with contextlib.ExitStack() as working:
            address = working.enter_context(old.working())
            publish(address, "hang", "shop", "h")
            publish(address, "quick", "shop", "done")
            until(lambda: {"began h", "quick done"} <= old.seen().keys() and old.beats() > 0)
            for n in range(4):
                publish(address, "quick", "slow", f"s{n}")
            publish(address, "nap", "shop", "n")
            until(lambda: is_there(lambda: dict(old.ask(LIVE)), {"sleeping": 1, "running": 1, "held": 1}))
            if restored is copied:
                working.close()  # the processes die with the server
            restored(old, new)
        finished = old.seen()
        _judge(new, finished)
    finally:
        old.server.stop()
        new.server.stop()


def expected_before_workers_run() -> set[str]:
    """The checks of doctor that fail after a restore, as the documentation lists them."""
    text = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()
    listed = text.split("`NOT OK` is expected of")[1].split(": they disappear")[0]
    return set(re.findall("`(.+?)`", listed))


def _judge(new: Place, finished: Counter[str]) -> None:
    live = dict(new.ask(LIVE))
    assert live["running"] == 1 and live["held"] >= 1, "the backup has what was in progress"
    until(lambda: "runs_claimed_by_nobody" in new.bad())
    resuming = new.doctor("resuming")
    assert "1 runs that were in progress are executed again" in resuming and "1 schedules publish" in resuming
    # As if the backup were older than a minute: until then its workers may count as active.
    new.ask("update tidegate.workers set seen_at = seen_at - interval '2 min' returning name")
    until(lambda: {"workers", "workflows"} <= new.bad().keys())
    assert {re.sub("^due lag of .*", "due lag of …", name) for name in new.bad()} <= expected_before_workers_run()
    with new.working() as address:
        wanted = {"began h", "ended h", "after n", *(f"quick s{n}" for n in range(4))}
        until(lambda: wanted <= (new.seen() + finished).keys() and new.beats() > 1)
        publish(address, "quick", "shop", "done")  # accepted before the backup: a duplicate
        publish(address, "quick", "shop", "later")
        until(lambda: "quick later" in new.seen())
        until(lambda: new.bad() == {})
    again = new.seen()
    assert again["before n"] == 0, "a step whose result is in the backup is not repeated"
    assert again["began h"] == 1, "what was being executed is executed again"
    assert again["quick done"] == 0 and finished["quick done"] == 1
    assert max(again.values()) == 1
    left = dict(new.ask("select count(*) as runs from tidegate.workflow_runs where status in ('pending', 'running')"))
    assert left["runs"] <= 1, "only a tick may be in progress"


def test_the_documented_dump_needs_an_address(database_url: str, tmp_path: Path) -> None:
    """Without one pg_dump would take another database: a default of this machine."""
    if not (binaries_folder() / "pg_dump").exists():
        pytest.skip("the bundled Postgres has no pg_dump")
    text = (Path(__file__).parents[2] / "docs" / "backup.md").read_text()
    block = text.split("## Making a backup")[1].split("```console\n")[1].split("```")[0]
    address = tmp_path / "database_url"
    commands = block.replace("/etc/tidegate/database_url", str(address))
    assert commands != block

    def dump() -> int:
        env = {"PATH": f"{binaries_folder()}:{os.environ['PATH']}"}
        return subprocess.run(
            ["sh", "-c", commands], cwd=tmp_path, env=env, capture_output=True, check=False
        ).returncode

    address.write_text("\n")
    assert dump() != 0 and not (tmp_path / "tidegate.dump").exists()
    address.write_text(f"{database_url}\n")
    assert dump() == 0 and (tmp_path / "tidegate.dump").stat().st_size > 10_000
