"""Waits of one execution: a step that waits for events. It is written with what it waits for in one commit; then it
looks back for events that came before that; then the run is suspended until an event wakes it, or its time is over."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tidegate import failpoints
from tidegate.errors import InvalidInput, NonRetryable
from tidegate.flow.code.user_calls import MAX_STEP_NAME
from tidegate.flow.code.wait_call import WaitCall
from tidegate.model.event import Event
from tidegate.model.ids import StepId, step_id
from tidegate.model.run import ClaimedRun
from tidegate.model.units import duration_ms
from tidegate.model.wait import MAX_PATTERNS, NewWait, On, WaitPattern, cancel_pattern, check_pattern

if TYPE_CHECKING:
    from tidegate.flow.call.steps import RunSteps

# The step of a run that registers what cancels it.
CANCEL_ON = "tidegate.cancel_on"
_ANY_ID = uuid.UUID(int=0)
# Ids have the time of the process that stored the event: its clock may be wrong by this much.
_CLOCK_ERROR_MS = 86_400_000


class WaitQuestion(NamedTuple):
    """What an execution asks about a step that waits: has its event come? `is_over`: its time is over. `least_id` is a
    lower bound of the ids of the events that can be meant."""

    run: ClaimedRun
    step_id: StepId
    is_over: bool
    least_id: uuid.UUID = _ANY_ID


class WaitAnswer(NamedTuple):
    """Whether the run is still held, or to be cancelled; whether the step is done, and its result."""

    is_kept: bool
    is_cancel_requested: bool = False
    is_done: bool = False
    result: Any = None


Ask = Callable[[WaitQuestion], Awaitable[WaitAnswer]]


async def wait(steps: RunSteps, call: WaitCall, ask: Ask) -> Any:
    """The step's result as stored: an event, or which one and the event, or several events; None after the timeout."""
    name = _name(steps, call)
    if (refusal := steps.refusal(name)) is not None:
        raise await steps.refused(refusal)
    known = steps.begin(name)
    if known is not None and known.status == "succeeded":
        return known.result
    with steps.in_progress(name, "wait"):
        await steps.journal.barrier()
        patterns = checked(steps, call)
        joined = " and " if call.mode == "all" else " or "
        steps.endings.waits_for[name] = joined.join(map(described, patterns))
        if known is None:
            await _register(steps, name, call, patterns)
            failpoints.hit("wait.registered")
        answer = WaitAnswer(True)
        if known is None or not known.retry_metadata.get("looked_back"):
            answer = await asked(steps, name, ask, is_over=False, since=call.since)
            failpoints.hit("wait.looked_back")
        if not answer.is_done:
            await steps.ready(name)
            answer = await asked(steps, name, ask, is_over=True)
        steps.waited(name)
        return answer.result


def _name(steps: RunSteps, call: WaitCall) -> str:
    """The name of a step that waits; by default by what it waits for, and how often the function has done so."""
    if call.name is not None:
        return call.name
    if not call.is_alone or (steps.is_async and asyncio.current_task() is not steps.function_task):
        raise NonRetryable(
            "a wait beside other steps needs a name, since their order may change; so does one in a task of its own, "
            f"as in asyncio.wait_for, which its own timeout= can replace: ctx.{call.method}(…, name='…')"
        )
    first = call.patterns[0] if call.patterns else ""
    what = str(getattr(first, "type", first)) if call.mode == "event" else call.method
    steps.waits_begun[what] += 1
    number = steps.waits_begun[what]
    name = f"wait {what}" if call.mode == "event" else what
    return f"{name[: MAX_STEP_NAME - 20]}{f' {number}' if number > 1 else ''}"


async def register_cancel(steps: RunSteps, patterns: Sequence[On], ask: Ask) -> None:
    """Before the function is called the first time: register what cancels the run, and look back to its creation."""
    known = steps.begin(CANCEL_ON)
    if known is not None and known.status == "succeeded":
        return
    call = WaitCall(CANCEL_ON, "cancel", patterns, 0, None, CANCEL_ON)
    found = [cancel_pattern(on, steps.run) for on in patterns]
    facts: dict[str, object] = {"reason": "cancel_on", "waits_for": [_stored(pattern) for pattern in found]}
    # An event that cancelled it before it was retried does not do so again.
    facts["events"] = known.retry_metadata.get("events", []) if known is not None else []
    waits = _new_waits(steps, call, found)
    await steps.journal.kept(steps.write(CANCEL_ON, kind="wait", status="pending", waits=waits, retry_metadata=facts))
    await asked(steps, CANCEL_ON, ask, is_over=False)
    steps.waited(CANCEL_ON)


