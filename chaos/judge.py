"""The verdicts: pure functions over what a run left behind. Every count must be 0; each says what it found.

Judged by three witnesses that know nothing of each other: the client's ledger, the database, and the sink that the
steps wrote their effects to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from chaos import effects
from chaos.effects import GIVEN_UP, SLACK_SECONDS
from chaos.records import Answer, Evidence, Mark, Owned, RunRow, Verb

SETTLED = ("launched", "skipped", "failed", "exhausted", "cancelled")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One promise: how often it was broken, and where."""

    name: str
    count: int
    found: list[str]


def judge(evidence: Evidence) -> list[Verdict]:
    """Every verdict, in the order in which they are shown."""
    verdicts = []
    for name, check in VERDICTS.items():
        found = list(check(evidence))
        verdicts.append(Verdict(name=name, count=len(found), found=found[:50]))
    return verdicts


def lost(evidence: Evidence) -> Iterator[str]:
    """Acknowledged events that are not there, or were never decided."""
    stored = {event.id: event for event in evidence.dump.events}
    decided: dict[str, list[str]] = defaultdict(list)
    for delivery in evidence.dump.deliveries:
        decided[delivery.event_id].append(delivery.status)
    waiting = sum(evidence.dump.unfinished.values()) > 0  # then `stuck` tells
    for answer in _acknowledged(evidence.answers):
        event = stored.get(answer.event_id or "")
        if event is None:
            yield f"{answer.key} was answered 202 as {answer.event_id} and is not in the database"
        elif answer.has_id and (event.external_id, event.source) != (answer.key, answer.source):
            yield f"{answer.key} was answered 202 as {answer.event_id}, which is {event.external_id}"
        elif not decided[event.id] and not waiting:
            yield f"{answer.key} ({event.type}) is stored and was never decided"


def unfinished(evidence: Evidence) -> Iterator[str]:
    """Events that were decided and did not come to the end that they were to have."""
    run_of = {run.delivery_id: run for run in evidence.dump.runs}
    for delivery in evidence.dump.deliveries:
        if delivery.status == "launched":
            run = run_of.get(delivery.id)
            if run is None:
                yield f"delivery {delivery.id} launched, and there is no run"
            elif run.status not in ("pending", "running") and not _ended_well(run):
                yield f"run {run.id} of {run.workflow} is {run.status}: {(run.error or '').splitlines()[-1:]}"
        elif delivery.status in SETTLED and not (
            delivery.status == "skipped" and delivery.workflow in evidence.dump.idempotency_windows
        ):
            yield f"delivery {delivery.id} of {delivery.workflow} is {delivery.status}"
    yield from _ended_by_another(evidence)


def _ended_by_another(evidence: Evidence) -> Iterator[str]:
    """Runs that ended while whoever held them was in the middle of a step: somebody else has ended them."""
    owners = Owners(evidence.dump.owned)
    marks: dict[str, list[Mark]] = defaultdict(list)
    for mark in evidence.marks:
        marks[mark.run].append(mark)
    for run in evidence.dump.runs:
        if run.status != "succeeded" or run.finished_at is None:
            continue
        holder = owners.at(run.id, run.finished_at - SLACK_SECONDS)
        done = [m for m in marks[run.id] if m.pid == holder and m.at <= run.finished_at + SLACK_SECONDS]
        if done and done[-1].what == "began":
            yield f"run {run.id} of {run.workflow} ended while its owner, {holder}, was in its step {done[-1].step}"


def _ended_well(run: RunRow) -> bool:
    """As it was to end; or given up since its worker died each time it was tried alone, which is a rule of its own."""
    if run.status == "failed":
        return run.workflow == "broken" or (run.error or "").startswith(GIVEN_UP)
    return run.status == "succeeded"


def launched_twice(evidence: Evidence) -> Iterator[str]:
    """More than one launch of an event and trigger, or of an idempotency key in its window."""
    dump = evidence.dump
    yield from _repeated("event stored twice", ((e.external_id, e.source) for e in dump.events if e.external_id))
    yield from _repeated("run launched twice", ((r.event_id, r.trigger_id) for r in dump.runs))
    yield from _repeated("decided twice", ((d.event_id, d.trigger_id) for d in dump.deliveries))
    effects = {(mark.event, mark.workflow, mark.run) for mark in evidence.marks}
    yield from _repeated("ran as two runs", ((event, workflow) for event, workflow, _ in effects))
    ids = {(a.key, a.event_id) for a in _acknowledged(evidence.answers) if a.has_id}
    yield from _repeated("answered with two ids", (key for key, _ in ids))
    launches: dict[tuple[str, str], list[float]] = defaultdict(list)
    for delivery in dump.deliveries:
        if delivery.dedupe_key is not None and delivery.launched_at is not None:
            launches[delivery.workflow, delivery.dedupe_key].append(delivery.launched_at)
    for (workflow, key), times in launches.items():
        window = dump.idempotency_windows.get(workflow, 0) / 1000
        times.sort()
        for earlier, later in pairwise(times):
            if later - earlier < window:
                yield f"key {key} of {workflow} launched again after {later - earlier:.3f} s"


