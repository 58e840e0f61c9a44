"""Traces: what an event goes through is one tree with one root, across processes, waits and retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.conftest import Clock
from tests.flow.http_receiver import LOOPBACK, Receiver
from tidegate import AsyncClient, Client, Context, SyncContext, Tidegate, failpoints
from tidegate.api.server import bind, serving
from tidegate.app import checked
from tidegate.flow import control
from tidegate.flow.accept.ingest import Ingest
from tidegate.flow.call.states import WRITING
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.model.source import RateLimit
from tidegate.settings import Settings
from tidegate.store.db import Connection, Database
from tidegate.telemetry import traces
from tidegate.worker.supervisor import Worker

PRODUCER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1bf7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"
UNSAMPLED = "00-2cf7651916cd43dd8448eb211c80319c-d7ad6b7169203331-00"


def trace_of(traceparent: str) -> int:
    return int(traceparent.split("-")[1], 16)


def named(span: ReadableSpan) -> str:
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


class Recorded:
    """The spans that were recorded, with the real SDK."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def all(self) -> list[ReadableSpan]:
        found = self._exporter.get_finished_spans()
        return sorted(found, key=lambda span: (span.start_time or 0, span.parent is not None))

    def of(self, trace_id: int) -> list[ReadableSpan]:
        return [span for span in self.all if span.context.trace_id == trace_id]

    def called(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.called(name)
        return span

    def tree(self) -> dict[str, Any]:
        """The one trace there is, as nested names; every parent must be there, and exactly one span has none."""
        spans = self.all
        assert len({span.context.trace_id for span in spans}) == 1, [span.name for span in spans]
        ids = {span.context.span_id for span in spans}
        roots = [span for span in spans if span.parent is None or span.parent.span_id not in ids]
        assert [span.parent for span in roots] == [None], [span.name for span in roots]

        def below(parent: ReadableSpan) -> dict[str, Any]:
            mine = [s for s in spans if s.parent is not None and s.parent.span_id == parent.context.span_id]
            return {f"{i} {span.name}": below(span) for i, span in enumerate(mine, 1)}

        return {roots[0].name: below(roots[0])}


def told(span: ReadableSpan, *names: str) -> tuple[Any, ...]:
    assert span.attributes is not None
    return tuple(span.attributes.get(f"tidegate.{name}") for name in names)


@pytest.fixture
def spans() -> Iterator[Recorded]:
    made = Recorded()
    traces.use(made.provider)
    yield made
    traces.switch_off()
    made.provider.shutdown()


@pytest.fixture
async def app(database_url: str, clock: Clock) -> AsyncIterator[Tidegate]:
    app = Tidegate(database_url=database_url, source_rate_limits={"slow": RateLimit(limit=1, interval_ms=60_000)})
    yield app
    await app.close()


@pytest.fixture
async def workers(app: Tidegate) -> AsyncIterator[list[Worker]]:
    made: list[Worker] = []
    yield made
    for worker in made:
        await worker.close()


@pytest.fixture
async def address(database_url: str, clock: Clock) -> AsyncIterator[str]:
    settings = Settings(database_url=database_url, port=0, auth="off")
    async with serving(settings, bind(settings)) as server:
        yield f"http://127.0.0.1:{server.port}"


async def turn(worker: Worker, clock: Clock) -> None:
    while (await worker.turn(clock.now)).done:
        pass


async def post(address: str, body: Any, **headers: str) -> Any:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{address}/v1/events", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return answer.json()


async def stored(connection: Connection) -> list[str | None]:
    rows = await connection.fetch("select traceparent from tidegate.workflow_events order by ingress_sequence")
    return [row[0] for row in rows]


def event(event_type: str = "go", source: str = "shop", **payload: Any) -> dict[str, Any]:
    return {"type": event_type, "source": source, "payload": payload}


async def test_one_trace_from_the_request_through_hold_retry_run_and_step_retry(
    app: Tidegate, workers: list[Worker], address: str, clock: Clock, connection: Connection, spans: Recorded
) -> None:
    tried: list[str] = []

    @app.workflow(on="go", source="slow")
    async def fulfil(ctx: Context) -> str:
        return await ctx.step("charge", charge)

    async def charge() -> str:
        tried.append("charge")
        if len(tried) == 1:
            raise ConnectionError("not today")
        return "paid"

    workers += [await app.worker(), await app.worker()]
    traces.switch_off()
    await post(address, event("other", "slow"))  # takes the only place of this minute
    await turn(workers[0], clock)
    traces.use(spans.provider)
    await post(address, event("go", "slow"))
    await turn(workers[0], clock)
    held = spans.one("gate")
    assert told(held, "decision", "reason", "source") == ("held", "rate_limit", "slow")
    until = await connection.fetchval("select next_attempt_at from tidegate.event_ingress_retries")
    assert told(held, "next_attempt_at") == (until.isoformat(),)
    assert not spans.called("match")
    await clock.advance(61_000)
    await turn(workers[1], clock)  # lets it through, and the step fails
    again_at = await connection.fetchval("select next_attempt_at from tidegate.workflow_run_steps")
    await clock.advance(60_000)
    await turn(workers[0], clock)
    assert tried == ["charge", "charge"]
    assert spans.tree() == {
        "POST /v1/events": {
            "1 gate": {},
            "2 gate": {},
            "3 match": {},
            "4 deliver": {},
            "5 run fulfil": {"1 step charge": {}},
            "6 run fulfil": {"1 step charge": {}},
        }
    }
    assert [told(span, "decision", "attempt") for span in spans.called("gate")] == [("held", 1), ("allowed", 1)]
    assert [told(span, "attempt", "status") for span in spans.called("run fulfil")] == [
        (1, "pending"),
        (2, "succeeded"),
    ]
    assert [told(span, "attempt", "status") for span in spans.called("step charge")] == [
        (1, "pending"),
        (2, "succeeded"),
    ]
    first, second = spans.called("step charge")
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "ConnectionError")
    assert second.status.status_code is StatusCode.UNSET
    assert told(first, "next_attempt_at") == (again_at.isoformat(),)


