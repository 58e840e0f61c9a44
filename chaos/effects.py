"""What user code did, judged at the sink alone as far as that goes: the effects that were to happen happened, none was
repeated and no run was executed twice at a time without a reason.

A reason is the end of the lease under which the earlier execution was done (its worker was killed, frozen or cut off),
or a stop that its step outlasted. Where nothing was broken, nothing is a reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from chaos.records import Evidence, Fault, Mark
from chaos.traffic import KEYED, STEPS

# Two clocks are compared, as closely as one can.
SLACK_SECONDS = 0.003
# A worker that is asked to stop gives its runs so long; what has not ended then is done again by another.
SHUTDOWN_SECONDS = 5.0
GIVEN_UP = "stopped retrying: "
NO_FAULTS = {"mended", "clock"}


class Attempt(NamedTuple):
    """A step was begun once, under a claim; `ended_at` is None when its process did not come to its end."""

    run: str
    step: str
    generation: int
    began_at: float
    pid: int
    ended_at: float | None
    has_failed: bool


def attempts(marks: Iterable[Mark]) -> list[Attempt]:
    """Each `began` with the first end of the same step, claim and process that belongs to no other."""
    begun: dict[tuple[str, str, int, int], list[Mark]] = defaultdict(list)
    ends: dict[tuple[str, str, int, int], list[Mark]] = defaultdict(list)
    for mark in marks:
        (begun if mark.what == "began" else ends)[mark.run, mark.step, mark.generation, mark.pid].append(mark)
    found = []
    for (run, step, generation, pid), mine in begun.items():
        ended = iter(ends.get((run, step, generation, pid), ()))
        for mark in mine:
            end = next(ended, None)
            has_failed = end is not None and end.what == "failed"
            found.append(Attempt(run, step, generation, mark.at, pid, end.at if end else None, has_failed))
    return sorted(found, key=lambda one: (one.generation, one.began_at))


def repeated(evidence: Evidence) -> Iterator[str]:
    """A step's effect that was had, or begun, before; except after a failure, or for a reason."""
    reasons = Reasons(evidence)
    last: dict[tuple[str, str], Attempt] = {}
    for later in attempts(evidence.marks):
        earlier = last.get((later.run, later.step))
        last[later.run, later.step] = later
        if earlier is None or (earlier.has_failed and (earlier.ended_at or 0) <= later.began_at):
            continue
        if not reasons.explain(earlier, later):
            yield f"{_told(later)} again, {later.began_at - earlier.began_at:+.3f} s after {_told(earlier)}"


def overlapping(evidence: Evidence) -> Iterator[str]:
    """Two executions of a run that were in a step at the same time, without a reason."""
    reasons = Reasons(evidence)
    by_run: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts(evidence.marks):
        by_run[attempt.run].append(attempt)
    for mine in by_run.values():
        if len(mine) == 1:
            continue
        for n, earlier in enumerate(mine):
            for later in mine[n + 1 :]:
                if _overlap(earlier, later) and not reasons.explain(earlier, later):
                    yield f"{_told(later)} while {_told(earlier)}"


def missing(evidence: Evidence) -> Iterator[str]:
    """Acknowledged events that a workflow was to run for, and whose last step never ended."""
    if any(evidence.dump.unfinished.values()):  # then `stuck` tells
        return
    done = {(m.workflow, m.subject or m.event) for m in evidence.marks if m.what == "ended" and _is_last(m)}
    wanted: dict[tuple[str, str], str] = {}
    given_up: set[tuple[str, str]] = set()
    dead = {(run.workflow, run.event_id) for run in evidence.dump.runs if (run.error or "").startswith(GIVEN_UP)}
    for answer in evidence.answers:
        if answer.status == 202 and answer.event_id is not None:
            for workflow in STEPS.get(answer.type.removeprefix("chaos."), {}):
                subject = (answer.dedupe_key if workflow in KEYED else None) or answer.event_id
                wanted[workflow, subject] = answer.key
                if (workflow, answer.event_id) in dead:
                    given_up.add((workflow, subject))
    settled = done | given_up
    for (workflow, subject), key in wanted.items():
        if (workflow, subject) not in settled:
            yield f"{key} was acknowledged, and {workflow} was never done for {subject}"


class Reasons:
    """Why an effect may be repeated."""

    def __init__(self, evidence: Evidence) -> None:
        self._is_broken = any(fault.fault not in NO_FAULTS for fault in evidence.faults)
        self._claims: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._lease_ends: dict[str, list[float]] = defaultdict(list)
        self._stops: dict[int, list[Fault]] = defaultdict(list)
        for one in evidence.dump.owned:
            if one.worker is not None:
                self._claims[one.run_id, int(one.worker.rpartition(":")[2])].append(one.at)
            elif one.lease_ended:
                self._lease_ends[one.run_id].append(one.at)
        for fault in evidence.faults:
            if fault.fault in ("stuck", "restart") and (not fault.until or fault.until - fault.at >= SHUTDOWN_SECONDS):
                self._stops[fault.pid].append(fault)

    def explain(self, earlier: Attempt, later: Attempt) -> bool:
        """Whether the claim of the earlier one was taken from its worker before the later one began."""
        if not self._is_broken or earlier.generation == later.generation:
            return False
        since = [at for at in self._claims[earlier.run, earlier.pid] if at <= earlier.began_at + SLACK_SECONDS]
        begin, end = (since[-1] if since else earlier.began_at) - SLACK_SECONDS, later.began_at + SLACK_SECONDS
        if any(begin <= at <= end for at in self._lease_ends[earlier.run]):
            return True
        return any(begin <= (fault.until or fault.at) and fault.at <= end for fault in self._stops[earlier.pid])


def _overlap(one: Attempt, other: Attempt) -> bool:
    first, second = sorted((one, other), key=lambda attempt: attempt.began_at)
    return first.ended_at is not None and second.began_at < first.ended_at


def _is_last(mark: Mark) -> bool:
    return any(steps.get(mark.workflow, ("",))[-1] == mark.step for steps in STEPS.values())


def _told(attempt: Attempt) -> str:
    return f"step {attempt.step} of run {attempt.run} (claim {attempt.generation}, process {attempt.pid})"
