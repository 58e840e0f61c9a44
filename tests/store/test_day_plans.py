"""A month of history costs the work of today nothing: no statement of the hot path looks into another day.

Plans are those of a worker's session: generic, without whole reads of tables. A partition that a plan names is fine, as
long as it is removed, or never executed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg
import pytest
from bench import history

from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.model.event import NewEvent
from tidegate.model.ids import delivery_id, step_id
from tidegate.model.ingress_retry import IngressRetry
from tidegate.model.run import ClaimedRun, FinishedRun
from tidegate.model.shares import Lane
from tidegate.model.source import SourceBreakerPolicy
from tidegate.model.step import RunNotes, StepWrite, SuspendedRun
from tidegate.store import (
    circumstances,
    decisions,
    deliveries,
    events,
    inbox_lanes,
    ingress_retries,
    run_lines,
    runs,
    sources,
    steps,
    trigger_gates,
)
from tidegate.store.db import Database, TransientConflict
from tidegate.store.decisions import NewDecision
from tidegate.store.deliveries import Claim, Decided, Moved
from tidegate.store.ingress_retries import Settled
from tidegate.store.totals import BatchTotals

from .builders import new_event
from .plans import STATISTICS, Recorder, Undone, days_read, explain

DAYS, EVENTS, RETRIES, NEW = 30, 15_000, 1_000, 40
TABLES = (*history.TABLES, "event_inbox")
# Events that nobody has decided about yet, and runs that a worker holds.
PUBLISH = "select tidegate.publish('tick', 's1', id => 'new' || n) from generate_series(1, $1::int) n"
CLAIM = """
update tidegate.workflow_runs
   set status = 'running', claim_generation = 1, claimed_by = 'w', claim_expires_at = now() + interval '1 hour'
 where id in (select id from tidegate.workflow_runs where status = 'pending' order by id limit $1)
