"""Every log line has an action of the form `noun.verb`, and every action is in docs/operations/logs.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tidegate

SOURCE = Path(tidegate.__file__).parent
PAGE = SOURCE.parent.parent / "docs" / "operations" / "logs.md"
DOCUMENTED = {
    action
    for row in re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    for action in re.findall(r"`([^`]+)`", row)
}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
LOGGERS = {"_log", "line"}
ACTION = re.compile(r"[a-z_]+\.[a-z_]+")


def actions(file: Path) -> Iterator[tuple[int, str]]:
    """The line and the action of each call; `*` stands for what is known only when it runs."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call):
            continue
        to_logger = (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in LOGGERS
            and node.func.attr in LEVELS
        )
        if to_logger or (isinstance(node.func, ast.Name) and node.func.id == "log"):
            assert node.args, f"{file.name}:{node.lineno} logs without an action"
            yield from ((node.lineno, text) for text in texts(node.args[0]))


def texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    else:
        assert isinstance(node, ast.Constant), ast.dump(node)
        yield str(node.value)


FOUND = [(f"{file.name}:{line}", text) for file in sorted(SOURCE.rglob("*.py")) for line, text in actions(file)]


def test_actions_are_a_noun_and_a_verb() -> None:
    assert len(FOUND) > 80
    assert [(place, text) for place, text in FOUND if not ACTION.fullmatch(text.replace("*", "x"))] == []


def test_actions_are_documented() -> None:
    missing = []
    for place, text in FOUND:
        pattern = re.compile(re.escape(text).replace(r"\*", "[a-z_]+"))
        if not any(pattern.fullmatch(action) for action in DOCUMENTED):
            missing.append((place, text))
    assert missing == []


def test_what_is_documented_is_logged() -> None:
    patterns = [re.compile(re.escape(text).replace(r"\*", "[a-z_]+")) for _, text in FOUND]
    assert {a for a in DOCUMENTED if not any(p.fullmatch(a) for p in patterns)} == {"library.log"}
    assert "library.log" in (SOURCE / "telemetry" / "logs.py").read_text()


def test_no_line_holds_what_users_sent() -> None:
    forbidden = r"\b(payload|parameters|output|result|secret|headers|body|metadata|dedupe_key|idempotency_key)="
    for file in sorted(SOURCE.rglob("*.py")):
        for call in re.findall(r"\b(?:_log\.\w+|log|line\.\w+)\(\s*f?\"[a-z_.{}]+\".*?\n", file.read_text()):
            assert not re.search(forbidden, call), f"{file.name}: {call}"
