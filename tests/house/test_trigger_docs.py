"""The examples and numbers in docs/triggers.md are true."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tidegate.errors import FieldError
from tidegate.model import cel_reader, expression, liquid_environment, path, pattern, predicate, template, work_limit
from tidegate.model.expression import compile_expression
from tidegate.model.predicate import OPERATORS, Predicate, compile_predicate
from tidegate.model.template import compile_template
from tidegate.model.trigger import compile_pattern
from tidegate.model.trigger_terms import FIELDS, MAX_NODES, TemplateError

TEXT = (Path(__file__).parent.parent.parent / "docs" / "triggers.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    assert found is not None, language
    return found[1]


def rows(section: str) -> list[list[str]]:
    """The cells of the section's first table, without its head."""
    text = TEXT.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


EVENT: dict[str, Any] = json.loads(block("json"))
PREDICATES = [(row[0].strip("`"), row[1]) for row in rows("Predicates")]
EXPRESSIONS = [re.split(r"\s+// ", line) for line in block("cel").splitlines()]
TEMPLATES = [re.split(r"\s+=> ", line) for line in block("liquid").splitlines()]


def test_the_event_has_all_fields() -> None:
    assert EVENT.keys() == set(FIELDS)
    assert "these eleven" in TEXT
    assert len(FIELDS) == 11


def test_every_operator_has_an_example_that_holds() -> None:
    assert {json.loads(source)["operator"] for source, holds in PREDICATES if holds == "yes"} == set(OPERATORS)


@pytest.mark.parametrize("row", rows("Which events"), ids=lambda row: row[0])
def test_patterns(row: list[str]) -> None:
    pattern, takes, not_taken = (re.findall(r"`([^`]+)`", cell) for cell in [*row, ""][:3])
    compiled = compile_pattern(pattern[0], "event_type", [])
    for name in takes:
        assert compiled is None or compiled.fullmatch(name)
    for name in not_taken:
        assert not compiled.fullmatch(name)


@pytest.mark.parametrize(("source", "holds"), PREDICATES)
def test_predicates(source: str, holds: str) -> None:
    errors: list[FieldError] = []
    compiled = compile_predicate(Predicate(**json.loads(source)), "p", errors)
    assert compiled is not None, errors
    assert (compiled.reason(EVENT) is None) is {"yes": True, "no": False}[holds]


@pytest.mark.parametrize(("source", "result"), EXPRESSIONS)
def test_expressions(source: str, result: str) -> None:
    errors: list[FieldError] = []
    compiled = compile_expression(source, "where", errors)
    assert compiled is not None, errors
    assert (compiled.reason(EVENT) is None) is {"true": True, "false": False}[result.partition(":")[0]]


@pytest.mark.parametrize(("source", "result"), TEMPLATES)
def test_templates(source: str, result: str) -> None:
    errors: list[FieldError] = []
    render = compile_template(source, "t", errors)
    assert render is not None, errors
    if result == "fails":
        with pytest.raises(TemplateError):
            render(EVENT)
    else:
        assert render(EVENT) == json.loads(result)


def test_functions_named_are_the_known_ones() -> None:
    known = re.search(r"The functions are `([^`]+)`; the methods are `([^`]+)`", TEXT)
    assert known is not None
    assert set(known[1].split()) == cel_reader._FUNCTIONS.keys()
    assert set(known[2].split()) == cel_reader._METHODS.keys() - {"existsOne"}


def test_limits() -> None:
    assert {row[0]: int(row[1].replace(",", "")) for row in rows("Limits")} == {
        "characters of a path": path.MAX_PATH_LENGTH,
        "characters of a pattern": pattern.MAX_PATTERN_LENGTH,
        "values of `in`, `not_in`": predicate.MAX_VALUES,
        "values within arrays and objects as operands": predicate.MAX_MEMBERS,
        "values of the event that a path visits": path.MAX_VISITS,
        "values that a predicate compares": MAX_NODES,
        "characters of `where`": expression.MAX_LENGTH,
        "nested loops in `where`": cel_reader.MAX_NESTED_LOOPS,
        "steps of a trigger's checks on an event": work_limit.MAX_STEPS,
        "characters of a string in a template": template.MAX_LENGTH,
        "levels of a template": template.MAX_DEPTH,
        "characters of a rendered string": template.MAX_OUTPUT,
        "bits of an integer in a template": liquid_environment.MAX_BITS,
        "steps of its templates on an event": work_limit.MAX_STEPS,
    }
    assert f"template's step costs {liquid_environment.PRICE}" in TEXT
    assert f"Steps of `where`: {expression._CONVERSION_STEPS} for each value" in TEXT
    assert f"{path.MAX_WORK:,} divided by its length" in TEXT


def test_sizes_named_for_loops_fit() -> None:
    def reason(source: str, count: int) -> str | None:
        compiled = compile_expression(source, "where", [])
        assert compiled is not None
        items = [{"sku": "a", "qty": i, "price": 5, "gift": False} for i in range(count)]
        return compiled.reason({"payload": {"items": items}})

    assert reason("event.payload.items.exists(i, i.sku == 'a' && i.qty > 998)", 1000) is None
    assert reason("event.payload.items.filter(i, i.qty > 98) != []", 100) is None
