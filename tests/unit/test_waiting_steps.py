"""What a waiting step waits for, by its kind."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from tidegate.flow.look.waiting_steps import waiting, why_step
from tidegate.model.ids import RunId, StepId
from tidegate.model.run import Step

AT = datetime(2026, 6, 1, 12, tzinfo=UTC)
STEP = StepId(uuid.UUID(int=7))


def step(kind: str = "step", name: str = "charge", **fields: Any) -> Step:
    rest: dict[str, Any] = {"retry_state": "scheduled", "next_attempt_at": AT} | fields
    return Step(id=STEP, workflow_run_id=RunId(uuid.uuid4()), name=name, kind=kind, **rest)


@pytest.mark.parametrize(
    ("given", "state", "text", "waits_for", "until"),
    [
        (step("sleep", "nap"), "sleeping", "sleeps until 2026-06-01 12:00:00 UTC (timer 'nap')", "the timer 'nap'", AT),
        (
            step(error="OSError: gone\ndetails", retry_attempts=2, retry_metadata={"reason": "failed", "of": 5}),
            "step_retry",
            "waits for attempt 3 of 5 of step 'charge' at 2026-06-01 12:00:00 UTC; it failed 2 times: OSError: gone",
            "attempt 3 of 5 of step 'charge'",
            AT,
        ),
        (
            step(error="SecretsUnreadable: key k2", retry_metadata={"reason": "failed"}),
            "step_waits",
            "waits to try step 'charge' again at 2026-06-01 12:00:00 UTC: SecretsUnreadable: key k2",
            "step 'charge'",
            AT,
        ),
        (
            step("wait", retry_metadata={"reason": "event", "mode": "any", "waits_for": [
                {"type": "order.approved", "where": "event.payload.id == run.parameters.id"},
                {"type": "order.refused", "source": "shop.*", "match": {".payload.id": 7}},
            ]}),
            "waiting_for_event",
            "waits until 2026-06-01 12:00:00 UTC for event order.approved where event.payload.id == run.parameters.id "
            "or event order.refused from shop.* with payload.id = 7",
            "event order.approved where event.payload.id == run.parameters.id or event order.refused from shop.* with "
            "payload.id = 7",
            AT,
        ),
        (
            step("wait", "manager", retry_metadata={"reason": "approval", "to": "ann@example.com"}),
            "waiting_for_approval",
            "waits until 2026-06-01 12:00:00 UTC for the approval 'manager' by ann@example.com; to decide: tidegate "
            f"approvals approve {STEP} (or reject)",
            "the approval 'manager' by ann@example.com",
            AT,
        ),
        (
            step("child", "ship", retry_state="none", next_attempt_at=None, retry_metadata={"total": 1}),
            "waiting_for_child", "waits for its child of step 'ship'", "its child of step 'ship'", None,
        ),
        (
            step("map", "labels", retry_state="none", next_attempt_at=None, retry_metadata={"total": 20}),
            "waiting_for_child", "waits for its 20 children of step 'labels'", "its 20 children of step 'labels'", None,
        ),
        (
            step("novel"),
            "step_waits", "waits until 2026-06-01 12:00:00 UTC for step 'charge' (novel)", "step 'charge'", AT,
        ),
    ],
)  # fmt: skip
def test_each_kind_has_its_answer(given: Step, state: str, text: str, waits_for: str, until: datetime | None) -> None:
    assert tuple(why_step(given, AT)) == (state, text, waits_for, until)
    assert waiting([given]) == [given]


def test_what_does_not_wait_is_left_out_and_the_first_due_is_first() -> None:
    later = step(name="later", next_attempt_at=AT.replace(hour=13))
    child = step("child", "ship", retry_state="none", next_attempt_at=None)
    cancel_on = step("wait", "cancel_on", retry_state="none", next_attempt_at=None)
    done = step(name="done", status="succeeded", retry_state="completed", next_attempt_at=None)
    first = step(name="first")
    assert waiting([child, later, done, cancel_on, first]) == [first, later, child]
