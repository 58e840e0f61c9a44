"""Budgets: what a declaration means, what a launch needs, and the pure decision, by table."""

from __future__ import annotations

import itertools
import re
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tidegate.flow.decide.budgets import Asking, BudgetState, KeyState, eta
from tidegate.model.allowance import Allowance
from tidegate.model.budget import (
    Budget,
    BudgetSpec,
    CannotSpend,
    ClosedKey,
    CompiledBudget,
    Need,
    StepSpend,
    declared_names,
    names_errors,
    step_spending,
)
from tidegate.model.ids import DeliveryId, RunId
from tidegate.model.trigger_terms import TemplateError
from tidegate.model.work_limit import WorkLeft
from tidegate.store.budgets import Holder, LockedBudget

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "Budget: rate: is required, or concurrency: a budget without both limits nothing"),
        ({"rate": "often"}, "Budget: rate: a rate is written like"),
        ({"rate": "1/s", "cost": 3}, "Budget: cost: must be text: a template, or for the cost an expression"),
        ({"rate": "1/s", "key": 3}, "Budget: key: must be text"),
        ({"concurrency": 0}, "Budget: concurrency: must be a whole number from 1 to 1000000"),
        ({"concurrency": True}, "Budget: concurrency: must be a whole number from 1 to 1000000"),
        ({"rate": "1/s", "key": " "}, "Budget: key: must not be empty; omit it for none"),
        (
            {"rate": "1/s", "key": "{{ event.nothing }}"},
            "Budget: key: uses `nothing`, which is not a field",
        ),
        ({"rate": "1/s", "cost": "event.payload."}, "Budget: cost: is not a CEL expression"),
        ({"rate": "1/s", "cost": "1 + 1"}, "Budget: cost: does not use `event`"),
        ({"concurrency": 1, "cost": "event.payload.n"}, "Budget: cost: needs a rate"),
        ({"rate": "1/s", "name": "with space"}, "Budget: name: must be 1 to 100 letters"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], error: str) -> None:
    name, rate = given.pop("name", "openai"), given.pop("rate", None)
    with pytest.raises(ValueError) as found:
        Budget(name, rate, **given)
    assert str(found.value).startswith(error)


def test_a_declaration_in_words() -> None:
    spec = Budget("x", "300/min", concurrency=2, key="{{ event.payload.t }}", cost="event.payload.n")
    assert spec.described() == "300/min, 2 at a time, per {{ event.payload.t }}, cost event.payload.n"
    assert spec.rate is not None and (spec.rate.limit, spec.rate.interval_ms) == (300, 60_000)
    assert Budget("x", concurrency=1).rate is None


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        ({"t": "acme", "n": 3}, Need("x", "acme", 3)),
        ({"t": 7, "n": 0}, Need("x", "7", 0)),
        ({"t": "a", "n": 2.0}, Need("x", "a", 2)),
        ({"t": "a", "n": 10}, Need("x", "a", 10)),
        ({"t": "a", "n": 11}, "budget x: cost: is 11, more than its rate of 10/s ever allows at once"),
        ({"t": "a", "n": True}, "budget x: cost: must be a whole number from 0 to 1000000000, not True"),
        ({"t": "a"}, "budget x: cost: event.payload.n is not in the event"),
        ({"t": None, "n": 1}, "budget x: key: renders null for this event"),
        ({"t": "", "n": 1}, "budget x: key: renders an empty text for this event"),
        ({"t": "k" * 501, "n": 1}, "budget x: key: renders 501 characters for this event; at most 500"),
    ],
)
def test_what_a_launch_needs(payload: dict[str, object], found: Need | str) -> None:
    budget = CompiledBudget(Budget("x", "10/s", key="{{ event.payload.t }}", cost="event.payload.n"))
    if isinstance(found, Need):
        assert budget.need({"payload": payload}, WorkLeft()) == found
    else:
        with pytest.raises(TemplateError) as error:
            budget.need({"payload": payload}, WorkLeft())
        assert str(error.value) == found


def test_names_of_a_declaration() -> None:
    known: dict[str, BudgetSpec] = {}
    assert declared_names([Budget("a", "1/s"), "b"], known) == ["a", "b"]
    assert declared_names([Budget("a", "1/s")], known) == ["a"] and set(known) == {"a"}
    with pytest.raises(ValueError, match="a is declared twice, and differently"):
        declared_names([Budget("a", "2/s")], known)
    with pytest.raises(ValueError, match="is a list"):
        declared_names("a", known)
    assert [e.field for e in names_errors(["a", "not ok"])] == ["budgets[1]"]
    assert names_errors(["a", "a"])[0].message == "names a budget twice"


def state(*specs: BudgetSpec, **keys: KeyState) -> BudgetState:
    """A state of budgets, each with the one key that is given by its name, or an unused one."""
    found = BudgetState({spec.name: LockedBudget(spec) for spec in specs})
    for spec in specs:
        found.keys[spec.name, ""] = keys.get(spec.name) or KeyState(Allowance(limit=spec.rate))
    return found


