"""The states of an execution: one attempt at one claimed run, in one worker.

    ready ───▶ executing ───▶ writing ───▶ finished or suspended
      │          │   │          ▲   │
      ▼          │   ▼          │   ▼
    released     │  stopping ───┘  lost
                 └────┴───────────▶ lost

- ready: claimed; waits in this worker for a free slot.
- executing: its function is being called. It holds a slot.
- stopping: its function was told to stop (timeout, every step waits, lease lost, shutdown). It starts no more steps and
  still holds the slot. A function that does not stop loses its slot and its task: it is abandoned, and the execution is
  writing or lost without it.
- writing: how the run ended, or until when it is suspended, is on its way into the database.
- finished, suspended: that is committed. A suspended run waits for its time, and no worker holds it.
- released: handed back before it began; any worker may claim the run.
- lost: nothing more is written here. The run belongs to another worker, or will when its lease ends.
"""

from __future__ import annotations


class ExecutionState:
    """One of the states below. A plain object, because it is compared several times for every run."""

    __slots__ = ("holds_slot", "is_over", "name", "next")

    def __init__(self, name: str, *, holds_slot: bool = False, is_over: bool = False) -> None:
        self.name = name
        self.holds_slot = holds_slot
        self.is_over = is_over
        self.next: tuple[ExecutionState, ...] = ()

    def __repr__(self) -> str:
        return self.name


READY = ExecutionState("ready")
EXECUTING = ExecutionState("executing", holds_slot=True)
STOPPING = ExecutionState("stopping", holds_slot=True)
WRITING = ExecutionState("writing")
FINISHED = ExecutionState("finished", is_over=True)
SUSPENDED = ExecutionState("suspended", is_over=True)
RELEASED = ExecutionState("released", is_over=True)
LOST = ExecutionState("lost", is_over=True)

READY.next = (EXECUTING, RELEASED)
EXECUTING.next = (WRITING, STOPPING, LOST)
STOPPING.next = (WRITING, LOST)
WRITING.next = (FINISHED, SUSPENDED, LOST)

STATES = (READY, EXECUTING, STOPPING, WRITING, FINISHED, SUSPENDED, RELEASED, LOST)
