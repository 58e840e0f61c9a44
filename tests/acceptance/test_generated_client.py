"""A client that `openapi-python-client` makes from our document publishes, and reads what became of it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest


def generated(url: str, folder: Path) -> Any:
    """The package that the tool makes, imported. Whatever it cannot understand is a warning, which none may be."""
    document = folder / "openapi.json"
    document.write_bytes(httpx.get(f"{url}/openapi.json").content)
    tool = str(Path(sys.executable).parent / "openapi-python-client")
    done = subprocess.run(
        [tool, "generate", "--path", str(document), "--meta", "none", "--output-path", str(folder / "made_client"),
         "--fail-on-warning"],
        capture_output=True, text=True, check=False, cwd=folder,
        env={"PATH": str(Path(sys.executable).parent), "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return importlib.import_module("made_client")


def test_a_generated_client_publishes(demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = generated(demo, tmp_path)
    models = importlib.import_module("made_client.models")
    post = importlib.import_module("made_client.api.default.post_events")
    show = importlib.import_module("made_client.api.default.show_event")
    client = made.Client(base_url=demo)
    at = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
    event = models.NewEvent(type_="made.client", source="made", id="made-1", occurred_at=at)
    event.payload = models.NewEventPayload.from_dict({"amount": 120})
    accepted = post.sync(client=client, body=event)
    assert isinstance(accepted, models.Accepted) and accepted.external_id == "made-1"
    shown = show.sync(str(accepted.id), client=client)
    assert shown.occurred_at == at and shown.payload.to_dict() == {"amount": 120}
    batch = post.sync(client=client, body=[models.NewEvent(type_="made.client", source="made") for _ in range(3)])
    assert isinstance(batch, models.AcceptedBatch) and len(batch.events) == 3
    refused = post.sync(client=client, body=models.NewEvent(type_="", source="made"))
    assert isinstance(refused, models.ProblemBody) and refused.status == 422
