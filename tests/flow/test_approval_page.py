"""The page of an approval link: what it shows, and what it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.flow.test_approvals import use
from tests.processes import run as run_command
from tidegate import Context, Tidegate
from tidegate.flow.accept import approvals as accept
from tidegate.flow.accept.approvals import ApprovalLinks
from tidegate.flow.keep import secrets
from tidegate.model.ids import step_id
from tidegate.store.db import Database
from tidegate.testing import Harness

NOTE = "Pay \u202e0001\u202c EUR\u200b\u2066\u00ad\u2028now\nto B\u00e9a: 1\u00a0000 \u20ac"


class Asked:
    """A harness with a run that waits for an approval."""

    def __init__(self, harness: Harness, link: str, comments: list[str | None]) -> None:
        self.harness, self.link, self.comments = harness, link, comments

    async def use(self, method: str = "POST", **given: Any) -> Any:
        return await use(self.harness, self.link, method, **given)


@pytest.fixture
async def asked() -> AsyncIterator[Asked]:
    app, links, comments = Tidegate(), list[str](), list[str | None]()

    @app.workflow()
    async def pay(ctx: Context) -> None:
        approval = await ctx.approval("manager\u202e1", timeout="1d", note=NOTE)
        links.append(approval.link)
        decision = await approval.decision()
        comments.append(decision and decision.comment)

    async with Harness(app) as harness:
        await harness.start(pay)
        await harness.run_until_idle()
        yield Asked(harness, links[0], comments)


async def test_characters_that_nobody_sees_are_written_as_escapes(asked: Asked) -> None:
    page = (await asked.use("GET", headers={"accept": "text/html"})).text
    assert "<p>Pay \\u202e0001\\u202c EUR\\u200b\\u2066\\u00ad\\u2028now</p>" in page
    assert "<p>to B\u00e9a: 1\u00a0000 \u20ac</p>" in page, "other characters stay"
    assert page.count("Approval: manager\\u202e1") == 2
    assert not set(page) & set("\u202e\u202c\u200b\u2066\u00ad\u2028")
    shown = (await asked.use("GET")).json()
    assert (shown["note"], shown["name"]) == (NOTE, "manager\u202e1"), "programs get the text as it is"


async def test_a_line_break_counts_once(asked: Asked) -> None:
    """A text area counts it once, and a form sends it as two characters."""
    text = "\n".join("x" * 500)
    assert len(text) == 999
    done = await asked.use(data={"decision": "approve", "comment": text.replace("\n", "\r\n")})
    assert (done.status_code, "You approved it" in done.text) == (200, True)
    await asked.harness.run_until_idle()
    assert asked.comments == [text]


async def test_a_comment_that_is_refused_is_in_the_form_again(asked: Asked) -> None:
    for comment in (f"first <line>\n{'x' * 1000}", "bell \x07"):
        page = await asked.use(data={"decision": "reject", "comment": comment})
        assert page.status_code == 422
        assert "The comment must be printable text of at most 1000 characters." in page.text
        shown = comment.replace("<", "&lt;").replace(">", "&gt;")
        assert f'maxlength="1000">\n{shown}</textarea>' in page.text and 'value="reject"' in page.text
    assert (await asked.use(data={"decision": "reject", "comment": "no"})).status_code == 200
    late = await asked.use(data={"decision": "reject", "comment": "x" * 1001})
    assert (late.status_code, "was not counted: it was already rejected" in late.text, "<form" in late.text) == (
        409,
        True,
        False,
    )


async def test_links_of_an_earlier_key_are_refused(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, token = asked.harness, asked.link.rpartition("/")[2]
    run = await harness.only_run("pay")
    database = Database(harness.database_url, "renewal", size=1)
    links, approval_id = ApprovalLinks(database, "https://gate.example"), step_id(run.id, "manager\u202e1")
    try:
        before = await links.link(approval_id)
        assert await links.check(token) == approval_id
        await secrets.renew_links(database, actor="ann")
        monkeypatch.setattr(accept, "KEY_SECONDS", 0.0)  # its time is over
        after = await links.link(approval_id)
        assert before != after and before.endswith(token)
        assert await links.check(token) is None
        assert await links.check(after.rpartition("/")[2]) == approval_id
    finally:
        await database.close()
    assert (await asked.use()).status_code == 404
    audit = (await harness.client.request("GET", "/admin/audit", action="secrets.renew_links"))["entries"]
    assert [one["actor"] for one in audit] == ["ann"]
    await harness.approve(run, run.steps["manager\u202e1"].name)
    await harness.run_until_idle()
    assert (await harness.only_run("pay")).status == "succeeded", "operators can still decide"


async def test_the_command_makes_a_new_key(asked: Asked) -> None:
    done = await asyncio.to_thread(
        lambda: run_command("secrets", "renew-links", env={"TIDEGATE_DATABASE_URL": asked.harness.database_url})
    )
    assert (done.returncode, "signed with a new key" in done.stdout) == (0, True), done.stderr
    assert (await asked.use()).status_code == 404
