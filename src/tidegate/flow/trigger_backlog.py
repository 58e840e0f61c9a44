"""Backlog: what a trigger's policy says about a delivery that must wait, and what leaves for it. Under the trigger's
lock, like its throttle: so no two workers add to the same backlog at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from tidegate.model.backlog import FULL, MAX_LEAVING, SUPERSEDED, TOO_OLD, Backlogs, Newest
from tidegate.model.delivery import DeliveryStatus
from tidegate.model.ids import TriggerId
from tidegate.model.retry import RetryState
from tidegate.store import backlogs as store
from tidegate.store.backlogs import LeftDelivery
from tidegate.store.db import Connection
from tidegate.store.totals import TriggerTotals
from tidegate.telemetry import metrics

if TYPE_CHECKING:
    from tidegate.flow.decide.deliver import Candidate, DeliveryState
    from tidegate.store.deliveries import Decided


class KeptOut(TypedDict):
    """The decision about a delivery that must wait and may not."""

    status: DeliveryStatus
    last_error: str
    reason: str
    retry_state: RetryState


class LeftBacklogs(NamedTuple):
    """What has left the backlogs for newcomers, in a transaction in which a trigger has a policy."""

    dropped: Sequence[LeftDelivery] = ()
    superseded: Sequence[LeftDelivery] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped or self.superseded)


NO_POLICY = LeftBacklogs()  # of a transaction in which no trigger has one
# What a newcomer that found the backlog full is counted as.
_OUTCOMES = {"exhausted": "dead_lettered"}


def pair_of(candidate: Candidate) -> tuple[TriggerId, str] | None:
    """The trigger and key in whose backlog it counts; None if there is no policy, it is a start, or its key could not
    be rendered."""
    trigger = candidate.trigger.trigger
    if trigger.backlog is None or candidate.event.starts is not None:
        return None
    return None if candidate.error is not None and trigger.key is not None else (trigger.id, candidate.keys.key)


async def load(connection: Connection, candidates: Sequence[Candidate], *, are_newcomers: bool) -> Backlogs | None:
    """The backlogs that these candidates may be added to; None without a policy. One that is replayed is new to it."""
    most: dict[tuple[TriggerId, str], int] = {}
    has_policy = False
    for one in candidates:
        if (policy := one.trigger.trigger.backlog) is None:
            continue
        if (pair := pair_of(one)) is None or not (are_newcomers or one.waited_for == "replay"):
            continue
        has_policy = True
        if policy.max_waiting is not None:
            most[pair] = policy.max_waiting + MAX_LEAVING
    if not has_policy:
        return None
    return Backlogs(await store.waiting(connection, most) if most else {})


def over(state: DeliveryState, candidate: Candidate, *, is_new: bool) -> KeptOut | None:
    """The decision about a delivery that must wait and may not, as the arguments of `decided`; None: it waits."""
    policy, pair = candidate.trigger.trigger.backlog, pair_of(candidate)
    if state.backlogs is None or policy is None or pair is None or not is_new:
        return None
    action = state.backlogs.over(pair, policy)
    if action is None:
        follow(state, candidate)
        return None
    text = f"{_full(candidate)}, and the trigger {'skips' if action == 'skip' else 'dead-letters'} what is over"
    if action == "skip":
        return KeptOut(status="skipped", last_error=text, reason=FULL, retry_state="none")
    return KeptOut(status="exhausted", last_error=text, reason=FULL, retry_state="exhausted")


def follow(state: DeliveryState, candidate: Candidate) -> None:
    """A newcomer is launched or waits: of a trigger that keeps the latest, it takes the place of what waits."""
    policy, pair = candidate.trigger.trigger.backlog, pair_of(candidate)
    if state.backlogs is None or policy is None or policy.keep is None or pair is None:
        return
    before, place = state.backlogs.newest.get(pair), candidate.event.ingress_sequence
    if before is None or before.ingress_sequence < place:
        state.backlogs.newest[pair] = Newest(candidate.id, candidate.event.id, place)


def noted(candidate: Candidate, now: datetime, *, is_new: bool) -> dict[str, object]:
    """What is stored with a delivery that begins to wait: the key that it counts by, and until when it may."""
    policy, pair = candidate.trigger.trigger.backlog, pair_of(candidate)
    if policy is None or pair is None or not is_new:
        return {}
    until = None if policy.max_wait_ms is None else now + timedelta(milliseconds=policy.max_wait_ms)
    return {"backlog": {"key": pair[1], "until": until}}


async def leave(connection: Connection, state: DeliveryState, candidates: Sequence[Candidate]) -> LeftBacklogs:
    """What has to leave for the newcomers that this transaction has stored."""
    found = state.backlogs
    if found is None:
        return NO_POLICY
    dropped: list[LeftDelivery] = []
    if found.leaving:
        last = {pair: one for one in candidates if (pair := pair_of(one)) is not None}
        said = {
            pair: (number, f"{_full(last[pair])}, and the oldest leaves for event {last[pair].event.id}")
            for pair, number in found.leaving.items()
        }
        dropped = await store.leave_oldest(connection, said, state.now)
    superseded = await store.supersede(connection, found.newest, state.now) if found.newest else []
    await store.follow(connection, [*dropped, *superseded], state.gates, state.budgets.budgets, state.now)
    return LeftBacklogs(dropped, superseded)


def counted(found: list[TriggerTotals], left: LeftBacklogs) -> list[TriggerTotals]:
    """The totals of triggers, with what has left as skipped."""
    if not left:
        return found
    counts = Counter(one.trigger_id for one in (*left.dropped, *left.superseded))
    return [one._replace(skipped=one.skipped + counts[one.trigger_id]) for one in found]


def report(left: LeftBacklogs, decided: Iterable[Decided], names: Mapping[TriggerId, str]) -> None:
    """Count, after the commit, what has left and what was not let in."""
    counts: Counter[tuple[TriggerId, str]] = Counter()
    counts.update((one.trigger_id, "dropped") for one in left.dropped)
    counts.update((one.trigger_id, SUPERSEDED) for one in left.superseded)
    for one in decided:
        if one.reason in (FULL, TOO_OLD):
            outcome = "too_old" if one.reason == TOO_OLD else _OUTCOMES.get(one.status, one.status)
            counts[one.trigger_id, outcome] += 1
    for (trigger_id, outcome), count in counts.items():
        metrics.left_backlog("trigger", names.get(trigger_id, str(trigger_id)), outcome, count)


def _full(candidate: Candidate) -> str:
    policy, key = candidate.trigger.trigger.backlog, candidate.keys.key
    most = policy.max_waiting if policy is not None else None
    return (
        f"{most} {'delivery waits' if most == 1 else 'deliveries wait'}{f' of key {key}' if key else ''} (max_waiting)"
    )