async def _register(steps: RunSteps, name: str, call: WaitCall, patterns: Sequence[WaitPattern]) -> None:
    """Write the step and what it waits for, in one commit."""
    try:
        timeout_ms = duration_ms(call.timeout)
    except ValueError as exc:
        raise NonRetryable(f"ctx.{call.method}: timeout: {exc}") from exc
    await steps.waits(
        name, kind="wait", delay_ms=timeout_ms, waits=_new_waits(steps, call, patterns),
        retry_metadata={
            "reason": "event", "mode": call.mode, "waits_for": [_stored(one) for one in patterns], "looked_back": False,
        },
    )  # fmt: skip


def checked(steps: RunSteps, call: WaitCall) -> list[WaitPattern]:
    """The patterns of a call. NonRetryable names what is wrong."""
    if not 1 <= len(call.patterns) <= MAX_PATTERNS:
        raise NonRetryable(f"ctx.{call.method} takes 1 to {MAX_PATTERNS} patterns, not {len(call.patterns)}")
    try:
        return [
            check_pattern(one, steps.run, "" if len(call.patterns) == 1 else f"pattern {n + 1}")
            for n, one in enumerate(call.patterns)
        ]
    except InvalidInput as exc:
        wrong = "; ".join(f"{error.field} {error.message}" for error in exc.errors)
        raise NonRetryable(f"ctx.{call.method}: {wrong}") from exc


def _new_waits(steps: RunSteps, call: WaitCall, patterns: Sequence[WaitPattern]) -> list[NewWait]:
    since, since_ms, after = None, None, None
    if isinstance(call.since, datetime):
        if call.since.tzinfo is None:
            raise NonRetryable(
                f"ctx.{call.method}: since must have a time zone, or be a duration before now, like '1h'"
            )
        since = call.since
    elif call.since is not None:
        try:
            since_ms = duration_ms(call.since)
        except ValueError as exc:
            raise NonRetryable(f"ctx.{call.method}: since: {exc}") from exc
    elif steps.event is not None:
        after = steps.event.ingress_sequence
    return [
        NewWait(number=n, mode=call.mode, pattern=one, after_sequence=after, since=since, since_ms=since_ms)
        for n, one in enumerate(patterns)
    ]


async def asked(steps: RunSteps, name: str, ask: Ask, *, is_over: bool, since: object = None) -> WaitAnswer:
    """The state of a step, from the database. LeaseLost or Cancelled: nothing more is to begin."""
    least_id = _least_id(steps.event) if since is None and steps.event is not None else _ANY_ID
    answer = await ask(WaitQuestion(steps.run, step_id(steps.run.id, name), is_over, least_id))
    steps.journal.learn(is_kept=answer.is_kept, is_cancel_requested=answer.is_cancel_requested)
    return answer


def _least_id(event: Event) -> uuid.UUID:
    milliseconds = (event.id.int >> 80) - _CLOCK_ERROR_MS
    return uuid.UUID(int=max(0, milliseconds) << 80)


def _stored(pattern: WaitPattern) -> dict[str, Any]:
    """What an operator reads of a pattern."""
    fields: dict[str, Any] = msgspec.to_builtins(pattern)
    return {name: value for name, value in fields.items() if value not in (None, {}, "*")}


def described(pattern: WaitPattern) -> str:
    """A pattern in words."""
    matched = ", ".join(f"{path.lstrip('.')} = {value!r}" for path, value in sorted(pattern.match.items()))
    source = "" if pattern.source == "*" else f" from {pattern.source}"
    text = f"event {pattern.type}{source}"
    return f"{text} with {matched}" if matched else f"{text} where {pattern.where}" if pattern.where else text
