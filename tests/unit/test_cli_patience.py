"""Commands whose answer was lost, or that were told to come back: what is repeated, and how to go on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from tidegate.cli import cli, patience
from tidegate.client import Client
from tidegate.errors import Unavailable

RUN = "01a1ee06-77d4-7000-9277-4b7d2c6a33fd"


class Server:
    """Answers requests in turn: an exception is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.answers, self.sent, self.waited = list(answers), list[Any](), list[float]()

        def request(_: Client, method: str, path: str, body: Any = None, **__: object) -> Any:
            self.sent.append((method, path, body))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(Client, "request", request)
        monkeypatch.setattr(patience.time, "sleep", self.waited.append)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def page(done: int, cursor: str | None, status: str = "done") -> dict[str, Any]:
    return {"verb": "rerun", "status": status, "done": done, "refused": 0, "reasons": {}, "remaining": 3,
            "next_cursor": cursor}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [(("runs", "rerun", RUN), {"id": "new", "rerun_of": RUN}), (("schedules", "run-now", "w"), {"event_id": "new"})],
)
def test_a_lost_answer_is_asked_for_again_with_the_same_id(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], answer: dict[str, str]
) -> None:
    server = Server(monkeypatch, Unavailable("no answer"), Unavailable("later", 7), answer)
    done = run(*arguments)
    assert done.exit_code == 0 and "new" in done.output
    assert server.waited == [1, 7]
    ids = {body["id"] for _, _, body in server.sent}
    assert len(server.sent) == 3 and len(ids) == 1
    run(*arguments)
    assert server.sent[-1][2]["id"] not in ids, "another call is another rerun"


def test_nobody_is_waited_for_who_was_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Unavailable("no answer")
    gone.__cause__ = httpx.ConnectError("refused")
    server = Server(monkeypatch, gone)
    assert run("runs", "rerun", RUN).exit_code == 1
    assert len(server.sent) == 1


def test_many_go_on_at_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(
        monkeypatch, page(0, "c0", "preview"), Unavailable("busy", 3), page(2, "c1"), Unavailable("lost"), page(1, None)
    )
    done = run("runs", "rerun", "--workflow", "w", "--yes")
    assert done.exit_code == 0 and "3 repeated" in done.output
    assert [body.get("cursor") for _, _, body in server.sent] == [None, "c0", "c0", "c1", "c1"]
    assert server.waited == [3, 1]


def test_many_that_cannot_go_on_say_how_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch, page(0, "c0", "preview"), page(2, "c1"), Unavailable("down", 61))
    done = run("runs", "rerun", "--workflow", "w", "--yes")
    assert done.exit_code == 1
    assert "2 runs repeated until now. To continue, give the same command with --cursor c1" in done.output
    server.answers = [page(1, None)]
    assert run("runs", "rerun", "--workflow", "w", "--yes", "--cursor", "c1").exit_code == 0
    assert server.sent[-1][2] == {"workflow": "w", "cursor": "c1"}