async def test_a_throttled_delivery_and_its_retry_are_in_the_trace(
    app: Tidegate, workers: list[Worker], clock: Clock, connection: Connection, spans: Recorded
) -> None:
    @app.workflow(on="go", throttle="1/min")
    async def rare(ctx: Context) -> None: ...

    workers.append(await app.worker())
    with spans.provider.get_tracer("mine").start_as_current_span("first"):
        await app.publish("go", source="shop")
    await turn(workers[0], clock)
    with spans.provider.get_tracer("mine").start_as_current_span("second") as mine:
        await app.publish("go", source="shop")
    await turn(workers[0], clock)
    await clock.advance(61_000)
    await turn(workers[0], clock)
    found = spans.of(mine.get_span_context().trace_id)
    assert [span.name for span in found] == ["second", "gate", "match", "deliver", "deliver", "run rare"]
    waited, launched = (span for span in found if span.name == "deliver")
    assert told(waited, "status", "reason", "run_id", "trigger") == ("throttled", "throttle", None, "rare/code")
    assert told(launched, "status", "attempt") == ("launched", 1)
    assert told(launched, "run_id") == told(found[-1], "run_id")
    assert {span.parent.span_id for span in found[1:] if span.parent} == {found[0].context.span_id}


async def test_the_producers_trace_is_continued_and_the_request_is_its_child(
    app: Tidegate, workers: list[Worker], address: str, clock: Clock, connection: Connection, spans: Recorded
) -> None:
    @app.workflow(on="go")
    async def fulfil(ctx: Context) -> None: ...

    workers.append(await app.worker())
    await post(address, event(), traceparent=PRODUCER)
    await turn(workers[0], clock)
    assert {span.context.trace_id for span in spans.all} == {trace_of(PRODUCER)}
    request = spans.one("POST /v1/events")
    assert request.parent is not None and f"{request.parent.span_id:016x}" in PRODUCER
    assert request.kind is SpanKind.SERVER and request.attributes is not None
    assert request.attributes["http.response.status_code"] == 202
    assert (request.attributes["http.route"], request.attributes["http.request.method"]) == ("/v1/events", "POST")
    assert await stored(connection) == [named(request)]
    assert {span.parent.span_id for span in spans.all if span.parent and span is not request} == {
        request.context.span_id
    }
    assert {span.name for span in spans.all} == {"POST /v1/events", "gate", "match", "deliver", "run fulfil"}


