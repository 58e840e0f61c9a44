"""Two releases of Tidegate side by side: the last one, from the history of this clone, and the one after this code.

The release after this code is a copy of it with the migrations of `chaos/next_release` and a higher version. So the
machinery of upgrades is exercised whether or not there is a release, and whether or not there are new migrations.
"""

from __future__ import annotations

import compileall
import io
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tidegate
from tidegate.store import migrate
from tidegate.store.migration import Migration

ROOT = Path(__file__).parent.parent
SAMPLES = Path(__file__).parent / "next_release"
# What came before was never released.
FIRST = (0, 2, 0)
_PARTS = ("src", "chaos")


class Release(NamedTuple):
    """Its version, and a folder with its `src` and `chaos`."""

    version: str
    folder: Path

    def environment(self, given: dict[str, str]) -> dict[str, str]:
        """What its processes are given: the same, and its own code."""
        return given | {"PYTHONPATH": os.pathsep.join([str(self.folder / "src"), str(self.folder)])}


class NoRelease(Exception):
    """There is no earlier release here; the message says why."""


def current() -> Release:
    """This code."""
    return Release(tidegate.__version__, ROOT)


def samples(base: int) -> list[Migration]:
    """The migrations of the release after one whose last migration is `base`; `+2` in a file is the second of them."""
    found = []
    for path in sorted(SAMPLES.glob("*.sql")):
        number, _, name = path.stem.partition("_")
        sql = re.sub(r"(?m)^-- needs: \+(\d+)$", lambda plus: f"-- needs: {base + int(plus[1])}", path.read_text())
        found.append(Migration(base + int(number), f"{base + int(number):04}_{name}", sql))
    return found


def next_release(folder: Path, without: Sequence[str] = ()) -> Release:
    """The release after this code, made in an empty folder; `without` kinds of sample migrations."""
    for part in _PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("results"))
    for migration in samples(migrate.latest()):
        if migration.kind not in without:
            path = folder / "src" / "tidegate" / "store" / "migrations" / f"{migration.name}.sql"
            path.write_text(migration.sql)
    major, minor, *_ = tidegate.__version__.split(".")
    version = f"{major}.{int(minor) + 1}.0"
    home = folder / "src" / "tidegate" / "__init__.py"
    home.write_text(home.read_text().replace(f'"{tidegate.__version__}"', f'"{version}"'))
    return _compiled(Release(version, folder))


def last_release(folder: Path, clone: Path = ROOT) -> Release:
    """The code of the last release, unpacked into an empty folder: of the first commit that has its version in
    pyproject.toml and does not call it unreleased in CHANGELOG.md. NoRelease outside a clone, and while there is none
    before the code that is checked out."""
    commit, version = _last(clone)
    packed = subprocess.run(
        ["git", "-C", str(clone), "archive", "--format=zip", commit, *_PARTS], capture_output=True, check=True
    ).stdout
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        archive.extractall(folder)
    return _compiled(Release(version, folder))


def _compiled(release: Release) -> Release:
    """Once, for the many processes that are started where Python is told to write no bytecode."""
    compileall.compile_dir(release.folder, quiet=2)
    return release


def _last(clone: Path) -> tuple[str, str]:
    if shutil.which("git") is None or not (clone / ".git").exists():
        raise NoRelease("this is not a clone: there is no history to find the last release in")
    head = _git(clone, "rev-parse", "HEAD").strip()
    # Where a version or a heading of the changelog changed.
    changes = _git(
        clone, "log", "--format=%H", "-G", "^(version = |## )", "--", "pyproject.toml", "CHANGELOG.md"
    ).split()
    for commit in changes:  # newest first
        version = _version(clone, commit)
        if version is None or commit == head or version == _version(clone, f"{commit}^"):
            continue
        if tuple(map(int, version.split("."))) >= FIRST:
            return commit, version
    raise NoRelease(f"the history has no release before this code: the first one is {'.'.join(map(str, FIRST))}")


def _version(clone: Path, commit: str) -> str | None:
    """The version that a commit has, if it is one of a release, and released."""
    found = re.search(r'(?m)^version = "(\d+\.\d+\.\d+)"$', _file(clone, commit, "pyproject.toml"))
    if found is None or f"\n## Unreleased (will be {found[1]})\n" in _file(clone, commit, "CHANGELOG.md"):
        return None
    return found[1]


def _file(clone: Path, commit: str, name: str) -> str:
    """Its text; empty where there is none: the first commit has no parent, and a shallow clone not every one."""
    try:
        return _git(clone, "show", f"{commit}:{name}")
    except subprocess.CalledProcessError:
        return ""


def _git(clone: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(clone), *arguments], capture_output=True, text=True, check=True).stdout
