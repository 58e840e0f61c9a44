"""Named SQL blocks from the .sql files beside this module.

A block starts with `-- name: <name>`; the comment lines after it describe it; the rest, up to the next block, is one
statement.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class Block:
    name: str
    description: str
    text: str


@cache
def load(aggregate: str) -> dict[str, str]:
    """The statements of `<aggregate>.sql`, by name."""
    return {block.name: block.text for block in blocks(aggregate)}


def blocks(aggregate: str) -> list[Block]:
    """Every block of `<aggregate>.sql`, in order."""
    source = (resources.files("tidegate.store") / f"{aggregate}.sql").read_text(encoding="utf-8")
    found: list[Block] = []
    for part in source.split("-- name: ")[1:]:
        name, _, rest = part.partition("\n")
        lines = rest.splitlines()
        comments = [line.removeprefix("--").strip() for line in lines if line.startswith("--")]
        statement = "\n".join(line for line in lines if not line.startswith("--")).strip().rstrip(";")
        found.append(Block(name.strip(), " ".join(comments), statement))
    return found


def aggregates() -> list[str]:
    """The names of all .sql files."""
    folder = resources.files("tidegate.store")
    return sorted(f.name.removesuffix(".sql") for f in folder.iterdir() if f.name.endswith(".sql"))
