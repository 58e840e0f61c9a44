"""What a run leaves behind, as lines of JSON: the ledger, the faults, the effects, and the database's own story.

Times called `at` or `…_at` are seconds of the machine's monotonic clock, which all processes share and no fault moves;
what comes from the database is turned into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

T = TypeVar("T")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to publish an event. `status` 0: no answer came. `key` names the event, also where it has no id."""

    key: str
    type: str
    source: str
    has_id: bool
    dedupe_key: str | None = None
    sent_at: float
    answered_at: float
    status: int
    event_id: str | None = None
    outcome: str | None = None


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an operator: `pause` or `resume` of a source or a workflow's trigger."""

    verb: str
    kind: str
    subject: str
    called_at: float
    answered_at: float
    status: int


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to the cluster; `until` where it lasted."""

    at: float
    fault: str
    target: str = ""
    pid: int = 0
    until: float = 0.0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A step's side effect: it `began`, it `ended`, or it `failed`, under a claim of its run. `subject`: what it is
    done for, where that is not the event."""

    at: float
    pid: int
    run: str
    event: str
    workflow: str
    step: str
    key: str
    what: str
    generation: int = 1
    subject: str = ""


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event in the database."""

    id: str
    external_id: str | None
    type: str
    source: str


class DeliveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about an event and a trigger."""

    id: str
    event_id: str
    trigger_id: str
    workflow: str
    source: str
    status: str
    retry_state: str
    run_id: str | None
    dedupe_key: str | None
    launched_at: float | None


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run."""

    id: str
    workflow: str
    event_id: str
    trigger_id: str
    delivery_id: str
    concurrency_key: str | None
    status: str
    error: str | None
    attempts: int
    created_at: float
    finished_at: float | None


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run, or a timer."""

    run_id: str
    name: str
    kind: str
    status: str
    retry_state: str
    updated_at: float


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """Who held a run from then on; None: nobody. `due_at`: when it was due as it was claimed. `lease_ended`: it was
    taken from whoever held it since the lease was over."""

    run_id: str
    at: float
    worker: str | None
    due_at: float | None
    lease_ended: bool = False


class Waited(msgspec.Struct, frozen=True, kw_only=True):
    """Something was to wait until `due_at` (`event` `delivery` `step`), and `at` it was written so, or went on."""

    kind: str
    subject: str
    name: str
    at: float
    due_at: float
    went_on: bool


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """The database at the end."""

    events: list[EventRow]
    deliveries: list[DeliveryRow]
    runs: list[RunRow]
    steps: list[StepRow]
    owned: list[Owned]
    waited: list[Waited]
    orphans: dict[str, int]
    unfinished: dict[str, int]
    max_concurrency: dict[str, int]
    throttles: dict[str, tuple[int, int]]
    limits: dict[str, tuple[int, int]]
    idempotency_windows: dict[str, int]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is judged."""

    answers: list[Answer]
    verbs: list[Verb]
    faults: list[Fault]
    marks: list[Mark]
    dump: Dump


class Writer:
    """Appends records to a file, each flushed as it is written."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def write(self, record: Any) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


def read(path: Path, kind: type[T]) -> list[T]:
    """The records of a file; a last line that was cut off by a kill is not one."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=kind) for line in lines]


def evidence(folder: Path) -> Evidence:
    """What a run left in its folder."""
    marks: list[Mark] = []
    for path in sorted((folder / "sink").glob("*.jsonl")):
        marks += read(path, Mark)
    return Evidence(
        answers=read(folder / "ledger.jsonl", Answer),
        verbs=read(folder / "operator.jsonl", Verb),
        faults=read(folder / "faults.jsonl", Fault),
        marks=sorted(marks, key=lambda mark: mark.at),
        dump=msgspec.json.decode((folder / "database.json").read_bytes(), type=Dump),
    )


def first(found: Sequence[str], count: int = 3) -> str:
    """A few of them, for people."""
    return "; ".join(found[:count]) + (f"; … {len(found) - count} more" if len(found) > count else "")
