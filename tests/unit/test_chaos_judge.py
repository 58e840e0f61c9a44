"""Every verdict of the chaos suite can fail: a clean story is acquitted, and each planted violation is found by its
verdict and by no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from chaos import faults
from chaos.figures import figures
from chaos.judge import VERDICTS, Owners, judge, most_at_once, most_in_any_interval, pauses
from chaos.records import (
    Answer,
    DeliveryRow,
    Dump,
    EventRow,
    Evidence,
    Fault,
    Mark,
    Owned,
    RunRow,
    StepRow,
    Verb,
    Waited,
    Writer,
    read,
)
from chaos.traffic import event

PID = 7


def answer(n: int, at: float, **changes: Any) -> Answer:
    made = Answer(
        key=f"k{n}",
        type="chaos.plain",
        source="shop",
        has_id=True,
        sent_at=at,
        answered_at=at + 0.01,
        status=202,
        event_id=f"e{n}",
        outcome="accepted",
    )
    return msgspec.structs.replace(made, **changes)


def event_row(n: int, **changes: Any) -> EventRow:
    return msgspec.structs.replace(
        EventRow(id=f"e{n}", external_id=f"k{n}", type="chaos.plain", source="shop"), **changes
    )


def delivery(n: int, at: float, **changes: Any) -> DeliveryRow:
    made = DeliveryRow(
        id=f"d{n}",
        event_id=f"e{n}",
        trigger_id="t",
        workflow="plain",
        source="shop",
        status="launched",
        retry_state="none",
        run_id=f"r{n}",
        dedupe_key=None,
        launched_at=at,
    )
    return msgspec.structs.replace(made, **changes)


def run_row(n: int, at: float, **changes: Any) -> RunRow:
    made = RunRow(
        id=f"r{n}",
        workflow="plain",
        event_id=f"e{n}",
        trigger_id="t",
        delivery_id=f"d{n}",
        concurrency_key=None,
        status="succeeded",
        error=None,
        attempts=1,
        created_at=at,
        finished_at=at + 0.1,
    )
    return msgspec.structs.replace(made, **changes)


def mark(n: int, at: float, what: str, **changes: Any) -> Mark:
    made = Mark(at=at, pid=PID, run=f"r{n}", event=f"e{n}", workflow="plain", step="only", key=f"r{n}:only", what=what)
    return msgspec.structs.replace(made, **changes)


def clean() -> Evidence:
    """Ten events, one a second: accepted, launched, run by one worker, finished."""
    each = range(10)
    dump = Dump(
        events=[event_row(n) for n in each],
        deliveries=[delivery(n, n + 0.1) for n in each],
        runs=[run_row(n, n + 0.1) for n in each],
        steps=[
            StepRow(
                run_id=f"r{n}", name="only", kind="step", status="succeeded", retry_state="none", updated_at=n + 0.18
            )
            for n in each
        ],
        owned=[one for n in each for one in (owned(n, n + 0.11), owned(n, n + 0.2, worker=None, due_at=None))],
        waited=[],
        orphans={"runs_claimed_by_nobody": 0},
        unfinished={"unfinished_runs": 0},
        max_concurrency={"narrow": 2},
        throttles={"throttled": (2, 1000)},
        limits={"limited": (2, 1000)},
        idempotency_windows={"keyed": 60_000},
    )
    return Evidence(
        answers=[answer(n, float(n)) for n in each],
        verbs=[],
        faults=[],
        marks=[m for n in each for m in (mark(n, n + 0.12, "began"), mark(n, n + 0.15, "ended"))],
        dump=dump,
    )


def owned(n: int, at: float, **changes: Any) -> Owned:
    return msgspec.structs.replace(Owned(run_id=f"r{n}", at=at, worker=f"host:{PID}", due_at=at - 0.01), **changes)


def verb(name: str, called_at: float, answered_at: float, status: int = 200) -> Verb:
    return Verb(verb=name, kind="source", subject="shop", called_at=called_at, answered_at=answered_at, status=status)


def changed(evidence: Evidence, **dump: Any) -> Evidence:
    return msgspec.structs.replace(evidence, dump=msgspec.structs.replace(evidence.dump, **dump))


def put(rows: list[Any], n: int, **changes: Any) -> list[Any]:
    """The rows with one of them changed."""
    return [msgspec.structs.replace(row, **changes) if i == n else row for i, row in enumerate(rows)]


Plant = Callable[[Evidence], Evidence]


def event_missing(found: Evidence) -> Evidence:
    return changed(found, events=found.dump.events[1:], deliveries=found.dump.deliveries[1:], runs=found.dump.runs[1:])


def event_never_decided(found: Evidence) -> Evidence:
    return changed(found, deliveries=found.dump.deliveries[1:], runs=found.dump.runs[1:])


def answered_as_another(found: Evidence) -> Evidence:
    return msgspec.structs.replace(found, answers=put(found.answers, 0, key="k99"))


def run_missing(found: Evidence) -> Evidence:
    return changed(found, runs=found.dump.runs[1:])


def run_failed(found: Evidence) -> Evidence:
    return changed(found, runs=put(found.dump.runs, 0, status="failed", error="Boom: unplanned"))


def delivery_exhausted(found: Evidence) -> Evidence:
    return changed(
        found, deliveries=put(found.dump.deliveries, 0, status="exhausted", run_id=None, launched_at=None),
        runs=found.dump.runs[1:], steps=found.dump.steps[1:],
    )  # fmt: skip


def ended_by_another(found: Evidence) -> Evidence:
    """The worker that held it had not finished its step."""
    late = [m if (m.run, m.what) != ("r0", "ended") else msgspec.structs.replace(m, pid=8) for m in found.marks]
    return msgspec.structs.replace(found, marks=late)


def stored_twice(found: Evidence) -> Evidence:
    return changed(found, events=[*found.dump.events, event_row(10, external_id="k0")])


def launched_twice(found: Evidence) -> Evidence:
    return changed(found, runs=[*found.dump.runs, run_row(0, 5.0, id="r10", delivery_id="d10")])


def effects_of_two_runs(found: Evidence) -> Evidence:
    return msgspec.structs.replace(found, marks=[*found.marks, mark(0, 5.0, "began", run="r10")])


def two_ids_for_one(found: Evidence) -> Evidence:
    twin = [answer(0, 0.5, event_id="e10")]
    return msgspec.structs.replace(
        changed(found, events=[*found.dump.events, event_row(10, external_id="k0", source="shop")],
                deliveries=[*found.dump.deliveries, delivery(10, 5.0, run_id="r10")],
                runs=[*found.dump.runs, run_row(10, 5.0)]),
        answers=[*found.answers, *twin],
    )  # fmt: skip


def key_again(found: Evidence) -> Evidence:
    rows = put(found.dump.deliveries, 0, workflow="keyed", dedupe_key="o1")
    return changed(found, deliveries=put(rows, 5, workflow="keyed", dedupe_key="o1"))


def row_waits(found: Evidence) -> Evidence:
    return changed(found, unfinished={"unfinished_runs": 1})


def orphan(found: Evidence) -> Evidence:
    return changed(found, orphans={"runs_claimed_by_nobody": 1})


def limit_exceeded(found: Evidence) -> Evidence:
    rows = found.dump.deliveries
    for n in range(3):
        rows = put(rows, n, source="limited", launched_at=1.0 + n * 0.3)
    return changed(found, deliveries=rows)


def throttle_exceeded(found: Evidence) -> Evidence:
    rows = found.dump.deliveries
    for n in range(3):
        rows = put(rows, n, workflow="throttled", launched_at=1.0 + n * 0.499)
    return changed(found, deliveries=rows)


def crowded_in_the_database(found: Evidence) -> Evidence:
    rows = found.dump.runs
    for n in range(3):
        rows = put(rows, n, workflow="narrow", concurrency_key="c", created_at=n * 0.01, finished_at=9.0)
    return msgspec.structs.replace(changed(found, runs=rows), marks=found.marks)


def crowded_in_the_sink(found: Evidence) -> Evidence:
    """The database says one after the other; the effects overlapped."""
    rows, marks = found.dump.runs, list(found.marks)
    for n in range(3):
        rows = put(rows, n, workflow="narrow", concurrency_key="c", created_at=n * 1.0, finished_at=n + 0.9)
    held = [owned(n, 0.0, due_at=0.0) for n in range(3)]
    steps = [s for s in found.dump.steps if s.run_id not in ("r0", "r1", "r2")]
    marks = [m for m in marks if m.run not in ("r0", "r1", "r2")]
    marks += [mark(n, at, what) for n in range(3) for at, what in ((0.1, "began"), (0.5, "ended"))]
    return msgspec.structs.replace(
        changed(found, runs=rows, owned=[*held, *(o for o in found.dump.owned if o.run_id not in ("r0", "r1", "r2"))],
                steps=steps), marks=marks)  # fmt: skip


def paused_launch(found: Evidence) -> Evidence:
    return msgspec.structs.replace(found, verbs=[verb("pause", 3.0, 3.05), verb("resume", 3.5, 3.55)])


def delivery_early(found: Evidence) -> Evidence:
    return changed(
        found, waited=[Waited(kind="delivery", subject="d1", name="throttle", at=1.0, due_at=1.5, went_on=True)]
    )


def claimed_early(found: Evidence) -> Evidence:
    return changed(found, owned=put(found.dump.owned, 0, due_at=600.0))


def step_early(found: Evidence) -> Evidence:
    wait = Waited(kind="step", subject="r4", name="only", at=4.115, due_at=4.5, went_on=False)
    return changed(found, waited=[wait])


def timer_early(found: Evidence) -> Evidence:
    wait = Waited(kind="step", subject="r4", name="nap", at=4.115, due_at=4.5, went_on=False)
    marks = [msgspec.structs.replace(m, step="after") if m.run == "r4" else m for m in found.marks]
    steps = [msgspec.structs.replace(s, name="after") if s.run_id == "r4" else s for s in found.dump.steps]
    return msgspec.structs.replace(changed(found, waited=[wait], steps=steps), marks=marks)


def accepted_while_down(found: Evidence) -> Evidence:
    return msgspec.structs.replace(found, faults=[Fault(at=3.9, fault="postgres", until=4.6)])


def step_again(found: Evidence) -> Evidence:
    again = [mark(2, 2.19, "began"), mark(2, 2.191, "ended")]
    return msgspec.structs.replace(found, marks=[*found.marks, *again])


def result_without_effect(found: Evidence) -> Evidence:
    return msgspec.structs.replace(found, marks=[m for m in found.marks if m.run != "r3"])


def executed_twice_by_one_claim(found: Evidence) -> Evidence:
    """Side by side, in one process; the lease was not over, and nothing was broken."""
    twin = [mark(2, 2.1201, "began"), mark(2, 2.1501, "ended")]
    return msgspec.structs.replace(found, marks=sorted([*found.marks, *twin], key=lambda m: m.at))


def taken_over(found: Evidence, *, lease_ended: bool, **faults: float) -> Evidence:
    """Run 5 is claimed by another while its worker, 7, is in its step, which that one ends too."""
    story = [owned(5, 5.13, worker=None, due_at=None, lease_ended=lease_ended), owned(5, 5.14, worker="host:8")]
    story += [one for one in found.dump.owned if (one.run_id, one.worker) != ("r5", None)]
    marks = [*found.marks, mark(5, 5.145, "began", pid=8, generation=3), mark(5, 5.16, "ended", pid=8, generation=3)]
    broken = [Fault(at=at, fault=fault, pid=PID, until=5.149) for fault, at in faults.items()]
    found = changed(found, owned=sorted([*story, owned(5, 5.2, worker=None, due_at=None)], key=lambda one: one.at))
    return msgspec.structs.replace(found, marks=sorted(marks, key=lambda m: m.at), faults=broken)


def taken_over_without_a_fault(found: Evidence) -> Evidence:
    return taken_over(found, lease_ended=True)


def taken_over_before_the_lease_was_over(found: Evidence) -> Evidence:
    return taken_over(found, lease_ended=False, freeze=5.125)


def beside_another_step(found: Evidence) -> Evidence:
    """No effect is repeated, but one execution continues while another is in a step."""
    marks = [mark(5, 5.13, "began", step="next", generation=3), mark(5, 5.16, "ended", step="next", generation=3)]
    return msgspec.structs.replace(found, marks=sorted([*found.marks, *marks], key=lambda m: m.at))


def effect_missing(found: Evidence) -> Evidence:
    """A second workflow of the event was to run."""
    answers = put(found.answers, 0, type="chaos.keyed", dedupe_key="o1")
    marks = [msgspec.structs.replace(m, workflow="each") if m.run == "r0" else m for m in found.marks]
    return msgspec.structs.replace(found, answers=answers, marks=marks)


AGAIN, BESIDE, MISSING = "effects repeated without a reason", "executions side by side", "effects missing"
# Where the sink and the rows agree, both verdicts find it.
ALSO: dict[Plant, set[str]] = {
    step_again: {AGAIN},
    two_ids_for_one: {MISSING},
    timer_early: {MISSING},
    result_without_effect: {MISSING},
    executed_twice_by_one_claim: {BESIDE},
    taken_over_without_a_fault: {BESIDE},
    taken_over_before_the_lease_was_over: {BESIDE},
}
PLANTED: dict[Plant, str] = {
    event_missing: "acknowledged events lost",
    event_never_decided: "acknowledged events lost",
    answered_as_another: "acknowledged events lost",
    run_missing: "runs that ended as they should not",
    run_failed: "runs that ended as they should not",
    delivery_exhausted: "runs that ended as they should not",
    ended_by_another: "runs that ended as they should not",
    stored_twice: "double launches",
    launched_twice: "double launches",
    effects_of_two_runs: "double launches",
    two_ids_for_one: "double launches",
    key_again: "double launches",
    row_waits: "rows stuck",
    orphan: "rows stuck",
    limit_exceeded: "limits exceeded",
    throttle_exceeded: "limits exceeded",
    crowded_in_the_database: "concurrency exceeded",
    crowded_in_the_sink: "concurrency exceeded",
    paused_launch: "launches while paused",
    delivery_early: "early retries",
    claimed_early: "early retries",
    step_early: "early retries",
    timer_early: "early retries",
    accepted_while_down: "202 while Postgres was down",
    step_again: "finished steps done again",
    result_without_effect: "finished steps done again",
    executed_twice_by_one_claim: AGAIN,
    taken_over_without_a_fault: AGAIN,
    taken_over_before_the_lease_was_over: AGAIN,
    beside_another_step: BESIDE,
    effect_missing: MISSING,
}


def broken(evidence: Evidence) -> set[str]:
    return {verdict.name for verdict in judge(evidence) if verdict.count}


def test_a_clean_story_is_acquitted() -> None:
    assert broken(clean()) == set()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_violation_is_found_by_its_verdict_alone(plant: Plant) -> None:
    assert broken(plant(clean())) == {PLANTED[plant]} | ALSO.get(plant, set())


def test_every_verdict_has_a_planted_violation() -> None:
    assert set(PLANTED.values()) == set(VERDICTS)


def test_what_is_allowed_is_acquitted() -> None:
    """A repeated effect after a crash, a zombie's mark, an unknown answer, a skipped key, a planned failure."""
    found = clean()
    zombie = mark(2, 2.5, "began", pid=99)
    frozen = [owned(2, 2.02, worker="host:99"), owned(2, 2.1, worker=None, due_at=None, lease_ended=True)]
    again = [owned(5, 5.13, worker=None, due_at=None, lease_ended=True), owned(5, 5.14, worker="host:8")]
    story = sorted([*found.dump.owned, *frozen, *again], key=lambda one: one.at)
    marks = [msgspec.structs.replace(m, generation=3) if m.run == "r2" else m for m in found.marks]
    marks += [zombie, mark(5, 5.15, "began", pid=8, generation=3), mark(5, 5.16, "ended", pid=8, generation=3)]
    broke = [Fault(at=2.03, fault="freeze", pid=99, until=2.49), Fault(at=5.125, fault="kill", pid=PID)]
    unknown = answer(20, 4.0, status=0, event_id=None, outcome=None)
    runs = put(found.dump.runs, 7, workflow="broken", status="failed", error="as planned")
    skipped = put(found.dump.deliveries, 8, workflow="keyed", status="skipped", run_id="r1", launched_at=None)
    runs = [run for run in runs if run.id != "r8"]
    steps = [step for step in found.dump.steps if step.run_id != "r8"]
    found = changed(found, owned=story, runs=runs, deliveries=skipped, steps=steps)
    found = msgspec.structs.replace(found, marks=marks, answers=[*found.answers, unknown], faults=broke)
    assert broken(found) == set()
    counted = figures(found)
    assert (counted.effects_repeated, counted.unanswered, counted.effects_of_zombies) == (1, 1, 2)


