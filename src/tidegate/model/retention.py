"""How long finished rows are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Retention(NamedTuple):
    """How long finished rows are kept, in seconds; 0: for ever."""

    events_seconds: int = 0
    dead_letters_seconds: int = 0
    audit_seconds: int = 0


KEEP_ALL = Retention()


def longest(retentions: Iterable[Retention]) -> Retention:
    """Of each kind the longest time: where several processes disagree, nothing goes that one of them wants to keep."""
    columns = list(zip(*retentions, strict=True))
    return Retention(*(0 if 0 in column else max(column) for column in columns))
