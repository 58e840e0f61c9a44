"""Patterns: found by RE2, and paid for before they are searched."""

import pytest

from tidegate.errors import FieldError
from tidegate.model.expression import compile_expression
from tidegate.model.pattern import compile_pattern
from tidegate.model.predicate import Predicate, compile_predicate
from tidegate.model.work_limit import MAX_STEPS, TooMuchWork, WorkLeft


@pytest.mark.parametrize("pattern", ["error", "(?i)timeout", "^a.*z$"])
def test_a_simple_pattern_reads_the_longest_text_of_an_event(pattern: str) -> None:
    work_left = WorkLeft()
    compile_pattern(pattern).is_in("error " * 43_000, work_left)
    assert work_left.left > 0


@pytest.mark.parametrize("pattern", ["error.{0,1000}timeout", "(a|b)*a(a|b){30}", "[a-q][^u-z]{13}x", r"\pL{5,20}z"])
def test_a_large_program_reads_no_long_text(pattern: str) -> None:
    compiled, work_left = compile_pattern(pattern), WorkLeft()
    assert not compiled.is_in("short", work_left)
    with pytest.raises(TooMuchWork):
        compiled.is_in("error " * 40_000, work_left)
    with pytest.raises(TooMuchWork):
        compiled.is_whole("error " * 40_000, WorkLeft())


def test_what_is_paid_grows_with_the_bytes_of_the_text() -> None:
    def paid(text: str) -> int:
        work_left = WorkLeft()
        compile_pattern("a.{20}z").is_in(text, work_left)
        return MAX_STEPS - work_left.left

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
    assert all("work limit" in error.message for error in errors), errors
