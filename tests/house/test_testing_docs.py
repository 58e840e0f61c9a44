"""The code in docs/testing.md runs, with pytest-asyncio and without it; so does that of docs/transactions.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tidegate.settings import Settings
from tidegate.store import transactions
from tidegate.testing import Harness

DOCS = Path(__file__).parent.parent.parent / "docs"
TEXT = (DOCS / "testing.md").read_text()
FILES = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", TEXT, re.DOTALL))
TRANSACTIONS = (DOCS / "transactions.md").read_text()


def run_pytest(folder: Path, *options: str) -> str:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly", *options)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_tests_pass(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert sorted(FILES) == ["app.py", "pyproject.toml", "test_app.py", "test_plain.py"]
    said = run_pytest(tmp_path)
    assert "5 passed" in said and "run.succeeded" not in said


def test_without_pytest_asyncio(tmp_path: Path) -> None:
    """The plugin runs the tests itself."""
    (tmp_path / "app.py").write_text(FILES["app.py"])
    text = re.sub(r"@pytest.fixture\(autouse=True\)\n", "", FILES["test_app.py"]).replace(
        "(tidegate):\n    ", "(tidegate):\n    await tables(tidegate)\n    "
    )
    text = text.replace("async def tables(tidegate):  # with", "async def tables(tidegate):\n    # with")
    (tmp_path / "test_app.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntidegate_app = app.py\n")
    assert "3 passed" in run_pytest(tmp_path, "-p", "no:asyncio", "test_app.py")


def test_without_an_application_it_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(tidegate): ...\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "the tidegate fixture needs an application" in done.stdout


def test_without_a_mode_of_pytest_asyncio_it_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("from tidegate import Tidegate\n\napp = Tidegate()\n")
    (tmp_path / "test_it.py").write_text("async def test_it(tidegate): ...\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntidegate_app = app.py\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1 and 'set `asyncio_mode = "auto"`' in done.stdout, done.stdout


def test_loading_the_plugin_imports_little() -> None:
    probe = "import sys, tidegate.pytest_plugin as p; assert not {'asyncpg', 'msgspec', 'httpx'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


async def test_the_transactions_do_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("transaction_docs")
    monkeypatch.setitem(sys.modules, "transaction_docs", module)
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", TRANSACTIONS, re.DOTALL))
    exec(compile(code, "docs/transactions.md", "exec"), module.__dict__)
    (tables,) = re.findall(r"```sql\n(.*?)```", TRANSACTIONS, re.DOTALL)
    async with Harness(module.app) as harness:
        address = harness.database_url.replace("postgresql://", "postgresql+psycopg://")
        monkeypatch.setenv("SHOP_DATABASE_URL", address)
        async with harness.connection() as connection:
            await connection.execute(tables)
        harness.fail_step("pay", times=2)
        for kind, amount in (("received", 5), ("received", 7), ("legacy", 3), ("returned", 2)):
            payload = {"customer": "ada", "amount": amount}
            await harness.publish(f"payment.{kind}", source="bank", payload=payload)
        await harness.advance("1h")
        assert max(run.output for run in await harness.runs("book")) == 12
        async with harness.connection() as connection:
            rows = await connection.fetch("select amount::int from payments order by 1")
        assert [row[0] for row in rows] == [-2, 3, 5, 7]
    module.engine().dispose()


def test_numbers() -> None:
    assert f"`TIDEGATE_TRANSACTION_CONNECTIONS` ({Settings().transaction_connections})" in TRANSACTIONS
    assert (
        f"(default {transactions.DEFAULT_SECONDS:g} s, at most {transactions.MAX_SECONDS / 3600:g} h)" in TRANSACTIONS
    )
    assert Settings().lease_ms > transactions.DEFAULT_SECONDS * 1000
