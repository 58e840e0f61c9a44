"""Triggers: which events they take, why not, and the parameters they give."""

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import FieldError, InvalidInput
from tidegate.flow.decide import deliver
from tidegate.model.event import Event
from tidegate.model.predicate import Predicate
from tidegate.model.retry import TRIGGER_RETRY
from tidegate.model.trigger import (
    MAX_PREDICATES,
    CompiledTrigger,
    Trigger,
    TriggerSpec,
    check_spec,
    compile_pattern,
)
from tidegate.model.trigger_index import TriggerIndex
from tidegate.model.trigger_terms import TemplateError

NOW = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)


def trigger(event_type: str = "order.created", parameters: list[str] | None = None, **changes: Any) -> CompiledTrigger:
    fields = {"name": event_type, "workflow": "fulfil"} | changes
    row = Trigger(id=uuid.uuid4(), workflow_definition_id=uuid.uuid4(), event_type=event_type, **fields)
    return CompiledTrigger(row, parameters if parameters is not None else ["*"])


def event(**payload: Any) -> Event:
    return Event(
        id=uuid.uuid4(),
        external_id=None,
        type="order.created",
        source="shop.api",
        occurred_at=NOW,
        received_at=NOW,
        ingress_sequence=1,
        payload=payload,
        correlation_id="c",
        ttl_ms=None,
        metadata={},
    )


def parameters(compiled: CompiledTrigger, given_event: Event) -> dict[str, Any]:
    return compiled.parameters(given_event, given_event.envelope())


