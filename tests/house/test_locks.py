"""The locks of images and CI: everything that is depended on, with hashes, for every Python, and no index in them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]
OF = {
    "image": [*EXTRAS["bullmq"], *EXTRAS["otel"], *GROUPS["build"]],
    "dev": [*EXTRAS["embedded"], *GROUPS["dev"]],
}


def name(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement)[0].lower().replace("_", "-").replace(".", "-")


@pytest.mark.parametrize("file", OF)
def test_everything_is_locked_with_its_hashes(file: str) -> None:
    text = (ROOT / "requirements" / f"{file}.txt").read_text()
    entries = re.split(r"\n(?=[a-z0-9])", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    locked = {}
    for entry in filter(str.strip, entries):
        found = re.match(r"([a-z0-9.-]+)(?:\[[a-z0-9,-]+\])?==(\S+)", entry)
        assert found is not None and "--hash=sha256:" in entry, entry[:80]
        locked[found[1]] = found[2]
    wanted = {name(requirement) for requirement in [*PROJECT["project"]["dependencies"], *OF[file]]}
    assert wanted <= locked.keys(), "run `make lock`"
    assert not re.search(r"https?://|file:|--(extra-)?index-url|--find-links", text)


def test_images_and_ci_use_them() -> None:
    assert "--require-hashes -r requirements/image.txt" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert "LOCKED=1" in (ROOT / ".ci" / "run").read_text()
    assert "--require-hashes -r requirements/dev.txt" in (ROOT / "Makefile").read_text()
