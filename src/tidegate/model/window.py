"""Windows: a trigger collects events, by key, and gives them to one run. Pure: the caller has read the open windows
under the trigger's lock.

Debounce: the window closes when no event has come for a while, or `max_wait` after it was opened. Batch: it closes when
it is full, or a while after it was opened. A window takes no event once its time is over, whether or not somebody has
noticed, and none beyond its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

from tidegate.errors import FieldError
from tidegate.model.event import Event
from tidegate.model.ids import DeliveryId, EventId, TriggerId
from tidegate.model.units import named_duration_ms, written_duration

# The most events of one window: its run is given them all at once.
MAX_EVENTS = 1000
MAX_WINDOW_MS = 366 * 86_400_000
# How long a debounced window may stay open, as a multiple of `debounce_ms`, unless `max_wait_ms` says so.
DEFAULT_WAITS = 10

# The reason of a delivery that waits in a window.
WINDOW = "window"

WindowState = Literal["open", "quiet", "closed", "taken", "ended"]


class CollectPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a trigger collects events: by debounce, or in batches."""

    debounce_ms: int | None = None
    max_wait_ms: int | None = None
    leading: bool = False
    batch_size: int | None = None
    batch_ms: int | None = None

    @property
    def most(self) -> int:
        """The most events of a window."""
        return self.batch_size or MAX_EVENTS

    def closes_at(self, opened_at: datetime, now: datetime) -> datetime:
        """When a window closes whose last event has come now."""
        if self.debounce_ms is None:
            return opened_at + timedelta(milliseconds=self.batch_ms or 0)
        longest = self.max_wait_ms or min(MAX_WINDOW_MS, DEFAULT_WAITS * self.debounce_ms)
        return min(now + timedelta(milliseconds=self.debounce_ms), opened_at + timedelta(milliseconds=longest))

    def __str__(self) -> str:
        if self.debounce_ms is None:
            return f"at most {self.most} events, {written_duration(self.batch_ms or 0)} after the first"
        longest = self.max_wait_ms or min(MAX_WINDOW_MS, DEFAULT_WAITS * self.debounce_ms)
        quiet, at_most = written_duration(self.debounce_ms), written_duration(longest)
        first = "the first event at once, the others " if self.leading else ""
        return f"{first}{quiet} after the last event, at most {at_most} after the first"


def Batch(  # noqa: N802 - read as a noun where it is used: batch=Batch(100, "5s")
    size: int, within: str | int | float
) -> CollectPolicy:
    """The batches of a workflow's trigger: at most `size` events, or those `within` a time after the first."""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_EVENTS:
        raise ValueError(f"Batch: size must be a whole number from 1 to {MAX_EVENTS}, not {size!r}")
    return CollectPolicy(batch_size=size, batch_ms=named_duration_ms("Batch: within", within, 1))


def declared_policy(
    on: str | None,
    debounce: str | int | float | None,
    max_wait: str | int | float | None,
    leading: bool,
    batch: CollectPolicy | None,
) -> CollectPolicy | None:
    """The policy that a declaration describes. ValueError names the field that is wrong."""
    if debounce is None:
        for name, given in (("max_wait", max_wait is not None), ("leading", leading)):
            if given:
                raise ValueError(f"{name}: requires debounce")
    if on is None and (debounce is not None or batch is not None):
        raise ValueError(f"{'batch' if debounce is None else 'debounce'}: requires on: it collects events")
    if batch is not None and not isinstance(batch, CollectPolicy):
        raise ValueError(f'batch: must be a Batch, as in Batch(100, "5s"), not {batch!r}')
    if debounce is None:
        return batch
    if batch is not None:
        raise ValueError("batch: cannot be combined with debounce")
    return CollectPolicy(
        debounce_ms=named_duration_ms("debounce", debounce, 1),
        max_wait_ms=None if max_wait is None else named_duration_ms("max_wait", max_wait, 1),
        leading=leading,
    )


