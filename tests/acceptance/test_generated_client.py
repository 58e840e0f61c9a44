"""A client that `openapi-python-client` makes from our document publishes, and reads what became of it."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tidegate.api import openapi


def generated(url: str, folder: Path) -> Any:
    """The package that the tool makes, imported. Whatever it cannot understand is a warning: CloudEvents, nothing else.

    Of a route that takes several kinds of bodies it makes a module that cannot be imported, so it is to see one.
    """
    document = folder / "openapi.json"
    document.write_bytes(httpx.get(f"{url}/openapi.json").content)
    tool = str(Path(sys.executable).parent / "openapi-python-client")
    done = subprocess.run(
        [tool, "generate", "--path", str(document), "--meta", "none", "--output-path", str(folder / "made_client")],
        capture_output=True, text=True, check=False, cwd=folder,
        env={"PATH": str(Path(sys.executable).parent), "HOME": str(folder)},
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "ERROR" not in told and told.count("WARNING") == 2, told
    assert re.findall(r'"\$ref": "(.*)"', told) == [openapi.CLOUD_EVENT["$ref"], openapi.CLOUD_EVENT_BATCH["$ref"]]
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


BODIES = {
    "application/cloudevents+json": {
        "specversion": "1.0", "id": "document-1", "source": "made", "type": "made.document", "subject": None,
        "time": "2026-01-31T09:30:00Z", "data": [1, 2], "extension": 5,
    },
    "application/cloudevents-batch+json": [
        {"specversion": "1.0", "id": "document-2", "source": "made", "type": "made.document"}
    ],
    "application/json": {"type": "made.document", "source": "made"},
}  # fmt: skip


@pytest.mark.parametrize("media", BODIES)
def test_the_document_has_every_kind_of_body_that_is_taken(address: str, media: str) -> None:
    """What its schema allows is accepted, and what it does not, an event without a type, is refused."""
    document = httpx.get(f"{address}/openapi.json").json()
    content = document["paths"]["/v1/events"]["post"]["requestBody"]["content"]
    assert content.keys() == BODIES.keys()
    judge = jsonschema_rs.Draft202012Validator(content[media]["schema"] | {"components": document["components"]})
    wrong = json.loads(json.dumps(BODIES[media]).replace('"type":', '"other":'))
    for body, is_right in ((BODIES[media], True), (wrong, False)):
        assert judge.is_valid(body) == is_right
        answer = httpx.post(
            f"{address}/v1/events", content=json.dumps(body), headers={"content-type": media}, trust_env=False
        )
        assert answer.status_code == (202 if is_right else 422), answer.text
