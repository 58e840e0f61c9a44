"""The work that one trigger may do on one event, counted before or while it is done.

Time itself is not asked: whether an event is within the budget must not depend on what else the machine does.
"""

from __future__ import annotations

# A step takes at most about a tenth of a microsecond, so that a trigger holds up a worker for some 30 ms at the worst.
MAX_STEPS = 300_000


class OverBudget(Exception):
    """A trigger asks for more work on an event than it may; the text says what to do about it."""

    def __init__(self, field: str = "") -> None:
        where = f"{field}: " if field else ""
        super().__init__(
            f"{where}over the budget of {MAX_STEPS} steps for one event and trigger; "
            "ask for less (a smaller pattern, path, loop or template), or send smaller events"
        )


class Budget:
    """What may still be done for one trigger on one event."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = MAX_STEPS

    def pay(self, steps: int) -> None:
        """Raises OverBudget when that is more than is left; the work must not be done then."""
        self.left -= steps
        if self.left < 0:
            raise OverBudget
