"""The steps of one execution: what a call of `ctx.step`, `ctx.sleep` or `ctx.wait_for` does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from tidegate import failpoints
from tidegate.errors import NonRetryable, StepFailed, first_line
from tidegate.flow.call import waits
from tidegate.flow.call.endings import NON_RETRYABLE, step_failure
from tidegate.flow.call.journal import Stop, Written
from tidegate.flow.call.spending import spend, waits_for_budget
from tidegate.flow.call.states import EXECUTING
from tidegate.flow.call.step_parts import StepParts
from tidegate.flow.call.transaction import StepTransaction
from tidegate.flow.code import user_calls
from tidegate.flow.code.context import current_step
from tidegate.flow.code.user_calls import Failure, encode_output, kept_result
from tidegate.flow.code.wait_call import WaitCall
from tidegate.flow.decide.reporting import run_fields
from tidegate.model.budget import Spending
from tidegate.model.declared import checked_result_rule
from tidegate.model.retry import RetryPolicy
from tidegate.model.step import StepWrite
from tidegate.model.typed import TypeRule
from tidegate.model.units import duration_ms
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

T = TypeVar("T")

_log = logger("run")


class RunSteps(StepParts):
    """The steps that an execution calls."""

    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        retry: RetryPolicy | None,
        timeout: str | int | float | None,
        transaction: StepTransaction | None = None,
        spending: Spending | None = None,
    ) -> Any:
        """The result of a step: stored before, or from calling it now, in a transaction if one is given, and when its
        budgets have room (`spending`). StepFailed when its retries are exhausted."""
        if (refusal := self.refusal(name)) is not None:
            raise await self.refused(refusal)
        rule = checked_result_rule(name, function)
        known = self.begin(name)
        if known is not None and known.status == "succeeded":
            return known.result if rule is None else self.restored(name, known.result, rule)
        if known is not None and known.status == "failed":
            raise StepFailed(name, known.error or "")
        self._active += 1
        try:
            if known is not None and waits_for_budget(known):
                self.endings.slots[name] = tuple(known.retry_metadata.get("budgets", ()))
                await self.barrier(name)
            elif known is not None or self.journal.is_busy or self.fit is not None:
                await self.ready(name)
            else:
                self.journal.check()
            while True:
                call = partial(function, *args, **kwargs)
                never = None if spending is None else await spend(self, name, spending, self._ask_spend)
                failure = (
                    await self._try(name, call, function, timeout, rule, transaction)
                    if never is None
                    else Failure(never)
                )
                if not isinstance(failure, Failure):
                    return failure
                await self._failed(name, failure.exc, retry or self._policy, spending)
                await self.ready(name)
        except asyncio.CancelledError:
            self.cut_off(name, "step")
            raise
        finally:
            self.leave()

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Call a synchronous function of a step in a thread."""
        found: T = await self._threads.call(self._step_threads, call)
        return found

    async def sleep(self, duration: str | int | float, name: str | None = None, *, is_alone: bool = True) -> None:
        """Resume after a time, counted from the first time this line was reached; no worker is held meanwhile."""
        name = self.named(name, "sleep", "ctx.sleep('2h', name='…')", is_alone=is_alone)
        if (refusal := self.refusal(name)) is not None:
            raise await self.refused(refusal)
        known = self.begin(name)
        if known is not None and known.status == "succeeded":
            return
        self._active += 1
        try:
            await self.journal.barrier()
            if known is None:
                await self.waits(name, kind="sleep", delay_ms=duration_ms(duration), retry_metadata={"reason": "sleep"})
            await self.ready(name)
            self.write(name, kind="sleep", status="succeeded", retry_state="completed")
        except asyncio.CancelledError:
            self.cut_off(name, "sleep")
            raise
        finally:
            self.leave()

    async def wait(self, call: WaitCall) -> Any:
        """What came of waiting for events: the step's result as stored."""
        return await waits.wait(self, call, self._ask)

    def restored(self, name: str, result: object, rule: TypeRule) -> object:
        """The stored result of a step, or of its child, as the type that its function declares now."""
        try:
            return rule.restored(result)
        except ValueError as exc:
            why = (
                f"the stored result of step {name!r} is not the {rule.name} that its function declares now: "
                f"{first_line(str(exc))}"
            )
            raise (self.misfit(why) if self.is_other_code else NonRetryable(why)) from exc

    async def _try(
        self, name: str, call: Callable[[], Any], function: Any, timeout: Any, rule: TypeRule | None,
        transaction: StepTransaction | None,
    ) -> Any:  # fmt: skip
        """Call a step's function once: its result, written down, or a Failure."""
        known, token = self._known.get(name), current_step.set(name)
        attempts = known.retry_attempts if known else 0
        if self.spans is not None:
            self.spans.begin_step(name, attempts + 1)
        try:
            if self._before_step is not None:
                self._before_step(name)
            if transaction is not None:
                written = self.write_of(name, status="succeeded", retry_attempts=attempts)
                kept = await transaction.run(self, written, rule)
                self._committed(written)
                return kept
            if timeout is None:
                value = await user_calls.called_in(self._step_threads, self._threads, call, function)
            else:
                value = await user_calls.called_within(timeout, name, self._step_threads, self._threads, call, function)
            result = encode_output(value, "the result", name)
            kept = kept_result(value, result, rule, name)
        except (Stop, GeneratorExit):
            raise
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if self.state is not EXECUTING or task is None or task.cancelling():
                raise
            return Failure(exc)  # nobody cancelled this step: its function raised it
        except BaseException as exc:  # noqa: BLE001 - user code may raise anything; it is the step's failure
            return Failure(exc)
        finally:
            current_step.reset(token)
            if self.spans is not None:
                self.spans.leave_step(name)
        failpoints.hit("step.before_commit")
        self.write(name, status="succeeded", result=result, retry_attempts=attempts)
        return kept

    async def _failed(
        self, name: str, exc: BaseException, policy: RetryPolicy, spending: Spending | None = None
    ) -> None:
        """Write that an attempt failed, and when there is another; StepFailed when there is none."""
        if self.spans is not None:
            self.spans.fail_step(name, exc)
        error = user_calls.error_text(exc)
        blocks = self.endings.block(exc, None if spending is None else spending.spend.keys)
        attempt, is_final, delay_ms = step_failure(exc, self._known.get(name), policy, self.now())
        fields = run_fields(self.run, self.event) | {
            "step": name,
            "attempt": attempt,
            "reason": first_line(error),
        }
        if is_final:
            _log.warning("step.exhausted", **fields)
            self.write(
                name, status="failed", error=error, retry_state="exhausted", retry_attempts=attempt,
                retry_metadata={"reason": "failed"} | ({NON_RETRYABLE: True} if isinstance(exc, NonRetryable) else {}),
                blocks=blocks,
            )  # fmt: skip
            raise StepFailed(name, error) from exc
        await self.waits(
            name, error=error, delay_ms=delay_ms, retry_attempts=attempt,
            retry_metadata={"reason": "failed", "of": policy.max_attempts}, blocks=blocks,
        )  # fmt: skip
        _log.warning("step.failed", **fields, next_attempt_at=self._known[name].next_attempt_at)

    def _committed(self, write: StepWrite) -> None:
        """A step that was not written by the journal is committed."""
        failpoints.hit("transaction.after_commit")
        self._known.pop(write.name, None)
        if write.retry_attempts:
            metrics.STEP_RETRIES.labels("due").inc()
            metrics.STEP_RETRIES.labels("completed").inc()
        if self.spans is not None:
            written: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
            written.set_result(Written(True))
            self.spans.wrote_step(write, written)