def stuck(evidence: Evidence) -> Iterator[str]:
    """Rows that still wait after everything was given its time, or that break an invariant of the schema."""
    for name, count in {**evidence.dump.unfinished, **evidence.dump.orphans}.items():
        for _ in range(count):
            yield name


def exceeded(evidence: Evidence) -> Iterator[str]:
    """Windows of a source's limit or a trigger's throttle with more launches than allowed."""
    dump = evidence.dump
    launched = [(d.source, d.workflow, d.launched_at) for d in dump.deliveries if d.launched_at is not None]
    for source, (limit, interval_ms) in dump.limits.items():
        most = most_in_any_interval([at for s, _, at in launched if s == source], interval_ms / 1000)
        if most > limit:
            yield f"source {source}: {most} within {interval_ms} ms where {limit} are allowed"
    for workflow, (limit, interval_ms) in dump.throttles.items():
        most = most_in_any_interval([at for _, w, at in launched if w == workflow], interval_ms / 1000)
        if most > limit:
            yield f"throttle of {workflow}: {most} within {interval_ms} ms where {limit} are allowed"


def crowded(evidence: Evidence) -> Iterator[str]:
    """More runs of a key at once than max_concurrency, by the database and by the sink."""
    spans: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    begun: dict[str, list[float]] = defaultdict(list)
    owners = Owners(evidence.dump.owned)
    for mark in evidence.marks:
        if owners.is_live(mark):
            begun[mark.run].append(mark.at)
    for run in evidence.dump.runs:
        if run.workflow in evidence.dump.max_concurrency and run.concurrency_key is not None:
            end = run.finished_at if run.finished_at is not None else float("inf")
            spans["the database", run.workflow, run.concurrency_key].append((run.created_at, end))
            if times := begun.get(run.id):
                spans["the sink", run.workflow, run.concurrency_key].append((min(times), max(times) - SLACK_SECONDS))
    for (witness, workflow, key), found in spans.items():
        most, allowed = most_at_once(found), evidence.dump.max_concurrency[workflow]
        if most > allowed:
            yield f"{workflow} of {key}: {most} at once where {allowed} are allowed, says {witness}"


def launched_while_paused(evidence: Evidence) -> Iterator[str]:
    """Launches between the return of a pause and the call that resumed."""
    for kind, subject, since, until in pauses(evidence.verbs):
        for delivery in evidence.dump.deliveries:
            mine = delivery.source if kind == "source" else delivery.workflow
            at = delivery.launched_at
            if mine == subject and at is not None and since + SLACK_SECONDS < at < until:
                yield f"delivery {delivery.id} of {subject} launched {at - since:.3f} s after its pause"


def early(evidence: Evidence) -> Iterator[str]:
    """Whatever went on before its time: by the database's own times, and by what the steps did."""
    waits: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for wait in evidence.dump.waited:
        if wait.kind == "step":
            waits[wait.subject, wait.name].append((wait.at, wait.due_at))
        elif wait.went_on and wait.at < wait.due_at:
            yield f"{wait.kind} {wait.subject} ({wait.name}) went on {wait.due_at - wait.at:.3f} s early"
    for owned in evidence.dump.owned:
        if owned.worker is not None and owned.due_at is not None and owned.at < owned.due_at:
            yield f"run {owned.run_id} was claimed {owned.due_at - owned.at:.3f} s early"
    owners = Owners(evidence.dump.owned)
    for mark in evidence.marks:
        if mark.what != "began" or not owners.is_live(mark):
            continue
        for name in (mark.step, "nap") if mark.step == "after" else (mark.step,):
            due = [due_at for at, due_at in waits.get((mark.run, name), ()) if at <= mark.at]
            if due and mark.at < due[-1] - SLACK_SECONDS:
                yield f"step {mark.step} of run {mark.run} began {due[-1] - mark.at:.3f} s early"


