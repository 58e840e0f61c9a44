"""`where`: CEL over the event. True or false; on an event it cannot answer for, false with the reason."""

from typing import Any

import cel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import FieldError
from tidegate.model.expression import MAX_LENGTH, CompiledExpression, compile_expression
from tidegate.model.work_limit import TooMuchWork

from .json_values import EVENTS

EVENT = {
    "type": "order.created",
    "source": "shop.api",
    "occurred_at": "2026-01-31T09:30:00Z",
    "payload": {"amount": 120, "f": 1.5, "zero": 0, "name": "Ann", "tags": ["a", "b"], "none": None, "big": 2**63 - 1},
    "metadata": {},
}


def compiled(source: str) -> CompiledExpression:
    errors: list[FieldError] = []
    found = compile_expression(source, "where", errors)
    assert errors == []
    assert found is not None
    return found


@pytest.mark.parametrize(
    "source",
    [
        "event.payload.amount > 100",
        "event.payload['amount'] == 120",
        "event.type == 'order.created' && event.source.startsWith('shop.')",
        "event.payload.name in ['Ann', 'Bob']",
        "'a' in event.payload.tags",
        "event.payload.tags.exists(t, t == 'b')",
        "event.payload.tags.all(t, size(t) == 1)",
        "has(event.payload.amount) && !has(event.payload.nope)",
        "event.payload.none == null",
        "event.payload.f < 2.0",
        "event.payload.name.matches('^A[a-z]+$')",
        "timestamp(event.occurred_at) > timestamp('2026-01-01T00:00:00Z')",
        "event.payload.amount > 100 ? true : false",
        "!(event.payload.amount < 100)",
    ],
)
def test_true(source: str) -> None:
    assert compiled(source).reason(EVENT) is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("event.payload.amount > 200", "is false"),
        ("event.payload.nope > 100", "where: event.payload.nope is not in the event"),
        ("event.payload.name.first == 'A'", ""),
        ("event.payload.amount", "neither true nor false"),
        ("event.payload.none", "neither true nor false"),
        ("event.payload.name > 100", ""),
        (
            "event.payload.amount + 'x' == 'y'",
            "event.payload.amount is a number (120) and 'x' is text: + takes two of one type",
        ),
        ("event.payload.amount / event.payload.zero > 1", "division by zero"),
        ("event.payload.amount % event.payload.zero > 1", "by zero"),
        ("event.payload.tags[9] == 'a'", "out of bounds"),
        ("event.payload.tags[-1] == 'a'", "out of bounds"),
        ("event.payload.amount * 9223372036854775807 > 1", "overflow"),
        ("int(event.payload.name) > 1", "int"),
        ("timestamp(event.payload.name) > timestamp('2026-01-01T00:00:00Z')", ""),
        ("event.payload.amount.matches('1')", "neither true nor false"),
        ("!event.payload.amount.matches('x')", "No such overload"),
        ("event.payload.amount.startsWith('1')", "startsWith() does not accept such a value"),
        ("size(event.payload.amount) > 1", "size() does not accept such a value"),
        ("!(event.payload.nope == 1)", "event.payload.nope is not in the event"),
        ("event.payload.nope != 1", "event.payload.nope is not in the event"),
        ("has(event.payload.nope.deeper)", "event.payload.nope is not in the event"),
        ("!has(event.payload.nope.deeper)", "event.payload.nope is not in the event"),
        ("has(event.payload.amount.x)", "event.payload.amount is not in the event"),
        ("event.payload.tags.all(t, t / 0 > 1)", ""),
        ("event.payload.none.x == 1", ""),
    ],
)
def test_not_true_with_the_reason(source: str, reason: str) -> None:
    found = compiled(source).reason(EVENT)
    assert found is not None
    assert found.startswith("where")
    assert reason in found
    assert "\n" not in found
    assert len(found) < 250


