"""Liquid templates over the event: its text is only ever a value, and the work is bounded."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import FieldError
from tidegate.model.liquid_environment import MAX_STEPS, MAX_TEXT
from tidegate.model.template import MAX_DEPTH, MAX_LENGTH, compile_template
from tidegate.model.trigger_terms import Render, TemplateError
from tidegate.model.work_limit import TooMuchWork

from .json_values import EVENTS, JSON

EVENT = {
    "type": "order.created",
    "metadata": {},
    "payload": {
        "id": 7,
        "price": 1.5,
        "name": "Ann",
        "none": None,
        "yes": True,
        "list": [1, "a", None],
        "object": {"a": {"b": [1]}},
        "now": "now",
        "evil": "{{ event.payload.id }}{% for i in (1..9) %}x{% endfor %}",
    },
}

STEPS = "over the work limit"


def compiled(source: Any) -> Render:
    errors: list[FieldError] = []
    found = compile_template(source, "parameter_template", errors)
    assert errors == []
    assert found is not None
    return found


def rendered(source: Any) -> Any:
    return compiled(source)(EVENT)


def refused(source: Any) -> FieldError:
    errors: list[FieldError] = []
    compile_template(source, "parameter_template", errors)
    assert len(errors) == 1, errors
    return errors[0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ event.payload.id }}", 7),
        ("{{event.payload.price}}", 1.5),
        ("{{ event.payload.none }}", None),
        ("{{ event.payload.yes }}", True),
        ("{{ event.payload.list }}", [1, "a", None]),
        ("{{ event.payload.object }}", {"a": {"b": [1]}}),
        ("{{ event.payload.object.a.b[0] }}", 1),
        ("{{ event.payload['name'] }}", "Ann"),
        ("{{ event.payload.list.size }}", 3),
        ("{{ event.payload.price | times: 2 }}", 3.0),
        ("{{ event.payload.name | upcase }}", "ANN"),
        ("{{ event.payload.nope | default: 3 }}", 3),
        ("{{ event.payload.name | replace: 'n', 'm' }}", "Amm"),
        ("{{ event.payload.list | join: '-' }}", "1-a-"),
        ("id {{ event.payload.id }}", "id 7"),
        (" {{ event.payload.id }}", " 7"),
        ("{{ event.payload.id }}{{ event.payload.id }}", "77"),
        ("{% if event.payload.yes %}y{% else %}n{% endif %}", "y"),
        ("{% for x in event.payload.list %}[{{ x }}]{% endfor %}", "[1][a][]"),
        ("{% for i in (1..3) %}{{ i }}{% endfor %}", "123"),
        ("{% assign n = event.payload.name %}{{ n }}", "Ann"),
        ("no template", "no template"),
        ("", ""),
        (5, 5),
        (None, None),
        (
            {"a": ["{{ event.payload.id }}", {"b": "x{{ event.type }}"}], "c": 1},
            {"a": [7, {"b": "xorder.created"}], "c": 1},
        ),
        ({"{{ event.payload.id }}": 1}, {"{{ event.payload.id }}": 1}),
    ],
)
def test_rendered(source: Any, expected: Any) -> None:
    value = rendered(source)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("source", ["{{ event.payload.evil }}", "{% assign e = event.payload.evil %}{{ e }}"])
def test_event_text_is_never_parsed_as_a_template(source: str) -> None:
    assert rendered(source) == EVENT["payload"]["evil"]
    assert rendered({"a": f"<{source}>"}) == {"a": f"<{EVENT['payload']['evil']}>"}


@given(st.text())
def test_any_event_text_comes_out_as_it_went_in(text: str) -> None:
    event = {"payload": {"t": text}}
    assert compiled("{{ event.payload.t }}")(event) == text
    assert compiled("<{{ event.payload.t }}>")(event) == f"<{text}>"
    assert compiled("{% capture c %}{{ event.payload.t }}{% endcapture %}{{ c }}")(event) == text


@pytest.mark.parametrize(
    "expression",
    [
        "event.payload.nope",
        "event.payload.nope.deeper",
        "event.payload.name.first_name",
        "event.payload.list[9]",
        "event.metadata.nope",
        "event.payload.nope | upcase",
    ],
)
@pytest.mark.parametrize("text", ["{{{{ {} }}}}", "x {{{{ {} }}}}"])
def test_what_is_not_in_the_event_fails_with_the_field(expression: str, text: str) -> None:
    render = compiled({"order": [text.format(expression)]})
    with pytest.raises(TemplateError, match=r"^parameter_template\.order\[0\]: "):
        render(EVENT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ event.payload.id | divided_by: 0 }}",
        "{{ event.payload.name | uniq: event.payload.id }}",
        "{{ event.payload.object | compact: event.payload.id }}",
        "{{ event.payload.list | sort }}",
        "{{ event.payload.list | where: 'a', 1 }}",
        "{{ event.payload.now | date: '%Y' }}",
        "{{ event.payload.evil | append: event.payload.evil | date: '%Y' }}",
    ],
)
def test_filter_that_fails_is_a_template_error(source: str) -> None:
    for text in (source, f"x{source}"):
        with pytest.raises(TemplateError, match=r"^parameter_template: ."):
            rendered(text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ payload.id }}", "uses `payload`; only `event` is available (line 1, column 4)"),
        ("a\n{% if foo %}{% endif %}", "uses `foo`; only `event` is available (line 2, column 7)"),
        ("{{ x }}{% assign x = 1 %}", "uses `x`"),
        ("{{ forloop.index }}", "uses `forloop`"),
        ("{% assign event = 1 %}{{ event }}", "assigns to the reserved name `event`"),
        ("{{ event.payloda.x }}", "uses `payloda`, which is not a field of an event; the fields are id, "),
        ("{{ event.event.type }}", "uses `event`"),
        ("{{ event['payloda'] }}", "uses `payloda`"),
        ("{{ event[0] }}", "uses `0`"),
        ("{% for x in event.items %}{% endfor %}", "uses `items`"),
        ("{{ event.type | append: event.nope }}", "uses `nope`, which is not a field of an event"),
        ("{{ event.type | nosuch }}", "uses the unknown filter `nosuch` (line 1, column 17)"),
        ("{{ event.type | strip_html }}", "unknown filter `strip_html`"),
        ("{% assign x = event.type | nosuch %}", "unknown filter `nosuch` (line 1, column 28)"),
        ("{% if true %}{% echo event.type | nosuch %}{% endif %}", "unknown filter `nosuch`"),
        ("{{ event.type | upcase: 1 }}", "the filter `upcase` with wrong arguments: too many"),
        ("{{ event.type | replace }}", "the filter `replace` with wrong arguments: missing"),
        ("{{ event.type | date }}", "the filter `date` with wrong arguments: missing"),
        ("{{ event.type | default: 1, nosuch: 2 }}", "unexpected keyword argument 'nosuch'"),
        ("{{ event.type", "not a Liquid template: expected '}}'"),
        ("{{ event.type ! }}", "not a Liquid template"),
        ("{% for x in event.payload.l %}", "not a Liquid template"),
        ("x\n {% nosuch %}", "not a Liquid template: unexpected tag 'nosuch' (line 2, column 5)"),
        ("{% include 'x' %}", "not a Liquid template: unexpected tag"),
        ("{% render 'x' %}", "not a Liquid template: unexpected tag"),
        ("{{ event.type }}" + "y" * MAX_LENGTH, f"longer than {MAX_LENGTH}"),
        ("{{ (1..1000000000) | join: ',' }}", "range"),
        ("{{ (1..event.payload.id) }}", "range"),
        ("{% assign r = (1..1000000000) %}{{ r | reverse }}", "range"),
        ("{% for i in event.payload.l %}{% if true %}{{ i | concat: (1..10000) }}{% endif %}{% endfor %}", "range"),
        ("{% for i in (1..event.nope) %}{% endfor %}", "uses `nope`"),
    ],
)
def test_refused(source: str, message: str) -> None:
    error = refused({"a": {"b": [1, source]}})
    assert error.field == "parameter_template.a.b[1]"
    assert message in error.message


def test_depth_is_bounded() -> None:
    source: Any = "{{ event.type }}"
    for _ in range(MAX_DEPTH):
        source = [source]
    assert str(rendered(source)).count("[") == MAX_DEPTH
    assert "deeper than" in refused([source]).message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in (1..event.payload.n) %}{% endfor %}", STEPS),
        ("{% for i in (1..event.payload.n) reversed %}{% endfor %}", STEPS),
        ("{% tablerow i in (1..event.payload.n) reversed %}{% endtablerow %}", STEPS),
        ("{% for i in (1..999) %}{% for j in (1..999) %}x{% endfor %}{% endfor %}", STEPS),
        ("{% assign x = 9 %}{% for i in (1..60) %}{% assign x = x | times: x %}{% endfor %}{{ x }}", "bits"),
        ("{% for i in (1..2000) %}{{ event.payload.t }}{% endfor %}", "output stream limit"),
        ("{% for i in (1..4000) %}{% if 1 == 1 and 2 == 2 and 3 == 3 %}{% endif %}{% endfor %}", STEPS),
        ("{% for i in (1..100) %}" * 2 + "{% endfor %}" * 2 + "{% for i in (1..9000) %}{% endfor %}", STEPS),
        ("{% for i in (1..500) %}{% if event.payload.l == event.payload.m %}{% endif %}{% endfor %}", STEPS),
        ("{% assign l = event.payload.l %}{% for i in (1..500) %}{% if l == l %}{% endif %}{% endfor %}", STEPS),
        ("{% assign a = event.payload.t %}" + "{% assign a = a | append: a %}" * 60, STEPS),
        ("{{ event.payload.l" + " | concat: event.payload.l" * 30 + " }}", STEPS),
        ("{{ event.payload.l" + " | sort" * 30 + " }}", STEPS),
        ("{{ event.payload.t | replace: '', event.payload.t }}", f"longer than {MAX_TEXT}"),
        ("{{ event.payload.t | split: '' | join: event.payload.t }}", f"longer than {MAX_TEXT}"),
        ("{{ event.payload.long | split: '' }}", "pieces"),
        (["{{ event.type }}"] * (MAX_STEPS // 10 + 1), STEPS),
    ],
)
def test_work_and_output_are_bounded(source: Any, message: str) -> None:
    payload = {"t": "x" * 2000, "long": "x" * 100_000, "l": list(range(2000)), "m": list(range(2000)), "n": 10**9}
    with pytest.raises((TemplateError, TooMuchWork), match=f"parameter_template.*: .*{message}"):
        compiled(source)({"type": "t", "payload": payload})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ event.payload.v }}{{ event.payload.x }} ", 'truefalse1{"a":[null,true],"b":"c"} '),
        ("{{ event.payload.x.a }}|{{ event.payload.v | join: ',' }}", 'true|true,false,,1,{"a":[null,true],"b":"c"}'),
        ("{{ event.payload.yes | append: event.payload.none | append: event.payload.x.b }}", "truec"),
        ("a{{ event.payload.x | append: '!' }}", 'a{"a":[null,true],"b":"c"}!'),
        ("{{ event.payload.x | upcase }}", '{"A":[NULL,TRUE],"B":"C"}'),
        ("{{ 'a true b' | remove: event.payload.yes }}", "a  b"),
        ("{{ 'abc' | split: event.payload.none | join: '-' }}", "a-b-c"),
        ("{{ 'abc' | split: nil | join: '-' }}", "a-b-c"),
        ("{% for i in event.payload.v %}{% cycle event.payload.yes, event.payload.none %}{% endfor %}", "truetrue"),
        ("{% liquid\necho event.payload.x\n%}", '{"a":[null,true],"b":"c"}'),
        ("{% capture a %}{{ event.payload.none }}{{ event.payload.yes }}{% endcapture %}{{ a }} ", "true "),
        ("{{ event.payload.yes | date: '%Y' }} ", "true "),
    ],
)
def test_values_are_spelled_as_in_liquid_and_json(source: str, expected: str) -> None:
    x = {"a": [None, True], "b": "c"}
    payload = {"v": [True, False, None, 1, x][:4] if "x.a" not in source else [True, False, None, 1, x], "x": x}
    payload |= {"yes": True, "none": None}
    assert compiled(source)({"payload": payload}) == expected


def test_all_texts_of_a_template_share_the_work() -> None:
    loop = "{% for i in (1..4000) %}{% endfor %}"
    assert compiled([loop])(EVENT) == [""]
    with pytest.raises(TooMuchWork, match=STEPS):
        compiled([loop] * 10)(EVENT)


def test_a_large_value_may_be_passed_on_whole() -> None:
    event = {"payload": {"l": list(range(120_000))}}
    assert compiled({"all": "{{ event.payload }}"})(event) == {"all": event["payload"]}


def test_uniq_tells_values_apart_without_comparing_each_with_each() -> None:
    event = {"payload": {"l": [2, 1, "1", True, 2, {"a": 1}, {"a": 1}], "o": [{"k": 1, "n": 1}, {"k": 1, "n": 2}, {}]}}
    assert compiled("{{ event.payload.l | uniq }}")(event) == [2, 1, "1", True, {"a": 1}]
    assert compiled("{{ event.payload.o | uniq: 'k' }}")(event) == [{"k": 1, "n": 1}, {}]
    many = {"payload": {"l": list(range(10_000))}}
    assert compiled("{{ event.payload.l | uniq | size }}")(many) == 10_000


FILTERS = ["upcase", "first", "last", "sort", "uniq", "compact", "sum", "size", "reverse", "join", "split: 'a'", "abs"]
FILTERS += [
    "plus: 1",
    "times: event.payload.b",
    "map: 'a'",
    "where: 'a', 1",
    "slice: 0, 2",
    "date: '%Y'",
    "round",
    "floor",
]
FILTERS += [
    "concat: event.payload.b",
    "truncate: event.payload.b",
    "replace: event.payload.b",
    "default: 1",
    "url_decode",
]


@given(EVENTS, st.sampled_from(FILTERS), st.sampled_from(["{}", "x{}"]))
def test_rendering_gives_a_value_or_a_template_error(event: dict[str, Any], name: str, text: str) -> None:
    render = compiled(text.format("{{ event.payload.a | " + name + " }}"))
    try:
        render(event)
    except TemplateError as exc:
        assert str(exc).startswith("parameter_template: ")


@given(JSON | st.text("{}%|.: ()[]'event1for in assign if end", max_size=40).map("{{{{ event.payload.{}".format))
def test_any_template_compiles_or_is_refused(source: Any) -> None:
    errors: list[FieldError] = []
    render = compile_template(source, "t", errors)
    if not errors:
        assert render is not None
        try:
            render(EVENT)
        except (TemplateError, TooMuchWork) as exc:
            assert str(exc).startswith("t")
