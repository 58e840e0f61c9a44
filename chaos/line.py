"""What `chaos.order` and `chaos.edits` share: a cluster of workers alone, bursts of numbered events, their judge."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from chaos import line_app
from chaos.cluster import Cluster
from tidegate.store.db import Database
from tidegate.telemetry import logs

WORKERS = 4
PATIENCE_SECONDS = 120.0

_PUBLISH = """
select tidegate.publish('line.' || $1, $1, jsonb_build_object('n', n)) from generate_series($2::int, $3::int) as n
"""
_LAUNCHED = """
select (e.payload ->> 'n')::int as n, extract(epoch from d.launched_at)::float8 * 1000 as at
  from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e on e.id = d.event_id
 where e.type = 'line.' || $1 and d.status = 'launched' order by d.launched_at, e.ingress_sequence
"""


class Launch(NamedTuple):
    """An event's number, and when it was launched, in milliseconds by the database's clock."""

    n: int
    at: float


class Line:
    """A cluster of workers that decide the same bursts."""

    def __init__(self, cluster: Cluster, database: Database) -> None:
        self.database = database
        self._cluster = cluster
        self._published: Counter[str] = Counter()

    async def burst(self, workflow: str, count: int) -> None:
        """So many events in one commit, numbered in the order of arrival."""
        first = self._published[workflow] + 1
        self._published[workflow] += count
        async with self.database.connection() as connection:
            await connection.execute(_PUBLISH, workflow, first, self._published[workflow])

    async def launched(self, workflow: str) -> list[Launch]:
        """In the order of launch."""
        async with self.database.connection() as connection:
            return [Launch(*row) for row in await connection.fetch(_LAUNCHED, workflow)]

    def effects(self, workflow: str) -> list[int]:
        """The numbers of the events whose function was called, in the order of the calls."""
        found = line_app.effects(self._cluster.folder / "sink")
        return [one.n for one in found if one.workflow == workflow]

    async def until_done(self, workflow: str, seconds: float = PATIENCE_SECONDS) -> float:
        """Wait until all events of a workflow had their effect; the seconds it took (more than allowed: not all)."""
        began_at = time.monotonic()
        while True:
            taken = time.monotonic() - began_at
            if taken > seconds or len(self.effects(workflow)) >= self._published[workflow]:
                return taken
            await asyncio.sleep(0.1)

    def complaints(self, workflow: str) -> list[str]:
        """Effects that did not happen, or happened again."""
        counts = Counter(self.effects(workflow))
        lost = self._published[workflow] - len(counts)
        repeated = sum(count > 1 for count in counts.values())
        found = [f"{workflow}: {lost} of {self._published[workflow]} effects did not happen"] if lost else []
        return found + ([f"{workflow}: {repeated} effects happened more than once"] if repeated else [])


def out_of_order(workflow: str, numbers: Sequence[int], what: str) -> list[str]:
    """A complaint when a later arrival comes before an earlier one."""
    wrong = [(a, b) for a, b in itertools.pairwise(numbers) if a > b]
    return [f"{workflow}: {len(wrong)} {what} out of order, first {wrong[0]}"] if wrong else []


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Line]:
    """The cluster, at work."""
    cluster = Cluster(folder, queue="postgres", apis=0, workers=WORKERS, app=Path(line_app.__file__))
    try:
        await cluster.start()
        await cluster.until_at_work()
        database = Database(cluster.database_url, "chaos", size=4)
        try:
            yield Line(cluster, database)
        finally:
            await database.close()
    finally:
        cluster.stop()


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario saw; no complaints: all is well."""

    seed: int
    trials: int
    complaints: list[str]


def main(
    name: str, text: str | None, scenario: Callable[[Path, int, int], Coroutine[Any, Any, Found]], trials: int
) -> None:
    """The command of a scenario."""
    parser = argparse.ArgumentParser(prog=f"python -m chaos.{name}", description=text)
    parser.add_argument("--trials", type=int, default=trials, help="how often [%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="what is random begins here [%(default)s]")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    logs.configure("warning", "console")
    with (
        tempfile.TemporaryDirectory(prefix=f"tidegate-{name}-", ignore_cleanup_errors=True) as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(scenario(Path(folder), arguments.trials, arguments.seed))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    print("\n".join([f"{name}: {found.trials} trials, seed {found.seed}", *(found.complaints or ["all is well"])]))
    sys.exit(1 if found.complaints else 0)
