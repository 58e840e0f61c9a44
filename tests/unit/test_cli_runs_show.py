"""`tidegate runs show`: what its header calls the time at which the function is called."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from tidegate.cli import cli
from tidegate.client import Client

AT = "2026-06-01T12:00:00Z"


@pytest.mark.parametrize(("started_at", "name"), [(None, "starts_at"), (AT, "resumes_at")])
def test_the_next_call_is_no_retry(monkeypatch: pytest.MonkeyPatch, started_at: str | None, name: str) -> None:
    run: dict[str, Any] = {
        "id": "r", "workflow": "w", "status": "pending", "attempts": 0, "created_at": AT, "started_at": started_at,
        "next_attempt_at": "2026-06-01T13:30:00Z", "version_held_at": None, "tags": None, "parameters": {},
        "error": None, "output": None,
    }  # fmt: skip
    monkeypatch.setattr(Client, "request", lambda *_, **__: {"run": run, "steps": []})
    shown = CliRunner().invoke(cli, ["runs", "show", "r"]).output
    assert f"  {name:<16}" in shown and "next_attempt_at" not in shown
