"""The console shows what events carry, which is untrusted: there is no way for it to become part of the page."""

from __future__ import annotations

import re
from importlib import resources

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