def asking(*needs: Need, sequence: int = 10, is_newcomer: bool = True, **rest: Any) -> Asking:
    return Asking(DeliveryId(uuid.uuid4()), needs, sequence, is_newcomer, **rest)


@pytest.mark.parametrize(
    ("spent", "in_use", "first_waiting", "cost", "is_newcomer", "why"),
    [
        (0, 0, None, 1, True, None),
        (9, 0, None, 1, True, None),
        (10, 0, None, 1, True, "rate"),
        (8, 0, None, 3, True, "rate"),
        (10, 0, None, 0, True, None),
        (0, 2, None, 1, True, "concurrency"),
        (0, 2, None, 0, True, "concurrency"),
        (0, 0, 5, 1, True, "line"),
        (0, 0, 50, 1, True, "line"),
        (0, 0, 5, 1, False, "line"),
        (0, 0, 50, 1, False, None),
    ],
)
def test_one_budget(
    spent: int, in_use: int, first_waiting: int | None, cost: int, is_newcomer: bool, why: str | None
) -> None:
    spec = Budget("x", "10/s", concurrency=None if in_use == 0 and cost == 0 else 2)
    allowance = Allowance(limit=spec.rate)
    allowance.spend(NOW, spent)
    one = state(spec, x=KeyState(allowance, in_use, first_waiting))
    refused = one.why_wait(asking(Need("x", "", cost), is_newcomer=is_newcomer), NOW)
    assert (refused and refused.waits_for["budget"]["why"]) == why  # type: ignore[index]


def test_all_or_none() -> None:
    a, b = Budget("a", "10/s"), Budget("b", "1/s", concurrency=1)
    both = state(a, b)
    first, second = asking(Need("a", "", 4), Need("b", "", 1)), asking(Need("a", "", 4), Need("b", "", 1))
    assert both.why_wait(first, NOW) is None
    both.spend(first.id, first.needs, RunId(first.id), NOW)
    assert both.why_wait(second, NOW) is not None
    assert both.keys["a", ""].allowance.free(NOW) == 6, "who is refused has spent nothing"
    assert both.held == [Holder(first.id, "b", "")]
    assert {one.line for one in both.changed()} == {("a", ""), ("b", "")}


def test_who_is_refused_blocks_those_behind_it() -> None:
    one = state(Budget("x", "10/s"))
    one.keys["x", ""].allowance.spend(NOW, 5)
    assert one.why_wait(asking(Need("x", "", 8)), NOW) is not None
    later = one.why_wait(asking(Need("x", "", 1)), NOW)
    assert later is not None and later.message == "budget x: waiting in line"


def test_times_are_paced_by_cost_for_newcomers_and_start_at_the_room_for_who_was_due() -> None:
    spec = Budget("x", "10/s")
    one = state(spec)
    one.keys["x", ""].allowance.spend(NOW, 10)
    times = [one.why_wait(asking(Need("x", "", 5)), NOW) for _ in range(3)]
    gaps = [b.until - a.until for a, b in itertools.pairwise(times) if a and b and a.until and b.until]
    assert gaps == [5 * spec.rate.pace] * 2 if spec.rate else False
    again = state(spec)
    again.keys["x", ""].allowance.spend(NOW, 10)
    again.keys["x", ""].allowance.drain_at = NOW + timedelta(hours=1)
    due = again.why_wait(asking(Need("x", "", 1), is_newcomer=False), NOW)
    assert due is not None and due.until is not None and due.until < NOW + timedelta(seconds=1.1)


def test_a_pause_holds_what_is_free_too_and_has_a_time() -> None:
    spec = Budget("x", "10/s")
    one = state(spec)
    one.budgets = {"x": LockedBudget(spec, NOW, NOW + timedelta(minutes=5), "costs", "ada")}
    refused = one.why_wait(asking(Need("x", "", 0)), NOW)
    assert refused is not None and refused.is_pause and refused.message == "budget x: paused by ada: costs"
    assert refused.until == NOW + timedelta(minutes=5)


def test_a_delivery_that_was_passed_on_reserves_what_the_others_have() -> None:
    both = state(Budget("a", "1/s"), Budget("b", "1/s"))
    both.keys["a", ""].allowance.spend(NOW, 1)
    passed = asking(Need("a", "", 1), Need("b", "", 1), is_newcomer=False, came_from="b", moves=2)
    refused = both.why_wait(passed, NOW)
    assert refused is not None and refused.is_move
    other = both.why_wait(asking(Need("b", "", 1)), NOW)
    assert other is not None and other.until is not None and other.until > NOW
    both.keys["a", ""] = KeyState(Allowance(limit=both.budgets["a"].spec.rate))
    both.keys["b", ""].is_blocked = False
    assert both.why_wait(passed, NOW) is None
    both.spend(passed.id, passed.needs, RunId(passed.id), NOW)
    assert both.keys["b", ""].reserved is None
    assert both.why_wait(asking(Need("b", "", 1)), NOW + timedelta(seconds=3)) is None


