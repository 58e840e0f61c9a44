"""Approvals: a link that decides once, in the commit that gives the run its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import pytest
from structlog.testing import capture_logs

from tidegate import Context, On, SyncContext, Tidegate
from tidegate.errors import Conflict, NotFound
from tidegate.flow.accept.approvals import ApprovalLinks
from tidegate.flow.keep import secrets
from tidegate.flow.look.explain import explain_any
from tidegate.model.approval import APPROVAL_DECIDED
from tidegate.model.ids import step_id
from tidegate.model.secrets import NO_KEYS, SecretKeys, new_key
from tidegate.store import secrets as store
from tidegate.store.db import Database
from tidegate.testing import Harness, RunResult


@dataclass
class Office:
    """What the workflows of these tests have sent and heard."""

    links: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    app: Tidegate = field(default_factory=Tidegate)

    async def mail(self, link: str) -> None:
        self.links.append(link)


@pytest.fixture
def office() -> Office:
    made = Office()

    @made.app.workflow(
        on="order.created", cancel_on=On("order.cancelled", where="event.payload.id == run.parameters.id")
    )
    async def fulfil(ctx: Context, id: int) -> object:
        approval = await ctx.approval("manager", timeout="3d", to="ann@example.com", note=f"Order <{id}>")
        await ctx.step("mail", made.mail, approval.link)
        decision = await approval.decision()
        made.heard.append("nobody" if decision is None else f"{decision.approved} {decision.by} {decision.comment}")
        return None if decision is None else {"approved": decision.approved, "via": decision.via, "at": decision.at}

    @made.app.workflow(on="order.created.sync")
    def fulfil_sync(ctx: SyncContext, id: int) -> object:
        approval = ctx.approval("manager", timeout="3d")
        ctx.step("mail", made.links.append, approval.link)
        decision = approval.decision()
        return None if decision is None else decision.approved

    @made.app.workflow(on=APPROVAL_DECIDED)
    async def book(ctx: Context, name: str, approved: bool) -> str:
        return f"{name} {approved}"

    return made


@pytest.fixture
async def harness(office: Office) -> AsyncIterator[Harness]:
    async with Harness(office.app, public_url="https://gate.example/tidegate") as made:
        yield made


async def asked(harness: Harness, id: int = 7) -> RunResult:
    """A run that waits for its approval."""
    await harness.publish("order.created", source="shop", payload={"id": id})
    await harness.run_until_idle()
    return (await harness.runs("fulfil"))[-1]


async def use(harness: Harness, link: str, method: str = "POST", **given: object) -> httpx.Response:
    """Use a link at the API of the harness."""
    base = harness.url
    path = urlsplit(link).path.removeprefix("/tidegate")
    if method == "POST" and not given:
        given = {"json": {"approved": True}}
    async with httpx.AsyncClient(base_url=base) as client:
        return await client.request(method, path, **given)  # type: ignore[arg-type]


async def test_the_link_resumes_the_run_with_the_decision(harness: Harness, office: Office) -> None:
    run = await asked(harness)
    [link] = office.links
    assert link.startswith("https://gate.example/tidegate/approvals/")
    assert (run.status, run.steps["manager"].status) == ("pending", "pending")
    assert "waits for approval 'manager'" in (run.warning or "")
    await harness.advance("1d")
    assert office.heard == []
    done = await use(harness, link, json={"approved": True, "comment": "fine"})
    assert (done.status_code, done.json()["state"], done.json()["approved"]) == (200, "decided", True)
    await harness.run_until_idle()
    [run] = await harness.runs("fulfil")
    assert run.output == {"approved": True, "via": "link", "at": harness.now.isoformat().replace("+00:00", "Z")}
    assert office.heard == ["True ann@example.com fine"] and office.links == [link]
    assert (await harness.only_run("book")).output == "manager True", "the decision is an event for triggers"


async def test_a_synchronous_workflow(harness: Harness, office: Office) -> None:
    await harness.publish("order.created.sync", source="shop", payload={"id": 7})
    await harness.run_until_idle()
    assert (await use(harness, office.links[0], data={"decision": "reject"})).status_code == 200
    await harness.run_until_idle()
    assert (await harness.only_run("fulfil_sync")).output is False


async def test_it_is_used_once_and_the_first_wins(harness: Harness, office: Office) -> None:
    await asked(harness)
    answers = await asyncio.gather(
        *(use(harness, office.links[0], json={"approved": n % 2 == 0, "comment": str(n)}) for n in range(10))
    )
    codes = [answer.status_code for answer in answers]
    assert sorted(codes) == [200] + [409] * 9
    first = codes.index(200)
    await harness.run_until_idle()
    assert office.heard == [f"{first % 2 == 0} ann@example.com {first}"]
    again = await use(harness, office.links[0])
    assert again.status_code == 409
    word = "approved" if first % 2 == 0 else "rejected"
    assert again.json()["detail"].startswith(f"Your decision was not counted: it was already {word} at ")
    assert len(await harness.runs("book")) == 1
    async with harness.connection() as connection:
        assert await connection.fetchval("select count(*) from tidegate.audit_log where action like 'approval.%'") == 1


async def test_reading_decides_nothing(harness: Harness, office: Office) -> None:
    await asked(harness)
    for accept in ("text/html,*/*", "application/json", "*/*"):
        for method in ("GET", "HEAD"):
            assert (await use(harness, office.links[0], method, headers={"accept": accept})).status_code == 200
    await harness.run_until_idle()
    assert (await harness.only_run("fulfil")).status == "pending"
    shown = (await use(harness, office.links[0], "GET")).json()
    assert (shown["name"], shown["note"], shown["state"], shown["approved"]) == ("manager", "Order <7>", "open", None)


async def test_the_page(harness: Harness, office: Office) -> None:
    run = await asked(harness)
    page = await use(harness, office.links[0], "GET", headers={"accept": "text/html"})
    assert "Order &lt;7&gt;" in page.text and "<script" not in page.text and 'method="post"' in page.text
    assert not [word for word in (str(run.id), "fulfil", "shop", "ann@example.com") if word in page.text]
    assert "form-action 'self'" in page.headers["content-security-policy"]
    assert "script-src" not in page.headers["content-security-policy"]
    assert (page.headers["referrer-policy"], page.headers["cache-control"]) == ("no-referrer", "no-store")
    done = await use(harness, office.links[0], data={"decision": "approve", "comment": " line one\r\nline two "})
    assert done.headers["content-type"].startswith("text/html") and "Thank you. You approved it at" in done.text
    assert "<form" not in done.text
    again = await use(harness, office.links[0], data={"decision": "reject", "comment": ""})
    assert again.status_code == 409 and "Your decision was not counted: it was already approved at" in again.text
    later = await use(harness, office.links[0], "GET", headers={"accept": "text/html"})
    assert "It was approved at" in later.text and "You" not in later.text
    await harness.run_until_idle()
    assert office.heard == ["True ann@example.com line one\nline two"]


async def test_after_the_timeout_nobody_has_decided(harness: Harness, office: Office) -> None:
    await asked(harness)
    await harness.advance("3d")
    assert office.heard == ["nobody"]
    async with harness.connection() as connection:
        story = await explain_any(connection, str((await harness.only_run("fulfil")).id))
    [step] = [line.reason for line in story.decisions if (line.stage, line.decision) == ("step", "timed_out")]
    assert step is not None and step.startswith("manager: nobody decided by 20"), step
    late = await use(harness, office.links[0])
    told = "Your decision was not counted. The time for this decision is over."
    assert (late.status_code, late.json()["detail"]) == (410, told)
    assert (await use(harness, office.links[0], "GET")).json()["state"] == "expired"
    assert await harness.runs("book") == []


async def test_time_is_over_before_a_worker_has_noticed(harness: Harness, office: Office) -> None:
    await asked(harness)
    await harness._set_clock((await harness.only_run("fulfil")).steps["manager"].next_attempt_at or harness.now)
    assert (await use(harness, office.links[0])).status_code == 410
    await harness.run_until_idle()
    assert office.heard == ["nobody"]


async def test_a_decision_in_time_counts_however_late_the_run_resumes(harness: Harness, office: Office) -> None:
    run = await asked(harness)
    await harness.approve(run, "manager", by="ann")
    async with harness.connection() as connection:
        assert await connection.fetchval("select count(*) from tidegate.event_waits where mode <> 'cancel'") == 0
    await harness._set_clock(harness.now.replace(year=harness.now.year + 1))
    await harness.run_until_idle()
    assert office.heard == ["True ann None"]


async def test_an_ended_run_is_not_decided(harness: Harness, office: Office) -> None:
    run = await asked(harness, 7)
    await harness.cancel(run)
    gone = await use(harness, office.links[0])
    assert (gone.status_code, "no longer needed" in gone.json()["detail"]) == (410, True)
    await asked(harness, 8)
    await harness.publish("order.cancelled", source="shop", payload={"id": 8})
    await harness.run_until_idle()
    assert (await use(harness, office.links[1])).status_code == 410
    with pytest.raises(Conflict, match="ended"):
        await harness.approve(run, "manager")
    with pytest.raises(NotFound):
        await harness.approve(run, "director")
    async with harness.connection() as connection:
        assert (
            await connection.fetchval("select count(*) from tidegate.workflow_events where type = $1", APPROVAL_DECIDED)
            == 0
        )


async def test_a_link_that_is_not_ours_is_refused(harness: Harness, office: Office) -> None:
    await asked(harness)
    base, _, token = office.links[0].rpartition("/")
    other = token[:-1] + ("A" if token[-1] != "A" else "B")
    of_other_run = "A" * 22 + token[22:]
    for wrong in (other, of_other_run, token[:-1], token + "A", token.lower(), "x", "a" * 64, "%00" * 5, "ä" * 64):
        for method in ("GET", "POST"):
            answer = await use(harness, f"{base}/{wrong}", method)
            assert answer.status_code == 404, wrong
            assert token not in answer.text
    assert (await use(harness, office.links[0], "GET")).json()["state"] == "open"


async def test_nothing_is_read_for_a_link_that_is_not_ours(harness: Harness, office: Office) -> None:
    await asked(harness)
    assert (await use(harness, office.links[0], "GET")).status_code == 200  # the key is known from now on
    async with harness.connection() as connection:
        await connection.execute("alter table tidegate.workflow_run_steps rename to away")
        try:
            assert (await use(harness, f"https://x/approvals/{'a' * 64}")).status_code == 404
            assert (await use(harness, office.links[0])).status_code == 500
        finally:
            await connection.execute("alter table tidegate.away rename to workflow_run_steps")


async def test_bodies_are_checked(harness: Harness, office: Office) -> None:
    await asked(harness)
    wrong: list[tuple[dict[str, object], int]] = [
        ({"json": {}}, 422),
        ({"json": {"approved": "yes"}}, 422),
        ({"json": {"approved": True, "by": "root"}}, 422),
        ({"json": {"approved": True, "comment": "x" * 1001}}, 422),
        ({"json": {"approved": True, "comment": "\x00"}}, 422),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415),
        ({"content": b" " * 20_000, "headers": {"content-type": "application/json"}}, 413),
        ({"data": {"decision": "maybe"}}, 422),
        ({"data": {"comment": "yes"}}, 422),
        ({"data": {"decision": "approve", "comment": "\x07"}}, 422),
        ({"content": b"decision=%ff", "headers": {"content-type": "application/x-www-form-urlencoded"}}, 400),
        ({"json": {"approved": True}, "headers": {"sec-fetch-site": "cross-site"}}, 403),
    ]
    for given, status in wrong:
        assert (await use(harness, office.links[0], **given)).status_code == status, given
    assert (await harness.only_run("fulfil")).status == "pending"
    assert (await use(harness, office.links[0])).status_code == 200


async def test_operators_list_and_decide(harness: Harness, office: Office) -> None:
    first, second = await asked(harness, 1), await asked(harness, 2)
    found = (await harness.client.request("GET", "/admin/approvals"))["approvals"]
    assert [(one["run_id"], one["name"], one["to"], one["note"]) for one in found] == [
        (str(first.id), "manager", "ann@example.com", "Order <1>"),
        (str(second.id), "manager", "ann@example.com", "Order <2>"),
    ]
    page = await harness.client.request("GET", "/admin/approvals", limit=1)
    rest = await harness.client.request("GET", "/admin/approvals", cursor=page["next_cursor"])
    assert [one["id"] for one in page["approvals"] + rest["approvals"]] == [one["id"] for one in found]
    path = f"/admin/approvals/{found[1]['id']}/reject"
    done = await harness.client.request("POST", path, {"comment": "no"})
    assert (done["decision"]["approved"], done["decision"]["by"], done["decision"]["via"]) == (False, "api", "operator")
    with pytest.raises(Conflict, match="It was rejected at"):
        await harness.client.request("POST", path)
    await harness.run_until_idle()
    assert office.heard == ["False api no"]
    left = (await harness.client.request("GET", "/admin/approvals"))["approvals"]
    assert [one["id"] for one in left] == [found[0]["id"]]
    audit = (await harness.client.request("GET", "/admin/audit", action="approval.reject"))["entries"]
    assert [(one["actor"], one["subject"]) for one in audit] == [("api", found[1]["id"])]


async def test_the_id_of_a_run_is_answered_with_its_approvals(harness: Harness, office: Office) -> None:
    run = await asked(harness)
    [approval] = (await harness.client.request("GET", "/admin/approvals"))["approvals"]
    with pytest.raises(NotFound, match=rf"is a run, not an approval; its approvals: {approval['id']} \(manager\)"):
        await harness.client.request("POST", f"/admin/approvals/{run.id}/approve")


async def test_explain_names_the_approval_and_the_command(harness: Harness, office: Office) -> None:
    run = await asked(harness)
    told = await harness.explain(run)
    assert "waits until" in told.summary and "the approval 'manager' by ann@example.com" in told.summary
    [approval_id] = [one["id"] for one in (await harness.client.request("GET", "/admin/approvals"))["approvals"]]
    assert f"tidegate approvals approve {approval_id}" in told.summary
    assert approval_id in (run.warning or "")
    await harness.approve(run, "manager")
    async with harness.connection() as connection:
        event_id = await connection.fetchval(
            "select id from tidegate.workflow_events where type = $1", APPROVAL_DECIDED
        )
    await harness.run_until_idle()
    assert f"woke run {run.id}" in str(await harness.explain(event_id))


async def test_an_approval_that_nobody_waits_for_any_more(harness: Harness) -> None:
    """The function ends without asking for the decision, is cut off, or asks for the same one twice."""
    app = Tidegate()
    links: list[str] = []

    @app.workflow()
    async def leave(ctx: Context) -> None:
        links.append((await ctx.approval("one", timeout="1d")).link)

    @app.workflow()
    async def impatient(ctx: Context) -> str:
        approval = await ctx.approval("one", timeout="1d")
        links.append(approval.link)
        try:
            async with asyncio.timeout(0.05):
                await asyncio.gather(approval.decision(), ctx.step("slow", asyncio.sleep, 60))
        except TimeoutError:
            return "gave up"
        return "decided"

    @app.workflow()
    async def twice(ctx: Context) -> list[bool]:
        approval = await ctx.approval("one", timeout="1d")
        first = await approval.decision()
        second = await approval.decision()
        return [one is not None and one.approved for one in (first, second)]

    @app.workflow()
    async def wrong(ctx: Context) -> None:
        await ctx.approval("one", timeout="1d", note="x" * 2001)

    async with Harness(app) as other:
        for workflow in (leave, impatient, twice, wrong):
            await other.start(workflow)
        await other.run_until_idle()
        assert (await other.only_run("leave")).status == "succeeded"
        assert (await other.only_run("impatient")).output == "gave up"
        assert "note must be printable text of at most 2000" in ((await other.only_run("wrong")).error or "")
        assert [(await use(other, link)).status_code for link in links] == [410, 410]
        await other.approve(await other.only_run("twice"), "one")
        await other.run_until_idle()
        assert (await other.only_run("twice")).output == [True, True]
        await other.start(twice, id="nobody")
        await other.advance("1d")
        assert (await other.runs("twice"))[-1].output == [False, False]


async def test_several_at_once_and_a_decision_while_the_function_runs(harness: Harness) -> None:
    app, links = Tidegate(), dict[str, str]()
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def mail(name: str, link: str) -> None:
        links[name] = link
        begun.set()
        await go_on.wait()

    @app.workflow()
    async def both(ctx: Context) -> list[bool | None]:
        manager = await ctx.approval("manager", timeout="1d")
        finance = await ctx.approval("finance", timeout="2d")
        await ctx.step("mail", mail, "manager", manager.link)
        found = await asyncio.gather(manager.decision(), finance.decision())
        return [None if one is None else one.approved for one in found]

    async with Harness(app) as other:
        await other.start(both)
        turning = asyncio.create_task(other.run_until_idle())
        await begun.wait()
        assert (await use(other, links["manager"])).status_code == 200, "it can be used while the mail is being sent"
        go_on.set()
        await turning
        run = await other.only_run("both")
        assert (run.steps["manager"].status, run.steps["finance"].status) == ("succeeded", "pending")
        await other.reject(run, "finance")
        await other.run_until_idle()
        assert (await other.only_run("both")).output == [True, False]


async def test_a_run_is_not_given_its_decision_again(harness: Harness) -> None:
    """A wait for events of this type is not given the one that the approval was given."""
    app = Tidegate()

    @app.workflow()
    async def curious(ctx: Context) -> list[object]:
        approval = await ctx.approval("one", timeout="1h")
        first = await approval.decision()
        other = await ctx.wait_for(APPROVAL_DECIDED, timeout="1h")
        return [first is not None, other is not None]

    @app.workflow()
    async def side_by_side(ctx: Context) -> list[object]:
        approval = await ctx.approval("one", timeout="1h")
        found = await asyncio.gather(approval.decision(), ctx.wait_for(APPROVAL_DECIDED, timeout="1h", name="other"))
        return [one is not None for one in found]

    async with Harness(app) as other:
        for workflow in (curious, side_by_side):
            await other.start(workflow)
            await other.run_until_idle()
            await other.approve((await other.runs(workflow.__name__))[-1], "one")
            await other.run_until_idle()
            await other.advance("2h")
        assert (await other.only_run("curious")).output == [True, False]
        assert (await other.only_run("side_by_side")).output == [True, False]


async def test_a_decision_that_fires_no_trigger_is_not_logged_as_an_event_without_effect() -> None:
    app = Tidegate()

    @app.workflow()
    async def work(ctx: Context) -> bool:
        return await (await ctx.approval("one", timeout="1h")).decision() is not None

    async with Harness(app) as harness:
        await harness.start(work)
        await harness.run_until_idle()
        with capture_logs() as logs:
            await harness.approve(await harness.only_run("work"), "one")
            await harness.publish("nobody.cares", source="shop")
            await harness.run_until_idle()
        assert (await harness.only_run("work")).output is True
        assert [log["type"] for log in logs if log["event"] == "event.launched_nothing"] == ["nobody.cares"]
        assert [log["step"] for log in logs if log["event"] == "run.woken"] == ["one"]


async def test_the_key_is_stored_like_other_secrets(office: Office) -> None:
    async with Harness(office.app, secrets_key=new_key()) as harness:
        await asked(harness)
        async with harness.connection() as connection:
            stored = await connection.fetchval("select approval_key from tidegate.installation")
            steps = await connection.fetchval("select json_agg(s)::text from tidegate.workflow_run_steps s")
        assert stored.startswith(" fernet:")
        assert office.links[0].rpartition("/")[2] not in steps
        assert (await use(harness, office.links[0])).status_code == 200


async def test_a_process_without_the_key(office: Office) -> None:
    async with Harness(office.app) as harness:
        async with harness.connection() as connection:
            await connection.execute("update tidegate.installation set approval_key = ' fernet:00000000:x'")
        run = await asked(harness)
        assert (run.status, office.links) == ("pending", [])
        assert "TIDEGATE_SECRETS_KEY" in (run.warning or "")
        assert (await use(harness, f"https://x/approvals/{'a' * 64}")).status_code == 503


async def test_time_that_passes_while_the_run_does_something_else(harness: Harness) -> None:
    """The link expires at its time; the run learns of it when it asks. Meanwhile nothing is overdue."""
    app, links = Tidegate(), list[str]()

    @app.workflow()
    async def busy(ctx: Context) -> str:
        approval = await ctx.approval("one", timeout="1h")
        links.append(approval.link)
        await ctx.sleep("3h")
        return "nobody" if await approval.decision() is None else "decided"

    async with Harness(app) as other:
        await other.start(busy)
        await other.advance("2h")
        assert (await use(other, links[0])).status_code == 410
        health = await other.client.request("GET", "/admin/event-health")
        assert (health["retries"]["steps"]["total"], health["retries"]["steps"]["overdue"]) == (2, 0)
        assert (await other.client.request("GET", "/admin/approvals"))["approvals"] == []
        await other.advance("1h")
        assert (await other.only_run("busy")).output == "nobody"


async def test_a_run_that_is_retried_asks_again_with_the_same_link(harness: Harness, office: Office) -> None:
    run = await asked(harness)
    await harness.cancel(run)
    assert (await use(harness, office.links[0])).status_code == 410
    await harness.advance("5d")
    await harness.client.request("POST", f"/v1/runs/{run.id}/retry")
    await harness.run_until_idle()
    assert set(office.links) == {office.links[0]}
    assert (await use(harness, office.links[0])).status_code == 200
    await harness.run_until_idle()
    assert office.heard == ["True ann@example.com None"]
    assert (await use(harness, office.links[0])).status_code == 409


async def test_a_rotation_encrypts_the_key_and_links_stay(office: Office) -> None:
    async with Harness(office.app) as harness:
        run = await asked(harness)
        keyed = Database(harness.database_url, "rotation", size=1, keys=SecretKeys(new_key()))
        try:
            done = await secrets.rotate(keyed, actor="test")
            assert (done.rotated, done.unreadable) == (1, [])
            async with harness.connection() as connection:
                assert (await connection.fetchval("select approval_key from tidegate.installation"))[:8] == " fernet:"
                assert "approval links" in secrets.unreadable_text(await store.survey(connection, NO_KEYS))
            again = await ApprovalLinks(keyed, harness._app.settings.link_base).link(step_id(run.id, "manager"))
            assert again == office.links[0]
            assert (await secrets.rotate(keyed, actor="test")).current == 1
        finally:
            await keyed.close()
