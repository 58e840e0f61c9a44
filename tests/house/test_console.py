"""The console shows what events carry, which is untrusted: there is no way for it to become part of the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

STATIC = resources.files("tidegate.api") / "static"
# Everything that makes a page or a program of text.
MAKERS = (
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|createContextualFragment|DOMParser|srcdoc|"
    r"\beval\b|new Function|set(Timeout|Interval)\(\s*[\"'`]|\.on[a-z]+\s*=[^=>]|javascript:|localStorage|"
    r"document\.cookie"
)


# The modules of the console.
CONSOLE = ("console.js", "panels.js", "parts.js")


@pytest.mark.parametrize("name", [*CONSOLE, "docs.js"])
def test_text_stays_text(name: str) -> None:
    assert re.findall(MAKERS, (STATIC / name).read_text()) == []


@pytest.mark.parametrize("name", ["console.html", "docs.html"])
def test_pages_hold_no_program_of_their_own(name: str) -> None:
    page = (STATIC / name).read_text()
    assert (
        re.findall(r"(?i)<script(?![^>]*\bsrc=\"/static/)|<style|\son[a-z]+=|\sstyle=|javascript:|<base|<iframe", page)
        == []
    )
    assert set(re.findall(r"(?:src|href)=\"([^\"#]*)\"", page)) <= {
        "/static/console.js", "/static/docs.js", "/static/style.css", "/static/icon.svg", "/docs", "/", "/openapi.json",
    }  # fmt: skip


def test_every_link_is_made_here() -> None:
    """An address from outside becomes a link only where it is checked to be http."""
    links = [link for name in CONSOLE for link in re.findall(r"href: (.*?)[ ,}]", (STATIC / name).read_text())]
    assert links and all(link.startswith("`#") or link == "where" for link in links), links
    assert "/^https?:/.test(where) ?" in (STATIC / "console.js").read_text()


def test_causes_say_what_to_do() -> None:
    """As on the command line: the same words of the same answer."""
    assert "visible(`do: ${cause.do}`)" in (STATIC / "console.js").read_text()


# Just enough of a browser for a panel: elements that have text, and one answer of the API.
BROWSER = """
class Element {
  constructor() { this.children = []; }
  setAttribute() {}
  append(...more) { this.children.push(...more); }
  get text() { return this.children.map((one) => one instanceof Element ? one.text : String(one)).join(" "); }
}
globalThis.document = { createElement: () => new Element() };
globalThis.sessionStorage = { getItem: () => null };
const answer = { ok: true, status: 200, headers: { get: () => "application/json" }, text: async () => process.argv[3] };
globalThis.fetch = async () => answer;
const { runPanel } = await import(process.argv[2]);
const [, parts] = await runPanel("r");
console.log(parts.filter((one) => one instanceof Element).map((one) => one.text).join("\\n"));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not on the PATH")
def test_a_decided_approval_is_a_sentence(tmp_path: Path) -> None:
    for name in CONSOLE:
        (tmp_path / name).write_text((STATIC / name).read_text())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "browser.js").write_text(BROWSER)
    step = {"id": "s", "kind": "wait", "status": "succeeded", "retry_attempts": 0, "next_attempt_at": None,
            "error": None, "retry_metadata": {"reason": "approval"}, "result": None}  # fmt: skip
    payload = {"approved": False, "by": "ann", "via": "link", "comment": "too <b>much</b>\nsecond line"}
    steps = [
        step | {"name": "boss", "is_timed_out": False, "result": {"payload": payload}},
        step | {"name": "late", "is_timed_out": True},
        step | {"name": "plain", "is_timed_out": False, "retry_metadata": {}, "result": {"answer": 42}},
    ]
    at = "2026-06-01T12:00:00Z"
    run = {"id": "r", "workflow": "w", "status": "succeeded", "created_at": at, "started_at": at, "finished_at": at,
           "parameters": {}, "output": None, "error": None, "attempts": 1}  # fmt: skip
    answer = {"run": run, "steps": steps, "children": [], "children_total": 0}
    drawn = subprocess.run(
        ["node", tmp_path / "browser.js", tmp_path / "panels.js", json.dumps(answer)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "rejected by ann (link): too <b>much</b>" in drawn and "nobody decided" in drawn
    assert '"payload"' not in drawn and '"answer": 42' in drawn