def acknowledged_while_down(evidence: Evidence) -> Iterator[str]:
    """202 to a request that was sent and answered while there was no Postgres."""
    for fault in evidence.faults:
        if fault.fault == "postgres":
            for answer in _acknowledged(evidence.answers):
                if answer.sent_at >= fault.at and answer.answered_at <= fault.until:
                    yield f"{answer.key} was answered 202 {answer.answered_at - fault.at:.3f} s after Postgres stopped"


def done_again(evidence: Evidence) -> Iterator[str]:
    """Steps that an owner of their run began although their result was committed before; results without an effect."""
    owners = Owners(evidence.dump.owned)
    done = {
        (s.run_id, s.name): s.updated_at for s in evidence.dump.steps if s.status == "succeeded" and s.kind == "step"
    }
    ended = {(mark.run, mark.step) for mark in evidence.marks if mark.what == "ended"}
    for mark in evidence.marks:
        at = done.get((mark.run, mark.step))
        if mark.what == "began" and at is not None and mark.at > at + SLACK_SECONDS and owners.is_live(mark):
            yield f"step {mark.step} of run {mark.run} was begun {mark.at - at:.3f} s after it was done"
    for run_id, name in sorted(done.keys() - ended):
        yield f"step {name} of run {run_id} is done, and its effect was never seen"


VERDICTS: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "acknowledged events lost": lost,
    "runs that ended as they should not": unfinished,
    "double launches": launched_twice,
    "rows stuck": stuck,
    "limits exceeded": exceeded,
    "concurrency exceeded": crowded,
    "launches while paused": launched_while_paused,
    "early retries": early,
    "202 while Postgres was down": acknowledged_while_down,
    "finished steps done again": done_again,
    "effects repeated without a reason": effects.repeated,
    "executions side by side": effects.overlapping,
    "effects missing": effects.missing,
}


class Owners:
    """Who held each run, and when."""

    def __init__(self, owned: Sequence[Owned]) -> None:
        self._by_run: dict[str, list[Owned]] = defaultdict(list)
        for one in owned:
            self._by_run[one.run_id].append(one)

    def at(self, run_id: str, at: float) -> int | None:
        """The process that held a run then."""
        holder = None
        for one in self._by_run.get(run_id, ()):
            if one.at > at:
                break
            holder = one.worker
        return None if holder is None else int(holder.rpartition(":")[2])

    def is_live(self, mark: Mark) -> bool:
        """Whether the process that did this held the run as it did it. One that was thought dead did not."""
        return self.at(mark.run, mark.at) == mark.pid

    def next_change(self, run_id: str, after: float, *, is_claim: bool) -> float | None:
        """When, after a time, somebody claimed a run, or it was taken from who held it."""
        changes = (one for one in self._by_run.get(run_id, ()) if one.at > after)
        return next((one.at for one in changes if (one.worker is not None) == is_claim), None)

    def held_by(self, pid: int, at: float) -> list[str]:
        """The runs that a process held."""
        return [run_id for run_id in self._by_run if self.at(run_id, at) == pid]


class Pause(NamedTuple):
    kind: str
    subject: str
    since: float
    until: float


def pauses(verbs: Iterable[Verb]) -> list[Pause]:
    """From the answer to each pause to the first call that would lift it."""
    found: list[Pause] = []
    since: dict[tuple[str, str], float] = {}
    for verb in verbs:
        subject = (verb.kind, verb.subject)
        if verb.verb == "pause" and 200 <= verb.status < 300:
            since[subject] = verb.answered_at
        elif verb.verb == "resume" and subject in since:
            found.append(Pause(*subject, since.pop(subject), verb.called_at))
    return found


def most_in_any_interval(times: Sequence[float], interval: float) -> int:
    """The most of them in any half-open sliding interval."""
    ordered, most, first = sorted(times), 0, 0
    for last, at in enumerate(ordered):
        while ordered[first] <= at - interval:
            first += 1
        most = max(most, last - first + 1)
    return most


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The most spans that hold at one moment; one that ends as another begins is not beside it."""
    steps = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans], key=lambda s: (s[0], s[1]))
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def _acknowledged(answers: Iterable[Answer]) -> Iterator[Answer]:
    return (answer for answer in answers if answer.status == 202)


def _repeated(what: str, keys: Iterable[object]) -> Iterator[str]:
    seen: set[object] = set()
    for key in keys:
        if key in seen:
            yield f"{what}: {key}"
        seen.add(key)