def test_a_pause_is_judged_from_its_answer_to_the_first_call_that_lifts_it() -> None:
    story = [
        verb("pause", 1.0, 1.1, status=0),
        verb("pause", 2.0, 2.1),
        verb("resume", 3.0, 3.1, status=503),
        verb("resume", 4.0, 4.1),
    ]
    assert [(pause.since, pause.until) for pause in pauses(story)] == [(2.1, 3.0)]


def test_owners() -> None:
    owners = Owners([owned(1, 1.0), owned(1, 2.0, worker=None), owned(1, 3.0, worker="host:9")])
    assert [owners.at("r1", at) for at in (0.5, 1.5, 2.5, 3.5)] == [None, PID, None, 9]
    assert owners.held_by(PID, 1.5) == ["r1"] and owners.next_change("r1", 1.5, is_claim=True) == 3.0
    assert owners.next_change("r1", 1.5, is_claim=False) == 2.0


def test_windows_and_spans() -> None:
    assert most_in_any_interval([0, 0.5, 1.0], 1.0) == 2  # half open
    assert most_in_any_interval([0, 0.5, 0.999], 1.0) == 3
    assert most_at_once([(0, 1), (1, 2)]) == 1
    assert most_at_once([(0, 1), (0.9, 2), (0.95, 0.96)]) == 3


