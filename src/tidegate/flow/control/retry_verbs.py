"""Verbs: cancel and force, and what each kind of waiting row (events, deliveries, steps) provides for them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol

from tidegate.model.source import BreakerPolicy
from tidegate.model.trigger_gate import TriggerMove
from tidegate.store.bulk_retries import WaitingMatch
from tidegate.store.db import Connection

RetryVerb = Literal["cancel", "force"]
RetryDone = Literal["cancelled", "forced"]

DONE: Final[dict[RetryVerb, RetryDone]] = {"cancel": "cancelled", "force": "forced"}


class RetryOrder(NamedTuple):
    """What an operator asks for. With `reason`, only rows that wait for that reason are changed."""

    verb: RetryVerb
    actor: str
    breaker: BreakerPolicy
    reason: str | None = None


class RetryRow(NamedTuple):
    """A row as it is now: `audited` for the audit log, `logged` for the log, `status` to say why it cannot be
    changed."""

    match: WaitingMatch
    status: str
    audited: Mapping[str, object]
    logged: Mapping[str, object]


class ChangedRetries(NamedTuple):
    """What one transaction cancelled or forced.

    `stopping` are steps whose run a worker still holds and will stop. `cancelled` counts the retries that ended, more
    than `ids` when a run ended with several; `ended_runs` are the workflows of runs that ended; `logged` has the fields
    of rows that are logged one by one even when many are changed.
    """

    ids: Sequence[uuid.UUID] = ()
    stopping: Sequence[uuid.UUID] = ()
    cancelled: int = 0
    ended_runs: Sequence[str] = ()
    moves: Sequence[TriggerMove] = ()
    logged: Sequence[Mapping[str, object]] = ()


class RetryVerbs(Protocol):
    """The verbs for one kind of row; `noun` names one such row in messages, logs and the audit log."""

    noun: str

    async def get(self, connection: Connection, row_id: uuid.UUID) -> RetryRow:
        """The row. NotFound when there is none, Conflict when it never waits for a retry."""

    async def change(self, connection: Connection, rows: Sequence[WaitingMatch], order: RetryOrder) -> ChangedRetries:
        """Cancel or force those of the rows that still wait, with their decision rows."""

    def count_cancelled(self, count: int) -> None:
        """Add to the kind's metric of cancelled retries."""
