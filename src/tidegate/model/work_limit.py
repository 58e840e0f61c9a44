"""The maximum work of one trigger on one event, in steps, counted before or while it is done.

Time is not measured: whether an event is within the work limit must not depend on the load of the machine.
"""

from __future__ import annotations

# A step takes at most about 0.1 µs, so that a trigger blocks a worker for about 30 ms in the worst case.
MAX_STEPS = 300_000


class TooMuchWork(Exception):
    """A trigger needs more steps on an event than the work limit allows; the text says how to fix it."""

    def __init__(self, field: str = "") -> None:
        where = f"{field}: " if field else ""
        super().__init__(
            f"{where}over the work limit of {MAX_STEPS} steps for one event and trigger; "
            "simplify the trigger (a smaller pattern, path, loop or template), or send smaller events"
        )


class WorkLeft:
    """The remaining steps of one trigger on one event."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def pay(self, steps: int) -> None:
        """Charge steps. Raises TooMuchWork if fewer are left; then the work must not be done."""
        self.left -= steps
        if self.left < 0:
            raise TooMuchWork
