"""Docs are true: what they name exists, and what exists they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tidegate
from tidegate.model.health import HEALTH
from tidegate.model.retry import RetryPolicy
from tidegate.settings import Settings
from tidegate.store.db import Connection

ROOT = Path(__file__).parent.parent.parent
DOCS = [*sorted(ROOT.glob("*.md")), ROOT / "bench" / "NOTES.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(document: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
    for path in re.findall(r"`((?:src|docs|tests|examples|bench|deploy)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
    for module in re.findall(r"`((?:flow|store|model|queue|worker|api|cli|telemetry)/[\w/]+\.py)`", text):
        assert (ROOT / "src" / "tidegate" / module).exists(), f"{document.name} names {module}"


@pytest.mark.parametrize("document", DOCS, ids=lambda p: p.name)
def test_links_lead_to_a_section_that_exists(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        page = document.parent / target if target else document
        assert anchor in anchors(page), f"{document.name} links to {target}#{anchor}"


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    for name in Settings.__struct_fields__:
        variable = f"TIDEGATE_{name.upper()}"
        assert variable in text, variable
        default = getattr(Settings(), name)
        if isinstance(default, RetryPolicy):
            row = next(line for line in text.splitlines() if line.startswith(f"| `{variable}…`"))
            cells = [cell.strip() for cell in row.split("|")[2:-1]]
            assert cells == [f"{getattr(default, f):g}" if isinstance(getattr(default, f), float)
                             else str(getattr(default, f)) for f in RetryPolicy.__struct_fields__]  # fmt: skip


def test_every_health_threshold_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "settings.md").read_text().split("\n## Health\n")[1].split("\n## ")[0]
    documented: dict[str, int] = {}
    for row in re.findall(r"^\| (`_.*)$", text, re.MULTILINE):
        names, defaults = row.split(" | ")[:2]
        documented |= zip(re.findall(r"`_(\w+)`", names), map(int, defaults.split(", ")), strict=True)
    assert documented == {name.upper(): getattr(HEALTH, name) for name in HEALTH.__struct_fields__}


async def test_every_table_and_column_is_documented(connection: Connection) -> None:
    text = (ROOT / "docs" / "schema.md").read_text()
    sections = dict(re.findall(r"### `(\w+)`\n(.*?)(?=\n### |\n## |\Z)", text, re.DOTALL))
    rows = await connection.fetch(
        "select table_name, column_name from information_schema.columns "
        "join pg_class on pg_class.oid = format('%I.%I', table_schema, table_name)::regclass and not relispartition "
        "where table_schema = 'tidegate' and table_name <> 'schema_migrations'"
    )
    assert {row["table_name"] for row in rows} == set(sections)
    for row in rows:
        assert f"`{row['column_name']}`" in sections[row["table_name"]], tuple(row)


async def test_the_queries_of_sizes_find_the_days(connection: Connection) -> None:
    by_day, others = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "scaling.md").read_text(), re.DOTALL)
    days = [row["day"] for row in await connection.fetch("select * from tidegate.days() as found (day) order by 1")]
    assert [row["day"] for row in await connection.fetch(by_day)] == days and len(days) >= 2
    listed = {row["table"] for row in await connection.fetch(others)}
    assert listed and not any(re.search(r"_\d{8}$", name) for name in listed)


def test_public_names() -> None:
    assert sorted(n for n in tidegate.__all__ if n != "__version__") == [
        "AsyncClient",
        "BacklogFull",
        "Batch",
        "Breaker",
        "Budget",
        "ChildFailed",
        "Client",
        "Conflict",
        "Context",
        "Forbidden",
        "InvalidInput",
        "NonRetryable",
        "NotFound",
        "On",
        "Overloaded",
        "RequestRefused",
        "Retry",
        "RetryAfter",
        "RunFailed",
        "StepFailed",
        "SyncContext",
        "Tidegate",
        "TidegateError",
        "TooManyRequests",
        "Unauthorized",
        "Unavailable",
    ]
    for name in tidegate.__all__:
        assert getattr(tidegate, name) is not None
    with pytest.raises(AttributeError):
        _ = tidegate.nonsense


def test_the_changelog_names_this_version() -> None:
    version, text = tidegate.__version__, (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## Unreleased (will be {version})\n" in text or f"\n## {version}" in text
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("page", ["installing.md", "deploy.md"])
def test_what_is_installed_is_this_version(page: str) -> None:
    named = re.findall(r"tidegate-(\d+\.\d+\.\d+)", (ROOT / "docs" / page).read_text())
    assert named and set(named) == {tidegate.__version__}


def test_migrations_that_the_changelog_names_exist() -> None:
    there = {file.name[:4] for file in (ROOT / "src" / "tidegate" / "store" / "migrations").glob("*.sql")}
    assert set(re.findall(r"\bmigration (\d{4})\b", (ROOT / "CHANGELOG.md").read_text())) <= there
