"""Caps on what waits of a source: exact for everyone who publishes, whichever way. Judged by what was stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import pytest

from tidegate import BacklogFull, Context, Tidegate
from tidegate.clock import utc_now, uuid7
from tidegate.errors import InvalidInput
from tidegate.flow import control
from tidegate.flow.accept.ingest import Ingest
from tidegate.flow.accept.webhooks import Webhooks
from tidegate.flow.look import health
from tidegate.model.backlog import SourceBacklog
from tidegate.model.event import EventLimits, NewEvent, check_event
from tidegate.model.source import RateLimit
from tidegate.store.db import Database, is_data_error
from tidegate.telemetry import metrics
from tidegate.testing import Harness

SOURCE = "shop"
STATES = """
select case when i.event_id is not null then 'undecided' when r.retry_state = 'scheduled' then 'held'
            when r.reason = 'backlog_full' then 'dropped' when l.id is not null then 'dead' else 'decided' end as state
  from tidegate.workflow_events e
  left join tidegate.event_inbox i on i.event_id = e.id
  left join tidegate.event_ingress_retries r on r.event_id = e.id
  left join tidegate.dead_letters l on l.kind = 'event' and l.subject_id = e.id and l.replayed_at is null
 where e.source = 'shop' order by e.ingress_sequence
