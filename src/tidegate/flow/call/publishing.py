"""Publishing from a run: a step whose event is stored in the transaction that stores the step's outcome, so once."""

from __future__ import annotations

import asyncio

import msgspec

from tidegate.clock import utc_now, uuid7
from tidegate.errors import BacklogFull, FieldError, InvalidInput, RetryAfter, StepFailed
from tidegate.flow.accept.backlog import SourceCaps
from tidegate.flow.call.steps import RunSteps
from tidegate.model import typed
from tidegate.model.event import OF_END, RUN_ENDS, Accepted, Event, EventLimits, NewEvent, check_event, source_of
from tidegate.model.not_json import not_encodable, set_or_bytes
from tidegate.model.run import ClaimedRun
from tidegate.telemetry import traces


def origin_of(run: ClaimedRun, event: Event | None) -> dict[str, object]:
    """Where an event comes from that a run publishes; `event` has launched the run."""
    origin: dict[str, object] = {"run_id": run.id, "event_id": run.event_id}
    if event is not None and (event.type.startswith(RUN_ENDS) or (event.origin or {}).get(OF_END)):
        origin[OF_END] = True
    return origin


async def publish(
    steps: RunSteps,
    name: str | None,
    fields: dict[str, object],
    limits: EventLimits,
    caps: SourceCaps,
    *,
    is_alone: bool,
) -> Accepted:
    """Publish an event as a step. InvalidInput names each invalid field; StepFailed when the event's own id was used
    before with another body; RetryAfter when its source takes no more events for now."""
    name = steps.named(name, "publish", "ctx.publish('…', name='…')", is_alone=is_alone)
    if (refusal := steps.refusal(name)) is not None:
        raise await steps.refused(refusal)
    known = steps.begin(name)
    if known is not None and known.status == "succeeded":
        return msgspec.convert(known.result, Accepted)
    if known is not None and known.status == "failed":
        raise StepFailed(name, known.error or "")
    event = _checked(steps, fields, limits)
    accepted = Accepted(event.id, event.external_id, "accepted")
    has_cap = bool(await caps.of([event]))
    with steps.in_progress():
        try:
            await steps.journal.barrier()
        except asyncio.CancelledError:
            steps.cut_off(name, "publish")
            raise
        result = msgspec.json.encode(accepted).decode()
        if has_cap:
            steps.journal.send()  # what others have written is not refused with it
        written = steps.write(name, kind="publish", status="succeeded", result=result, event=event, has_cap=has_cap)
        if event.external_id is None and not has_cap:  # nobody else has its id, so it is stored as it is
            return accepted
        try:
            await steps.journal.kept(written)
        except BacklogFull as exc:
            steps.journal.forget(written)
            raise RetryAfter(exc.retry_after_seconds, f"publish {name!r}: {exc}") from exc
        instead = written.result().instead
    if instead is None:
        return accepted
    if instead.status == "failed":
        steps.remember(instead)
        raise StepFailed(name, instead.error or "")
    return msgspec.json.decode(instead.result or "", type=Accepted)


def _checked(steps: RunSteps, fields: dict[str, object], limits: EventLimits) -> NewEvent:
    run, what = steps.run, "the event cannot be published"
    given: dict[str, object] = {"source": source_of(run.workflow), "correlation_id": run.correlation_id}
    given |= {field: value for field, value in fields.items() if value is not None}
    try:
        given = (
            given | {"payload": typed.payload_of(given.get("payload"))} if given.get("payload") is not None else given
        )
        plain = msgspec.to_builtins(given, str_keys=True, enc_hook=typed.plain)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInput(what, [not_encodable(given, exc)]) from exc
    if (refused := set_or_bytes(given)) is not None:
        raise InvalidInput(what, [refused])
    errors: list[FieldError] = []
    trace = traces.current() or (steps.event.traceparent if steps.event else None)
    event = check_event(plain, new_id=uuid7(), now=utc_now(), limits=limits, errors=errors, traceparent=trace)
    if event is None:
        raise InvalidInput(what, errors)
    origin = msgspec.json.encode(origin_of(run, steps.event)).decode()
    return msgspec.structs.replace(event, origin=origin)