"""


class Facts(NamedTuple):
    """What the statements are asked about: all of it is of today."""

    now: datetime
    definition: uuid.UUID
    triggers: list[uuid.UUID]
    undecided: list[uuid.UUID]
    held_events: list[uuid.UUID]
    held_deliveries: list[uuid.UUID]
    held_runs: list[uuid.UUID]
    waiting_runs: list[uuid.UUID]
    version: int

    def decided(self, **changes: Any) -> list[Decided]:
        """Launches of the events that nobody has decided about."""
        return [
            Decided(
                id=(one := delivery_id(event_id, self.triggers[0])), trigger_id=self.triggers[0], event_id=event_id,
                trigger_version=1, status="launched", last_error=None, run_id=one,
                workflow_definition_id=self.definition, correlation_id="c", parameters="{}",
            )._replace(**changes)
            for event_id in self.undecided
        ]  # fmt: skip

    def waits(self) -> list[Decided]:
        """The same, but they are to wait."""
        return self.decided(
            status="throttled", run_id=None, retry_state="scheduled", next_attempt_at=self.now, retry_attempts=1,
            reason="throttle", source="s1", ingress_sequence=1,
        )  # fmt: skip

    def settled(self) -> list[Decided]:
        """Launches of deliveries that have waited."""
        [pattern, *_] = self.decided(retry_state="completed")
        return [pattern._replace(id=one, run_id=one) for one in self.held_deliveries]

    def moved(self) -> list[Moved]:
        return [
            Moved(one, "exhausted" if n % 2 else "throttled", "exhausted" if n % 2 else "scheduled",
                  None if n % 2 else self.now, 2, "throttle", None, {}, 1)
            for n, one in enumerate(self.held_deliveries)
        ]  # fmt: skip

    def claimed(self) -> list[ClaimedRun]:
        return [
            ClaimedRun(
                id=one, workflow="history0", event_id=None, correlation_id=None, parameters={}, attempts=1,
                claim_generation=1, now=self.now, started_at=self.now,
            )
            for one in self.held_runs
        ]  # fmt: skip

    def finished(self, status: Any = "succeeded") -> list[FinishedRun]:
        return [FinishedRun(id=one, claim_generation=1, status=status, output="1") for one in self.held_runs]

    def written(self, **changes: Any) -> list[StepWrite]:
        given = {"claim_generation": 1, "name": "two", "status": "succeeded", "result": "1", "is_new": True} | changes
        return [
            StepWrite(id=step_id(one, given["name"]), workflow_run_id=one, **given) for one in self.held_runs
        ]  # fmt: skip

    def suspended(self) -> list[SuspendedRun]:
        return [SuspendedRun(id=one, claim_generation=1, next_attempt_at=self.now) for one in self.held_runs]

    def settled_events(self) -> list[Settled]:
        return [Settled(one, "completed", 2, None, None, None, {}, 0) for one in self.held_events]

    def retries(self) -> list[IngressRetry]:
        return [IngressRetry(event_id=one, source="s1", next_attempt_at=self.now) for one in self.undecided]

    def new(self, first: int = 1_000) -> list[NewEvent]:
        return [new_event(external_id=f"new{n}", source="s1", type="tick") for n in range(first, first + NEW)]


Call = Callable[[Any, Facts], Awaitable[Any]]
STATEMENTS: dict[str, Call] = {
    # accept
    "events.insert": lambda c, f: events.insert(c, [*f.new(), new_event()]),
    "events.insert of repeats": lambda c, f: events.insert(c, f.new(1)),
    "events.insert_new": lambda c, f: events.insert_new(c, [*f.new(), new_event()]),
    "events.resolve": lambda c, f: events.resolve(c, f.new(1)),
    # decide
    "events.claim_inbox": lambda c, f: events.claim_inbox(c, 500),
    "events.claim_inbox_one": lambda c, f: events.claim_inbox_one(c, EVENTS + RETRIES + 2),
    "events.get_many": lambda c, f: events.get_many(c, f.undecided),
    "events.set_traceparents": lambda c, f: events.set_traceparents(c, dict.fromkeys(f.undecided, "00-a-b-01")),
    "circumstances.of_event": lambda c, f: circumstances.of_event(c, f.undecided[0]),
    "circumstances.children_of": lambda c, f: circumstances.children_of(c, step_id(f.held_runs[0], "map-1")),
    "events.correlation_id": lambda c, f: events.correlation_id(c, f.undecided[0]),
    "events.dead_letter": lambda c, f: events.dead_letter(c, EVENTS + RETRIES + 2, "x"),
    "deliveries.launch_unrestricted": lambda c, f: deliveries.launch_unrestricted(
        c, f.decided(), f.now, Claim("w", 1000, [f.definition], 10), BatchTotals(), f.version, []
    ),
    "inbox_lanes.waiting": lambda c, f: inbox_lanes.waiting(c, "", 500),
    "inbox_lanes.claim": lambda c, f: inbox_lanes.claim(c, {Lane("shop"): 10}, 500),
    "deliveries.launch": lambda c, f: deliveries.launch(c, f.decided(), f.now, Claim("w", 1000, [f.definition], 10)),
    "deliveries.launch of failures": lambda c, f: deliveries.launch(
        c, f.decided(status="failed", last_error="x", run_id=None), f.now
    ),
    "deliveries.hold": lambda c, f: deliveries.hold(c, f.waits(), f.now),
    "decisions.insert": lambda c, f: decisions.insert(
        c, [NewDecision(one, None, "gate", "throttled") for one in f.undecided]
    ),
    "trigger_gates.lock": lambda c, f: trigger_gates.lock(c, always=f.triggers[:1], others=f.triggers[1:]),
    "trigger_gates.lines": lambda c, f: trigger_gates.lines(c, f.triggers),
    "trigger_gates.slots": lambda c, f: trigger_gates.slots(c, [(one, "") for one in f.triggers]),
    "trigger_gates.replan": lambda c, f: trigger_gates.replan(c, f.triggers[0]),
    # hold
    "deliveries.due_triggers": lambda c, f: deliveries.due_triggers(c, 50),
    "deliveries.list_due": lambda c, f: deliveries.list_due(c, f.triggers, 250),
    "deliveries.take": lambda c, f: deliveries.take(c, f.held_deliveries, f.now),
    "deliveries.settle": lambda c, f: deliveries.settle(c, f.settled(), f.now, Claim("w", 1000, [f.definition], 10)),
    "deliveries.take_stale": lambda c, f: deliveries.take_stale(c, f.triggers[0], plan_version=9, after=0, limit=500),
    "deliveries.move": lambda c, f: deliveries.move(c, f.moved()),
    "deliveries.keep_waiting": lambda c, f: deliveries.keep_waiting(c, f.held_deliveries, 3),
    "deliveries.release_sources": lambda c, f: deliveries.release_sources(c, 500),
    "deliveries.next_due_seconds": lambda c, f: deliveries.next_due_seconds(c),
    "trigger_gates.next_in_line": lambda c, f: trigger_gates.next_in_line(c, {(one, ""): 2 for one in f.triggers}),
    "trigger_gates.wake": lambda c, f: trigger_gates.wake(c, [(one, "") for one in f.triggers]),
    "ingress_retries.hold": lambda c, f: ingress_retries.hold(c, f.retries()),
    "ingress_retries.due_sources": lambda c, f: ingress_retries.due_sources(c, 50),
    "ingress_retries.take_due": lambda c, f: ingress_retries.take_due(c, source="s1", now=f.now, limit=500),
    "ingress_retries.first_due": lambda c, f: ingress_retries.first_due(c, "s1"),
    "ingress_retries.take_stale": lambda c, f: ingress_retries.take_stale(c, "s1", plan_version=9, after=0, limit=500),
    "ingress_retries.keep_order": lambda c, f: ingress_retries.keep_order(c, "s1", 0),
    "ingress_retries.settle": lambda c, f: ingress_retries.settle(c, f.settled_events()),
    "ingress_retries.next_due_seconds": lambda c, f: ingress_retries.next_due_seconds(c),
    "sources.backlogs": lambda c, f: c.fetch(sources._sql["backlogs"], ["s1", "s2"]),
    # run
    "runs.claim_due": lambda c, f: runs.claim_due(c, definitions=[f.definition], limit=100, worker="w", lease_ms=1000),
    "run_lines.due_workflows": lambda c, f: run_lines.due_workflows(c, [f.definition], 9, worker="w", lease_ms=1000),
    "run_lines.list_due": lambda c, f: run_lines.list_due(c, {f.definition: 100}, worker="w", lease_ms=1000),
    "run_lines.claim": lambda c, f: run_lines.claim(
        c, f.waiting_runs, definitions=[f.definition], worker="w", lease_ms=1000
    ),
    "runs.has_suspects": lambda c, f: runs.has_suspects(c, [f.definition], worker="w", lease_ms=1000),
    "runs.claim_suspect": lambda c, f: runs.claim_suspect(
        c, definitions=[f.definition], worker="w", lease_ms=1000, is_counted=True
    ),
    "runs.pass_trial": lambda c, f: runs.pass_trial(c, f.claimed()[0]),
    "runs.cancel_requested": lambda c, f: runs.cancel_requested(c, f.held_runs),
    "runs.renew": lambda c, f: runs.renew(c, f.claimed(), 1000),
    "runs.succeed": lambda c, f: runs.succeed(c, f.finished(), f.written()),
    "runs.succeed without steps": lambda c, f: runs.succeed(c, f.finished(), []),
    "runs.finish": lambda c, f: runs.finish(c, f.finished("failed")),
    "runs.suspend": lambda c, f: runs.suspend(c, f.suspended()),
    "runs.note": lambda c, f: runs.note(
        c, [RunNotes(id=one.id, claim_generation=1, version="2", tags={"a": "b"}) for one in f.claimed()]
    ),
    "runs.hold_for_version": lambda c, f: runs.hold_for_version(c, f.suspended()),
    "runs.offer_versions": lambda c, f: runs.offer_versions(c, "w"),
    "runs.accept_version": lambda c, f: runs.accept_version(c, f.waiting_runs[0]),
    "runs.list_version_held": lambda c, f: runs.list_version_held(c),
    "runs.cancel_waiting": lambda c, f: runs.cancel_waiting(c, f.waiting_runs[0], "ann"),
    "runs.request_cancel": lambda c, f: runs.request_cancel(c, f.held_runs[0], "ann"),
    "runs.lock": lambda c, f: runs.lock(c, f.held_runs),
    "runs.dead_letter": lambda c, f: runs.dead_letter(c, f.finished("failed")),
    "runs.release": lambda c, f: runs.release(c, f.claimed()),
    "runs.release_unstarted": lambda c, f: runs.release_unstarted(c, f.claimed()),
    "runs.release_expired": lambda c, f: runs.release_expired(c, 100),
    "runs.list_killers": lambda c, f: runs.list_killers(c, 3, 100),
    "runs.next_due_seconds": lambda c, f: runs.next_due_seconds(c, [f.definition], worker="w", lease_ms=1000),
    "runs.set_concurrency_keys": lambda c, f: runs.set_concurrency_keys(c, f.held_runs, ["k"] * len(f.held_runs)),
    "runs.ended_by": lambda c, f: runs.ended_by(c, f.finished()),
    "runs.trigger_of": lambda c, f: runs.trigger_of(c, f.held_runs[0]),
    "runs.get": lambda c, f: runs.get(c, f.held_runs[0]),
    "steps.write": lambda c, f: steps.write(c, f.written()),
    "steps.write of retries": lambda c, f: steps.write(
        c, f.written(name="one", status="pending", retry_state="scheduled", delay_ms=1000, retry_attempts=2)
    ),
    "steps.write of ended runs": lambda c, f: steps.write(c, f.written(), ended=set(f.held_runs)),
    "steps.list_of_runs": lambda c, f: steps.list_of_runs(c, f.held_runs),
    "steps.list_of_run": lambda c, f: steps.list_of_run(c, f.held_runs[0]),
    "steps.end_waiting": lambda c, f: steps.end_waiting(c, f.held_runs),
    "trigger_gates.close": lambda c, f: trigger_gates.close(c, f.triggers[0], key=None, delay_ms=1000, reason="x"),
    "sources.counting_runs": lambda c, f: sources.counting_runs(c, f.held_runs, SourceBreakerPolicy()),
}


@pytest.fixture(scope="module")
def month_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A database with 30 days of history, and with work that waits, all of it of today."""
    name = "plans_of_days"

    async def make() -> None:
        admin = await asyncpg.connect(postgres.admin_url())
        await admin.execute(f"create database {name} template {template} owner {ROLE}")
        await admin.close()
        connection = await asyncpg.connect(postgres.url(name))
        await history.add_days(connection, DAYS)
        await history.set_autovacuum(connection, is_on=False, tables=TABLES)
        await history.load(connection, events=EVENTS, retries=RETRIES, days=DAYS)
        await connection.execute(PUBLISH, NEW)
        await connection.execute(CLAIM, NEW)
        await connection.close()

    async def drop() -> None:
        admin = await asyncpg.connect(postgres.admin_url())
        await admin.execute(f"drop database {name} with (force)")
        await admin.close()

    asyncio.run(make())
    yield postgres.url(name)
    asyncio.run(drop())


