"""Migrations can be applied while the release before works: each says what it is, and none locks a table for long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import releases

from tidegate.store import migrate, online
from tidegate.store.migration import Migration

# Those before were made before the first release: no process of an earlier one can be alive.
FIRST_CHECKED = 2
CHECKED = [one for one in migrate.migrations() if one.version >= FIRST_CHECKED]
SAMPLES = releases.samples(migrate.latest())
# Tables that every event writes to: they are too large to be changed as a whole.
HOT = "event_decisions event_inbox event_ingress_retries workflow_events workflow_run_steps workflow_runs "
HOT += "workflow_trigger_deliveries trigger_idempotency_keys dead_letters audit_log"

# What holds a lock for as long as a table is large, or waits for one that others wait behind.
LONG = {
    r"create (unique )?index (?!concurrently)": "an index is built concurrently, in a file with `transaction: no`",
    r"\badd (constraint \w+ )?(check|foreign key|exclude)\b(?!.*\bnot valid\b)": "a constraint is added `not valid`",
    r"\badd column\b[^,;]*\b(references|check)\b": "a constraint is added `not valid`, apart from its column",
    r"\badd (constraint \w+ )?(unique|primary key)\b(?! using index)": "a unique index is built first, concurrently",
    r"\badd column\b[^,;]*\b(unique|primary key|generated)\b": "that rewrites or scans the table",
    r"\badd column\b[^,;]*\bdefault (?!(tidegate\.)?now\(\))\w[\w.]*\(": "a volatile default rewrites the table",
    r"\balter (column )?\w+ (set data )?type\b": "another type rewrites the table: add a column",
    r"\bset not null\b": "that scans the table: add a check instead",
    r"\b(vacuum full|cluster|lock table|truncate|refresh materialized|set (un)?logged|set tablespace)\b": "that locks",
    r"\breindex\b(?!.* concurrently)": "that locks",
    rf"\b(update|delete from) tidegate\.({HOT.replace(' ', '|')})\b": "many rows are changed in small batches",
}
# What the release before may still use.
REMOVED = {
    r"\bdrop (table|column|view|function|type|schema|sequence|trigger)\b": "drops are contractions",
    r"\brename\b": "a rename takes the old name away: add, and contract later",
}


def faults(migration: Migration) -> Iterator[str]:
    """What keeps a migration from being applied under load."""
    text = " ".join(re.sub(r"(?m)--.*$", "", migration.sql).lower().split())
    text = re.sub(r"\$\$.*?\$\$", "", text)  # a function's body is not executed with the migration
    made = re.findall(r"create table (?:if not exists )?tidegate\.(\w+)", text)
    if "kind" not in migration.declared:
        yield "it does not declare its kind"
    if migration.is_online:
        list(online.statements(migration))
    elif len(hot := set(re.findall(r"alter table (?:only )?tidegate\.(\w+)", text)) & set(HOT.split())) > 1:
        yield f"while it waits for one of {sorted(hot)} it holds the lock of the other: one file for each"
    for statement in filter(None, map(str.strip, text.split(";"))):
        table = re.search(r"(?:alter table (?:only )?(?:if exists )?| on )tidegate\.(\w+)", statement)
        if statement.startswith("create table") or (table is not None and table[1] in made):
            continue
        yield from (why for pattern, why in LONG.items() if re.search(pattern, statement))
        if migration.kind == "expand":
            yield from (why for pattern, why in REMOVED.items() if re.search(pattern, statement))


@pytest.mark.parametrize("migration", [*CHECKED, *SAMPLES], ids=lambda one: one.name)
def test_it_can_be_applied_while_the_release_before_works(migration: Migration) -> None:
    assert list(faults(migration)) == []


@pytest.mark.parametrize("migration", [*CHECKED, *SAMPLES], ids=lambda one: one.name)
def test_a_contraction_needs_a_version_that_exists(migration: Migration) -> None:
    known = {one.version for one in (*migrate.migrations(), *SAMPLES)}
    assert migration.compatible_from in known


def test_what_was_released_is_unchanged(tmp_path: Path) -> None:
    """Databases have its checksum on record, and refuse a program that has another."""
    try:
        last = releases.last_release(tmp_path)
    except releases.NoRelease as exc:
        pytest.skip(str(exc))
    released = (last.folder / "src" / "tidegate" / "store" / "migrations").glob("*.sql")
    now = {one.name: one.sql for one in migrate.migrations()}
    assert [path.stem for path in released if now.get(path.stem) != path.read_text()] == []


@pytest.mark.parametrize(
    ("sql", "count"),
    [
        ("create index x on tidegate.workflow_runs (id)", 1),
        ("create unique index x on tidegate.workflow_runs (id)", 1),
        ("create table tidegate.x (id int); create index x_idx on tidegate.x (id)", 0),
        ("alter table tidegate.workflow_runs add constraint c check (id is not null)", 1),
        ("alter table tidegate.workflow_runs add constraint c check (id is not null) not valid", 0),
        ("alter table tidegate.workflow_runs add constraint c foreign key (id) references tidegate.x (id)", 1),
        ("alter table tidegate.workflow_runs add constraint c unique (id)", 1),
        ("alter table tidegate.workflow_runs add constraint c unique using index x", 0),
        ("alter table tidegate.workflow_runs add column x int check (x > 0)", 1),
        ("alter table tidegate.workflow_runs add column x uuid not null default gen_random_uuid()", 1),
        ("alter table tidegate.workflow_runs add column x timestamptz not null default now()", 0),
        ("alter table tidegate.workflow_runs add column x bigint not null default 0", 0),
        ("alter table tidegate.workflow_runs alter column attempts type numeric", 1),
        ("alter table tidegate.workflow_runs alter attempts set data type numeric", 1),
        ("alter table tidegate.workflow_runs alter column attempts set not null", 1),
        ("alter table tidegate.workflow_runs alter column attempts drop not null", 0),
        ("alter table tidegate.workflow_runs drop column attempts", 1),
        ("alter table tidegate.workflow_runs rename column attempts to tries", 1),
        ("drop table tidegate.workers", 1),
        ("update tidegate.workflow_runs set attempts = 0", 1),
        ("update tidegate.registry_version set version = 1", 0),
        ("alter table tidegate.workflow_runs add x int; alter table tidegate.workflow_events add x int", 1),
        ("-- create index x on tidegate.workflow_runs (id)\nselect 1", 0),
        ("create function tidegate.x() as $$ begin lock table tidegate.workflow_events; end $$", 0),
    ],
)
def test_what_locks_or_removes_is_noticed(sql: str, count: int) -> None:
    found = list(faults(Migration(99, "0099_sample", f"-- kind: expand\n{sql};")))
    assert len(found) == count, found


def test_a_contraction_may_remove_and_a_kind_is_needed() -> None:
    drop = "alter table tidegate.workflow_runs drop column attempts;"
    assert list(faults(Migration(99, "0099_sample", f"-- kind: contract\n-- needs: 98\n{drop}"))) == []
    assert list(faults(Migration(99, "0099_sample", "select 1;"))) == ["it does not declare its kind"]