"""


def application(done: list[int] | None = None) -> Tidegate:
    app = Tidegate()

    @app.workflow(on="cart.changed")
    async def handle(ctx: Context, n: int = 0) -> None:
        if done is not None:
            done.append(n)

    @app.workflow(on="order.paid")
    async def tell(ctx: Context, n: int = 0) -> None:
        await ctx.publish("cart.changed", source=SOURCE, payload={"n": n})

    return app


async def cap(harness: Harness, most: int, when_full: Any = "refuse") -> Database:
    _, database = harness._inside()
    await control.set_backlog(database, SOURCE, SourceBacklog(most, when_full), "test")
    return database


async def states(harness: Harness) -> list[str]:
    async with harness.connection() as connection:
        return [row[0] for row in await connection.fetch(STATES)]


def event(n: int, own_id: str | None = None, source: str = SOURCE) -> NewEvent:
    raw: dict[str, Any] = {"type": "cart.changed", "source": source, "payload": {"n": n}}
    found = check_event(
        raw | ({"id": own_id} if own_id else {}), new_id=uuid7(), now=utc_now(), limits=EventLimits(), errors=[]
    )
    assert found is not None
    return found


async def over_http(harness: Harness, *numbers: int) -> bool:
    """Whether one request, of one event or a batch, was accepted. Checks the answer if it was refused."""
    body: list[dict[str, Any]] = [{"type": "cart.changed", "source": SOURCE, "payload": {"n": n}} for n in numbers]
    async with httpx.AsyncClient(base_url=harness.url) as client:
        answer = await client.post("/v1/events", json=body if len(body) > 1 else body[0])
    if answer.status_code == 202:
        return True
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    problem = answer.json()
    assert problem["type"] == "urn:tidegate:backlog-full"
    assert "source shop is full" in problem["detail"] or "source shop has room for " in problem["detail"]
    field = "[0].source" if len(numbers) > 1 else "source"
    assert problem["errors"][0] == {"field": field, "message": "at most 3 may wait (max_waiting)"}
    return False


async def in_pieces(harness: Harness, *numbers: int) -> bool:
    """The same in two pieces, which takes the way through the framework."""
    address = httpx.URL(harness.url)
    items = ",".join(f'{{"type":"cart.changed","source":"shop","payload":{{"n":{n}}}}}' for n in numbers)
    body = f"[{items}]".encode() if len(numbers) > 1 else items.encode()
    reader, writer = await asyncio.open_connection(address.host, address.port)
    head = f"POST /v1/events HTTP/1.1\r\nhost: {address.host}:{address.port}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:10])
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.write(body[10:])
    answer = (await reader.read()).decode()
    writer.close()
    status = answer.split(" ", 2)[1]
    assert status in ("202", "429"), answer
    if status == "429":
        assert "retry-after: 5" in answer.lower() and '"urn:tidegate:backlog-full"' in answer
    return status == "202"


async def by_sql(harness: Harness, *numbers: int) -> bool:
    try:
        async with harness.connection() as connection, connection.transaction():
            for n in numbers:
                await connection.fetchval(
                    "select tidegate.publish('cart.changed', 'shop', jsonb_build_object('n', $1::int))", n
                )
    except Exception as exc:
        assert "source shop is full: at most 3 of its events may wait (max_waiting); publish again later" in str(exc)
        assert not is_data_error(exc)
        return False
    return True


async def by_app(harness: Harness, *numbers: int) -> bool:
    _, database = harness._inside()
    ingest = Ingest(database, max_waiting=1000, after_commit=lambda: None)
    try:
        await ingest.accept([event(n) for n in numbers])
    except BacklogFull as full:
        assert full.retry_after_seconds == 5
        assert "source shop is full" in str(full) or "source shop has room for 1 of these 2 events" in str(full)
        return False
    finally:
        await ingest.close()
    return True


WAYS: dict[str, Callable[..., Awaitable[bool]]] = {
    "http": over_http, "in_pieces": in_pieces, "sql": by_sql, "app": by_app,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("when_full", "accepted", "found"),
    [
        ("refuse", [True, True, False, True, False], ["undecided"] * 3),
        ("drop_oldest", [True] * 5, ["dropped"] * 4 + ["undecided"] * 3),
        ("dead_letter", [True] * 5, ["undecided"] * 3 + ["dead"] * 4),
    ],
)
async def test_whichever_way_events_come_the_cap_holds(
    way: str, when_full: Any, accepted: list[bool], found: list[str]
) -> None:
    async with Harness(application()) as harness:
        await cap(harness, 3, when_full)
        publish = WAYS[way]
        # The third is a batch that does not fit as a whole: nothing of it is stored.
        requests = [(0,), (1,), (2, 3), (4,), (5, 6)]
        assert [await publish(harness, *numbers) for numbers in requests] == accepted
        assert await states(harness) == found


async def test_what_was_published_before_is_no_newcomer() -> None:
    async with Harness(application()) as harness:
        database = await cap(harness, 1)
        ingest = Ingest(database, max_waiting=1000, after_commit=lambda: None)
        [first] = await ingest.accept([event(0, "a")])
        [again] = await ingest.accept([event(0, "a")])
        assert (again.status, again.id) == ("duplicate", first.id)
        with pytest.raises(BacklogFull):
            await ingest.accept([event(1, "b")])
        [other] = await ingest.accept([event(1, "b", source="other")])
        assert other.status == "accepted"
        await ingest.close()
        assert 'kind="source",name="shop",outcome="refused"' in metrics.text().decode()


async def test_a_batch_that_can_never_fit_is_not_to_be_retried() -> None:
    """Only new events of the source count: neither those that were published before, nor an id that a batch repeats,
    nor those for later."""
    async with Harness(application()) as harness:
        database = await cap(harness, 10)
        ingest = Ingest(database, max_waiting=1000, after_commit=lambda: None)
        too_many = [event(0, source="other"), *(event(n) for n in range(11))]
        with pytest.raises(InvalidInput) as never:
            await ingest.accept(too_many)
        [error] = never.value.errors
        assert (error.field, error.message) == (
            "[1].source",
            "11 events of source shop in one request, and at most 10 of it may wait (max_waiting): split the batch",
        )
        assert await states(harness) == []
        assert len(await ingest.accept([event(1, "same") for _ in range(11)])) == 11
        await ingest.accept([event(n) for n in range(7)])
        with pytest.raises(BacklogFull) as full:
            await ingest.accept([event(1, "same"), *(event(n) for n in range(5))])
        assert str(full.value) == (
            "source shop has room for 2 of these 5 events: 8 wait, at most 10 may wait (max_waiting); "
            "nothing was stored"
        )
        assert [one.field for one in full.value.errors] == [f"[{n}].source" for n in range(1, 6)]
        later = [msgspec.structs.replace(event(n), delay_ms=60_000) for n in range(11)]
        assert len(await ingest.accept([*later, event(1, "same"), event(7), event(8)])) == 14
        await cap(harness, 3)
        await ingest.caps_changed()
        with pytest.raises(BacklogFull, match="source shop is full: 10 of its events wait, at most 3 may wait"):
            await ingest.accept([event(9)])
        await ingest.close()


async def test_one_batch_that_can_never_fit_refuses_no_other_request() -> None:
    async with Harness(application()) as harness:
        database = await cap(harness, 3)
        ingest = Ingest(database, max_waiting=1000, after_commit=lambda: None)
        requests = [[event(0)], [event(n) for n in range(4)], [event(1), event(2)]]
        told = await asyncio.gather(*(ingest.accept(one) for one in requests), return_exceptions=True)
        await ingest.close()
        assert [type(one) for one in told] == [list, InvalidInput, list]
        assert await states(harness) == ["undecided"] * 3


@pytest.mark.parametrize("when_full", ["refuse", "drop_oldest", "dead_letter"])
async def test_the_cap_is_exact_for_many_at_once(when_full: Any) -> None:
    async with Harness(application()) as harness:
        database = await cap(harness, 10, when_full)
        ingests = [Ingest(database, max_waiting=1000, after_commit=lambda: None) for _ in range(4)]

        async def publish(n: int) -> bool:
            if n % 5 == 4:
                return await _sql(harness, n)
            with suppress(BacklogFull):
                await ingests[n % 4].accept([event(n)] * 1 if n % 3 else [event(n), event(-n)])
                return True
            return False

        await asyncio.gather(*(publish(n) for n in range(60)))
        counts = Counter(await states(harness))
        assert counts["undecided"] == 10
        assert (counts["dropped"], counts["dead"]) == {
            "refuse": (0, 0), "drop_oldest": (counts.total() - 10, 0), "dead_letter": (0, counts.total() - 10),
        }[when_full]  # fmt: skip
        for ingest in ingests:
            await ingest.close()
        await harness.run_until_idle()
        assert len(await harness.runs("handle")) == 10


@pytest.mark.parametrize("when_full", ["refuse", "drop_oldest", "dead_letter"])
async def test_every_event_is_decided_or_has_left_while_workers_decide(when_full: Any) -> None:
    done: list[int] = []
    async with Harness(application(done)) as harness:
        database = await cap(harness, 5, when_full)
        await control.set_limit(database, SOURCE, RateLimit(limit=20, interval_ms=1000), "test")
        ingests = [Ingest(database, max_waiting=1000, after_commit=lambda: None) for _ in range(3)]
        accepted: list[int] = []

        async def publish(worker: int) -> None:
            for n in range(worker, 150, 3):
                with suppress(BacklogFull):
                    await ingests[worker].accept([event(n)])
                    accepted.append(n)

        publishing = asyncio.gather(*(publish(worker) for worker in range(3)))
        while not publishing.done():
            await harness.run_until_idle()
            await harness.advance("20ms")
        await publishing
        await harness.advance("1m")
        async with harness.connection() as connection:
            rows = await connection.fetch(STATES.replace("as state", "as state, (e.payload ->> 'n')::int as n", 1))
        by_state: dict[str, list[int]] = {}
        for row in rows:
            by_state.setdefault(row[0], []).append(row[1])
        assert sorted(n for numbers in by_state.values() for n in numbers) == sorted(accepted)
        assert sorted(by_state["decided"]) == sorted(done)
        assert by_state.keys() <= {"decided", "dropped", "dead"}
        assert len(done) < 150
        for ingest in ingests:
            await ingest.close()


async def _sql(harness: Harness, n: int) -> bool:
    with suppress(Exception):
        async with harness.connection() as connection:
            await connection.fetchval(
                "select tidegate.publish('cart.changed', 'shop', jsonb_build_object('n', $1::int))", n
            )
            return True
    return False


async def test_held_events_count_and_the_oldest_leave_without_leaving_a_hole() -> None:
    done: list[int] = []
    async with Harness(application(done)) as harness:
        database = await cap(harness, 3, "drop_oldest")
        await control.set_limit(database, SOURCE, RateLimit(limit=1, interval_ms=60_000), "test")
        for n in range(8):
            await harness.publish("cart.changed", source=SOURCE, payload={"n": n})
            await harness.run_until_idle()
        assert await states(harness) == ["decided"] + ["dropped"] * 4 + ["held"] * 3
        await harness.advance("190s")
        assert done == [0, 5, 6, 7]


async def test_a_paused_source_fills_and_then_refuses() -> None:
    done: list[int] = []
    async with Harness(application(done)) as harness:
        database = await cap(harness, 2)
        await control.pause(database, SOURCE, actor="test")
        for n in range(2):
            await harness.publish("cart.changed", source=SOURCE, payload={"n": n})
            await harness.run_until_idle()
        with pytest.raises(BacklogFull):
            await harness.publish("cart.changed", source=SOURCE, payload={"n": 2})
        await control.resume(database, SOURCE, "test")
        await harness.run_until_idle()
        await harness.publish("cart.changed", source=SOURCE, payload={"n": 3})
        await harness.run_until_idle()
        assert done == [0, 1, 3]


async def test_explain_says_why_an_event_was_dropped_and_a_dead_letter_can_be_replayed() -> None:
    done: list[int] = []
    async with Harness(application(done)) as harness:
        database = await cap(harness, 1, "drop_oldest")
        first = await harness.publish("cart.changed", source=SOURCE, payload={"n": 0})
        second = await harness.publish("cart.changed", source=SOURCE, payload={"n": 1})
        said = await harness.explain(first)
        assert said.summary == (
            "dropped: source shop is full: at most 1 of its events may wait (max_waiting), and the oldest leaves for "
            f"event {second.id}"
        )
        await cap(harness, 1, "dead_letter")
        third = await harness.publish("cart.changed", source=SOURCE, payload={"n": 2})
        assert "and what is over becomes a dead letter; dead letter" in (await harness.explain(third)).summary
        await harness.run_until_idle()
        async with harness.connection() as connection:
            letter = await connection.fetchval("select id from tidegate.dead_letters")
        await control.replay_letter(database, letter, "test")
        await harness.run_until_idle()
        assert done == [1, 2]


async def test_a_run_that_publishes_for_a_full_source_waits_and_publishes_once() -> None:
    done: list[int] = []
    async with Harness(application(done)) as harness:
        database = await cap(harness, 1)
        await control.pause(database, SOURCE, actor="test")
        await harness.publish("cart.changed", source=SOURCE, payload={"n": 1})
        await harness.publish("order.paid", source="pay", payload={"n": 2})
        await harness.run_until_idle()
        run = await harness.only_run("tell")
        assert run.status == "pending"
        assert "is full" in (await harness.explain(run.id)).summary
        await control.resume(database, SOURCE, "test")
        await harness.run_until_idle()
        await harness.advance("10s")
        assert (await harness.only_run("tell")).status == "succeeded"
        assert done == [1, 2]


async def test_a_schedule_whose_source_is_full_publishes_its_tick_when_there_is_room() -> None:
    ticks: list[str] = []
    app = Tidegate()

    @app.workflow(every="1m")
    async def tick(ctx: Context, scheduled_at: str = "") -> None:
        ticks.append(scheduled_at)

    async with Harness(app) as harness:
        _, database = harness._inside()
        await control.set_backlog(database, "tidegate.schedule", SourceBacklog(1, "refuse"), "test")
        await control.pause(database, "tidegate.schedule", actor="test")
        await harness.advance("3m")
        async with harness.connection() as connection:
            assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 1
        await control.resume(database, "tidegate.schedule", "test")
        await harness.run_until_idle()
        await harness.advance("2m")
        assert len(ticks) >= 3


async def test_the_sender_of_a_webhook_is_refused_like_any_other() -> None:
    async with Harness(application()) as harness:
        database = await cap(harness, 1)
        ingest = Ingest(database, max_waiting=1000, after_commit=lambda: None)
        webhooks = Webhooks(database, ingest)
        assert (await webhooks.accept(event(0, "first"))).status == "accepted"
        with pytest.raises(BacklogFull):
            await webhooks.accept(event(1, "second"))
        assert (await webhooks.accept(event(0, "first"))).status == "duplicate"
        await ingest.close()


async def test_a_source_of_its_own_has_no_cap() -> None:
    async with Harness(application()) as harness:
        _, database = harness._inside()
        with pytest.raises(InvalidInput, match="Tidegate's own"):
            await control.set_backlog(database, "tidegate.start", SourceBacklog(1, "refuse"), "test")


async def test_an_event_for_a_later_time_does_not_count_before_it() -> None:
    done: list[int] = []
    async with Harness(application(done)) as harness:
        await cap(harness, 1)
        for n in range(3):
            await harness.publish("cart.changed", source=SOURCE, payload={"n": n}, delay="1m")
        await harness.publish("cart.changed", source=SOURCE, payload={"n": 3})
        await harness.run_until_idle()
        await harness.advance("2m")
        assert sorted(done) == [0, 1, 2, 3]


async def test_health_says_so_before_it_is_full_and_the_change_is_on_record() -> None:
    async with Harness(application()) as harness:
        database = await cap(harness, 5)
        for n in range(4):
            await harness.publish("cart.changed", source=SOURCE, payload={"n": n})
        async with harness.connection() as connection:
            [cause] = [one for one in (await health.snapshot(connection)).causes if one.code == "source_backlog"]
        assert cause.message == "4 of 5 events that may wait do; when it is full, publishing is refused"
        assert cause.subject == SOURCE and cause.runbook.endswith("#source-backlog")
        removed = await control.set_backlog(database, SOURCE, None, "ann")
        assert (removed.max_waiting, removed.when_full) == (None, None)
        async with harness.connection() as connection:
            rows = await connection.fetch(
                "select actor, action from tidegate.audit_log where subject = 'shop' order by id"
            )
        assert [tuple(row) for row in rows] == [("test", "source.backlog"), ("ann", "source.backlog")]
