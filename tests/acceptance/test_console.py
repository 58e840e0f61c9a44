"""The console in a real browser, where one is installed: what a run waits for, its parent and its children."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.test_sources import eventually
from tests.processes import PATIENCE_SECONDS, worker
from tidegate.client import Client

APP = """
from tidegate import Tidegate

app = Tidegate()


@app.workflow(on="order.created")
async def order(ctx, id: int):
    await ctx.start(label, id=id)
    return await ctx.run(approve, id=id)


@app.workflow()
async def approve(ctx, id: int):
    approval = await ctx.approval("manager", timeout="3d")
    return {"approved": await approval.decision() is not None}


@app.workflow()
async def label(ctx, id: int):
    raise ValueError(f"<b>no paper</b> for {id}")
"""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="module")
def server(shared_url: str, address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("console") / "app.py"
    file.write_text(APP)
    with worker(shared_url, file, TIDEGATE_STEP_RETRY_MAX_ATTEMPTS="1"):
        yield address


def shown(page: str, profile: Path) -> str:
    """The page as the browser has drawn it, once its requests were answered."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--dump-dom", page],
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True,
    )  # fmt: skip
    return done.stdout


def text_of(page: str) -> str:
    """What a reader sees in the panel."""
    panel = re.search(r'id="panel-body".*?</aside>', page, re.DOTALL)
    assert panel, page[-3000:]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", panel[0])).split())


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_run_shows_its_parent_its_children_and_what_it_waits_for(server: str, tmp_path: Path) -> None:
    with Client(server) as client:
        event = client.publish("order.created", source="shop", payload={"id": 7})

        def waiting() -> dict[str, Any] | None:
            found = client.request("GET", "/v1/runs", event_id=event.id)["runs"]
            detail: dict[str, Any] = client.request("GET", f"/v1/runs/{found[0]['id']}") if found else {}
            children = {child["workflow"]: child for child in detail.get("children", ())}
            is_so = set(children) == {"approve", "label"} and children["label"]["status"] == "failed"
            return {"id": detail["run"]["id"], **children} if is_so and children["approve"]["run_id"] else None

        parent = eventually(waiting, "one child waits, the other failed")
        child = parent["approve"]["run_id"]
        eventually(lambda: client.request("GET", f"/v1/explain/{child}")["waits_for"], "the child waits")
        story = client.request("GET", f"/v1/explain/{child}")

    page = shown(f"{server}/#run={parent['id']}", tmp_path / "one")
    told = text_of(page)
    assert "Waits for " in told and "Children" in told, told
    assert f'href="#run={child}"' in page and f'href="#run={parent["label"]["run_id"]}"' in page
    assert "<b>no paper</b> for 7" in told, "as text"

    page = shown(f"{server}/#run={child}", tmp_path / "two")
    told = text_of(page)
    assert f"Waits for {story['waits_for']}" in told and ", until " in told, told
    assert f'datetime="{story["until"]}"' in page
    assert "to decide: tidegate approvals approve " in told, told
    assert f'href="#run={parent["id"]}"' in page and "Parent run" in told
