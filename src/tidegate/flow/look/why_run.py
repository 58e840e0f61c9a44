"""Why a run does not proceed, or how it ended. Pure."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

from tidegate.errors import first_line
from tidegate.flow.look import waiting_steps
from tidegate.flow.look.waiting_steps import AwaitedChildren
from tidegate.flow.look.why import (
    ANOTHERS,
    NAMED,
    NO_WORKER,
    Why,
    leave_out,
    letter_text,
    moment,
    nobody,
    present,
    some,
)
from tidegate.model.ids import StepId
from tidegate.model.priority import share_of_workflow
from tidegate.model.run import INTERNAL_STEPS, SUSPECT_CRASHES, Run, Step, risk_of_resuming
from tidegate.model.worker_share import ReservedSlots
from tidegate.store.circumstances import MAX_AHEAD, BudgetWait, RunCircumstances, RunSlotWait, StoryLetter
from tidegate.store.workers import WorkerRecord


class RunFacts(NamedTuple):
    """What was read about a run at one moment of the database's clock."""

    now: datetime
    run: Run
    around: RunCircumstances
    steps: Sequence[Step]
    workers: Sequence[WorkerRecord]
    letters: Sequence[StoryLetter] = ()
    awaited: AwaitedChildren | None = None
    budgets: Mapping[StepId, BudgetWait] = MappingProxyType({})


def why_run(facts: RunFacts) -> Why:
    """The one answer about a run; `until` is not in the past."""
    answer = _why(facts)
    return answer._replace(until=None) if answer.until is not None and answer.until < facts.now else answer


def _why(facts: RunFacts) -> Why:
    run = facts.run
    if run.status == "succeeded":
        return Why("succeeded", f"succeeded{_too_late(run)}")
    if run.status == "failed":
        failed = _failed(facts)
        return failed._replace(text=f"{failed.text}{_too_late(run)}")
    if run.status == "cancelled":
        return _cancelled(facts)
    if run.status == "running":
        return _running(facts)
    return _pending(facts)


def _failed(facts: RunFacts) -> Why:
    said = first_line(facts.run.error or "") or "no reason"
    text, until = letter_text(_letter(facts))
    return Why("failed", f"failed: {said}{text}", "its dead letter to be replayed" if until else None, until)


def _cancelled(facts: RunFacts) -> Why:
    run = facts.run
    by = f" by {run.cancelled_by}" if run.cancelled_by else ""
    at = f" at {moment(run.finished_at)}" if run.finished_at else ""
    said = first_line(run.error or "")
    why = f": {said}" if said and said != f"cancelled{by}" else ""
    text, until = letter_text(_letter(facts))
    return Why("cancelled", f"cancelled{by}{at}{why}{text}", "its retry" if until else None, until)


def _letter(facts: RunFacts) -> StoryLetter | None:
    """The newest dead letter of the run or one of its steps that was not replayed."""
    mine = [one for one in facts.letters if facts.run.id in (one.subject_id, one.workflow_run_id)]
    return next((one for one in reversed(mine) if one.replayed_at is None), None)


def _running(facts: RunFacts) -> Why:
    run, around, lease = facts.run, facts.around, facts.around.claim_expires_at
    name = around.claimed_by or "a worker"
    worker = next((one for one in facts.workers if one.name == around.claimed_by), None)
    absent = None if present(facts.workers) else nobody(facts.now, facts.workers)
    if lease is not None and lease <= facts.now:
        text = f"lost its worker {name}: its lease ended at {moment(lease)}; {absent or 'another worker takes it over'}"
        return Why("worker_lost", text, NO_WORKER if absent else "another worker to take it over")
    if worker is None or worker.is_late or not worker.is_alive:
        seen = f"was last seen {_ago(facts.now, worker.seen_at)}" if worker else "sent no heartbeat"
        text = f"may have lost its worker {name}, which {seen}"
        if lease is not None and absent:
            text += f"; its lease ends at {moment(lease)}; {absent}"
        elif lease is not None:
            text += f"; another worker takes it over when the lease ends at {moment(lease)}"
        return Why("worker_lost", text, "the lease of its worker to end", lease)
    if run.cancel_requested_at is not None:
        text = f"{_cancelling(run)}; it stops at its next step, or ends by itself if it has begun the last one"
        return Why("cancelling", text, "its function to reach the next step")
    limit = f"; it times out at {moment(around.deadline_at)}" if around.deadline_at else ""
    text = f"is executing on worker {name} since {moment(around.updated_at)}{_progress(facts.steps)}{limit}"
    return Why("executing", text, None, around.deadline_at)


def _cancelling(run: Run) -> str:
    assert run.cancel_requested_at is not None, "somebody asked for it"
    by = f" by {run.cancelled_by}" if run.cancelled_by else ""
    return f"is being cancelled{by} since {moment(run.cancel_requested_at)}"


