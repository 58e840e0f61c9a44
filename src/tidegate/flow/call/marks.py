"""Marks: what a function says of its run: which patches it takes, and its tags."""

from __future__ import annotations

import uuid
from typing import Protocol

from tidegate.errors import NonRetryable
from tidegate.flow.call.fit import PATCH_PREFIX
from tidegate.flow.call.journal import Journal
from tidegate.flow.code.context import current_step
from tidegate.flow.code.user_calls import MAX_STEP_NAME, is_step_name
from tidegate.model.run import ClaimedRun, Step

# How many tags a run may be given in one execution, and how long their names and values may be.
MAX_TAGS, MAX_TAG_NAME, MAX_TAG_VALUE = 20, 50, MAX_STEP_NAME


class Marked(Protocol):
    """What marks need of the execution."""

    run: ClaimedRun
    journal: Journal
    patches: dict[str, bool]

    def known(self, name: str) -> Step | None: ...
    @property
    def is_replaying(self) -> bool: ...
    def write(self, name: str, *, status: str, result: str) -> object: ...


def patched(execution: Marked, name: str) -> bool:
    """Whether the run takes the new way at this place: decided once, and recorded as a step. A run that has recorded
    steps behind this place has passed it on the old way."""
    if name in execution.patches:
        return execution.patches[name]
    step = f"{PATCH_PREFIX}{name}"
    if not is_step_name(step) or not name:
        longest = MAX_STEP_NAME - len(PATCH_PREFIX)
        raise NonRetryable(f"a patch's name must be text of 1 to {longest} characters, not {name!r}")
    if (outer := current_step.get()) is not None:
        raise NonRetryable(f"ctx.patched({name!r}) is called inside step {outer!r}; call it from the workflow itself")
    known = execution.known(step)
    found = not execution.is_replaying if known is None else known.result is True
    if known is None:
        execution.write(step, status="succeeded", result="true" if found else "false")
    execution.patches[name] = found
    return found


def tag(execution: Marked, given: dict[str, str | int | uuid.UUID]) -> None:
    """Give the run tags; they are stored with what it writes next."""
    for name, value in given.items():
        text = str(value)
        if not isinstance(value, str | int | uuid.UUID) or not is_step_name(text):
            raise NonRetryable(f"tag {name!r}: must be text, an integer or a UUID of 1 to {MAX_TAG_VALUE} characters")
        if len(name) > MAX_TAG_NAME or not name.isidentifier():
            raise NonRetryable(f"tag {name!r}: its name must be an identifier of at most {MAX_TAG_NAME} characters")
    before = execution.journal.notes
    if len({*given, *(before.tags if before else ())}) > MAX_TAGS:
        raise NonRetryable(f"a run can be given at most {MAX_TAGS} tags")
    execution.journal.note(execution.run, tags={name: str(value) for name, value in given.items()})
