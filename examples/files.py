"""File ingest: several files are downloaded, parsed and loaded concurrently; the result of each step is stored.

    tidegate dev examples/files.py
    tidegate publish files.arrived --source sftp --data '{"files": ["north.csv", "south.csv", "west.csv"]}'

A failed download is retried while the others continue; a file that was loaded is not loaded again. `east.csv`
has an invalid line: a retry cannot help, so the error is reported and the other files are loaded.
"""

import asyncio
import csv
import tempfile
from pathlib import Path
from typing import Any

from tidegate import Context, NonRetryable, Retry, StepFailed, Tidegate

app = Tidegate()

# Simulates a remote file server and a database.
REMOTE = {
    "north.csv": "region,amount\nnorth,10\nnorth,20\n",
    "south.csv": "region,amount\nsouth,5\n",
    "west.csv": "region,amount\nwest,7\nwest,8\nwest,9\n",
    "east.csv": "region,amount\neast,many\n",
}
WAREHOUSE: dict[str, list[dict[str, Any]]] = {}

# Different workers may execute the steps of one run: store files where all of them can read them.
SPOOL = Path(tempfile.gettempdir()) / "tidegate-files"


def download(name: str, folder: str) -> str:
    """Synchronous step functions run in threads. The stored result is small: a path, not the content."""
    if name not in REMOTE:
        raise FileNotFoundError(name)
    path = SPOOL / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(REMOTE[name])
    return str(path)


def parse(path: str) -> list[dict[str, Any]]:
    """The result of a step is stored as JSON: lists, objects, strings, numbers."""
    rows = list(csv.DictReader(Path(path).read_text().splitlines()))
    try:
        return [{"region": row["region"], "amount": int(row["amount"])} for row in rows]
    except ValueError as exc:
        raise NonRetryable(f"{Path(path).name}: {exc}") from exc


def load(name: str, rows: list[dict[str, Any]]) -> int:
    """Idempotent, since it may be repeated after a crash: it replaces the rows instead of adding to them."""
    WAREHOUSE[name] = rows
    return len(rows)


@app.workflow(on="files.arrived", timeout="1d", max_concurrency=2)
async def ingest(ctx: Context, files: list[str]) -> dict[str, Any]:
    """Process the files concurrently, each step by step."""

    async def one(name: str) -> int | str:
        try:
            path = await ctx.step(
                f"download {name}", download, name, str(ctx.run_id), retry=Retry(max_attempts=8, base="5s", cap="10m")
            )
            rows = await ctx.step(f"parse {name}", parse, path)
            return await ctx.step(f"load {name}", load, name, rows, timeout="30s")
        except StepFailed as exc:
            return str(exc)

    found = await asyncio.gather(*(one(name) for name in files))
    return dict(zip(files, found, strict=True))
