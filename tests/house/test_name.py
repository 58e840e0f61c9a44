"""The product has one name, and no text says to install it by name from an index, where it may be another package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Written apart, so that this file does not hold it.
FORMER = "head" + "gate"
SHORT = re.compile(r"\bh" + r"g(?![a-z0-9])", re.IGNORECASE)
BY_NAME = re.compile(r"(?:pip3?|pipx|uv|uvx|poetry|conda) [^\n`]*?[ '\"]tidegate(?![\w./-]*\.whl)(?=[\['\"=<>~ `\n]|$)")


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    names = listed.stdout.decode().split("\0")[:-1]
    if not names:  # a source archive has no index
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_nothing_of_the_former_name_is_left() -> None:
    found = []
    for file in tracked():
        name, body = str(file.relative_to(ROOT)), file.read_bytes()
        if FORMER in name.lower() or FORMER.encode() in body.lower():
            found.append(name)
        elif file.suffix != ".png" and SHORT.search(body.decode(errors="replace")):
            found.append(f"{name} (short form)")
    assert not found


def test_no_text_says_to_install_by_name_from_an_index() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in tracked()
        if file.suffix in {".md", ".py", ".yml", ".toml", ".html", ".js", ""} and file != Path(__file__)
        for line in file.read_text(errors="replace").splitlines()
        if BY_NAME.search(line)
    ]
    assert not found


def test_an_instruction_to_install_by_name_would_be_noticed() -> None:
    for line in (
        "pip install tidegate",
        "pip install 'tidegate[otel]'",
        "uv add tidegate",
        'pipx install "tidegate==1"',
    ):
        assert BY_NAME.search(line), line
    for line in (
        "pip install './tidegate[embedded]'",
        "pip install './dist/tidegate-0.2.0-py3-none-any.whl[embedded]'",
    ):
        assert not BY_NAME.search(line), line