async def test_an_unsampled_producer_leaves_no_span_anywhere(
    app: Tidegate, workers: list[Worker], address: str, clock: Clock, connection: Connection, spans: Recorded
) -> None:
    done: list[str] = []

    @app.workflow(on="go")
    async def fulfil(ctx: Context) -> None:
        await ctx.step("one", done.append, "one")

    workers.append(await app.worker())
    await post(address, event(), traceparent=UNSAMPLED)
    await turn(workers[0], clock)
    assert done == ["one"]
    assert spans.all == []
    [kept] = await stored(connection)
    assert kept is not None and kept.endswith("-00") and trace_of(kept) == trace_of(UNSAMPLED)


async def test_an_event_of_sql_gets_its_root_where_it_is_dispatched_and_keeps_it(
    app: Tidegate, workers: list[Worker], clock: Clock, connection: Connection, spans: Recorded
) -> None:
    @app.workflow(on="go", source="slow")
    async def fulfil(ctx: Context) -> None:
        await ctx.sleep("10s")

    workers += [await app.worker(), await app.worker()]
    await connection.execute("select tidegate.publish('other', 'slow', '{}')")
    await turn(workers[0], clock)
    before = len(spans.all)
    await connection.execute("select tidegate.publish('go', 'slow', '{}')")
    await turn(workers[0], clock)
    for worker in (workers[1], workers[0], workers[1]):
        await clock.advance(60_000)
        await turn(worker, clock)
    mine = spans.all[before:]
    [root] = [span for span in mine if span.parent is None]
    assert root.name == "dispatch" and (await stored(connection))[1] == named(root)
    assert [span.name for span in mine] == ["dispatch", "gate", "gate", "match", "deliver", "run fulfil", "run fulfil"]
    assert {span.context.trace_id for span in mine} == {root.context.trace_id}
    assert {span.parent.span_id for span in mine if span.parent} == {root.context.span_id}


async def test_what_was_rolled_back_leaves_no_span(
    app: Tidegate, workers: list[Worker], clock: Clock, connection: Connection, spans: Recorded
) -> None:
    @app.workflow(on="go")
    async def fulfil(ctx: Context) -> None: ...

    workers.append(await app.worker())
    await connection.execute("select tidegate.publish('go', 'shop', '{}')")
    failpoints.arm("dispatch.before_commit=raise")  # the batch is taken apart, and each decided alone
    await turn(workers[0], clock)
    assert spans.tree() == {"dispatch": {"1 gate": {}, "2 match": {}, "3 deliver": {}, "4 run fulfil": {}}}
    assert await stored(connection) == [named(spans.one("dispatch"))]


async def test_the_batch_that_is_lost_with_its_worker_is_told_by_the_next(
    database: Database, clock: Clock, connection: Connection, spans: Recorded
) -> None:
    await connection.execute("select tidegate.publish('go', 'shop', '{}')")
    dispatch = Dispatch(database, batch_size=10, after_launch=lambda: None)
    failpoints.arm("dispatch.after_commit=raise")
    with pytest.raises(failpoints.FailpointHit):
        await dispatch.run_once()
    assert spans.all == [], "it died before it could tell"
    [kept] = await stored(connection)
    assert kept is not None, "but the trace that it began is stored"