def test_a_closed_key_lets_one_go_first_when_its_time_has_come() -> None:
    one = state(Budget("x", "10/s"))
    one.keys["x", ""].closed = ClosedKey(NOW + timedelta(seconds=30), "429")
    early = one.why_wait(asking(Need("x", "", 1)), NOW)
    assert early is not None and early.until == NOW + timedelta(seconds=30) and early.message == "budget x: closed: 429"
    later, first = NOW + timedelta(seconds=30), asking(Need("x", "", 1))
    one.keys["x", ""].is_blocked = False
    assert one.why_wait(first, later) is None
    one.spend(first.id, first.needs, RunId(first.id), later)
    second = one.why_wait(asking(Need("x", "", 1)), later)
    assert second is not None and second.until == later + timedelta(minutes=1)
    assert second.message == f"budget x: half open: run {first.id} is tried first (429)"
    one.keys["x", ""].is_blocked = False
    assert one.why_wait(asking(Need("x", "", 1)), later + timedelta(minutes=1)) is None


def test_the_expected_time_counts_what_is_ahead() -> None:
    spec = Budget("x", "10/s")
    allowance = Allowance(limit=spec.rate)
    assert eta(allowance, LockedBudget(spec), 1, 0, NOW) == NOW
    allowance.spend(NOW, 10)
    soon, later = (eta(allowance, LockedBudget(spec), 1, ahead, NOW) for ahead in (0, 100))
    assert soon is not None and later is not None
    assert timedelta(seconds=10) <= later - soon <= timedelta(seconds=10.3)
    assert eta(allowance, LockedBudget(spec, NOW), 1, 0, NOW) is None
    assert eta(allowance, LockedBudget(spec), 1, 10**15, NOW) == NOW + timedelta(days=3660)


# Steps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "key", "cost", "found"),
    [
        ("a", None, None, StepSpend(["a"])),
        (["b", "a"], None, 3, StepSpend(["a", "b"], costs={"a": 3, "b": 3})),
        (["b", "a"], {"b": 7}, {"a": 0}, StepSpend(["a", "b"], {"b": "7"}, {"a": 0})),
        (Budget("a", "1/s"), "x", None, StepSpend(["a"], {"a": "x"})),
    ],
)
def test_what_a_step_asks_for(budget: Any, key: Any, cost: Any, found: StepSpend) -> None:
    spending = step_spending(budget, key, cost)
    assert spending.spend == found
    assert [spec.name for spec in spending.specs] == (["a"] if isinstance(budget, BudgetSpec) else [])


@pytest.mark.parametrize(
    ("budget", "key", "cost", "said"),
    [
        ([], None, None, "budget: names no budget"),
        (["a", "a"], None, None, "budget: names a budget twice"),
        (["not ok"], None, None, "budget[0]: is not the name of a budget"),
        ([3], None, None, "budget: contains 3"),
        (None, None, None, "budget: "),
        ("a", " ", None, "budget_key: renders an empty text"),
        ("a", None, 1.5, "budget_cost: must be a whole number"),
        ("a", None, True, "budget_cost: must be a whole number"),
        ("a", None, {"b": 1}, "budget_cost: 'b' is not one of the step's budgets"),
    ],
)
def test_what_a_step_cannot_ask_for(budget: Any, key: Any, cost: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        step_spending(budget, key, cost)


@pytest.mark.parametrize(
    ("spec", "spend", "need"),
    [
        (Budget("a", "9/s"), StepSpend(["a"]), Need("a", "", 1)),
        (Budget("a", "9/s"), StepSpend(["a"], {"a": "x"}, {"a": 9}), Need("a", "", 9)),
        (Budget("a", "9/s", key="{{ event.source }}"), StepSpend(["a"], {"a": "x"}), Need("a", "x", 1)),
        (Budget("a", "9/s", key="{{ event.source }}"), StepSpend(["a"]), Need("a", "", 1)),
        (Budget("a", concurrency=1), StepSpend(["a"], costs={"a": 50}), Need("a", "", 1)),
    ],
)
def test_what_a_step_of_a_run_without_an_event_needs(spec: BudgetSpec, spend: StepSpend, need: Need) -> None:
    assert CompiledBudget(spec).step_need(spend, None, WorkLeft()) == need


def test_a_cost_that_is_given_is_checked() -> None:
    with pytest.raises(CannotSpend, match="budget a: cost: is 10, more than its rate of 9/s ever allows at once"):
        CompiledBudget(Budget("a", "9/s")).step_need(StepSpend(["a"], costs={"a": 10}), None, WorkLeft())


def test_the_steps_of_the_run_that_is_tried_first_are_not_shut_out() -> None:
    run_id, other = RunId(uuid.uuid4()), RunId(uuid.uuid4())
    closed = ClosedKey(NOW - timedelta(seconds=1), "429", run_id, NOW + timedelta(minutes=1))
    spec = Budget("x", "10/s")
    key = KeyState(Allowance(limit=spec.rate), closed=closed)
    found = state(spec, x=key)
    assert found.why_wait(asking(Need("x", "", 1), run_id=run_id), NOW) is None
    key.begin(run_id, NOW)
    assert key.closed == closed
    assert found.why_wait(asking(Need("x", "", 1), run_id=other), NOW) is not None
