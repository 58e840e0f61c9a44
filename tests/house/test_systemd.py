"""systemd accepts the units, and they name settings and commands that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.test_deploy import CLOSING_SECONDS, DEPLOY, SETTINGS, is_checked
from tidegate.cli import cli
from tidegate.settings import Settings

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def test_units_have_valid_settings() -> None:
    lines = (DEPLOY / "systemd" / "tidegate.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    is_checked(given)
    for unit in UNITS:
        text = unit.read_text()
        assert set(re.findall(r"TIDEGATE_\w+(?==)", text)) <= SETTINGS
        for name, file in re.findall(r"^LoadCredential=(\w+):(\S+)$", text, re.MULTILINE):
            assert f"%d/{name}" in text and file == f"/etc/tidegate/{name}"
        command = re.search(r"^ExecStart=/opt/tidegate/bin/tidegate (\w+)", text, re.MULTILINE)
        assert command is not None and command[1] in cli.list_commands(None)  # type: ignore[arg-type]
    # A file of variables overrides a unit's own: a port in it would be that of all instances.
    assert not {"TIDEGATE_PORT", "TIDEGATE_METRICS_PORT"} & given.keys()
    worker = (DEPLOY / "systemd" / "tidegate-worker@.service").read_text()
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", worker, re.MULTILINE)[1])  # type: ignore[index]
    assert stop >= Settings().shutdown_ms / 1000 + CLOSING_SECONDS


def test_units_are_hardened_alike() -> None:
    hardened = {unit.read_text().partition("\n# A user that exists")[2].partition("\n\n")[0].strip() for unit in UNITS}
    assert len(UNITS) == 3 and len(hardened) == 1


def test_the_ports_of_instances_are_those_of_the_proxies() -> None:
    docs = (DEPLOY.parent / "docs" / "deploy.md").read_text()
    started = re.findall(r"tidegate-serve@(\d+)", docs)
    upstream = re.findall(
        r"^  server 127\.0\.0\.1:(\d+) max_fails=0;", (DEPLOY / "nginx" / "tidegate.conf").read_text(), re.MULTILINE
    )
    named = re.search(r"TG_UPSTREAM='(.*?)'", (DEPLOY / "caddy" / "Caddyfile").read_text())
    assert named is not None and named[1].replace("127.0.0.1:", "").split() == upstream == ["8700", "8701"]
    assert set(started) == set(upstream)
    assert "Environment=TIDEGATE_PORT=%i\n" in (DEPLOY / "systemd" / "tidegate-serve@.service").read_text()


def test_a_role_of_its_own_for_the_migration() -> None:
    added, unit = (
        (DEPLOY / "systemd" / name).read_text() for name in ("separate-roles.conf", "tidegate-migrate.service")
    )
    command = re.search(r"^ExecStart=(/.*)$", unit, re.MULTILINE)
    assert command is not None and f"ExecStart=\nExecStart={command[1]} --grant-to tidegate_app\n" in added
    for name, file in re.findall(r"^LoadCredential=(\w+):(\S+)$", added, re.MULTILINE):
        assert f"TIDEGATE_DATABASE_URL_FILE=%d/{name}" in added and file == f"/etc/tidegate/{name}"
    assert set(re.findall(r"TIDEGATE_\w+", added)) <= SETTINGS


def test_the_direct_address_behind_a_pooler() -> None:
    added, docs = (DEPLOY / "systemd" / "pooler.conf").read_text(), (DEPLOY.parent / "docs" / "deploy.md").read_text()
    [(name, file)] = re.findall(r"^LoadCredential=(\w+):(\S+)$", added, re.MULTILINE)
    assert file == f"/etc/tidegate/{name}" and f"> {file})" in docs
    assert f"\nEnvironment=TIDEGATE_DATABASE_DIRECT_URL_FILE=%d/{name}\n" in added
    assert set(re.findall(r"TIDEGATE_\w+", added)) <= SETTINGS
    [units] = re.findall(r"^for unit in (.*); do\n.*pooler\.conf", docs, re.MULTILINE)
    assert {f"{unit}.service" for unit in units.split()} == {unit.name for unit in UNITS}
    assert all(unit.name in added for unit in UNITS)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on the PATH")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    tidegate = Path(sys.executable).parent / "tidegate"
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/tidegate/bin/tidegate", str(tidegate)))
    folder = tmp_path / "tidegate-migrate.service.d"
    folder.mkdir()
    added = (DEPLOY / "systemd" / "separate-roles.conf").read_text()
    (folder / "separate-roles.conf").write_text(added.replace("/opt/tidegate/bin/tidegate", str(tidegate)))
    for unit in UNITS:
        (tmp_path / f"{unit.name}.d").mkdir(exist_ok=True)
        shutil.copy(DEPLOY / "systemd" / "pooler.conf", tmp_path / f"{unit.name}.d")
    files = [str(tmp_path / unit.name.replace("@.", "@8700." if "serve" in unit.name else "@1.")) for unit in UNITS]
    done = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and str(tmp_path) not in done.stderr, done.stderr
    for file in (tmp_path / unit.name for unit in UNITS):
        safe = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
        if "unrecognized option" not in safe.stderr:  # before systemd 250
            assert safe.returncode == 0, safe.stdout[-300:] + safe.stderr
