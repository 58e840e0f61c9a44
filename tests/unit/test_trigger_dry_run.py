"""A dry run shows, check by check, what a trigger would do with an event."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from tidegate.clock import uuid7
from tidegate.errors import InvalidInput
from tidegate.model.event import Event, EventLimits
from tidegate.model.predicate import Predicate
from tidegate.model.trigger import Trigger, TriggerSpec
from tidegate.model.trigger_change import changed, created, declared
from tidegate.model.trigger_dry_run import evaluate, sample_event

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)


def event(**given: Any) -> Event:
    raw = {"type": "order.created", "source": "shop.api", "payload": {"id": 7, "amount": 120}} | given
    return sample_event(raw, new_id=uuid7(), now=NOW, limits=EventLimits())


def trigger(**given: Any) -> Trigger:
    nobody = uuid.UUID(int=0)
    fields = {"name": "t", "event_type": "order.created"} | given
    return Trigger(id=nobody, workflow_definition_id=nobody, workflow="fulfil", **fields)


def test_everything_holds() -> None:
    found = evaluate(
        trigger(
            predicates=[Predicate(path="$.payload.amount", operator="gt", value=100)],
            where="event.payload.id == 7",
            parameter_template={"order": "{{ event.payload.id }}"},
            idempotency_key="{{ event.payload.id }}",
            concurrency_key="{{ event.source }}",
        ),
        [],
        event(),
    )
    assert (found.matches, found.reason, found.errors) == (True, None, [])
    assert found.event_type.holds and found.event_source.holds
    assert [(p.path, p.operator, p.holds, p.reason) for p in found.predicates] == [
        ("$.payload.amount", "gt", True, None)
    ]
    assert found.where and (found.where.expression, found.where.holds) == ("event.payload.id == 7", True)
    assert found.parameters == {"order": 7}
    assert (found.idempotency_key, found.concurrency_key) == ("7", "shop.api")


def test_each_check_says_why_not() -> None:
    found = evaluate(
        trigger(
            event_type="order.paid",
            event_source="shop.web",
            predicates=[
                Predicate(path="$.payload.id", operator="equals", value=7),
                Predicate(path="$.payload.nothing", operator="exists"),
            ],
            where="event.payload.amount > 1000",
        ),
        ["id"],
        event(),
    )
    assert not found.matches and found.reason == "the trigger takes events of type order.paid"
    assert found.event_type.reason == "the event's type is order.created, not order.paid"
    assert found.event_source.reason == "the event's source is shop.api, not shop.web"
    assert [p.holds for p in found.predicates] == [True, False]
    assert found.predicates[1].reason == "$.payload.nothing is not in the event"
    assert found.where and not found.where.holds and "where is false" in (found.where.reason or "")
    assert found.parameters == {"id": 7} and found.idempotency_key is None and found.concurrency_key is None


def test_template_errors_do_not_hide_each_other() -> None:
    found = evaluate(
        trigger(
            parameter_template={"a": {"b": "{{ event.payload.missing }}"}},
            idempotency_key="{{ event.payload.gone }}",
            concurrency_key="{{ event.payload.id }}",
        ),
        [],
        event(),
    )
    assert found.matches and found.parameters is None and found.idempotency_key is None
    assert found.concurrency_key == "7"
    assert [error.split(":")[0] for error in found.errors] == ["parameter_template.a.b", "idempotency_key"]


def test_parameters_that_are_too_large() -> None:
    found = evaluate(
        trigger(parameter_template={"x": "{{ event.payload.x }}", "y": "{{ event.payload.x }}"}),
        [],
        event(payload={"x": "a" * 200_000}),
    )
    assert found.matches and found.parameters is None and "at most 262144 are allowed" in found.errors[0]


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        ({"type": "a"}, ["event.source"]),
        (7, ["event"]),
        ({"type": "a", "source": "s", "payload": {"x": "\x00"}}, ["event.payload.x"]),
    ],
)
def test_a_wrong_sample_names_its_fields(raw: Any, fields: list[str]) -> None:
    with pytest.raises(InvalidInput) as refused:
        sample_event(raw, new_id=uuid7(), now=NOW, limits=EventLimits())
    assert [e.field for e in refused.value.errors] == fields


# Creating and changing ----------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"name": "n", "event_type": "a.b"}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({}, ["name", "event_type"]),
        ([], ["body"]),
        (None, ["body"]),
        (GOOD | {"nonsense": 1}, ["nonsense"]),
        (GOOD | {"name": None}, ["name"]),
        (GOOD | {"name": " "}, ["name"]),
        (GOOD | {"name": "a\x00"}, ["name"]),
        (GOOD | {"event_type": 5}, ["event_type"]),
        (GOOD | {"event_source": ""}, ["event_source"]),
        (GOOD | {"predicates": [{"path": "$.id", "operator": "exists"}, {"path": "a b", "operator": "exists"}]},
         ["predicates[1].path"]),
        (GOOD | {"predicates": [{"path": 1, "operator": "exists"}]}, ["predicates[0].path"]),
        (GOOD | {"predicates": [{"path": "$.id", "operator": "is"}]}, ["predicates[0].operator"]),
        (GOOD | {"predicates": [{"path": "$.id"}]}, ["predicates[0].operator"]),
        (GOOD | {"predicates": [{"path": "$.id", "operator": "exists", "x": 1}]}, ["predicates[0].x"]),
        (GOOD | {"predicates": [{"path": "$.id", "operator": "equals", "value": "\x00"}]}, ["predicates[0].value"]),
        (GOOD | {"predicates": [{"path": "$.id", "operator": "equals", "value": 10**30}]}, ["predicates[0].value"]),
        (GOOD | {"predicates": [{"path": "$.id", "operator": "equals", "value": 1e300}]}, ["predicates[0].value"]),
        (GOOD | {"predicates": "x"}, ["predicates"]),
        (GOOD | {"where": "event.payload.x >"}, ["where"]),
        (GOOD | {"where": "1 == 1"}, ["where"]),
        (GOOD | {"parameter_template": {"order": {"id": "{{ event.x | nope }}"}}}, ["parameter_template.order.id"]),
        (GOOD | {"parameter_template": []}, ["parameter_template"]),
        (GOOD | {"throttle_count": 5}, ["throttle_window_ms"]),
        (GOOD | {"throttle_count": 0, "throttle_window_ms": 1}, ["throttle_count"]),
        (GOOD | {"throttle_count": 10**30, "throttle_window_ms": 1}, ["throttle_count"]),
        (GOOD | {"throttle_count": 1.5, "throttle_window_ms": 1}, ["throttle_count"]),
        (GOOD | {"max_concurrency": True}, ["max_concurrency"]),
        (GOOD | {"idempotency_window_ms": -1}, ["idempotency_window_ms"]),
        (GOOD | {"retry": {"max_ms": 1}}, ["retry.max_ms"]),
        (GOOD | {"retry": {"factor": "2"}}, ["retry.factor"]),
        (GOOD | {"retry": {"nope": 2}}, ["retry.nope"]),
        (GOOD | {"retry": 5}, ["retry"]),
        (GOOD | {"breaker": {"threshold": 0}}, ["breaker.threshold"]),
        (GOOD | {"status": "asleep"}, ["status"]),
        (GOOD | {"status": None}, ["status"]),
        (GOOD | {"version": 1}, ["version"]),
        (GOOD | {"id": "x"}, ["id"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: Any, fields: list[str]) -> None:
    with pytest.raises(InvalidInput) as refused:
        created(given, "w", ["*"])
    assert [e.field for e in refused.value.errors] == fields, refused.value


def test_endless_nesting_is_refused() -> None:
    given = GOOD | {"predicates": [{"path": "$.id", "operator": "equals", "value": nested(100)}]}
    with pytest.raises(InvalidInput, match="nested deeper than 16 levels"):
        created(given, "w", ["*"])


def test_unknown_fields_name_those_that_are_known() -> None:
    with pytest.raises(InvalidInput, match="known fields: base_ms, factor, max_ms"):
        created(GOOD | {"retry": {"base": 2}}, "w", ["*"])
    with pytest.raises(InvalidInput, match="known fields: path, operator, value"):
        created(GOOD | {"predicates": [{"paths": 2}]}, "w", ["*"])


def test_a_change_keeps_what_it_does_not_name_and_null_clears() -> None:
    spec = created(GOOD | {"where": "event.payload.x > 1", "event_source": "s", "max_concurrency": 3}, "w", []).spec
    kept = changed(spec, "active", {"max_concurrency": 5, "version": 4}, "w", [])
    assert (kept.spec.where, kept.spec.max_concurrency, kept.status) == ("event.payload.x > 1", 5, "active")
    cleared = changed(spec, "active", {"where": None, "event_source": None, "predicates": None}, "w", [])
    assert cleared.spec == TriggerSpec(name="n", event_type="a.b", max_concurrency=3)
    assert changed(spec, "active", {"status": "disabled"}, "w", []).status == "disabled"
    assert changed(spec, "active", {}, "w", []).spec == spec


def test_what_code_declared_leaves_defaults_out() -> None:
    assert declared(TriggerSpec(name="code", event_type="a", max_concurrency=2)) == {
        "name": "code",
        "event_type": "a",
        "max_concurrency": 2,
    }


def test_a_dry_run_has_the_work_limit_of_a_delivery() -> None:
    slow = Predicate(path="$.payload.text", operator="regex", value="error.{0,1000}timeout")
    found = evaluate(
        trigger(predicates=[Predicate(path="$.type", operator="exists"), slow], where="event.payload.id == 7"),
        ["id"],
        event(payload={"id": 7, "text": "error " * 40_000}),
    )
    assert not found.matches
    assert found.reason and found.reason.startswith("predicates[1]: over the work limit")
    assert found.errors == [found.reason]
    assert [one.holds for one in found.predicates] == [True, False]


def test_a_template_over_the_work_limit_is_reported_by_a_dry_run() -> None:
    loops = "{% for i in event.payload.l %}{% for j in event.payload.l %}{{ j }}{% endfor %}{% endfor %}"
    found = evaluate(trigger(parameter_template={"a": loops}), ["a"], event(payload={"l": list(range(500))}))
    assert found.matches
    assert [error[:22] for error in found.errors] == ["parameter_template.a: "] and "work limit" in found.errors[0]
