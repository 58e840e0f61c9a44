"""The yardstick: pgqueuer, from the first enqueue until every job is handled; on the same Postgres, in a database of
its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import asyncpg

from bench import neighbours, pipeline
from bench.client import Enqueue
from bench.rate import Rate
from bench.stage import ROOT, Stage, prepared

PYTHON = Path(sys.prefix) / "pgqueuer" / "bin" / "python"

# A job leaves the queue when it is logged as handled.
_IS_EMPTY = "select not exists (select from pgqueuer)"
_HANDLED = "select count(*) from pgqueuer_log where status = 'successful'"


def version() -> str:
    """Which pgqueuer it is; RuntimeError when there is none."""
    if not PYTHON.exists():
        raise RuntimeError(f"pgqueuer is not installed in {PYTHON.parents[1]}; `make bench` installs it")
    code = "from importlib.metadata import version; print(version('pgqueuer'))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


async def measure(stage: Stage, jobs: int, warm_up: int) -> Rate:
    """One process enqueues in batches over several connections, another one handles."""
    async with stage.database() as url:
        subprocess.run(_command("install", url), cwd=ROOT, check=True)
        with stage.program("pgqueuer", _command("work", url), ROOT, os.environ):
            # By index, as for Headgate: the rows that it has handled lie before those that are left.
            watcher = await asyncpg.connect(url, server_settings={"enable_seqscan": "off"})
            try:
                job = partial(Enqueue, url=url, batch=pipeline.BATCH, connections=pipeline.CONNECTIONS)
                with prepared(job(first=0, events=warm_up), _command("enqueue")) as go:
                    go()
                await pipeline.reached(watcher, _IS_EMPTY)
                again = prepared(job(first=warm_up, events=jobs), _command("enqueue"))
                with again as go, neighbours.watched() as others:
                    started_at = go().started_at
                    await pipeline.reached(watcher, _IS_EMPTY)
                    ended_at = time.monotonic()
                handled = await watcher.fetchval(_HANDLED)
                if handled != warm_up + jobs:
                    raise RuntimeError(f"{warm_up + jobs} jobs were enqueued, but {handled} handled")
            finally:
                await watcher.close()
    return Rate(round(jobs / (ended_at - started_at), 1), others.our_us(jobs), others.cores)


def _command(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "bench.pgqueuer_side", *arguments]
