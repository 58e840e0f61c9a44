"""The console in a real browser, where one is installed: what a run waits for, its parent and children, approvals."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
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
    decision = await approval.decision()
    return {"approved": decision.approved, "comment": decision.comment, "via": decision.via}


@app.workflow(on="parcels.ready")
async def parcels(ctx):
    return await ctx.map(deliver, [1, 2])


@app.workflow(max_concurrency=1)
async def deliver(ctx, id: int):
    await ctx.sleep("1h")


@app.workflow()
async def label(ctx, id: int):
    raise ValueError(f"<b>no paper</b> for {id}")
"""
DRIVER = shutil.which("chromedriver")
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
    assert f'href="#run={parent["id"]}"' in page and "Parent run" in told


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_child_that_is_not_launched_yet_says_why(server: str, tmp_path: Path) -> None:
    with Client(server) as client:
        event = client.publish("parcels.ready", source="shop", payload={})

        def held() -> tuple[str, str] | None:
            found = client.request("GET", "/v1/runs", event_id=event.id)["runs"]
            detail = client.request("GET", f"/v1/runs/{found[0]['id']}") if found else {}
            children = detail.get("children", ())
            waiting = [one["run_id"] for one in children if one["run_id"] and not one["is_launched"]]
            is_so = len(children) == 2 and len(waiting) == 1
            is_so = is_so and client.request("GET", f"/v1/explain/{waiting[0]}")["waits_for"] == "a free slot"
            return (found[0]["id"], waiting[0]) if is_so else None

        parent, child = eventually(held, "one child is held")
    assert "not launched" in text_of(shown(f"{server}/#run={parent}", tmp_path / "parent"))
    told = text_of(shown(f"{server}/#run={child}", tmp_path / "child"))
    assert "This run is not launched yet: deliver waits for a free slot: 1 of 1 slots" in told, told


class Driven:
    """A browser that is driven by the WebDriver protocol."""

    def __init__(self, driver: str, profile: Path) -> None:
        self._http = httpx.Client(base_url=driver, timeout=PATIENCE_SECONDS)
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": BROWSER}
        asked = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._path = f"/session/{self._post('/session', asked)['sessionId']}"

    def open(self, url: str) -> None:
        self._post(f"{self._path}/url", {"url": url})

    def run(self, script: str, *given: Any) -> Any:
        return self._post(f"{self._path}/execute/sync", {"script": script, "args": given})

    def close(self) -> None:
        self._http.delete(self._path)
        self._http.close()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Driven]:
    assert DRIVER is not None
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = next(found[1] for line in process.stdout if (found := re.search(r"on port (\d+)\.", line)))
        driven = Driven(f"http://127.0.0.1:{port}", tmp_path / "profile")
        yield driven
        driven.close()
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def asked(client: Client, number: int) -> dict[str, Any]:
    """The approval of a run that is started here."""
    run_id = client.start("approve", {"id": number}).run_id

    def of_run() -> dict[str, Any] | None:
        found = client.request("GET", "/admin/approvals")["approvals"]
        return next((one for one in found if one["run_id"] == run_id), None)

    return eventually(of_run, "the run asks for an approval")


@pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs Chromium and chromedriver")
def test_an_operator_decides_an_approval(server: str, browser: Driven) -> None:
    with Client(server) as client:
        approval = asked(client, 8)
        browser.open(f"{server}/#run={approval['run_id']}")
        buttons = "[...document.querySelectorAll('.decide button')]"
        titles = eventually(lambda: browser.run(f"return {buttons}.map((one) => one.textContent)"), "the buttons")
        assert titles == ["Approve", "Reject"]
        browser.run("document.querySelector('.decide input').value = 'not \u003cb\u003etoday\u003c/b\u003e'")
        browser.run(f"{buttons}[1].click()")
        run = eventually(
            lambda: (found := client.request("GET", f"/v1/runs/{approval['run_id']}")["run"])["finished_at"] and found,
            "the run goes on",
        )
        assert run["output"] == {"approved": False, "comment": "not <b>today</b>", "via": "operator"}
        eventually(lambda: not browser.run(f"return {buttons}.length"), "nothing is left to decide")
        told = eventually(
            lambda: browser.run("return [...document.querySelectorAll('.story p')].map((one) => one.textContent)"),
            "what was decided is shown",
        )
        assert [text for text in told if re.fullmatch(r"rejected by \S+ \(operator\): not <b>today</b>", text)], told


@pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="needs Chromium and chromedriver")
def test_why_a_decision_was_refused_is_shown(server: str, browser: Driven) -> None:
    with Client(server) as client:
        approval = asked(client, 9)
        browser.open(f"{server}/#run={approval['run_id']}")
        click = "const one = document.querySelector('.decide button'); one?.click(); return Boolean(one)"
        eventually(lambda: browser.run("return document.querySelector('.decide')"), "the buttons")
        browser.run("document.querySelector('.decide input').value = 'x'.repeat(1001)")
        assert browser.run(click)
        why = eventually(
            lambda: browser.run("return document.querySelector('.decide [role=status]').textContent"), "why"
        )
        assert "comment" in why
        client.request("POST", f"/admin/approvals/{approval['id']}/approve", body={})