def test_a_line_that_was_cut_off_is_not_read(tmp_path: Any) -> None:
    writer = Writer(tmp_path / "ledger.jsonl")
    writer.write(answer(1, 1.0))
    writer.close()
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"key": "k2", "ty')
    assert read(tmp_path / "ledger.jsonl", Answer) == [answer(1, 1.0)]


def test_the_same_seed_makes_the_same_plan_and_the_same_events() -> None:
    assert faults.plan(5, 60, faults.FAULTS) == faults.plan(5, 60, list(reversed(faults.FAULTS)))
    assert faults.plan(5, 60, faults.FAULTS) != faults.plan(6, 60, faults.FAULTS)
    assert event(5, 17) == event(5, 17) and event(5, 17) != event(6, 17)


def test_a_plan_breaks_as_often_as_it_says() -> None:
    plan = faults.plan(1, 60, ["kill", "postgres", "flush", "redis", "freeze", "rolling"])
    count = {fault: sum(action.fault == fault for action in plan) for fault in faults.FAULTS}
    assert count["kill"] == 29 and count["postgres"] == 3 and count["flush"] == 19 and count["redis"] == 1
    assert all(0 < action.at < 60 for action in plan)
    lease = faults.LEASE_MS / 1000
    assert all(action.seconds > lease for action in plan if action.fault == "freeze")
