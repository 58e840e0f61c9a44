"""Liquid templates over the event: its text is only ever a value, and the work is bounded."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import FieldError
from headgate.model.template import MAX_DEPTH, MAX_LENGTH, MAX_TEXT, Render, TemplateError, compile_template

from .json_values import EVENTS, JSON

EVENT = {
    "type": "order.created",
    "payload": {
        "id": 7,
        "price": 1.5,
        "name": "Ann",
        "none": None,
        "yes": True,
        "list": [1, "a", None],
        "object": {"a": {"b": [1]}},
        "evil": "{{ event.payload.id }}{% for i in (1..9) %}x{% endfor %}",
    },
}


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
        ("{{ event.payload.list | join: '-' }}", "1-a-None"),
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
        "event.nope",
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
        "{{ event.payload.name | date: event.payload.id, 1, 2 }}",
    ],
)
def test_filter_that_fails_is_a_template_error(source: str) -> None:
    for text in (source, f"x{source}"):
        with pytest.raises(TemplateError, match=r"^parameter_template: ."):
            rendered(text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ payload.id }}", "uses `payload`; only `event` is known"),
        ("{% if foo %}{% endif %}", "uses `foo`"),
        ("{{ event.x | nosuch }}", "unknown filter `nosuch`"),
        ("{{ event.x", "not a Liquid template"),
        ("{% for x in event.l %}", "not a Liquid template"),
        ("{% nosuch %}", "not a Liquid template"),
        ("{% include 'x' %}", "not a Liquid template"),
        ("{% render 'x' %}", "not a Liquid template"),
        ("{{ event.x }}" + "y" * MAX_LENGTH, f"longer than {MAX_LENGTH}"),
        ("{{ (1..1000000000) | join: ',' }}", "range"),
        ("{{ (1..event.payload.id) }}", "range"),
        ("{% assign r = (1..1000000000) %}{{ r | reverse }}", "range"),
        ("{% for i in event.l %}{% if true %}{{ event.x | concat: (1..1000000000) }}{% endif %}{% endfor %}", "range"),
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
        ("{% for i in (1..1000000000) %}{% endfor %}", "loop iteration limit"),
        ("{% for i in (1..999) %}{% for j in (1..999) %}x{% endfor %}{% endfor %}", "loop iteration limit"),
        ("{% tablerow i in (1..1000000000) %}{% endtablerow %}", "loop iteration limit"),
        ("{% for i in (1..9000) %}{{ event.t }}{% endfor %}", "output stream limit"),
        ("{% assign a = event.t %}" + "{% assign a = a | append: a %}" * 60, "local namespace limit"),
        ("{{ event.t | replace: '', event.t }}", f"longer than {MAX_TEXT}"),
        ("{{ event.t | split: '' | join: event.t }}", f"longer than {MAX_TEXT}"),
    ],
)
def test_work_and_output_are_bounded(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=f"parameter_template: .*{message}"):
        compiled(source)({"t": "x" * 2000})


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


@given(JSON | st.text("{}%|.: ()[]'event1for in assign if end", max_size=40).map("{{{{ event.{}".format))
def test_any_template_compiles_or_is_refused(source: Any) -> None:
    errors: list[FieldError] = []
    render = compile_template(source, "t", errors)
    if not errors:
        assert render is not None
        try:
            render(EVENT)
        except TemplateError as exc:
            assert str(exc).startswith("t")
