"""File ingest: several files are downloaded, parsed and loaded side by side; each finished part is kept.

    tidegate dev examples/files.py
    tidegate publish files.arrived --source sftp --data '{"files": ["north.csv", "south.csv", "west.csv"]}'

When one download fails it is tried again while the others go on; nothing that was loaded is loaded anew. `east.csv`
has a bad line: trying it again cannot help, so it is reported and the rest is loaded.
"""

import asyncio
import csv
import tempfile
from pathlib import Path
from typing import Any

from tidegate import Context, NonRetryable, Retry, StepFailed, Tidegate

app = Tidegate()

# What a server elsewhere would hold, and a database.
REMOTE = {
    "north.csv": "region,amount\nnorth,10\nnorth,20\n",
    "south.csv": "region,amount\nsouth,5\n",
    "west.csv": "region,amount\nwest,7\nwest,8\nwest,9\n",
    "east.csv": "region,amount\neast,many\n",
}
WAREHOUSE: dict[str, list[dict[str, Any]]] = {}

# Steps of one run may be done by several workers: files belong where all of them can read them.
SPOOL = Path(tempfile.gettempdir()) / "tidegate-files"


def download(name: str, folder: str) -> str:
    """Steps that are plain functions run in threads. What is remembered is small: a path, not the content."""
    if name not in REMOTE:
        raise FileNotFoundError(name)
    path = SPOOL / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(REMOTE[name])
    return str(path)


def parse(path: str) -> list[dict[str, Any]]:
    """What a step returns comes back as JSON: lists, objects, text, numbers."""
    rows = list(csv.DictReader(Path(path).read_text().splitlines()))
    try:
        return [{"region": row["region"], "amount": int(row["amount"])} for row in rows]
    except ValueError as exc:
        raise NonRetryable(f"{Path(path).name}: {exc}") from exc


def load(name: str, rows: list[dict[str, Any]]) -> int:
    """May be repeated after a crash, so it replaces instead of adding."""
    WAREHOUSE[name] = rows
    return len(rows)


@app.workflow(on="files.arrived", timeout="1d", max_concurrency=2)
async def ingest(ctx: Context, files: list[str]) -> dict[str, Any]:
    """The files side by side, each from one step to the next."""

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