@pytest.mark.parametrize(
    ("source", "payload", "reason"),
    [
        ("event.payload.a > 100", {"a": "120"},
         'event.payload.a is text ("120") and 100 is a number: > takes two of one type'),
        ("100 < event.payload.a", {"a": "120"},
         '100 is a number and event.payload.a is text ("120"): < takes two of one type'),
        ("event.payload.a >= 1.5", {"a": None},
         "event.payload.a is null and 1.5 is a number: >= takes two of one type"),
        (
            "event.payload.a < event.payload.b", {"a": "1", "b": 2},
            'event.payload.a is text ("1") and event.payload.b is a number (2): < takes two of one type',
        ),
        ("event.payload.a in event.payload.b", {"a": 1, "b": 3},
         "event.payload.b is a number (3), and in needs a list or an object"),
        ("event.payload.a && true", {"a": "yes"}, 'event.payload.a is text ("yes"), and && needs true or false'),
        ("!event.payload.a", {"a": [1]}, "event.payload.a is a list ([1]), and ! needs true or false"),
        ("event.payload.a.startsWith('x')", {"a": 3},
         "startsWith() does not accept such a value (event.payload.a is a number)"),
        ("event.payload.a.exists(t, t > 3)", {"a": ["x"]}, "(event.payload.a is a list)"),
    ],
)  # fmt: skip
def test_type_errors_name_the_field_and_both_types(source: str, payload: dict[str, Any], reason: str) -> None:
    found = compiled(source).reason({"payload": payload})
    assert found is not None and found.startswith("where: ") and found.endswith(reason)


