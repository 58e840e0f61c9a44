"""Ids are UUIDv7 in order of creation, with the standard class and with the driver's."""

from __future__ import annotations

import subprocess
import sys
import uuid

import pytest
from asyncpg.pgproto.pgproto import UUID

from tidegate import clock


@pytest.mark.parametrize("new_uuid", [lambda number: uuid.UUID(bytes=number), UUID], ids=["standard", "driver"])
def test_ids_are_ordered_and_have_version_7(new_uuid: type[uuid.UUID], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_new_uuid", new_uuid)
    ids = [clock.uuid7() for _ in range(10_000)]
    assert ids == sorted(ids) and len(set(ids)) == len(ids)
    assert {(one.version, one.variant) for one in ids} == {(7, uuid.RFC_4122)}
    assert isinstance(ids[0], uuid.UUID)


def test_the_driver_is_loaded_by_the_store_alone() -> None:
    probe = """
import sys, uuid
from tidegate import clock
assert type(clock.uuid7()) is uuid.UUID and "asyncpg" not in sys.modules
import tidegate.store.db
assert type(clock.uuid7()) is not uuid.UUID and isinstance(clock.uuid7(), uuid.UUID)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