def matches(pattern: str, name: str) -> bool:
    errors: list[FieldError] = []
    compiled = compile_pattern(pattern, "event_type", errors)
    assert errors == []
    return compiled is None or compiled.fullmatch(name) is not None


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("*", "anything", True),
        ("order.created", "order.created", True),
        ("order.created", "order.createdX", False),
        ("order.created", "orderXcreated", False),
        ("order.*", "order.created", True),
        ("order.*", "order.", True),
        ("order.*", "order", False),
        ("*.created", "order.created", True),
        ("*.created", "order.created.x", False),
        ("shop.*.v1", "shop.eu.api.v1", True),
        ("shop.*.v1", "shop.v1", False),
        ("*shop*", "my-shop-eu", True),
        ("**", "x", True),
        ("a+b?", "a+b?", True),
        ("a+b?", "aab", False),
        ("https://x/?q=[*", "https://x/?q=[1", True),
        ("Order.*", "order.created", False),
    ],
)
def test_wildcards(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


@given(st.lists(st.text("ab.*", max_size=5), min_size=1, max_size=4), st.text("ab.", max_size=12))
def test_wildcard_means_any_run_of_characters(parts: list[str], name: str) -> None:
    pattern = "*".join(parts)
    if not pattern:
        return
    # The definition, by dynamic programming: row[j] says whether the pattern so far takes name[:j].
    row = [True] + [False] * len(name)
    for char in pattern:
        if char == "*":
            row = [any(row[: j + 1]) for j in range(len(name) + 1)]
        else:
            row = [False] + [row[j] and name[j] == char for j in range(len(name))]
    assert matches(pattern, name) is row[-1]


@pytest.mark.parametrize("pattern", ["", " ", "x" * 201])
def test_bad_pattern_is_refused(pattern: str) -> None:
    for field in ("event_type", "event_source"):
        with pytest.raises(InvalidInput) as caught:
            trigger(**{"event_type": "x", "name": "n"} | {field: pattern})
        assert [e.field for e in caught.value.errors] == [field]


@pytest.mark.parametrize(
    ("source", "expected"), [("*", True), ("shop.api", True), ("shop.*", True), ("shop", False), ("crm.*", False)]
)
def test_source(source: str, expected: bool) -> None:
    assert trigger(event_source=source).takes_source("shop.api") is expected


def test_index_finds_by_type_and_source_in_a_stable_order() -> None:
    exact, other, wild, everything, elsewhere = triggers = [
        trigger("order.created"),
        trigger("order.deleted"),
        trigger("order.*"),
        trigger("*"),
        trigger("order.created", event_source="crm.*"),
    ]
    index = TriggerIndex(triggers)
    assert list(index.candidates("order.created", "shop.api")) == [exact, wild, everything]
    assert list(index.candidates("order.created", "crm.eu")) == [exact, elsewhere, wild, everything]
    assert list(index.candidates("order.deleted", "shop.api")) == [other, wild, everything]
    assert list(index.candidates("invoice.paid", "shop.api")) == [everything]
    assert list(TriggerIndex([]).candidates("order.created", "shop.api")) == []


TYPES = st.sampled_from(["a", "b", "a.b", "a.c", "*", "a.*", "*.b", "a*b"])


@given(st.lists(st.tuples(TYPES, TYPES)), st.sampled_from(["a", "b", "a.b", "a.c"]), st.sampled_from(["a", "a.b"]))
def test_index_finds_what_a_look_at_every_trigger_finds(
    patterns: list[tuple[str, str]], event_type: str, source: str
) -> None:
    triggers = [trigger(t, event_source=s) for t, s in patterns]
    expected = {
        c.trigger.id
        for c in triggers
        if matches(c.trigger.event_type, event_type) and matches(c.trigger.event_source, source)
    }
    found = [c.trigger.id for c in TriggerIndex(triggers).candidates(event_type, source)]
    assert set(found) == expected
    assert len(found) == len(expected)


def test_all_checks_must_hold_and_the_first_that_does_not_is_the_reason() -> None:
    compiled = trigger(
        predicates=[
            Predicate(path="$.payload.amount", operator="gt", value=100),
            Predicate(path="$.payload.vip", operator="equals", value=True),
        ],
        where="event.payload.amount < 1000",
    )
    reasons = {
        120: None,
        50: "$.payload.amount gt 100 does not hold for 50",
        2000: "where is false: event.payload.amount < 1000",
    }
    assert {n: compiled.reason(event(amount=n, vip=True).envelope()) for n in reasons} == reasons
    assert compiled.reason(event(amount=120).envelope()) == "$.payload.vip is not in the event"
    assert trigger().reason(event().envelope()) is None


def test_parameters_by_name_from_the_payload() -> None:
    given_event = event(order_id=7, amount=120, extra=1)
    assert parameters(trigger(parameters=["order_id", "amount", "missing"]), given_event) == {
        "order_id": 7,
        "amount": 120,
    }
    assert parameters(trigger(parameters=["*"]), given_event) == {"order_id": 7, "amount": 120, "extra": 1}
    assert parameters(trigger(parameters=[]), given_event) == {}


def test_parameters_by_template() -> None:
    compiled = trigger(parameters=["order_id"], parameter_template={"order_id": "{{ event.payload.id }}", "fixed": 1})
    assert parameters(compiled, event(id=7)) == {"order_id": 7, "fixed": 1}
    with pytest.raises(TemplateError, match=r"^parameter_template\.order_id: "):
        parameters(compiled, event())
    assert parameters(trigger(parameters=["x"], parameter_template={}), event(x=1)) == {}


def test_everything_wrong_is_named() -> None:
    spec = TriggerSpec(
        name="code",
        event_type="",
        event_source=" ",
        predicates=[
            Predicate(path="$.payload.a", operator="exists"),
            Predicate(path="$[", operator="regex", value="("),
        ],
        where="1 >",
        parameter_template={"a": ["{{ nope }}"]},
    )
    with pytest.raises(InvalidInput, match="trigger code") as caught:
        check_spec(spec, "fulfil", ["a"])
    assert {e.field for e in caught.value.errors} == {
        "event_type",
        "event_source",
        "predicates[1].path",
        "predicates[1].value",
        "where",
        "parameter_template.a[0]",
    }


def test_number_of_predicates_is_bounded() -> None:
    one = Predicate(path="$.type", operator="exists")
    assert trigger(predicates=[one] * MAX_PREDICATES).reason(event().envelope()) is None
    with pytest.raises(InvalidInput, match="predicates"):
        trigger(predicates=[one] * (MAX_PREDICATES + 1))


def test_good_spec_passes() -> None:
    spec = TriggerSpec(name="code", event_type="order.*", where="event.payload.amount > 100")
    assert check_spec(spec, "fulfil", ["order_id"]) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"predicates": [Predicate(path="$.payload.a[0].b_2", operator="exists")]}, True),
        ({"predicates": [Predicate(path="$.payload", operator="exists")]}, True),
        ({"predicates": [Predicate(path="$.payload[0]", operator="exists")]}, True),
        ({"predicates": [Predicate(path="$['payload'].a", operator="exists")]}, False),
        ({"predicates": [Predicate(path="$.payload['a b']", operator="exists")]}, False),
        ({"predicates": [Predicate(path="$.metadata.payload", operator="exists")]}, False),
        ({"predicates": [Predicate(path="$.id", operator="exists")]}, False),
        ({"predicates": [Predicate(path="$.payload.a[?@.b == $.source]", operator="exists")]}, False),
        ({"predicates": [Predicate(path="$.payload.*", operator="exists")]}, False),
        ({"where": "event.payload.a == 1"}, False),
        ({"parameter_template": {"a": "{{ event.id }}"}}, False),
        ({"idempotency_key": "{{ event.id }}"}, False),
        ({"concurrency_key": "{{ event.source }}"}, False),
    ],
)
def test_what_needs_only_the_payload_is_known(fields: dict[str, Any], expected: bool) -> None:
    assert trigger(**fields).of_payload is expected


def test_the_payload_alone_gives_the_same_as_the_whole_event() -> None:
    one = trigger(predicates=[Predicate(path="$.payload.amount", operator="gt", value=100)])
    for payload in ({"amount": 200}, {"amount": 1}, {}):
        one_event = event(**payload)
        alone, whole = {"payload": one_event.payload}, one_event.envelope()
        assert one.reason(alone) == one.reason(whole)
        assert one.parameters(one_event, alone) == one.parameters(one_event, whole)


def test_what_nothing_limits_is_decided_the_same_in_short() -> None:
    one = trigger(parameters=["amount"])
    candidate = deliver.render(uuid.uuid4(), event(amount=7), one, {})
    state = deliver.DeliveryState(now=NOW, policy=TRIGGER_RETRY)
    assert deliver.decide(state, [candidate], are_newcomers=True) == [deliver.launched(candidate)]