def test_event_data_is_not_changed_by_evaluation() -> None:
    event = {"payload": {"l": [1, 2]}}
    assert compiled("event.payload.l.map(x, x + 1) == [2, 3]").reason(event) is None
    assert event == {"payload": {"l": [1, 2]}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "1 to 2000 characters"),
        ("event.type == '" + "x" * MAX_LENGTH + "'", "1 to 2000 characters"),
        ("event.payload.amount >", "not a CEL expression: the expression ends too early at line 1"),
        ("event.payload.amount >", "at line 1, column 23"),
        ("event.payload.amount > 100 AND true", "at line 1, column 28"),
        ("event.payload.x == 9223372036854775808", "not a CEL expression"),
        ("(" * 900 + "event.type" + ")" * 900, "not a CEL expression"),
        ("has(event)", "invalid argument to has() macro at line 1, column 5"),
        ("has(event.payload['x'])", "invalid argument to has()"),
        ("has(event.payload, 1)", "calls has() with 2 arguments; it takes 1 (line 1, column 1)"),
        ("has() && event.payload.x", "calls has() with 0 arguments"),
        ("1 > 0", "does not use `event`"),
        ("payload.amount > 100", "uses `payload`; only `event` is available (line 1, column 1)"),
        ("event.payload.amount > limit", "uses `limit`; only `event` is available (line 1, column 24)"),
        ("event.payload.a == 1 &&\n  even.type == 'x'", "uses `even`; only `event` is available (line 2, column 3)"),
        ("event.payload.l.exists(x, y == 2)", "uses `y`; only `event` is available"),
        ("event.payload.l.exists(x, x == 2) && x == 1", "uses `x`; only `event` is available (line 1, column 38)"),
        ("event.payload.l.exists(event, event == 2)", "names a variable `event`, which is a reserved name"),
        ("event.payload.l.exists(x, x.exists(x, x == 2))", "names a variable `x`"),
        ("event.payload.l.exists(x)", "calls exists() with 1 arguments; it takes 2"),
        ("event.payload.l.exists(x, x, x)", "calls exists() with 3 arguments"),
        ("event.payload.l.map(x, x, x, x) == []", "it takes 2 or 3"),
        ("event.payload.l.exists(x.y, x)", "argument must be a simple name at line 1, column 25"),
        ("nosuch(event.payload.amount)", "calls nosuch(), which is not available; available: bytes, "),
        ("event.type == 'x' || event.type.lower() == 'x'", "calls .lower(), which is not available; available: all, "),
        ("event.type == 'x' || event.type.lower() == 'x'", "(line 1, column 33)"),
        ("contains(event.type, 'x')", "calls contains(), which is not available"),
        ("size(event.type, 1) > 1", "calls size() with 2 arguments"),
        ("event.type.startsWith()", "calls startsWith() with 0 arguments"),
        ("math.greatest(event.payload.a, 1) > 1", "uses `math`"),
        ("optional.of(event.type) == event.type", "uses `optional`"),
        ("Foo{a: 1} == event.type", "creates a `Foo`"),
        (".event.type == 'x'", "does not use `event`"),
        (".event.type == event.type", "cannot be understood"),
        ("event.payloda.x == 1", "uses `payloda`, which is not a field of an event; the fields are id, external_id, "),
        ("event.payloda.x == 1", "(line 1, column 7)"),
        ("has(event.payloda)", "uses `payloda`"),
        ("event['payloda'].x == 1", "uses `payloda`"),
        ("event.event.type == 'x'", "uses `event`"),
        ("event.payload.l.exists(x, x == event.limit)", "uses `limit`"),
        ("event.type.matches('(')", "matches() with an invalid RE2 pattern: missing ): ("),
        ("event.type.matches(event.payload.pattern)", "matches() with something other than a pattern in quotes"),
        ("event.type.matches('a' + 'b')", "matches() with something other than a pattern in quotes"),
        ("event.type.matches(b'a')", "matches() with something other than a pattern in quotes"),
        ("event.payload.a.all(x, x.all(y, y.all(z, z == 1)))", "nests more than 2 of all, exists"),
        ("(event.payload.a + event.payload.b).all(x, x == 1)", "calls all() on something that is neither a path"),
        ("event.payload.a.map(x, x).all(y, y == 1)", "calls all() on something that is neither a path"),
        ("[event.payload.a].all(x, x == 1)", "calls all() on something that is neither a path"),
        ("\x00", "not a CEL expression"),
    ],
)
def test_refused(source: str, message: str) -> None:
    errors: list[FieldError] = []
    assert compile_expression(source, "where", errors) is None
    assert [e.field for e in errors] == ["where"]
    assert message in errors[0].message
    assert len(errors[0].message) < 400


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # A number is a number, whole or not; one in a text is a text.
        ("event.payload.amount > 100.5", True),
        ("event.payload.amount == 120.0", True),
        ("event.payload.f > 1", True),
        ("event.payload.digits > 100", False),
        ("event.payload.digits == 120", False),
        ("double(event.payload.digits) > 100", True),
        ("event.payload.big == 9223372036854775807", True),
        ("event.payload.big > 9223372036854775806", True),
        # What || and && do not need is not missed.
        ("event.payload.nope == 1 || event.type == 'order.created'", True),
        ("event.type == 'order.created' || event.payload.nope == 1", True),
        ("!(event.payload.nope == 1 && event.type == 'other')", True),
        ("event.payload.nope == 1 && event.type == 'order.created'", False),
        ("has(event.payload.none)", True),
        ("has(event.payload.nope) && has(event.payload.nope.deeper)", False),
        ("!has(event.payload.nope) || !has(event.payload.nope.deeper)", True),
        ("has(event.metadata) && has(event.payload.o.a.b)", True),
        ("event.payload.o.a['b'] == 1 && event['payload'][\"o\"].a.b == 1", True),
        ("event.payload[event.payload.key] == 'Ann'", True),
        ("event['ty' + 'pe'] == 'order.created'", True),
        ("'amount' in event.payload && !('nope' in event.payload)", True),
        ("size(event) == 5 && size(event.payload.tags) == 2", True),
        ("event.payload.o.exists(k, k == 'a')", True),
        ("event.payload.lists.all(l, l.all(x, x > 0)) && event.payload.lists[1].exists(x, x == 3)", True),
        ("event.payload.tags.filter(t, t != 'a').all(t, t == 'b')", True),
        ("event.payload.tags.map(t, t + t) == ['aa', 'bb']", True),
        ("event.payload.tags.map(t, t == 'b', t + '!') == ['b!']", True),
        ("event.payload.tags.exists_one(t, t == 'b')", True),
        ("['order.', 'stock.'].exists(p, event.type.startsWith(p))", True),
        ("event.payload.empty.all(x, x == 1) && !event.payload.empty.exists(x, true)", True),
        # An element without the field stops a loop, unless the field is asked for.
        ("event.payload.mixed.exists(m, m.sku == 'b')", False),
        ("event.payload.mixed.exists(m, has(m.sku) && m.sku == 'b')", True),
        # Case counts, and text is compared as it is written; its size is in bytes of UTF-8.
        ("event.payload.name == 'ann'", False),
        ("event.payload.name.matches('(?i)^ann$')", True),
        ("event.payload.street == 'Straße' && size(event.payload.street) == 7", True),
        ("event.occurred_at >= '2026-01-01' && timestamp(event.occurred_at).getFullYear() == 2026", True),
        ("type(event.payload.amount) == int", True),
        ("event.type == 'order.created' // event.nope", True),
        ("event.type == \"order.created\" && event.payload.name != 'event.nope(\\'' && '\"x(' != event.type", True),
        ('event.type != r\'\\\' && event.type != """a "quoted" word"""', True),
        ("event.payload.tags.exists(_0, _0 == 'a')", True),
        ("event.type in ['order.created'] && (event.type) in (['order.created'])", True),
        ("event.payload.amount % 7 == 1 && -event.payload.amount < 0", True),
        ("event.payload.f / 2 > 0.1", False),
        ("event.payload.f / 2.0 > 0.1", True),
    ],
)
def test_what_cel_means_here(source: str, expected: bool) -> None:
    payload = {
        **EVENT["payload"],
        "digits": "120",
        "key": "name",
        "o": {"a": {"b": 1}},
        "lists": [[1], [2, 3]],
        "empty": [],
        "mixed": [{"qty": 1}, {"sku": "b"}],
        "street": "Straße",
    }
    event = {**EVENT, "payload": payload}
    reason = compiled(source).reason(event)
    assert (reason is None) is expected, reason
    assert library_says(source, event) is expected


