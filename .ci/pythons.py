"""`make test-pythons`: the tests on each Python that is found: on the PATH, the system's own, pyenv's.

Each has a virtual environment of its own under `.venv-pythons/`. Arguments are pytest's; `--others` leaves out the
Python that runs this, whose tests are run anyway.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv-pythons"
OLDEST = (3, 11)
ASK = "import sys; print(sys.implementation.name, '.'.join(map(str, sys.version_info[:3])))"


def candidates() -> Iterator[Path]:
    """Where a Python may be."""
    yield Path(sys.executable)
    yield Path("/usr/bin/python3")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for folder in (*os.environ.get("PATH", "").split(os.pathsep), *sorted(pyenv.glob("versions/*/bin"))):
        yield from sorted(Path(folder).glob("python3*"))


def found() -> dict[str, Path]:
    """The Pythons that this project can run on, by version; of each version the first."""
    pythons: dict[str, Path] = {}
    for python in candidates():
        if python.name.removeprefix("python3").replace(".", "").strip("0123456789") or not os.access(python, os.X_OK):
            continue  # python3-config and the like
        asked = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=False)
        name, _, version = asked.stdout.strip().partition(" ")
        if asked.returncode == 0 and name == "cpython" and tuple(map(int, version.split(".")[:2])) >= OLDEST:
            pythons.setdefault(version, python)
    return pythons


def environment(version: str, python: Path) -> Path:
    """A virtual environment with everything that the tests need; its Python."""
    folder = FOLDER / version
    inside, ready = folder / "bin" / "python", folder / ".ready"
    wanted = ROOT / "pyproject.toml"
    if not ready.exists() or ready.stat().st_mtime < wanted.stat().st_mtime:
        print(f"test-pythons: {version}: installing ({python})", flush=True)
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)  # Debian's has no pip of its own
        pip = [sys.executable, "-m", "pip", "--python", inside, "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "--group", "dev", "-e", ".[embedded]"], cwd=ROOT, check=True)
        ready.touch()
    return inside


def main(arguments: list[str]) -> int:
    own = ".".join(map(str, sys.version_info[:3]))
    pythons = found()
    if "--others" in arguments:
        arguments.remove("--others")
        pythons.pop(own, None)
    statuses = {}
    for version, python in pythons.items():
        inside = environment(version, python)
        print(f"test-pythons: {version}", flush=True)
        jobs = ["-n", os.environ.get("JOBS", "2"), "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not alone"]
        statuses[version] = subprocess.run(
            [inside, "-m", "pytest", *jobs, *arguments], cwd=ROOT, check=False
        ).returncode
    for version, status in statuses.items():
        print(f"test-pythons: {version}: {'passed' if status == 0 else f'failed ({status})'}")
    return int(any(statuses.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
