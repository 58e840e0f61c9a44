"""Patterns: found by RE2, and paid for before they are searched."""

import pytest

from tidegate.errors import FieldError
from tidegate.model.budget import MAX_STEPS, Budget, OverBudget
from tidegate.model.expression import compile_expression
from tidegate.model.pattern import compile_pattern
from tidegate.model.predicate import Predicate, compile_predicate


@pytest.mark.parametrize("pattern", ["error", "(?i)timeout", "^a.*z$"])
def test_a_simple_pattern_reads_the_longest_text_of_an_event(pattern: str) -> None:
    budget = Budget()
    compile_pattern(pattern).is_in("error " * 43_000, budget)
    assert budget.left > 0


@pytest.mark.parametrize("pattern", ["error.{0,1000}timeout", "(a|b)*a(a|b){30}", "[a-q][^u-z]{13}x", r"\pL{5,20}z"])
def test_a_large_program_reads_no_long_text(pattern: str) -> None:
    compiled, budget = compile_pattern(pattern), Budget()
    assert not compiled.is_in("short", budget)
    with pytest.raises(OverBudget):
        compiled.is_in("error " * 40_000, budget)
    with pytest.raises(OverBudget):
        compiled.is_whole("error " * 40_000, Budget())


def test_what_is_paid_grows_with_the_bytes_of_the_text() -> None:
    def paid(text: str) -> int:
        budget = Budget()
        compile_pattern("a.{20}z").is_in(text, budget)
        return MAX_STEPS - budget.left

    assert paid("é" * 2000) > 1.9 * paid("e" * 2000) > 3.6 * paid("e" * 1000)


def test_what_could_read_nothing_is_refused_on_save() -> None:
    errors: list[FieldError] = []
    pattern = r"\pL{5,45}z"
    compile_predicate(Predicate(path="$.payload.t", operator="regex", value=pattern), "predicates[0]", errors)
    compile_predicate(
        Predicate(path=f"$.payload[?search(@, '{pattern}')]".replace("\\", "\\\\"), operator="exists"),
        "predicates[1]",
        errors,
    )
    compile_expression(f"event.payload.t.matches(r'{pattern}')", "where", errors)
    assert [error.field for error in errors] == ["predicates[0].value", "predicates[1].path", "where"]
    assert all("too large" in error.message for error in errors), errors


def test_a_path_or_expression_that_no_event_could_satisfy_is_refused_on_save() -> None:
    errors: list[FieldError] = []
    path = "$.payload.items[?" + " || ".join(f"@.f{n} == {n}" for n in range(30)) + "]"
    compile_predicate(Predicate(path=path, operator="exists"), "predicates[0]", errors)
    numbers = "[" + ",".join("1" * 380) + "]"
    source = f"{numbers}.all(a, {numbers}.all(b, a == b && a == b && event.ttl_ms == 1))"
    compile_expression(source, "where", errors)
    assert [error.field for error in errors] == ["predicates[0].path", "where"]
    assert all("budget" in error.message for error in errors), errors
