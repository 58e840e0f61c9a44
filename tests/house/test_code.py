"""The shape of the code: sizes, names, types, and which modules may read the environment and the clock."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import tidegate

SOURCE = Path(tidegate.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60

# What exceeds the sizes, each with the reason why it stays whole.
LARGE: dict[str, str] = {}

MAX_FILES = 16
# Folders of any size: their files are independent of each other, and a reader finds the one to open by its name.
FLAT = {"model": "one module per noun", "store": "one module per aggregate", "cli": "one module per command group"}

# How often the code of each folder says `Any`. Numbers may only shrink: write `object` for what is only inspected,
# or the type that it has. What is left stands at the seams: JSON values, rows of the driver, libraries without types.
ANY_BUDGET = {
    ".": 59,
    "api": 44,
    "api/admin": 2,
    "api/v1": 26,
    "cli": 125,
    "flow/call": 32,
    "flow/code": 69,
    "flow/control": 11,
    "flow/decide": 11,
    "flow/hold": 1,
    "flow/keep": 5,
    "flow/look": 2,
    "flow/look/near": 1,
    "flow/run": 3,
    "model": 111,
    "queue": 18,
    "store": 68,
    "telemetry": 37,
}

BROAD_EXCEPT = re.compile(r"#\s*noqa:[^#\n]*\bBLE001\b(?P<reason>.*)")


def functions(file: Path) -> list[tuple[str, int]]:
    tree = ast.parse(file.read_text())
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in nodes]


def test_modules_and_functions_are_small() -> None:
    large = {f.name for f in FILES if len(f.read_text().splitlines()) > MAX_MODULE_LINES}
    large |= {f"{f.name} {name}" for f in FILES for name, lines in functions(f) if lines > MAX_FUNCTION_LINES}
    assert large == set(LARGE)


def folder_of(file: Path, root: Path) -> str:
    return file.parent.relative_to(root).as_posix()


def folder_sizes(root: Path) -> Counter[str]:
    return Counter(folder_of(file, root) for file in root.rglob("*.py") if file.name != "__init__.py")


def test_folders_are_small() -> None:
    sizes = folder_sizes(SOURCE)
    assert sizes.keys() >= FLAT.keys(), "a folder that is named here is gone"
    large = {name: size for name, size in sizes.items() if name not in FLAT and size > MAX_FILES}
    assert not large, f"more than {MAX_FILES} files: {large}"


def shared_class_names(root: Path) -> set[str]:
    trees = [ast.parse(file.read_text()) for file in root.rglob("*.py")]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {name for name, count in names.items() if count > 1}


def test_a_class_name_stands_for_one_class() -> None:
    assert shared_class_names(SOURCE) == set()


def count_any(root: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for file in root.rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        counts[folder_of(file, root)] += sum(
            (isinstance(node, ast.Name) and node.id == "Any")
            or (isinstance(node, ast.Attribute) and node.attr == "Any")
            for node in nodes
        )
    return counts


def test_any_stays_within_the_budget() -> None:
    found = {name: count for name, count in count_any(SOURCE).items() if count}
    assert found == ANY_BUDGET, "lower the number with the code; write a type in place of a further `Any`"


def broad_excepts_without_reason(root: Path) -> list[str]:
    return [
        f"{file.relative_to(root)}:{number}"
        for file in sorted(root.rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (found := BROAD_EXCEPT.search(line)) and not re.match(r" - \S", found["reason"])
    ]


def test_every_broad_except_gives_its_reason() -> None:
    assert broad_excepts_without_reason(SOURCE) == []
    assert sum(len(BROAD_EXCEPT.findall(file.read_text())) for file in FILES) > 20, "the pattern finds none"


def test_the_checks_notice_what_they_look_for(tmp_path: Path) -> None:
    (tmp_path / "flow").mkdir()
    (tmp_path / "flow" / "__init__.py").write_text("")
    (tmp_path / "flow" / "one.py").write_text("import typing\nclass Same: ...\nx: typing.Any = 1\n")
    (tmp_path / "two.py").write_text(
        "from typing import Any\nclass Same: ...\nclass Other:\n    y: list[Any] = []\n"
        "try: ...\nexcept Exception: ...  # noqa: BLE001\n"
        "try: ...\nexcept Exception: ...  # noqa: BLE001 - the others continue\n"
        "try: ...\nexcept Exception: ...  # noqa: S110, BLE001 because\n"
    )
    assert folder_sizes(tmp_path) == {"flow": 1, ".": 1}
    assert shared_class_names(tmp_path) == {"Same"}
    assert count_any(tmp_path) == {"flow": 1, ".": 1}
    assert broad_excepts_without_reason(tmp_path) == ["two.py:6", "two.py:10"]


def users_of(pattern: str) -> set[str]:
    return {str(f.relative_to(SOURCE)) for f in FILES if re.search(pattern, f.read_text())}


def test_the_environment_is_read_in_one_place() -> None:
    assert users_of(r"\benviron\b|getenv|putenv") == {"settings.py"}


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
assert cel.cli.__file__  # importing it loads the real module
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
