"""What a run was like, beside the verdicts: how much was published, broken and repeated, and how fast it recovered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from chaos.effects import GIVEN_UP
from chaos.judge import Owners
from chaos.records import Evidence


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Some durations in seconds."""

    count: int
    p50: float
    max: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and times of one run."""

    published: int
    acknowledged: int
    requests: int
    refused: int
    unanswered: int
    recovered: int
    answered_without_postgres: dict[int, int]
    launched: int
    succeeded: int
    failed_as_planned: int
    given_up: int
    effects: int
    effects_repeated: int
    effects_of_zombies: int
    faults: dict[str, int]
    released_seconds: Spread | None
    takeover_seconds: Spread | None
    first_202_after_postgres_seconds: Spread | None
    stop_seconds: Spread | None


def figures(evidence: Evidence) -> Figures:
    """Counted from the same evidence as the verdicts."""
    answers, dump = evidence.answers, evidence.dump
    acknowledged = {a.key for a in answers if a.status == 202}
    known = {a.event_id for a in answers if a.status == 202}
    owners = Owners(dump.owned)
    ended = Counter((mark.run, mark.step) for mark in evidence.marks if mark.what == "ended")
    return Figures(
        published=len({a.key for a in answers}),
        acknowledged=len(acknowledged),
        requests=len(answers),
        refused=sum(a.status in (429, 503) for a in answers),
        unanswered=sum(a.status == 0 for a in answers),
        recovered=sum(event.id not in known for event in dump.events),
        answered_without_postgres=_without_postgres(evidence),
        launched=len(dump.runs),
        succeeded=sum(run.status == "succeeded" for run in dump.runs),
        failed_as_planned=sum(run.status == "failed" and run.workflow == "broken" for run in dump.runs),
        given_up=sum((run.error or "").startswith(GIVEN_UP) for run in dump.runs),
        effects=sum(ended.values()),
        effects_repeated=sum(count - 1 for count in ended.values()),
        effects_of_zombies=sum(not owners.is_live(mark) for mark in evidence.marks),
        faults=dict(Counter(fault.fault for fault in evidence.faults)),
        released_seconds=_spread(_takeovers(evidence, owners, is_claim=False)),
        takeover_seconds=_spread(_takeovers(evidence, owners, is_claim=True)),
        first_202_after_postgres_seconds=_spread(_first_answers(evidence)),
        stop_seconds=_spread([f.until - f.at for f in evidence.faults if f.fault == "restart"]),
    )


def _without_postgres(evidence: Evidence) -> dict[int, int]:
    """What those heard who asked while there was no Postgres, by status; 0 is no answer."""
    down = [(fault.at, fault.until) for fault in evidence.faults if fault.fault == "postgres"]
    asked = (a for a in evidence.answers if any(at <= a.sent_at and a.answered_at <= until for at, until in down))
    return dict(sorted(Counter(a.status for a in asked).items()))


def _takeovers(evidence: Evidence, owners: Owners, *, is_claim: bool) -> list[float]:
    """From the kill of a worker until each run that it held was taken from it, or claimed by the next."""
    found = []
    for fault in evidence.faults:
        if fault.fault == "kill" and fault.target.startswith("worker"):
            for run_id in owners.held_by(fault.pid, fault.at):
                changed_at = owners.next_change(run_id, fault.at, is_claim=is_claim)
                if changed_at is not None:
                    found.append(changed_at - fault.at)
    return found


def _first_answers(evidence: Evidence) -> list[float]:
    """From a Postgres that is ready again to the next 202."""
    accepted = sorted(a.answered_at for a in evidence.answers if a.status == 202)
    found = []
    for fault in evidence.faults:
        if fault.fault == "postgres-ready":
            following = next((at for at in accepted if at > fault.at), None)
            if following is not None:
                found.append(following - fault.at)
    return found


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    return Spread(count=len(ordered), p50=round(ordered[len(ordered) // 2], 3), max=round(ordered[-1], 3))
