"""Two versions on one database under load, forwards and back, with kills: every verdict is 0.

`make chaos` is the long version.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from chaos import releases, skew

import tidegate
from tidegate.store import migrate

SHORT = skew.Choice(seed=1, rounds=1, per_second=40, waits=False, progress=10)

pytestmark = pytest.mark.timeout(900)


def side_by_side(folder: Path, old: releases.Release, new: releases.Release) -> skew.Found:
    """What came of it; nothing was broken, and both versions have worked."""
    found = asyncio.run(skew.run(folder / "cluster", old, new, SHORT, print))
    assert found.is_clean, skew.table(found)
    assert found.acknowledged > 100 and sum(found.changes.values()) > 8
    assert found.effects_by.keys() == {"old", "new"}
    return found


def test_two_versions_side_by_side(tmp_path: Path) -> None:
    """This code, and the release after it."""
    new = releases.next_release(tmp_path / "next")
    found = side_by_side(tmp_path, releases.current(), new)
    assert found.new != found.old == tidegate.__version__
    assert found.applied == [one.name for one in releases.samples(migrate.latest())]
    assert found.waited == found.applied[-1:]  # the contraction, while processes of this code were alive


def test_the_last_release_and_this_code(tmp_path: Path) -> None:
    try:
        old = releases.last_release(tmp_path / "last")
    except releases.NoRelease as exc:
        pytest.skip(str(exc))
    side_by_side(tmp_path, old, releases.current())


# How the last release is found ----------------------------------------------------------------------------------------


def git(clone: Path, *arguments: str) -> None:
    named = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(clone), *named, *arguments], check=True, capture_output=True)


def commit(clone: Path, version: str, content: str) -> None:
    (clone / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n# {content}\n')
    for part in ("src", "chaos"):
        (clone / part).mkdir(exist_ok=True)
        (clone / part / "content").write_text(content)
    git(clone, "add", "-A")
    git(clone, "commit", "-m", content)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("no git")
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init")
    return folder


def test_the_last_release_is_the_commit_that_released_its_version(clone: Path, tmp_path: Path) -> None:
    commits = [("0.1.0", "", "never released"), ("0.2.0", "0.2.0", "in work"), ("0.2.0", "0.2.0", "still in work")]
    commits += [("0.2.0", "", "first"), ("0.2.0", "", "after the first"), ("0.3.0", "0.3.0", "in work again")]
    commits += [("0.3.0", "", "second"), ("0.3.0", "", "after the second")]
    found = []
    for n, (version, unreleased, content) in enumerate(commits):
        heading = f"Unreleased (will be {unreleased})" if unreleased else version
        (clone / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n")
        commit(clone, version, content)
        try:
            release = releases.last_release(tmp_path / str(n), clone)
        except releases.NoRelease as exc:
            found.append(str(exc)[:26])
        else:
            found.append((release.folder / "src" / "content").read_text())
    none = "the history has no release"
    assert found == [none, none, none, none, "first", "first", "first", "second"]


def test_outside_a_clone_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(releases.NoRelease, match="not a clone"):
        releases.last_release(tmp_path / "last", tmp_path)
