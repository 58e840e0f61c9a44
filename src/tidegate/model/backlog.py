"""Backlog policies: how much may wait, what happens to a newcomer when it is full, and when what waits is too old.

A source's policy is applied when an event is published (`flow/accept/backlog.py`), a trigger's when a delivery must
wait (`flow/trigger_backlog.py`). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import msgspec

from tidegate.errors import FieldError
from tidegate.model.ids import DeliveryId, EventId, TriggerId
from tidegate.model.units import named_duration_ms, written_duration

# What happens when as much waits as may. A publisher can be refused; a delivery is decided when its event is accepted.
SourceWhenFull = Literal["refuse", "drop_oldest", "dead_letter"]
WhenFull = Literal["skip", "drop_oldest", "dead_letter"]
Keep = Literal["latest"]
Duration = str | int | float | None

MAX_WAITING = 1_000_000
MAX_WAIT_MS = 366 * 86_400_000
# How many leave in one transaction, at most: the others, with the newcomers after it.
MAX_LEAVING = 1000
# A backlog that is filled to this share of its cap is reported.
NEARLY_FULL = 0.8
# The reasons of what has left: for a newcomer, or because it is too old.
FULL = "backlog_full"
SUPERSEDED = "superseded"
TOO_OLD = "max_wait"
TOO_LONG = "it has waited for longer than the trigger's max_wait"


class BacklogPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What may wait of a trigger, or of each of its keys: at most `max_waiting`, of each key the `latest` only, none
    longer than `max_wait_ms`."""

    max_waiting: int | None = None
    when_full: WhenFull = "skip"
    keep: Keep | None = None
    max_wait_ms: int | None = None

    def __str__(self) -> str:
        parts = []
        if self.max_waiting is not None:
            parts.append(f"at most {self.max_waiting} waiting, then {self.when_full}")
        if self.keep is not None:
            parts.append("keeps the latest")
        if self.max_wait_ms is not None:
            parts.append(f"waits at most {written_duration(self.max_wait_ms)}")
        return ", ".join(parts)


class SourceBacklog(NamedTuple):
    """What may wait of a source: at most `max_waiting` events that are undecided or held."""

    max_waiting: int
    when_full: SourceWhenFull


def check_policy(policy: BacklogPolicy, *, collects: bool, cancels: bool, errors: list[FieldError]) -> None:
    """Name each field that is wrong; `collects`: into windows, `cancels`: the run before."""
    for name, high in (("max_waiting", MAX_WAITING), ("max_wait_ms", MAX_WAIT_MS)):
        value = getattr(policy, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high):
            errors.append(FieldError(f"backlog.{name}", f"must be a whole number from 1 to {high}"))
    if policy.max_waiting is None and policy.keep is None and policy.max_wait_ms is None:
        errors.append(FieldError("backlog", "must have max_waiting, keep or max_wait_ms; omit it for no policy"))
    if policy.max_waiting is None and policy.when_full != "skip":
        errors.append(FieldError("backlog.when_full", "requires max_waiting"))
    if policy.keep is not None and policy.max_waiting is not None:
        errors.append(FieldError("backlog.keep", "cannot be combined with max_waiting: of each key only one waits"))
    if collects and policy.keep is not None:
        errors.append(FieldError("backlog.keep", "cannot be combined with collect: a window keeps every event"))
    if collects and policy.max_wait_ms is not None:
        message = "cannot be combined with collect, which has a time of its own; ttl_ms of an event applies in a window"
        errors.append(FieldError("backlog.max_wait_ms", message))
    if cancels and (policy.keep is not None or policy.max_waiting is not None):
        name = "keep" if policy.keep is not None else "max_waiting"
        errors.append(FieldError(f"backlog.{name}", "cannot be combined with cancel_running, which keeps the latest"))


def declared_backlog(
    on: str | None, max_waiting: int | None, when_full: str | None, keep: str | None, max_wait: Duration
) -> BacklogPolicy | None:
    """The policy that a declaration describes; `max_wait` is given if it is not that of a window. ValueError names the
    argument that is wrong."""
    if max_waiting is None and keep is None and max_wait is None:
        if when_full is not None:
            raise ValueError("when_full: requires max_waiting")
        return None
    given = {"max_waiting": max_waiting, "keep": keep, "max_wait": max_wait}
    named = next(name for name, value in given.items() if value is not None)
    if on is None:
        raise ValueError(f"{named}: requires on: it is about events that wait; for a schedule, see overlap")
    if max_waiting is None and when_full is not None:
        raise ValueError("when_full: requires max_waiting")
    if when_full == "refuse":
        raise ValueError(
            "when_full: refuse is for sources (tidegate sources backlog); use skip, drop_oldest, dead_letter"
        )
    if when_full is not None and when_full not in get_args(WhenFull):
        raise ValueError(f"when_full: must be skip, drop_oldest or dead_letter, not {when_full!r:.60}")
    if keep is not None and keep not in get_args(Keep):
        raise ValueError(f"keep: must be latest, not {keep!r:.60}")
    if max_waiting is not None and (
        isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or not 1 <= max_waiting <= MAX_WAITING
    ):
        raise ValueError(f"max_waiting: must be a whole number from 1 to {MAX_WAITING}, not {max_waiting!r:.60}")
    return msgspec.convert(
        {
            "max_waiting": max_waiting,
            "when_full": when_full or "skip",
            "keep": keep,
            "max_wait_ms": None if max_wait is None else named_duration_ms("max_wait", max_wait, 1),
        },
        BacklogPolicy,
    )


class Newest(NamedTuple):
    """The latest newcomer of a trigger and key, which takes the place of what waits."""

    id: DeliveryId
    event_id: EventId
    ingress_sequence: int


@dataclass(slots=True)
class Backlogs:
    """The backlogs that one transaction may add to, by trigger and key: how many wait, as far as that matters; how many
    of the oldest are to leave, and what takes the place of the rest."""

    waiting: dict[tuple[TriggerId, str], int] = field(default_factory=dict)
    leaving: dict[tuple[TriggerId, str], int] = field(default_factory=dict)
    newest: dict[tuple[TriggerId, str], Newest] = field(default_factory=dict)

    def over(self, pair: tuple[TriggerId, str], policy: BacklogPolicy) -> WhenFull | None:
        """What happens to a newcomer that must wait; None: it waits. It is counted if it does."""
        if policy.max_waiting is None:
            return None
        waiting = self.waiting[pair]
        if waiting >= policy.max_waiting and policy.when_full != "drop_oldest":
            return policy.when_full
        self.waiting[pair] = waiting + 1
        if waiting >= policy.max_waiting:  # more than one, if the cap was lowered
            self.leaving[pair] = min(MAX_LEAVING, self.waiting[pair] - policy.max_waiting)
        return None