async def ids(connection: Any, query: str) -> list[Any]:
    return [row[0] for row in await connection.fetch(query)]


async def facts_of(connection: Any) -> Facts:
    found = [
        await ids(connection, f"select id from tidegate.workflow_event_triggers order by name limit {NEW}"),
        await ids(connection, "select event_id from tidegate.event_inbox"),
        await ids(
            connection,
            "select event_id from tidegate.event_ingress_retries where retry_state = 'scheduled' "
            f"order by next_attempt_at limit {NEW}",
        ),
        await ids(
            connection,
            "select id from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled' "
            f"order by next_attempt_at limit {NEW}",
        ),
        await ids(connection, "select id from tidegate.workflow_runs where status = 'running'"),
        await ids(connection, "select id from tidegate.workflow_runs where status = 'pending'"),
    ]
    assert all(len(some) >= 20 for some in found)
    [[now, definition, version]] = await connection.fetch(
        "select now(), (select workflow_definition_id from tidegate.workflow_runs where status = 'pending' limit 1), "
        "(select version from tidegate.registry_version)"
    )
    return Facts(now, definition, *found, version)


async def asked(call: Call, facts: Facts) -> Sequence[tuple[str, tuple[Any, ...]]]:
    recorder = Recorder()
    with suppress(TransientConflict):
        await call(recorder, facts)
    assert recorder.asked
    return recorder.asked


@STATISTICS
async def test_the_work_of_today_looks_into_no_other_day(month_url: str, has_statistics: bool) -> None:
    connection = await Database(month_url, "worker", size=1).dedicated()
    found: dict[str, set[str]] = {}
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute(f"analyze {', '.join(f'tidegate.{table}' for table in TABLES)}")
            facts = await facts_of(connection)
            for name, call in STATEMENTS.items():
                for text, arguments in await asked(call, facts):
                    read = days_read(await explain(connection, text, arguments))
                    found[name] = found.get(name, set()) | {
                        one for one in read if not one.endswith(f"_{facts.now:%Y%m%d}")
                    }
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()
    looked = [f"{name} looks into {len(days)}: {min(days)} …" for name, days in found.items() if days]
    assert not looked, "\n".join(looked)