async def test_spans_of_the_users_own_code_are_inside_of_the_step(
    app: Tidegate, workers: list[Worker], clock: Clock, spans: Recorded
) -> None:
    tracer = spans.provider.get_tracer("shop")

    async def charge() -> None:
        with tracer.start_as_current_span("card"):
            await asyncio.sleep(0)

    def pack() -> None:
        tracer.start_span("box").end()

    @app.workflow(on="go")
    async def fulfil(ctx: Context) -> None:
        tracer.start_span("looked").end()
        await asyncio.gather(ctx.step("charge", charge), ctx.step("pack", pack))
        with tracer.start_as_current_span("last"):
            await ctx.step("wrap", pack)

    @app.workflow(on="go")
    def plain(ctx: SyncContext) -> None:
        tracer.start_span("seen").end()
        ctx.step("carry", pack)

    workers.append(await app.worker())
    with tracer.start_as_current_span("caller"):
        await app.publish("go", source="shop")
    await turn(workers[0], clock)
    [tree] = spans.tree().values()
    runs = {name[2:]: below for name, below in tree.items() if "run " in name}
    assert runs["run plain"] == {"1 seen": {}, "2 step carry": {"1 box": {}}}
    assert runs["run fulfil"] == {
        "1 looked": {},
        "2 step charge": {"1 card": {}},
        "3 step pack": {"1 box": {}},
        "4 last": {"1 step wrap": {"1 box": {}}},
    }


async def test_what_a_step_publishes_stays_in_the_trace(
    app: Tidegate, workers: list[Worker], address: str, clock: Clock, connection: Connection, spans: Recorded
) -> None:
    @app.workflow(on="go")
    async def first(ctx: Context) -> None:
        await ctx.step("tell", tell)
        await ctx.step("tell-by-http", tell_by_http)
        await ctx.step("tell-from-a-thread", tell_from_a_thread)

    async def tell() -> None:
        await app.publish("then", source="shop")

    async def tell_by_http() -> None:
        async with AsyncClient(address) as client:
            await client.publish("then", source="shop")

    def tell_from_a_thread() -> None:
        with Client(address) as client:
            client.publish_many([event("then")])

    @app.workflow(on="then")
    async def second(ctx: Context) -> None: ...

    workers.append(await app.worker())
    await post(address, event())
    await turn(workers[0], clock)
    assert len(spans.called("run second")) == 3
    [tree] = spans.tree().values()
    [below] = [found for name, found in tree.items() if name.endswith("run first")]
    expected = {"1 gate": {}, "2 match": {}, "3 deliver": {}, "4 run second": {}}
    assert below == {
        "1 step tell": expected,
        "2 step tell-by-http": {"1 POST /v1/events": expected},
        "3 step tell-from-a-thread": {"1 POST /v1/events": expected},
    }


async def test_a_batch_whose_events_have_traces_of_their_own(
    app: Tidegate, workers: list[Worker], address: str, clock: Clock, connection: Connection, spans: Recorded
) -> None:
    workers.append(await app.worker())
    given = [PRODUCER, OTHER, UNSAMPLED, None, "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"]
    batch = [
        {"specversion": "1.0", "id": str(i), "type": "go", "source": "shop"} | ({"traceparent": one} if one else {})
        for i, one in enumerate(given)
    ]
    await post(address, batch, **{"content-type": "application/cloudevents-batch+json"})
    await turn(workers[0], clock)
    request = spans.one("POST /v1/events")
    assert request.parent is None
    assert [link.context.trace_id for link in request.links] == [trace_of(one) for one in (PRODUCER, OTHER, UNSAMPLED)]
    assert await stored(connection) == [PRODUCER, OTHER, UNSAMPLED, *[named(request)] * 3]
    for one in (PRODUCER, OTHER):
        mine = spans.of(trace_of(one))
        assert [span.name for span in mine] == ["gate", "match"]
        assert all(span.parent and f"{span.parent.span_id:016x}" in one for span in mine)
    assert spans.of(trace_of(UNSAMPLED)) == []
    assert len(spans.of(request.context.trace_id)) == 1 + 3 * 2