def check_policy(policy: CollectPolicy, errors: list[FieldError]) -> None:
    """Name each field that is wrong."""
    for name, high in (("debounce_ms", MAX_WINDOW_MS), ("max_wait_ms", MAX_WINDOW_MS), ("batch_size", MAX_EVENTS),
                       ("batch_ms", MAX_WINDOW_MS)):  # fmt: skip
        value = getattr(policy, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high):
            errors.append(FieldError(f"collect.{name}", f"must be a whole number from 1 to {high}"))
            return
    is_debounce, is_batch = policy.debounce_ms is not None, policy.batch_size is not None or policy.batch_ms is not None
    if is_debounce == is_batch:
        errors.append(FieldError("collect", "must have either debounce_ms, or batch_size and batch_ms"))
    elif is_batch and (policy.batch_size is None or policy.batch_ms is None):
        missing = "batch_size" if policy.batch_size is None else "batch_ms"
        errors.append(FieldError(f"collect.{missing}", "is required: set both batch_size and batch_ms"))
    elif is_batch and (policy.leading or policy.max_wait_ms is not None):
        name = "leading" if policy.leading else "max_wait_ms"
        errors.append(FieldError(f"collect.{name}", "requires debounce_ms"))
    elif is_debounce and policy.max_wait_ms is not None and policy.max_wait_ms < (policy.debounce_ms or 0):
        errors.append(FieldError("collect.max_wait_ms", "must be at least debounce_ms"))


@dataclass(slots=True)
class Window:
    """A row of `trigger_windows`. `was_there`: before this transaction; `is_changed`: by it."""

    id: DeliveryId
    trigger_id: TriggerId
    key: str
    state: WindowState
    event_id: EventId
    size: int
    opened_at: datetime
    closes_at: datetime
    oldest_event_id: EventId
    last_event_id: EventId | None
    last_sequence: int
    expires_at: datetime | None
    trigger_version: int
    was_there: bool = True
    is_changed: bool = False

    def takes(self, policy: CollectPolicy, now: datetime) -> bool:
        return self.state == "open" and now < self.closes_at and self.size < policy.most

    def close(self, state: WindowState = "closed") -> None:
        self.state, self.is_changed = state, True

    def add(self, event: Event, version: int) -> None:
        """One more event; the caller has asked whether it takes it."""
        self.size, self.is_changed = self.size + 1, True
        self.oldest_event_id = min(self.oldest_event_id, event.id)
        if event.ingress_sequence >= self.last_sequence:
            self.last_event_id, self.last_sequence = event.id, event.ingress_sequence
        self.trigger_version = min(self.trigger_version, version)
        if event.ttl_ms is not None:
            at = event.counted_from + timedelta(milliseconds=event.ttl_ms)
            self.expires_at = min(self.expires_at or at, at)


class Collected(NamedTuple):
    """The window that an event was put into; `is_first`: it has opened it."""

    window: Window
    is_first: bool


class Windows:
    """The windows of one transaction, by trigger and key: those that were open, and those that it opens."""

    def __init__(self, found: list[Window]) -> None:
        self._open = {(window.trigger_id, window.key): window for window in found}
        self._seen = list(found)

    @property
    def changed(self) -> list[Window]:
        """Those to be written, in an order in which no two of a trigger and key are open at the same time."""
        return [window for window in self._seen if window.is_changed]

    @property
    def times(self) -> dict[DeliveryId, datetime]:
        """When each of them closes."""
        return {window.id: window.closes_at for window in self._seen}

    def opens(self, policy: CollectPolicy, of: tuple[TriggerId, str] | None, now: datetime) -> bool:
        """Whether one more event of a trigger and key would open a window that waits."""
        window = self._open.get(of) if of is not None else None
        if window is None:
            return not policy.leading
        return not window.takes(policy, now) and (
            not policy.leading or (window.state == "quiet" and now < window.closes_at)
        )

    def collect(
        self, policy: CollectPolicy, own_id: DeliveryId, event: Event, trigger: tuple[TriggerId, int], key: str,
        now: datetime,
    ) -> Collected | None:  # fmt: skip
        """Put an event into the window of its key, which is opened if need be. None: it is launched at once, as the
        first of a trigger with `leading`."""
        trigger_id, version = trigger
        window = self._open.get((trigger_id, key))
        if window is not None and window.takes(policy, now):
            window.add(event, version)
        else:
            was_quiet = window is not None and window.state == "quiet" and now < window.closes_at
            if window is not None:
                window.close("ended" if window.state == "quiet" else "closed")
            is_leading = policy.leading and not was_quiet
            window = Window(
                own_id, trigger_id, key, "quiet" if is_leading else "open", event.id, 0, now, now, event.id, event.id,
                event.ingress_sequence, None, version, was_there=False,
            )  # fmt: skip
            window.add(event, version)
            self._open[trigger_id, key] = window
            self._seen.append(window)
        window.closes_at = policy.closes_at(window.opened_at, now)
        if window.state == "quiet":
            return None
        if window.size >= policy.most:
            window.closes_at = now
            window.close()
        return Collected(window, window.id == own_id)