def _too_late(run: Run) -> str:
    """That a run ended although it was to be cancelled: it had begun its last step."""
    if run.cancel_requested_at is None:
        return ""
    by = f" by {run.cancelled_by}" if run.cancelled_by else ""
    asked = f"a cancel was requested{by} at {moment(run.cancel_requested_at)}"
    return f"; {asked}, after its last step had begun: the run ended first"


def _ago(now: datetime, at: datetime) -> str:
    seconds = max(0, int((now - at).total_seconds()))
    return f"{seconds} s ago, at {moment(at)}"


def _progress(steps: Sequence[Step]) -> str:
    """Where a run is that is being executed, by what is stored of it: a step is stored when it ends."""
    failed = [step for step in steps if step.kind == "step" and step.status == "pending" and step.retry_attempts]
    if failed:
        return f", attempt {failed[0].retry_attempts + 1} of step {failed[0].name!r}"
    done = [
        step for step in steps if step.status in ("succeeded", "failed") and not step.name.startswith(INTERNAL_STEPS)
    ]
    if not done:
        return ""
    last = max(done, key=lambda step: (step.updated_at is not None, step.updated_at, step.created_at))
    at = f" (ended at {moment(last.updated_at)})" if last.updated_at else ""
    return f", after its step {last.name!r}{at}"


def _pending(facts: RunFacts) -> Why:
    run, around = facts.run, facts.around
    assert run.next_attempt_at is not None, "a pending run has a time"
    if around.slot is not None and run.cancel_requested_at is None:
        return _without_slot(facts, around.slot)
    if run.next_attempt_at <= facts.now:
        return _due(facts)
    if run.cancel_requested_at is not None:
        text = f"{_cancelling(run)}; a worker ends it at {moment(run.next_attempt_at)}, when its trigger is open again"
        return Why("cancelling", text, "its trigger to be open again", run.next_attempt_at)
    if run.version_held_at is not None:
        return _version(facts)
    answer = _waiting(facts, run.next_attempt_at)
    if around.deadline_at is not None:
        who = f"{run.workflow} itself" if answer.state == "waiting_for_child" else "it"
        until = min(around.deadline_at, answer.until or around.deadline_at)
        answer = answer._replace(text=f"{answer.text}; {who} times out at {moment(around.deadline_at)}", until=until)
    given_back = "; it holds no slot meanwhile" if around.has_no_slot else ""
    return answer._replace(text=f"{answer.text}{given_back}{_unserved(facts)}")


def _without_slot(facts: RunFacts, slot: RunSlotWait) -> Why:
    """It is due, and has given its slots back: it goes on when it has them again."""
    limit = facts.around.deadline_at
    out = f"; it times out at {moment(limit)}" if limit else ""
    text = f"is due since {moment(slot.since)} and waits for {slot.text}{out}{_unserved(facts)}"
    if slot.budget is None:
        return Why("concurrency", text, "a free slot", limit)
    return Why("budget", text, f"a slot of budget {slot.budget}", limit)


def _waiting(facts: RunFacts, due: datetime) -> Why:
    """What it waits for, and until when, apart from its timeout; it is due then, or when its timeout ends."""
    run, around = facts.run, facts.around
    waiting = waiting_steps.waiting(facts.steps)
    is_cut = around.deadline_at is not None and around.deadline_at <= due
    if around.closed_until is not None and around.closed_until > facts.now and around.closed_until >= due:
        said = around.closed_reason or "a step asked everyone to wait"
        until = around.closed_until if is_cut else due
        text = f"waits until {moment(until)}: a step of its trigger asked everyone to wait: {said}"
        return Why("retry_after", text, "the time that a step asked everyone to wait for", until)
    if waiting:
        first = waiting[0]
        answer = waiting_steps.why_step(
            first, first.next_attempt_at if is_cut else due, facts.awaited, facts.budgets.get(first.id)
        )
        return answer._replace(text=f"{answer.text}{waiting_steps.others(waiting[1:])}")
    at = "" if is_cut else f" until {moment(due)}"
    if around.retry_attempts:
        said = run.warning or "its function asked for it"
        return Why("run_retry", f"waits{at} to be called again: {said}", "its next attempt", None if is_cut else due)
    if is_cut:
        return Why("until_deadline", "waits", "its timeout", due)
    return Why("waiting", f"waits{at}: {run.warning or 'it is not due before'}", "its time", due)


def _unserved(facts: RunFacts) -> str:
    """That nobody could go on with it now, if workers were there before."""
    if not facts.workers or any(facts.run.workflow in worker.workflows for worker in present(facts.workers)):
        return ""
    if leaving := [worker.name for worker in present(facts.workers) if facts.run.workflow in worker.left_out]:
        return f"; {leave_out(leaving, f'the code of {facts.run.workflow}')}"
    if present(facts.workers):
        return f"; no living worker has the code of {facts.run.workflow} now"
    return f"; {nobody(facts.now, facts.workers)}"


