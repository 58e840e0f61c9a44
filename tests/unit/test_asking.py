"""Commands that take something away ask first on a terminal."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result

from tidegate.cli import cli
from tidegate.client import Client
from tidegate.errors import Unavailable

TRIGGER = "01a1ee06-77d4-7000-9277-4b7d2c6a33fd"
COMMANDS = [
    (("budgets", "delete", "openai"), "Delete budget openai?"),
    (("triggers", "delete", TRIGGER), f"Delete trigger {TRIGGER}, and cancel its waiting deliveries?"),
    (("webhooks", "delete", "shop"), "Delete the webhook of shop? Its requests are refused then."),
    (("webhooks", "retire", "shop", "ab12"), "Revoke the secret ab12 of shop now?"),
    (("workflows", "delete", "bill"), "Delete workflow bill?"),
    (("token", "revoke", "ann"), "Revoke token ann?"),
]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that were sent; none is answered."""
    found: list[str] = []

    def request(_: Client, method: str, path: str, *__: object, **___: object) -> Any:
        found.append(f"{method} {path}")
        raise Unavailable("no answer")

    monkeypatch.setattr(Client, "request", request)
    monkeypatch.delenv("TIDEGATE_DATABASE_URL", raising=False)
    return found


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, answer: str, on_terminal: bool) -> Result:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: on_terminal)
    return CliRunner().invoke(cli, list(arguments), input=answer)


@pytest.mark.parametrize(("command", "question"), COMMANDS)
def test_it_asks_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, sent: list[str], command: tuple[str, ...], question: str
) -> None:
    refused = run(monkeypatch, *command, answer="n\n", on_terminal=True)
    assert question in refused.output and sent == []
    assert refused.exit_code != 0
    agreed = run(monkeypatch, *command, answer="y\n", on_terminal=True)
    assert question in agreed.output and len(sent) == 1


@pytest.mark.parametrize(("command", "question"), COMMANDS)
def test_it_does_not_ask_with_yes_or_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, sent: list[str], command: tuple[str, ...], question: str
) -> None:
    first = run(monkeypatch, *command, "--yes", answer="", on_terminal=True)
    second = run(monkeypatch, *command, answer="", on_terminal=False)
    assert question not in first.output + second.output and len(sent) == 2
