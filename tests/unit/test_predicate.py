"""Predicates: a path, an operator, an operand; always an answer, never an error, in bounded time."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import FieldError
from tidegate.model.event import Event
from tidegate.model.path import MAX_FILTER_TEXT, MAX_VISITS
from tidegate.model.predicate import (
    MAX_MEMBERS,
    MAX_VALUES,
    OPERATORS,
    CompiledPredicate,
    Predicate,
    compile_predicate,
)
from tidegate.model.trigger_terms import FIELDS, MAX_NODES
from tidegate.model.work_limit import TooMuchWork

from .json_values import EVENTS, JSON

EVENT = {
    "type": "order.created",
    "occurred_at": "2026-01-31T09:30:00Z",
    "payload": {
        "n": 7,
        "f": 7.5,
        "text": "Straße",
        "digits": "7",
        "exponent": "1e2",
        "zero": 0,
        "empty": "",
        "none": None,
        "yes": True,
        "list": [1, "Two", {"x": 3}],
        "object": {"a": 1, "B": [2]},
        "items": [{"sku": "a", "qty": 1}, {"sku": "b", "qty": 5}],
        "a.b": "dotted",
    },
}


def compiled(path: str, operator: str, value: Any = None, **more: Any) -> CompiledPredicate:
    errors: list[FieldError] = []
    predicate = Predicate(path=path, operator=operator, value=value, **more)  # type: ignore[arg-type]
    found = compile_predicate(predicate, "predicates[0]", errors)
    assert errors == []
    assert found is not None
    return found


def holds(path: str, operator: str, value: Any = None, **more: Any) -> bool:
    return compiled(path, operator, value, **more).reason(EVENT) is None


def refused(path: str = "$.payload.n", operator: str = "exists", **more: Any) -> FieldError:
    errors: list[FieldError] = []
    predicate = Predicate(path=path, operator=operator, **more)  # type: ignore[arg-type]
    assert compile_predicate(predicate, "predicates[2]", errors) is None
    assert len(errors) == 1, errors
    return errors[0]


@pytest.mark.parametrize(
    ("path", "operator", "value", "expected"),
    [
        ("$.payload.n", "exists", None, True),
        ("$.payload.none", "exists", None, True),
        ("$.payload.n", "exists", True, True),
        ("$.payload.n", "equals", 7, True),
        ("$.payload.n", "equals", 7.0, True),
        ("$.payload.n", "equals", 8, False),
        ("$.payload.n", "equals", "7", False),
        ("$.payload.digits", "equals", 7, False),
        ("$.payload.zero", "equals", False, False),
        ("$.payload.yes", "equals", 1, False),
        ("$.payload.yes", "equals", True, True),
        ("$.payload.none", "equals", None, True),
        ("$.payload.zero", "equals", None, False),
        ("$.payload.list", "equals", [1, "two", {"x": 3.0}], True),
        ("$.payload.list", "equals", [1, "two"], False),
        ("$.payload.object", "equals", {"B": [2], "a": 1}, True),
        ("$.payload.object", "equals", {"b": [2], "a": 1}, False),
        ("$.payload.n", "not_equals", 8, True),
        ("$.payload.n", "not_equals", 7, False),
        ("$.payload.n", "not_equals", "7", True),
        ("$.payload.n", "gt", 6, True),
        ("$.payload.n", "gt", 7, False),
        ("$.payload.n", "gte", 7, True),
        ("$.payload.n", "lt", 7.5, True),
        ("$.payload.n", "lt", 7, False),
        ("$.payload.n", "lte", 7, True),
        ("$.payload.n", "lte", 6.99, False),
        ("$.payload.n", "gt", "6", True),  # a number in a string is a number
        ("$.payload.digits", "gt", 6, True),
        ("$.payload.digits", "lt", "10", True),
        ("$.payload.exponent", "gte", 100, True),
        ("$.payload.yes", "gt", 0, False),
        ("$.payload.none", "lt", 1, False),
        ("$.payload.list", "gt", 0, False),
        ("$.payload.empty", "lt", 1, False),
        ("$.payload.text", "gt", 1, False),
        ("$.payload.n", "gt", "abc", False),
        ("$.payload.text", "gt", "strasa", True),
        ("$.payload.text", "lt", "z", True),
        ("$.occurred_at", "gte", "2026-01-01T00:00:00Z", True),
        ("$.occurred_at", "lt", "2026-01-01T00:00:00Z", False),
        ("$.payload.text", "contains", "RASS", True),
        ("$.payload.text", "contains", "", True),
        ("$.payload.text", "contains", 1, False),
        ("$.payload.list", "contains", "two", True),
        ("$.payload.list", "contains", {"x": 3}, True),
        ("$.payload.list", "contains", True, False),
        ("$.payload.object", "contains", "a", True),
        ("$.payload.object", "contains", 1, False),
        ("$.payload.n", "contains", 7, False),
        ("$.payload.none", "contains", None, False),
        ("$.payload.text", "regex", "^str", True),
        ("$.payload.text", "regex", "^tr", False),
        ("$.payload.n", "regex", "7", False),
        ("$.payload.list", "regex", "Two", False),
    ],
)
def test_operator(path: str, operator: str, value: Any, expected: bool) -> None:
    assert holds(path, operator, value) is expected


@pytest.mark.parametrize(
    ("path", "operator", "values", "expected"),
    [
        ("$.payload.n", "in", [1, 7], True),
        ("$.payload.n", "in", ["7"], False),
        ("$.payload.text", "in", ["x", "STRASSE"], True),
        ("$.payload.none", "in", [None], True),
        ("$.payload.yes", "in", [1], False),
        ("$.payload.n", "not_in", [1, 2], True),
        ("$.payload.n", "not_in", [7], False),
        ("$.payload.n", "not_in", ["7"], True),
    ],
)
def test_operator_with_several_values(path: str, operator: str, values: list[Any], expected: bool) -> None:
    assert holds(path, operator, values=values) is expected


def operands(operator: str) -> dict[str, Any]:
    if operator == "exists":
        return {}
    return {"values": ["x", None]} if operator in ("in", "not_in") else {"value": "x"}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("path", ["$.payload.nope", "$.payload.n.deeper", "$.payload.list[9]", "$.payload[*].nope"])
def test_missing_field_makes_every_operator_false(operator: str, path: str) -> None:
    assert compiled(path, operator, **operands(operator)).reason(EVENT) == f"{path} is not in the event"


@pytest.mark.parametrize(
    ("operator", "operand"),
    [
        ("equals", {"value": "STRASSE"}),
        ("in", {"values": ["STRASSE"]}),
        ("contains", {"value": "STRA"}),
        ("regex", {"value": "^STR"}),
        ("gte", {"value": "STRASSE"}),
    ],
)
def test_case_counts_only_when_asked(operator: str, operand: dict[str, Any]) -> None:
    assert holds("$.payload.text", operator, **operand)
    upper = {"payload": {"text": "Straße"}}
    sensitive = compiled("$.payload.text", operator, case_sensitive=True, **operand)
    assert (sensitive.reason(upper) is None) == (operator == "gte")  # lower case sorts after upper case
    assert sensitive.reason({"payload": {"text": "STRASSE"}}) is None


def test_regex_flags() -> None:
    lines = {"payload": {"t": "one\ntwo"}}
    assert compiled("$.payload.t", "regex", "^two$").reason(lines) is not None
    assert compiled("$.payload.t", "regex", "^two$", flags="m").reason(lines) is None
    assert compiled("$.payload.t", "regex", "one.two").reason(lines) is not None
    assert compiled("$.payload.t", "regex", "ONE.TWO", flags="si", case_sensitive=True).reason(lines) is None


@pytest.mark.parametrize(
    ("path", "operator", "operand", "expected"),
    [
        ("$.payload.items[*].qty", "gt", {"value": 4}, True),
        ("$.payload.items[*].qty", "gt", {"value": 5}, False),
        ("$.payload.items[*].sku", "not_equals", {"value": "a"}, False),
        ("$.payload.items[*].sku", "not_equals", {"value": "c"}, True),
        ("$.payload.items[*].sku", "not_in", {"values": ["b", "c"]}, False),
        ("$.payload.items[?@.sku == 'b'].qty", "equals", {"value": 5}, True),
        ("$.payload.items[?@.sku == 'z'].qty", "equals", {"value": 5}, False),
        ("$.payload.items[?@.qty > $.payload.zero && @.sku != 'b'].sku", "equals", {"value": "a"}, True),
        ("$.payload.items[?match(@.sku, '[bc]')].qty", "equals", {"value": 5}, True),
        ("$..qty", "equals", {"value": 5}, True),
        ("$.payload.items[0,1].qty", "equals", {"value": 5}, True),
        ("$.payload.list[1:]", "equals", {"value": "two"}, True),
        ("$.payload.items[-1].qty", "equals", {"value": 5}, True),
        ("$.payload['a.b']", "equals", {"value": "dotted"}, True),
        ('$["payload"]["n"]', "equals", {"value": 7}, True),
        ("$", "contains", {"value": "payload"}, True),
    ],
)
def test_paths(path: str, operator: str, operand: dict[str, Any], expected: bool) -> None:
    assert holds(path, operator, **operand) is expected


def test_reason_says_what_was_expected_and_found() -> None:
    assert compiled("$.payload.n", "gt", 9).reason(EVENT) == "$.payload.n gt 9 does not hold for 7"
    assert compiled("$.payload.n", "in", values=[1]).reason(EVENT) == "$.payload.n in [1] does not hold for 7"
    long = compiled("$.payload.t", "equals", "x").reason({"payload": {"t": "y" * 10_000}})
    assert long is not None
    assert len(long) < 150


@pytest.mark.parametrize(
    "path",
    [
        *("", "payload.n", "$.", "$[", "$.a | $.b", "$.a & $.b", "$.a b", "$[?@.a ==]", "$[?(" + "(" * 400),
        *("$.payload[?@.a =~ /x/]", "$.payload.~n", "$[?nosuch(@.a)]", "$[99999999999999999999]", "$['\\ud800']"),
        *("$" + ".a" * 250, "\x00"),
    ],
)
def test_bad_path_is_refused(path: str) -> None:
    assert refused(path).field == "predicates[2].path"


@pytest.mark.parametrize("path", ["$[?@..a]", "$[?count($.payload.items[*]) > 1]", "$[?@.a && (!@[?@.b])]"])
def test_filter_over_several_values_is_refused(path: str) -> None:
    error = refused(path)
    assert error.field == "predicates[2].path"
    assert "several values" in error.message


@pytest.mark.parametrize(
    ("operator", "more", "field"),
    [
        ("exists", {"value": False}, "value"),
        ("exists", {"value": "x"}, "value"),
        ("exists", {"values": [1]}, "value"),
        ("in", {}, "values"),
        ("in", {"value": 1}, "value"),
        ("not_in", {"value": 1, "values": [1]}, "value"),
        ("in", {"values": []}, "values"),
        ("not_in", {"values": list(range(MAX_VALUES + 1))}, "values"),
        ("equals", {"values": [1]}, "values"),
        ("regex", {"values": ["x"]}, "values"),
        ("gt", {}, "value"),
        ("gt", {"value": None}, "value"),
        ("lt", {"value": True}, "value"),
        ("gte", {"value": [1]}, "value"),
        ("lte", {"value": {}}, "value"),
        ("regex", {}, "value"),
        ("regex", {"value": 7}, "value"),
        ("regex", {"value": ""}, "value"),
        ("regex", {"value": "x" * 513}, "value"),
        ("regex", {"value": "("}, "value"),
        ("regex", {"value": "(?=x)"}, "value"),
        ("regex", {"value": r"(a)\1"}, "value"),
        ("regex", {"value": "((a{1,100}){1,100}){1,100}"}, "value"),
        ("regex", {"value": "x", "flags": "x"}, "flags"),
        ("equals", {"value": "x", "flags": "i"}, "flags"),
        ("exists", {"flags": "i"}, "flags"),
        ("equals", {"value": list(range(MAX_MEMBERS + 1))}, "value"),
        ("contains", {"value": {"a": [[{}] * MAX_MEMBERS]}}, "value"),
        ("in", {"values": [[1] * MAX_MEMBERS, [1]]}, "values"),
    ],
)
def test_bad_operand_is_refused(operator: str, more: dict[str, Any], field: str) -> None:
    assert refused(operator=operator, **more).field == f"predicates[2].{field}"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("payload.n", "must begin with $"),
        ("$.payload[?@.a ==]", "unexpected end of expression at column 18"),
        ("$.payload[1", "unexpected end of segment at column 12"),
        ("$.payload.a b", "unexpected token 'b' at column 13"),
        ("$.payload[?nosuch(@.a)]", "function 'nosuch' is not defined at column 12"),
        ("$.payloda.x", "uses `payloda`, which is not a field of an event; the fields are id, external_id, type, "),
        ("$.payloda.x", "(column 3)"),
        ("$['payloda']", "uses `payloda`"),
        ("$.event.payload.x", "uses `event`"),
        ("$['payload', 'nope'].x", "uses `nope`"),
        ("$.payload[?@.a > $.limit]", "uses `limit`, which is not a field of an event"),
        ("$[0]", "applies an index to $"),
        ("$[1:2].x", "applies an index to $"),
        ("$.payload[?search(@.a, '(')]", "search() with an invalid RE2 pattern: missing ): ("),
        ("$.payload[?match(@.a, @.b)]", "is not text in quotes"),
        ("$.payload[?match(@.a, $.payload.p)]", "is not text in quotes"),
        ("$.payload[?match($.payload.t, 'x')]", "calls match() on $"),
        ("$.payload[?match(@, '" + "(x{1,100}){1,100}" * 20 + "')]", "match() with an invalid RE2 pattern"),
    ],
)
def test_wrong_path_is_named_with_its_place(path: str, message: str) -> None:
    assert message in refused(path).message


@pytest.mark.parametrize("path", ["$", "$..x", "$.*", "$[*].x", "$[?@.x]", *(f"$.{name}" for name in FIELDS)])
def test_path_that_may_lead_somewhere_is_taken(path: str) -> None:
    compiled(path, "exists")


def test_fields_are_those_of_the_envelope() -> None:
    now = datetime.now(UTC)
    event = Event(
        id=UUID(int=1),
        external_id=None,
        type="t",
        source="s",
        occurred_at=now,
        received_at=now,
        ingress_sequence=1,
        payload={},
        correlation_id="c",
        ttl_ms=None,
        metadata={},
    )
    assert set(FIELDS) == event.envelope().keys()


@pytest.mark.parametrize(
    ("operator", "value", "message"),
    [
        ("regex", "a(b", "missing ): a(b"),
        ("regex", "a**", "bad repetition operator: **"),
        ("gt", {}, "gt takes a number or text"),
        ("exists", 1, "exists takes no value"),
    ],
)
def test_wrong_operand_is_named(operator: str, value: Any, message: str) -> None:
    assert message in refused(operator=operator, value=value).message


def test_path_and_operand_are_both_named() -> None:
    errors: list[FieldError] = []
    compile_predicate(Predicate(path="$[", operator="gt"), "predicates[0]", errors)
    assert [e.field for e in errors] == ["predicates[0].path", "predicates[0].value"]


# Each of these would take a backtracking engine longer than the universe has existed; the suite would not end.
REDOS = ["(a+)+$", "^(a|a)*$", "(a*)*b", "(.*a){25}$", "^(([a-z])+.)+[A-Z]([a-z])+$"]


@pytest.mark.parametrize("pattern", REDOS)
def test_catastrophic_patterns_are_harmless(pattern: str) -> None:
    text = "a" * 20_000 + "!"
    assert compiled("$.payload.t", "regex", pattern).reason({"payload": {"t": text}}) is not None
    assert compiled(f"$.payload[?match(@, '{pattern}')]", "exists").reason({"payload": {"t": text}}) is not None


def test_path_that_multiplies_is_cut_off() -> None:
    chain: dict[str, Any] = {}
    for _ in range(60):
        chain = {"a": chain}
    with pytest.raises(TooMuchWork):
        compiled("$" + "..*" * 30 + "[?@.nope]", "exists").reason(chain)


@pytest.mark.parametrize("path", ["$.payload.l[?@.nope]", "$.payload[" + ",".join("*" * 100) + "][?@.nope]"])
def test_wide_event_is_cut_off(path: str) -> None:
    with pytest.raises(TooMuchWork):
        compiled(path, "exists").reason({"payload": {"l": [1] * MAX_VISITS}})


@pytest.mark.parametrize("value", [[1] * 3, {"a": 1}, "x" * (MAX_FILTER_TEXT + 1)])
def test_filter_does_not_compare_what_is_large(value: Any) -> None:
    event = {"payload": {"l": [{"x": value}], "y": value}}
    reason = compiled("$.payload.l[?@.x == $.payload.y]", "exists").reason(event)
    assert reason is not None
    assert "in a filter" in reason


def test_many_operands_cost_one_look() -> None:
    values = [f"Sku {i}" for i in range(MAX_VALUES)]
    found = compiled("$.payload.l[*]", "not_in", values=values)
    assert found.reason({"payload": {"l": ["other"] * MAX_NODES}}) is None
    assert found.reason({"payload": {"l": ["other", "SKU 999"]}}) is not None


def test_long_text_counts_as_many_values() -> None:
    path = "$.payload[" + ",".join(["'t'"] * 100) + "]"
    with pytest.raises(TooMuchWork):
        compiled(path, "equals", "x").reason({"payload": {"t": "x" * 100_000}})


@pytest.mark.parametrize("operator", ["equals", "not_equals"])
def test_nothing_is_decided_by_what_was_not_looked_at(operator: str) -> None:
    found = compiled("$.payload.l[*]", operator, "x")
    assert (found.reason({"payload": {"l": ["a"] * MAX_NODES}}) is None) == (operator == "not_equals")
    with pytest.raises(TooMuchWork, match=r"predicates\[0\]"):
        found.reason({"payload": {"l": ["a"] * MAX_NODES + ["a", "x"]}})
    assert compiled("$.payload.l[*]", "equals", "a").reason({"payload": {"l": ["a"] * (MAX_NODES + 1)}}) is None


PATHS = ["$", "$.payload", "$.payload.a", "$.payload.items[0]", "$.payload.items[-1].x", "$..*", "$.payload[*]"]
PATHS += ["$.payload.items[?@.x > 1]", "$.payload[?@ == $.payload.a]", "$.payload.items[?search(@, 'x')]", "$.type[1:]"]


@given(EVENTS, st.sampled_from(PATHS), st.sampled_from(OPERATORS), JSON, st.booleans())
def test_reason_never_raises(event: dict[str, Any], path: str, operator: Any, operand: Any, sensitive: bool) -> None:
    many = operator in ("in", "not_in")
    predicate = Predicate(
        path=path,
        operator=operator,
        value=None if many else operand,
        values=[operand] if many else None,
        case_sensitive=sensitive,
    )
    errors: list[FieldError] = []
    found = compile_predicate(predicate, "p", errors)
    assert (found is None) == bool(errors)
    if found is not None:
        assert found.reason(event) is None or path in str(found.reason(event))


@given(st.text(max_size=40) | st.text("$.[]*?@'\"()!&|<>=,:-0a~^#{}/\\ ", max_size=40).map(lambda t: f"${t}"))
def test_any_path_compiles_or_is_refused(path: str) -> None:
    errors: list[FieldError] = []
    found = compile_predicate(Predicate(path=path, operator="exists"), "p", errors)
    assert (found is None) == bool(errors)
    if found is not None:
        found.reason(EVENT)


@given(EVENTS, JSON)
def test_equals_and_not_equals_disagree_on_a_single_value(event: dict[str, Any], operand: Any) -> None:
    same, other = (compiled("$.payload", op, operand).reason(event) is None for op in ("equals", "not_equals"))
    assert same != other
