"""Children of a run: steps that start other workflows and wait for their ends.

The step and the start of its first children are one commit; what follows happens in the transactions that end the
children (`flow/run/children.py`). So a run with many children resumes once, when all of them have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from tidegate.clock import uuid7
from tidegate.errors import ChildFailed, FieldError, InvalidInput, NonRetryable
from tidegate.flow.call.steps import RunSteps
from tidegate.flow.code.child_calls import Child
from tidegate.flow.code.workflow import Workflow
from tidegate.model.child import ChildBatch
from tidegate.model.event import EventLimits
from tidegate.model.run import Step
from tidegate.model.start import plain_fields, start_event, unwrapped, wrong_names
from tidegate.model.step import StepKind
from tidegate.model.typed import TypeRule, has_fields

# The children of a step are stored in batches, so that a transaction stays short.
MAX_BATCH = 500
MAX_ITEMS = 100_000
MAX_AT_ONCE = 10_000
# A run that waits for a child is woken by its end; it looks by itself after this time, too.
RECHECK = timedelta(days=1)


class Children:
    """The steps of one execution that start children."""

    def __init__(self, steps: RunSteps, workflows: Mapping[str, Workflow], limits: EventLimits) -> None:
        self._steps = steps
        self._workflows = workflows
        self._limits = limits

    async def start(self, name: str | None, child: Child, given: Mapping[str, object], *, is_alone: bool) -> str:
        """Start a child, unless this was done before; the name of the step."""
        steps = self._steps
        name = steps.named(name, "run", "ctx.run(child, name='…')", is_alone=is_alone)
        slug = self._slug(child)
        if (refusal := steps.refusal(name)) is not None:
            raise await steps.refused(refusal)
        known = steps.open(name)
        if _is_new(known):
            await self._write(name, "child", slug, [self._parameters(slug, given)], {})
        return name

    async def map(
        self, name: str | None, child: Child, items: Sequence[object], at_once: int, *, goes_on: bool, is_alone: bool
    ) -> list[Any]:
        """The results of a child for each item, in order."""
        steps = self._steps
        name = steps.named(name, "map", "ctx.map(child, items, name='…')", is_alone=is_alone)
        slug, items = self._slug(child), list(items)
        if not 1 <= at_once <= MAX_AT_ONCE:
            raise NonRetryable(f"at_once: must be a whole number from 1 to {MAX_AT_ONCE}, not {at_once!r}")
        if len(items) > MAX_ITEMS:
            raise NonRetryable(f"items: {len(items)} are too many; at most {MAX_ITEMS} in one map")
        if (refusal := steps.refusal(name)) is not None:
            raise await steps.refused(refusal)
        known = steps.begin(name)
        if not items:
            return []
        if _is_new(known) or (known is not None and _is_incomplete(known, len(items))):
            given = [self._of_item(slug, n, item) for n, item in enumerate(items)]
            await self._write(name, "map", slug, given, {"at_once": at_once, "goes_on": goes_on}, _added(known))
        found = await self.result(name, "map")
        rule = self._rule(child)
        if goes_on:
            return [self._told(name, one, rule) for one in found]
        return found if rule is None else [steps.restored(name, one, rule) for one in found]

    async def typed_result(self, name: str, child: Child) -> object:
        """What the child of a step returned, as the type that its function declares."""
        found, rule = await self.result(name), self._rule(child)
        return found if rule is None else self._steps.restored(name, found, rule)

    async def result(self, name: str, kind: StepKind = "child") -> Any:
        """Wait for the children of a step; what they returned. ChildFailed when one has failed; TimeoutError when a
        call of this was cut off."""
        steps = self._steps
        if (refusal := steps.wait_refusal(name)) is not None:
            raise await steps.refused(refusal)
        with steps.in_progress():
            try:
                while (known := steps.awaited(name)) is not None and known.status == "pending":
                    await steps.wait_for_wake(known, steps.now() + RECHECK, f"step {name!r} waits for its runs")
            except asyncio.CancelledError:
                steps.cut_off(name, kind)
                raise
        assert known is not None, f"step {name!r} was begun"
        if known.status != "succeeded":
            raise ChildFailed(name, known.error or "")
        return known.result

    async def _write(
        self, name: str, kind: StepKind, slug: str, given: list[str], options: dict[str, object], added: int = 0
    ) -> None:
        """Write the step with its children, in batches."""
        steps = self._steps
        with steps.in_progress():
            try:
                await steps.barrier(name)
                for first in range(added, len(given), MAX_BATCH):
                    batch = ChildBatch(slug, first, given[first : first + MAX_BATCH])
                    counts = {"total": len(given), "added": first + len(batch.parameters)}
                    written = steps.write(
                        name, kind=kind, status="pending", retry_metadata=options | counts, children=batch
                    )
                    if counts["added"] < len(given):
                        await steps.journal.kept(written)
            except asyncio.CancelledError:
                steps.cut_off(name, kind, is_opening=True)
                raise

    def _slug(self, child: Child) -> str:
        if isinstance(child, str):
            return child
        found = [one.slug for one in self._workflows.values() if one.function is child]
        if not found:
            shown = getattr(child, "__name__", child)
            raise NonRetryable(f"{shown} is not a workflow of this application; pass the function or its slug")
        return found[0]

    def _rule(self, child: Child) -> TypeRule | None:
        """How the output of a child that is given as a function is restored; by slug it stays JSON."""
        return None if isinstance(child, str) else self._workflows[self._slug(child)].result_rule

    def _told(self, name: str, one: dict[str, object], rule: TypeRule | None) -> object:
        if one["error"] is not None:
            return ChildFailed(name, f"run {one['run_id']}: {one['error']}")
        return one["result"] if rule is None else self._steps.restored(name, one["result"], rule)

    def _of_item(self, slug: str, position: int, item: object) -> str:
        """The parameters for an item of a map as JSON text. NonRetryable or InvalidInput names the item."""
        try:
            return self._parameters(slug, self._item(slug, item))
        except InvalidInput as exc:
            errors = [FieldError(f"items[{position}].{one.field}", one.message, one.too_large) for one in exc.errors]
            raise InvalidInput(f"item {position} of the map cannot be started", errors) from exc
        except NonRetryable as exc:
            raise NonRetryable(f"items[{position}]: {exc}") from exc

    def _item(self, slug: str, item: object) -> Mapping[str, object]:
        """The parameters for an item of a map: the item itself, or the value of the only parameter."""
        names = self._workflows[slug].parameter_names if slug in self._workflows else ["*"]
        if isinstance(item, Mapping) and (len(names) != 1 or names == ["*"] or list(item) == names):
            return item
        if len(names) == 1 and names != ["*"]:
            return {names[0]: item}
        if has_fields(type(item)):
            return plain_fields(item)
        raise NonRetryable(
            f"{slug} takes {'any parameters' if names == ['*'] else ', '.join(names) or 'no parameters'}; "
            f"an item must be an object with these, not {type(item).__name__}"
        )

    def _parameters(self, slug: str, given: Mapping[str, object]) -> str:
        """The parameters of a child as JSON text. InvalidInput names those that are wrong."""
        if (workflow := self._workflows.get(slug)) is not None:
            given = unwrapped(given, workflow.payload_argument)
            if errors := wrong_names(given.keys(), workflow.parameter_names, workflow.required_names):
                raise InvalidInput(f"the parameters are not those of workflow {slug}", errors)
        return start_event(slug, given, new_id=uuid7(), limits=self._limits, origin={}).payload


def _is_new(known: Step | None) -> bool:
    """Whether its children are to be started: for the first time, or again, since its run was replayed."""
    return known is None or known.begins_again


def _is_incomplete(known: Step, total: int) -> bool:
    return known.status == "pending" and _added(known) < total


def _added(known: Step | None) -> int:
    return 0 if known is None or known.retry_metadata.get("revived") else int(known.retry_metadata.get("added", 0))
