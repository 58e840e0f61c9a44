"""Approvals of one execution: a step that waits for a person's decision.

It is written, with what it waits for, before the function is given the link, so that a link that was sent can be used.
The function waits for the decision when it likes. The decision writes the step's result (`decide/approvals.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate import failpoints
from tidegate.errors import NonRetryable, RetryAfter, Unavailable
from tidegate.flow.call.waits import Ask, asked
from tidegate.flow.code.approval_call import ApprovalCall
from tidegate.model.approval import APPROVAL, APPROVAL_DECIDED, MAX_NOTE, MAX_TO, text_errors
from tidegate.model.ids import step_id
from tidegate.model.units import duration_ms
from tidegate.model.wait import NewWait, WaitPattern

if TYPE_CHECKING:
    from tidegate.flow.accept.approvals import ApprovalLinks
    from tidegate.flow.call.steps import RunSteps


async def ask_for(steps: RunSteps, call: ApprovalCall, links: ApprovalLinks) -> str:
    """Begin to wait for an approval, unless this was done before; its link."""
    if (refusal := steps.refusal(call.name)) is not None:
        raise await steps.refused(refusal)
    known = steps.open(call.name)
    try:
        link = await links.link(step_id(steps.run.id, call.name))
    except Unavailable as exc:  # the key cannot be read: for want of an operator's key, or of the database
        raise RetryAfter(exc.retry_after_seconds, f"approval {call.name!r}: {exc}") from exc
    if known is None:
        timeout_ms = _checked(call)
        with steps.in_progress(call.name, "wait", is_opening=True):
            await steps.barrier(call.name)
            await _register(steps, call, timeout_ms)
        failpoints.hit("approval.registered")
    return link


async def result(steps: RunSteps, name: str, ask: Ask) -> object:
    """Wait for the decision: the event that it published; None after the timeout. TimeoutError when a call of this was
    cut off."""
    if (refusal := steps.wait_refusal(name)) is not None:
        raise await steps.refused(refusal)
    known = steps.awaited(name)
    if known is not None and known.status == "succeeded":
        return known.result
    with steps.in_progress(name, "wait"):
        approval_id = step_id(steps.run.id, name)
        steps.endings.waits_for[name] = f"approval {name!r} (tidegate approvals approve {approval_id})"
        await steps.ready(name)
        steps.awaited(name)  # another call of this may have been cut off meanwhile
        answer = await asked(steps, name, ask, is_over=True)
        steps.waited(name)
    return answer.result


async def _register(steps: RunSteps, call: ApprovalCall, timeout_ms: int) -> None:
    approval_id = str(step_id(steps.run.id, call.name))
    pattern = WaitPattern(type=APPROVAL_DECIDED, match={"approval_id": approval_id})
    facts = {"reason": APPROVAL, "to": call.to, "note": call.note}
    after = steps.event.ingress_sequence if steps.event is not None else None
    await steps.waits(
        call.name, kind="wait", delay_ms=timeout_ms,
        waits=[NewWait(number=0, mode="event", pattern=pattern, after_sequence=after)],
        retry_metadata={name: value for name, value in facts.items() if value is not None},
    )  # fmt: skip


def _checked(call: ApprovalCall) -> int:
    """How long it can be decided, in ms. NonRetryable names what is wrong."""
    errors = [*text_errors("to", call.to, MAX_TO), *text_errors("note", call.note, MAX_NOTE)]
    if errors:
        raise NonRetryable(f"ctx.approval: {'; '.join(f'{error.field} {error.message}' for error in errors)}")
    try:
        return duration_ms(call.timeout)
    except ValueError as exc:
        raise NonRetryable(f"ctx.approval: timeout: {exc}") from exc