async def test_a_span_around_ingest_is_continued_by_the_events_of_its_trace(
    database: Database, clock: Clock, connection: Connection, spans: Recorded
) -> None:
    ingest = Ingest(database, max_waiting=10, after_commit=lambda: None)
    span = traces.begin("caller", PRODUCER)
    span.enter()
    for given in (PRODUCER, OTHER, None):
        one = checked({"type": "go", "source": "shop"}, Settings())
        await ingest.accept([msgspec.structs.replace(one, traceparent=given)])
    span.leave()
    await ingest.close()
    assert await stored(connection) == [span.traceparent, OTHER, span.traceparent]


async def test_one_cloudevent_with_a_trace_takes_the_request_into_it(
    address: str, connection: Connection, spans: Recorded
) -> None:
    one = {"specversion": "1.0", "id": "1", "type": "go", "source": "shop", "traceparent": PRODUCER}
    await post(address, one, **{"content-type": "application/cloudevents+json"})
    request = spans.one("POST /v1/events")
    assert request.parent is not None and f"{request.parent.span_id:016x}" in PRODUCER
    assert await stored(connection) == [named(request)]


async def test_requests_that_are_refused_and_other_routes_have_spans_but_probes_have_none(
    address: str, spans: Recorded
) -> None:
    async with httpx.AsyncClient(trust_env=False, base_url=address) as client:
        await client.post("/v1/events", json={"type": "go"}, headers={"traceparent": PRODUCER})
        await client.get("/v1/events/nobody", headers={"traceparent": PRODUCER})
        for path in ("/livez", "/readyz", "/metrics", "/"):
            await client.get(path)
    found = {span.name: span.attributes["http.response.status_code"] for span in spans.all if span.attributes}
    assert found == {"POST /v1/events": 422, "GET /v1/events/{id}": 404}
    assert spans.one("GET /v1/events/{id}").context.trace_id == trace_of(PRODUCER)


async def test_of_several_traceparents_none_is_continued(address: str, connection: Connection, spans: Recorded) -> None:
    """As W3C's Trace Context asks: nobody can tell which one is meant. The request is taken, in a trace of its own."""
    twice = [("traceparent", PRODUCER), ("traceparent", OTHER)]
    async with httpx.AsyncClient(trust_env=False, base_url=address) as client:
        answer = await client.post("/v1/events", json=event(), headers=twice)
        await client.get("/v1/events/nobody", headers=twice)
    assert answer.status_code == 202
    assert all(span.parent is None for span in spans.all) and len(spans.all) == 2
    assert await stored(connection) == [named(spans.one("POST /v1/events"))]


async def test_an_http_workflows_request_carries_the_steps_span(
    app: Tidegate, workers: list[Worker], database: Database, clock: Clock, spans: Recorded
) -> None:
    receiver = Receiver()
    try:
        body = {"slug": "hook", "kind": "http", "url": receiver.url, "allow_private": True}
        await control.create_workflow(database, body, allowed=LOOPBACK.allowed, actor="ann")
        await control.create_trigger(database, "hook", {"name": "t", "event_type": "go"}, "ann")
        app.configure(Settings(http_allow="127.0.0.0/8"))
        workers.append(await app.worker())
        await workers[0]._definitions_once()  # what the worker's own loop does
        with spans.provider.get_tracer("mine").start_as_current_span("caller"):
            await app.publish("go", source="shop")
        await turn(workers[0], clock)
        [(headers, _)] = receiver.seen
        assert headers["traceparent"] == named(spans.one("step request"))
        assert "run hook" in str(spans.tree())
    finally:
        receiver.close()


