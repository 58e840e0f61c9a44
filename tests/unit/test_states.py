"""The states of an execution: what may follow what."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tidegate.flow.call.execution import Execution
from tidegate.flow.call.states import (
    EXECUTING,
    FINISHED,
    LOST,
    READY,
    RELEASED,
    STATES,
    STOPPING,
    SUSPENDED,
    WRITING,
    ExecutionState,
)

MAY_FOLLOW = {
    READY: {EXECUTING, RELEASED},
    EXECUTING: {STOPPING, WRITING, LOST},
    STOPPING: {WRITING, LOST},
    WRITING: {FINISHED, SUSPENDED, LOST},
}


class Bare(Execution):
    """Only what `move` needs."""

    def __init__(self, state: ExecutionState) -> None:
        self.state = state
        self.run: Any = type("Run", (), {"id": "r-1"})()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(STATES, STATES)))
def test_a_state_is_followed_by_those_that_may(before: ExecutionState, after: ExecutionState) -> None:
    execution = Bare(before)
    if after in MAY_FOLLOW.get(before, set()):
        execution.move(after)
        assert execution.state is after
    else:
        with pytest.raises(RuntimeError, match=f"execution of run r-1 is {before} and cannot become {after}"):
            execution.move(after)
        assert execution.state is before


def test_what_is_over_holds_nothing_and_is_followed_by_nothing() -> None:
    over = {state for state in STATES if state.is_over}
    assert over == {FINISHED, SUSPENDED, RELEASED, LOST}
    assert all(not state.next and not state.holds_slot for state in over)
    assert {state for state in STATES if state.holds_slot} == {EXECUTING, STOPPING}
