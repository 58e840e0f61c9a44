"""Of the tests themselves: each of them asserts something, by itself or through a function of the tests that does."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of pytest; and of Hypothesis, whose machines assert in their rules.
ASSERTING = {"raises", "run_state_machine_as_test"}

Named = tuple[str, str]  # a module and a function in it


def named_in(module: str, tree: ast.Module) -> dict[str, Named]:
    """What a module's plain names stand for: its own functions, and those that it imports."""
    found = {
        one.name: (module, one.name) for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and one.module:
            found |= {alias.asname or alias.name: (one.module, alias.name) for alias in one.names}
    return found


def calls_of(function: ast.AST, names: dict[str, Named]) -> set[Named]:
    """The functions that it calls, or passes on to be called."""
    used = {one.id for one in ast.walk(function) if isinstance(one, ast.Name)}
    return {names[name] for name in used & names.keys()}


def is_asserting(function: ast.AST) -> bool:
    nodes = list(ast.walk(function))
    used = {
        one.attr if isinstance(one, ast.Attribute) else one.id
        for one in nodes
        if isinstance(one, ast.Attribute | ast.Name)
    }
    return any(isinstance(one, ast.Assert) for one in nodes) or bool(used & ASSERTING)


def test_every_test_asserts() -> None:
    calls: dict[Named, set[Named]] = {}
    asserting: set[Named] = set()
    for file in (ROOT / "tests").rglob("*.py"):
        module, tree = ".".join(file.relative_to(ROOT).with_suffix("").parts), ast.parse(file.read_text())
        names = named_in(module, tree)
        for function in tree.body:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                calls[module, function.name] = calls_of(function, names)
                if is_asserting(function):
                    asserting.add((module, function.name))
    while more := {function for function, used in calls.items() if used & asserting} - asserting:
        asserting |= more
    tests = {function for function in calls if function[1].startswith("test_")}
    assert len(tests) > 1000
    assert sorted(tests - asserting) == []
