"""The shape of the code: sizes, and who may read the environment and the clock."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import tidegate

SOURCE = Path(tidegate.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

# What exceeds the sizes, each with the reason why it stays whole.
LARGE: dict[str, str] = {}


def functions(file: Path) -> list[tuple[str, int]]:
    tree = ast.parse(file.read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in nodes]


def test_modules_and_functions_are_small() -> None:
    large = {f.name for f in FILES if len(f.read_text().splitlines()) > MAX_MODULE_LINES}
    large |= {f"{f.name} {name}" for f in FILES for name, lines in functions(f) if lines > MAX_FUNCTION_LINES}
    assert large == set(LARGE)


def users_of(pattern: str) -> set[str]:
    return {str(f.relative_to(SOURCE)) for f in FILES if re.search(pattern, f.read_text())}


def test_the_environment_is_read_in_one_place() -> None:
    assert users_of(r"os\.environ|getenv") == {"settings.py"}


def test_the_wall_clock_is_read_in_one_place() -> None:
    assert users_of(r"datetime\.now|utcnow|time\.time|time_ns\(") == {"clock.py"}


def test_no_vague_module_names() -> None:
    assert not {f.stem for f in FILES} & {"utils", "helpers", "common", "manager", "base", "misc"}


def test_importing_reads_no_environment_and_loads_little() -> None:
    probe = """
import os, sys
class Forbidden(dict):
    def __getitem__(self, key): raise AssertionError(f"read {key}") if key.startswith("TIDEGATE") else KeyError(key)
    def get(self, key, default=None): assert not str(key).startswith("TIDEGATE"), key; return default
os.environ = Forbidden()
import tidegate
assert not {"asyncpg", "httpx", "starlette", "uvicorn", "structlog", "msgspec"} & set(sys.modules), sorted(sys.modules)
from tidegate import Tidegate, Client, Retry
app = Tidegate()
@app.workflow(on="a.b")
async def f(ctx): ...
import tidegate.cli.process
assert "prompt_toolkit" not in sys.modules  # a terminal, for a process that has none
import cel.cli
assert cel.cli.__file__  # the real one, for whoever wants it
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