def _version(facts: RunFacts) -> Why:
    """Its recorded steps do not fit the code that tried it last, which its warning tells."""
    run, until = facts.run, facts.around.deadline_at
    wanted = f"version {run.version} of {run.workflow}"
    _, _, misfit = (run.warning or "").partition(f"{wanted}: ")
    why = misfit.partition(". Start such a worker")[0]
    has: dict[str, list[str]] = {}
    for worker in present(facts.workers):
        if run.workflow in worker.workflows:
            has.setdefault(worker.code_versions.get(run.workflow, "none"), []).append(worker.name)
    told = some([f"{version} ({some(names)})" for version, names in sorted(has.items())])
    living = f"living workers have version {told}" if has else "no living worker has its workflow"
    limit = f"; it times out at {moment(until)}" if until else ""
    text = f"waits for a worker with {wanted}{f': {why}' if why else ''}; {living}; to let it go on with the code that "
    text += f"workers have now: tidegate runs resume {run.id} --on-current-code (this "
    text += f"{risk_of_resuming(run.warning)}){limit}"
    return Why("version_mismatch", text, f"a worker with {wanted}", until)


def _due(facts: RunFacts) -> Why:
    """It is due: who could execute it, and why does nobody?"""
    run = facts.run
    alive = present(facts.workers)
    able = [worker for worker in alive if run.workflow in worker.workflows]
    if not alive:
        return Why("no_worker", f"waits for a worker: {nobody(facts.now, facts.workers, 'none is running')}", NO_WORKER)
    if not able and (leaving := [worker.name for worker in alive if run.workflow in worker.left_out]):
        text = f"waits for a worker that takes {run.workflow}: {leave_out(leaving, 'its code')}"
        return Why("left_out", text, f"a worker that takes {run.workflow}")
    if not able:
        offered = sorted({name for worker in alive for name in worker.workflows})
        near = difflib.get_close_matches(run.workflow, offered, NAMED, 0.5)
        listed = some([*near, *(name for name in offered if name not in near)]) or "no workflows"
        offer = "the only living worker offers" if len(alive) == 1 else f"the {len(alive)} living workers offer"
        text = f"waits for a worker that has its code: {offer} {listed}"
        return Why("workflow_unserved", text, f"a worker that has the code of {run.workflow}")
    if run.crashes >= SUSPECT_CRASHES:
        text = f"waits to be executed alone: its worker died {run.crashes} times in a row"
        return Why("suspect", text, "a worker that executes nothing else")
    busy = [worker for worker in able if not _has_room(worker, run.workflow)]
    ahead, soon = _ahead(facts.around), "" if facts.around.ahead else " next"
    if len(busy) == len(able):
        slots = sum(worker.slots for worker in able)
        of = f"worker {able[0].name}" if len(able) == 1 else f"{len(able)} workers"
        full = f"the only slot of {of} is busy" if slots == 1 else f"all {slots} slots of {of} are busy"
        if kept := sum(count for worker in able for name, count in worker.reserved.items() if name != run.workflow):
            full += f" or reserved for other workflows ({kept})"
        return Why(
            "slots_busy", f"waits for a free worker slot: {full}: {_executing(able)}{ahead}", "a free worker slot"
        )
    if run.cancel_requested_at is not None:
        text = f"{_cancelling(run)}; a worker with a free slot ends it{soon}{ahead}"
        return Why("cancelling", text, "a worker to end it")
    died = f"; its worker died {run.crashes} time before" if run.crashes else ""
    return Why("due", f"is due: a worker with a free slot claims it{soon}{ahead}{died}", "a worker to claim it")


def _ahead(around: RunCircumstances) -> str:
    """How many due runs are before it, and the share of its workflow."""
    count, text = around.ahead, ""
    if count:
        least = "at least " if count >= MAX_AHEAD else ""
        text = f"; {least}{count} due run{'s' * (count > 1)} of its workflow {'are' if count > 1 else 'is'} before it"
    return f"{text}; {share_of_workflow(around.priority)}" if around.priority > 1 else text


def _has_room(worker: WorkerRecord, workflow: str) -> bool:
    """Whether the worker has a slot that a run of the workflow may use."""
    if not worker.reserved:
        return len(worker.executing) < worker.slots
    used = Counter(one.workflow for one in worker.executing)
    return ReservedSlots(worker.slots, worker.reserved).may_begin(workflow, used)


def _executing(workers: Sequence[WorkerRecord]) -> str:
    """What busy workers execute, the longest first."""
    held = sorted(
        ((one.since, worker.name, one) for worker in workers for one in worker.executing), key=lambda x: x[:2]
    )
    told = ((at, name, f"{one.workflow} (run {one.run_id})" if one.workflow else ANOTHERS) for at, name, one in held)
    return some([f"{name} executes {what} since {moment(at)}" for at, name, what in told])
