"""Every SQL block has a description and can be prepared; every block and every store function has a caller."""

from __future__ import annotations

import ast
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conftest import cloned
from tidegate.embedded import EmbeddedPostgres
from tidegate.store import sql
from tidegate.store.db import Connection, Database

SOURCE = Path(__file__).parents[2] / "src" / "tidegate"
STORE = SOURCE / "store"
BLOCKS = [(aggregate, block) for aggregate in sql.aggregates() for block in sql.blocks(aggregate)]
# Names that only tests need: they go through all .sql files.
FOR_TESTS = {("sql", "aggregates")}
FRAGMENTS = [(aggregate, one) for aggregate in sql.aggregates() for one in sql.fragments(aggregate)]


@pytest.fixture(scope="module")
def prepares_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A migrated database for all blocks: to prepare one changes nothing."""
    with cloned(postgres, template, "prepares") as url:
        yield url


@pytest.fixture
async def connection(prepares_url: str) -> AsyncIterator[Connection]:
    opened = await Database(prepares_url, "test", size=1).dedicated()
    yield opened
    await opened.close()


@pytest.mark.parametrize(("aggregate", "block"), BLOCKS, ids=[f"{a}.{b.name}" for a, b in BLOCKS])
async def test_block_is_described_and_prepares(connection: Connection, aggregate: str, block: sql.Block) -> None:
    assert block.description, f"{aggregate}.{block.name} has no description"
    prepared = await connection.prepare(block.text)  # type: ignore[attr-defined]
    assert prepared.get_query() == block.text


def store_names(module: Path) -> set[tuple[str, str]]:
    """The store modules and names in them that a module uses; one of the store's own also uses its own names."""
    tree = ast.parse(module.read_text())
    aliases: dict[str, str] = {}
    found: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "tidegate.store":
            aliases |= {name.asname or name.name: name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tidegate.store."):
            found |= {((node.module or "").rpartition(".")[2], name.name) for name in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            found.add((aliases[node.value.id], node.attr))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and module.parent == STORE:
            found.add((module.stem, node.id))
    return found


def loaded_blocks(module: Path) -> list[tuple[str, str]]:
    """The .sql files that a module loads and, for each of its lookups, a pattern of the names looked up."""
    tree = ast.parse(module.read_text())
    loads = {
        node.targets[0].id: node.value.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "load"
        and isinstance(node.value.args[0], ast.Constant)
    }  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in loads:
            parts = node.slice.values if isinstance(node.slice, ast.JoinedStr) else [node.slice]
            pattern = "".join(
                re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"\w+" for part in parts
            )
            found.append((str(loads[node.value.id]), pattern))
    return found


def test_every_store_function_and_class_has_a_caller() -> None:
    used = set().union(*map(store_names, SOURCE.rglob("*.py"))) | FOR_TESTS
    defined = {
        (module.stem, node.name)
        for module in STORE.glob("*.py")
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert len(defined) > 100
    assert not defined - used, "only tests use these: delete them"


def test_every_block_has_a_caller() -> None:
    lookups = [lookup for module in STORE.glob("*.py") for lookup in loaded_blocks(module)]
    unused = [
        f"{aggregate}.{block.name}"
        for aggregate, block in BLOCKS
        if not any(aggregate == of and re.fullmatch(pattern, block.name) for of, pattern in lookups)
    ]
    assert not unused, "no module of the store loads these: delete them"


@pytest.mark.parametrize(("aggregate", "fragment"), FRAGMENTS, ids=[f"{a}.{one.name}" for a, one in FRAGMENTS])
def test_fragment_is_described_and_shared(aggregate: str, fragment: sql.Block) -> None:
    assert fragment.description, f"{aggregate}.{fragment.name} has no description"
    own = (STORE / f"{aggregate}.sql").read_text().count(f"{{{{{fragment.name}}}}}")
    others = sum(file.read_text().count(f"{{{{{aggregate}.{fragment.name}}}}}") for file in STORE.glob("*.sql"))
    assert own + others > 1, "a fragment is for texts that several statements share"


def test_unknown_fragment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "_read", lambda _, kind: [sql.Block("x", "x", "select {{y}}")] if kind == "name" else [])
    with pytest.raises(KeyError):
        sql.blocks("events")