async def test_exceptions_tell_their_type_and_place_and_nothing_of_what_they_say(
    app: Tidegate, workers: list[Worker], clock: Clock, spans: Recorded
) -> None:
    async def charge(card: str) -> None:
        raise ValueError(f"card {card} refused")

    @app.workflow(on="go")
    async def fulfil(ctx: Context, card: str) -> None:
        await ctx.step("charge", charge, card)

    @app.workflow(on="go")
    async def broken(ctx: Context, card: str) -> None:
        raise RuntimeError(f"card {card}")

    app.configure(Settings(database_url=app.settings.database_url))
    workers.append(await app.worker())
    await app.publish("go", source="shop", payload={"card": "4111-secret"})
    await turn(workers[0], clock)
    whole = "".join(span.to_json() for span in spans.all)
    assert "4111-secret" not in whole and "refused" not in whole
    [raised] = spans.one("step charge").events
    assert raised.attributes is not None and raised.attributes["exception.type"] == "ValueError"
    assert "in charge" in str(raised.attributes["exception.stacktrace"])
    assert spans.one("run broken").status.description == "RuntimeError"
    assert told(spans.one("run broken"), "status") == ("failed",)


async def test_an_attempt_that_lost_its_claim_is_told_as_discarded(
    app: Tidegate, workers: list[Worker], clock: Clock, connection: Connection, spans: Recorded
) -> None:
    tracer = spans.provider.get_tracer("shop")

    async def charge() -> None:
        tracer.start_span("card").end()
        await connection.execute("update tidegate.workflow_runs set claim_generation = claim_generation + 1")

    @app.workflow(on="go")
    async def fulfil(ctx: Context) -> None:
        await ctx.step("charge", charge)
        await ctx.step("never", charge)

    workers.append(await app.worker())
    await app.publish("go", source="shop")
    await workers[0].turn(clock.now)
    assert told(spans.one("step charge"), "status") == ("discarded",)
    assert told(spans.one("run fulfil"), "status") == ("discarded",)
    [tree] = spans.tree().values()
    assert "{'1 step charge': {'1 card': {}}}" in str(tree)


async def test_a_run_that_is_lost_while_its_end_is_written_is_told_as_discarded(
    app: Tidegate, workers: list[Worker], clock: Clock, connection: Connection, spans: Recorded
) -> None:
    hold = connection.transaction()

    async def charge() -> None:
        await hold.start()
        await connection.execute("select from tidegate.workflow_runs for update")

    @app.workflow(on="go")
    async def fulfil(ctx: Context) -> None:
        await ctx.step("charge", charge)

    workers.append(await app.worker())
    await app.publish("go", source="shop")
    turning = asyncio.create_task(workers[0].turn(clock.now))
    runner = workers[0]._runner
    async with asyncio.timeout(30):
        while not [one for one in runner._slots.held() if one.state is WRITING]:  # noqa: ASYNC110 - it is not told
            await asyncio.sleep(0.01)
        [execution] = runner._slots.held()
        runner._slots.lease_lost(execution.run)
        assert told(spans.one("step charge"), "status") == ("discarded",)
        assert told(spans.one("run fulfil"), "status") == ("discarded",)
        await hold.rollback()
        await turning
    assert [span.name for span in spans.all].count("run fulfil") == 1


async def test_a_run_of_an_untraced_event_is_in_nobodys_trace(
    app: Tidegate, workers: list[Worker], clock: Clock, connection: Connection, spans: Recorded
) -> None:
    seen: list[str | None] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.workflow(on="go", max_concurrency=1)
    async def narrow(ctx: Context) -> None:
        seen.append(traces.current())
        begun.set()
        await ctx.step("wait", go_on.wait)

    workers.append(await app.worker())
    for _ in range(2):  # the second waits for the slot of the first
        await app.publish("go", source="shop")
    turning = asyncio.create_task(turn(workers[0], clock))
    await begun.wait()
    await connection.execute(
        "update tidegate.workflow_events set traceparent = null where id in "
        "(select event_id from tidegate.workflow_trigger_deliveries where status = 'throttled')"
    )
    go_on.set()
    await turning  # what ends the first launches and begins the second
    first = spans.one("run narrow")
    assert seen == [named(first), None]
    assert len(spans.called("step wait")) == 1
