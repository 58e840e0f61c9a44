"""The wheel, installed outside the repository, has everything: SQL files, pages, the typed marker, a working `dev`."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.acceptance.conftest import DEMO, ROOT
from tidegate.client import Client


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("*.whl"))


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {n for n in names if not n.split("/")[0].endswith(".dist-info")}
    expected = {
        f"tidegate/{f.relative_to(ROOT / 'src' / 'tidegate')}"
        for f in (ROOT / "src" / "tidegate").rglob("*")
        if f.is_file() and "__pycache__" not in f.parts
    }
    assert package == expected
    assert {
        "tidegate/py.typed",
        "tidegate/store/migrations/0001_foundation.sql",
        "tidegate/store/events.sql",
    } <= package
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_installed_elsewhere_dev_works(wheel: Path, tmp_path: Path) -> None:
    """A clean environment: its own Tidegate, the dependencies of this one, none of this repository."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    packages = environment / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    zipfile.ZipFile(wheel).extractall(packages)
    # The dependencies only: a path file of the repository's editable install is not followed from here.
    (packages / "dependencies.pth").write_text("\n".join(p for p in site.getsitepackages() if "site-packages" in p))
    python = environment / "bin" / "python"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TIDEGATE_", "PYTHON"))}
    where = subprocess.run(
        [python, "-c", "import tidegate; print(tidegate.__file__)"],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=clean,
    )  # fmt: skip
    assert str(packages) in where.stdout
    script = "import sys; sys.argv[0] = 'tidegate'; from tidegate.cli import main; main()"
    dev = subprocess.Popen(
        [python, "-u", "-c", script, "dev", str(DEMO), "--port", "0"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=clean,
    )  # fmt: skip
    try:
        assert dev.stdout is not None
        address = ""
        for line in dev.stdout:
            if "API and console on" in line:
                address = line.split(" on ")[1].split()[0]
            if "Ctrl-C" in line:
                break
        with Client(address) as client:
            assert (
                client.publish("order.created", source="shop.api", payload={"id": 1, "amount": 1}).status == "accepted"
            )
        assert (tmp_path / ".tidegate" / "pg" / "PG_VERSION").exists()
    finally:
        dev.terminate()
        assert dev.wait(60) == 0
        dev.stdout.close()  # type: ignore[union-attr]
