"""Named SQL blocks from the .sql files beside this module.

A block starts with `-- name: <name>`; the comment lines after it describe it; the rest, up to the next block, is one
statement. A fragment starts with `-- fragment: <name>` and has a description too; `{{name}}` in a statement or fragment
stands for its text (`{{file.name}}` for that of a fragment in another file). A fragment that has parameters uses the
same numbers as the statements that include it.
"""

from __future__ import annotations

import re
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
    """Every statement of `<aggregate>.sql`, in order, with the texts of its fragments."""
    return [Block(one.name, one.description, _include(one.text, aggregate)) for one in _read(aggregate, "name")]


def fragments(aggregate: str) -> list[Block]:
    """Every fragment of `<aggregate>.sql`, in order, as written."""
    return _read(aggregate, "fragment")


def aggregates() -> list[str]:
    """The names of all .sql files."""
    folder = resources.files("tidegate.store")
    return sorted(f.name.removesuffix(".sql") for f in folder.iterdir() if f.name.endswith(".sql"))


def _read(aggregate: str, kind: str) -> list[Block]:
    source = (resources.files("tidegate.store") / f"{aggregate}.sql").read_text(encoding="utf-8")
    found: list[Block] = []
    for part in re.split(r"(?m)^-- (?=name: |fragment: )", source)[1:]:
        head, _, rest = part.partition("\n")
        of_kind, _, name = head.partition(": ")
        lines = rest.splitlines()
        comments = [line.removeprefix("--").strip() for line in lines if line.startswith("--")]
        statement = "\n".join(line for line in lines if not line.startswith("--")).strip().rstrip(";")
        if of_kind == kind:
            found.append(Block(name.strip(), " ".join(comments), statement))
    return found


def _include(text: str, aggregate: str) -> str:
    """The text with each fragment in its place; one that does not exist raises KeyError."""

    def included(found: re.Match[str]) -> str:
        file, name = found[1] or aggregate, found[2]
        return _include({one.name: one.text for one in fragments(file)}[name], file)

    return re.sub(r"\{\{(?:(\w+)\.)?(\w+)\}\}", included, text)
