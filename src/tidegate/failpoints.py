"""Named places where a test can make the process die, fail or wait. When disarmed, a failpoint costs one check.

A point is armed by `TIDEGATE_FAILPOINTS="name=action,…"` (read by settings) or by `arm()`. Actions: `kill` ends the
process immediately, like kill -9 (status 137), `raise` raises, `sleep:<seconds>` waits; `kill@3` acts at the third hit.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

POINTS = frozenset(
    {
        "ingest.before_begin",
        "ingest.before_commit",
        "ingest.after_commit",
        "dispatch.after_claim",
        "dispatch.after_gate",
        "dispatch.after_match",
        "dispatch.before_commit",
        "dispatch.after_commit",
        "arrival.before_commit",
        "arrival.after_commit",
        "retry.before_commit",
        "window.closing",
        "delivery_retry.before_commit",
        "delivery_retry.after_commit",
        "stale.before_commit",
        "stale.after_commit",
        "delivery_replan.before_commit",
        "replan.before_commit",
        "run.after_claim",
        "slot_line.before_enter",
        "slot_line.before_commit",
        "step.before_commit",
        "step.after_spend",
        "step_budget.before_commit",
        "step_budget.after_commit",
        "step_lines.before_commit",
        "step_lines.after_commit",
        "wait.registered",
        "wait.before_look_back",
        "wait.before_looked_back",
        "wait.looked_back",
        "wait.before_lock",
        "wait.before_result",
        "wait.before_wake",
        "wait.before_time_out",
        "wait.before_timed_out",
        "approval.registered",
        "approval.before_result",
        "approval.before_commit",
        "transaction.before_write",
        "transaction.before_commit",
        "transaction.after_commit",
        "run.before_finish",
        "run.after_finish",
        "outcome.before_dead_letter",
        "outcome.before_commit",
        "outcome.after_commit",
        "queue.after_send",
        "reconcile.mid_batch",
        "schedule.before_commit",
        "backfill.after_commit",
        "replay.before_commit",
        "replay.after_commit",
        "prune.before_commit",
        "bulk_retries.before_commit",
        "bulk_retries.after_commit",
        "event_replay.before_commit",
        "event_replay.after_commit",
        "migrate.mid_migration",
    }
)


class FailpointHit(Exception):
    """Raised by a point armed with `raise`."""


@dataclass(slots=True)
class _Armed:
    action: str
    hits_left: int


_armed: dict[str, _Armed] = {}


def arm(spec: str) -> None:
    """Arm points from `name=action[@hit]`, separated by commas. ValueError if a name or action is unknown."""
    for part in filter(None, (p.strip() for p in spec.split(","))):
        name, _, action = part.partition("=")
        action, _, nth = action.partition("@")
        if name not in POINTS:
            raise ValueError(f"unknown failpoint {name!r}; known: {', '.join(sorted(POINTS))}")
        if action not in ("kill", "raise") and not action.startswith("sleep:"):
            raise ValueError(f"failpoint {name}: action must be kill, raise or sleep:<seconds>, not {action!r}")
        _armed[name] = _Armed(action, int(nth or 1))


def disarm() -> None:
    """Disarm every point."""
    _armed.clear()


def hit(name: str) -> None:
    """Pass the point; run its action if it is armed and this is the configured hit."""
    if not _armed:
        return
    armed = _armed.get(name)
    if armed is None:
        return
    armed.hits_left -= 1
    if armed.hits_left != 0:
        return
    if armed.action == "kill":
        os._exit(137)
    if armed.action == "raise":
        raise FailpointHit(name)
    time.sleep(float(armed.action.removeprefix("sleep:")))