def library_says(source: str, event: dict[str, Any]) -> bool:
    """What the expression means without our reading of it."""
    try:
        return cel.evaluate(source, {"event": event}) is True
    except Exception:
        return False


LARGE = {
    "l": list(range(2000)),
    "m": list(range(2000)),
    "objects": [{"a": i, "tags": ["x", "y"]} for i in range(800)],
    "text": "x" * 100_000,
    "huge": [0] * 100_000,
    "one": 1,
}


@pytest.mark.parametrize(
    "source",
    [
        "event.payload.one == 1",
        "event.payload.l.all(x, x >= 0)",
        "event.payload.objects.exists(o, o.tags.exists(t, t == 'y'))",
        "event.payload.objects.exists(o, o.a == event.payload.one)",
        "event.payload.text.matches('^x+$')",
        "size(event.payload.l) == 2000",
    ],
)
def test_usual_work_on_a_large_event(source: str) -> None:
    assert compiled(source).reason({"payload": LARGE}) is None


@pytest.mark.parametrize(
    "source",
    [
        "size(event.payload.huge) > 1",
        "size(event.payload) > 1",
        "size(event) > 1",
        "event.payload.l.map(x, x) != []",
        "event.payload.l.filter(x, x > 0) != []",
        "event.payload.l.all(x, x in event.payload.m)",
        "event.payload.l.all(x, event.payload.m.all(y, y >= 0))",
        "event.payload.l.all(x, event.payload.text != 'x')",
        "event.payload.l.all(x, event.payload.m != [])",
        "event.payload.objects.all(o, o.tags.all(t, t in o.tags" + " && o == o" * 9 + "))",
        "event.payload.l.all(x, " + " && ".join(["x >= 0"] * 100) + ")",
        "event.payload.l.filter(x, true).all(x, true)",
        "event.payload.l" + " + event.payload.l" * 50 + " != []",
        "[0, 1, 2].all(x, event.payload.l.all(y, " + " && ".join(["y >= 0"] * 30) + "))",
    ],
)
def test_work_is_bounded_before_it_is_done(source: str) -> None:
    with pytest.raises(TooMuchWork):
        compiled(source).reason({"payload": LARGE})


def test_each_step_into_a_large_value_counts() -> None:
    deep: dict[str, Any] = {"end": [1] * 3000}
    for _ in range(20):
        deep = {"a": deep}
    once = "x" + ".a" * 20 + ".end != []"
    assert compiled(f"event.payload.l.all(x, {once})").reason({"payload": {"l": [deep]}}) is None
    with pytest.raises(TooMuchWork):
        compiled(f"event.payload.l.all(x, {once} && {once} && {once} && {once})").reason({"payload": {"l": [deep]}})


EXPRESSIONS = [
    compiled(source)
    for source in (
        "event.payload.a > 1",
        "event.payload.a / event.payload.b == 1",
        "event.payload.a[event.payload.b] == event.payload.items",
        "event.payload.items.all(x, x == event.payload.a)",
        "event.payload.items.map(x, x + x) == event.payload.a",
        "size(event.payload.a) > 1",
        "event.payload.a.matches('b+') && event.payload.b",
        "event.payload.a in event.payload.items",
        "-event.payload.a < int(event.payload.b)",
        "duration(event.payload.a) < duration(event.payload.b)",
        "event.payload.a ? event.payload.b : event.payload.items",
        "event.payload.a.b.items == event",
    )
]


@given(EVENTS, st.sampled_from(EXPRESSIONS))
def test_reason_never_raises(event: dict[str, Any], expression: CompiledExpression) -> None:
    reason = expression.reason(event)
    assert reason is None or reason.startswith("where")
    assert (reason is None) is library_says(expression.source, event)


@given(st.text(max_size=50) | st.text("event.payl()[]{}<>=!&|?:+-*/%'\"0123,", max_size=50).map("event.{}".format))
def test_any_text_compiles_or_is_refused(source: str) -> None:
    errors: list[FieldError] = []
    found = compile_expression(source, "where", errors)
    assert (found is None) == bool(errors)
    if found is not None:
        found.reason(EVENT)
