"""Wake-ups for waiting rows, with the job ids that operators see."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from headgate.clock import utc_now
from headgate.model.ingress_retry import IngressRetry
from headgate.queue.port import Wakeup

_MS = timedelta(milliseconds=1)


def event_wakeups(retries: Sequence[IngressRetry], now: datetime | None = None) -> list[Wakeup]:
    """`event-retry:<event_id>:<attempt>` for each held event. A wrong clock here makes hints early or late, no more."""
    now = now or utc_now()
    return [
        Wakeup(
            "retries",
            f"event-retry:{retry.event_id}:{retry.attempts}",
            retry.event_id,
            max(0, round((retry.next_attempt_at - now) / _MS)),
        )
        for retry in retries
        if retry.next_attempt_at is not None
    ]
