"""What runs wait for: keys, expressions with the run, and which event is given to which wait."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.clock import uuid7
from tidegate.errors import InvalidInput
from tidegate.model.event import Event
from tidegate.model.run import ClaimedRun
from tidegate.model.wait import (
    CORRELATION,
    On,
    OpenWait,
    WaitPattern,
    cancel_pattern,
    check_pattern,
    contained,
    give,
    key_of_event,
    written_paths,
    written_value,
)

NOW = datetime(2026, 6, 1, tzinfo=UTC)
RUN = ClaimedRun(
    id=uuid7(), workflow="w", event_id=None, correlation_id="c-1", attempts=1, claim_generation=1, now=NOW,
    started_at=NOW, parameters={"id": 7, "who": {"name": "ann"}, "list": [1]},
)  # fmt: skip


def event(sequence: int = 1, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "id": uuid7(), "external_id": None, "type": "word", "source": "shop", "occurred_at": NOW, "received_at": NOW,
        "ingress_sequence": sequence, "payload": {}, "correlation_id": "c-1", "ttl_ms": None, "metadata": {},
    }  # fmt: skip
    return Event(**fields | changes)


def wait(step: uuid.UUID | None = None, **changes: Any) -> OpenWait:
    pattern = WaitPattern(type="word", **changes.pop("pattern", {}))
    fields: dict[str, Any] = {
        "id": uuid7(), "workflow_run_id": RUN.id, "step_id": step or uuid7(), "number": 0, "mode": "event",
        "event_type": pattern.type, "source": pattern.source, "paths": pattern.paths, "key": pattern.key,
        "where_text": pattern.where, "after_sequence": 0, "since": None, "until": NOW + timedelta(hours=1),
        "met_event_id": None, "met_event": None, "created_at": NOW,
    }  # fmt: skip
    return OpenWait(**fields | changes)


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [(7, 7.0, True), (1e20, 10**20, True), (0, -0.0, True), (True, 1, False), ("7", 7, False), (None, False, False),
     (0.1, 0.1, True), ("a", "A", False), (10**30, 10**30 + 1, False)],
)  # fmt: skip
def test_values_are_equal_as_in_json(one: object, other: object, is_equal: bool) -> None:
    assert (written_value(one) == written_value(other)) is is_equal


@pytest.mark.parametrize("value", [[1], {"a": 1}, float("nan"), float("inf"), "\x00", "\ud800", b"x"])
def test_what_is_not_a_single_value_has_no_key(value: object) -> None:
    assert written_value(value) is None


def test_an_event_without_the_field_has_no_key() -> None:
    paths = written_paths(["b.c", "a"])
    assert paths == '["a","b.c"]'
    assert key_of_event(event(payload={"a": 1, "b": {"c": "x"}}), paths) == '[1,"x"]'
    for payload in ({"a": 1}, {"a": 1, "b": 2}, {"a": [1], "b": {"c": "x"}}):
        assert key_of_event(event(payload=payload), paths) is None
    long = key_of_event(event(payload={"a": "x" * 10_000, "b": {"c": 1}}), paths)
    assert long is not None and long.startswith("sha256:") and len(long) < 100


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ("event.payload.id == run.parameters.id", {"id": 7}),
        ("run.parameters.who.name == event.payload.by && event.payload.n > 3", {"by": "ann"}),
        ("event.payload.a.b == 'x' && event.payload.ok == true", {"a.b": "x", "ok": True}),
        ("event.payload.id == 7 || event.payload.id == 8", {}),
        ("event.payload.id == 7 ? true : false", {}),
        ("!(event.payload.id == 7)", {}),
        ("event.payload.id != 7", {}),
        ("event.payload.list == run.parameters.list", {}),
        ("event.payload.id == run.parameters.missing", {}),
        ("event.payload.id == event.payload.other", {}),
        ("(event.payload.id == 7 || true) && event.payload.x == 1", {"x": 1}),
        ("event.payload.text == '== 7 && event.payload.id == 8'", {"text": "== 7 && event.payload.id == 8"}),
    ],
)
def test_equalities_of_an_expression_become_its_key(where: str, match: dict[str, Any]) -> None:
    assert check_pattern(On("word", where=where), RUN).match == match


@given(
    st.dictionaries(st.sampled_from("ab"), st.sampled_from([1, 1.0, "1", True, None, "x"]), min_size=1),
    st.dictionaries(st.sampled_from("ab"), st.sampled_from([1, 2, "1", True, None, "x", [1]])),
)
def test_the_key_never_hides_an_event_that_the_expression_accepts(
    parameters: dict[str, Any], payload: dict[str, Any]
) -> None:
    """Looked up by its key, a wait meets the same events as by its expression alone."""
    where = " && ".join(f"event.payload.{name} == run.parameters.{name}" for name in sorted(parameters))
    run = ClaimedRun(
        id=RUN.id, workflow="w", event_id=None, correlation_id=None, attempts=1, claim_generation=1, now=NOW,
        started_at=NOW, parameters=parameters,
    )  # fmt: skip
    pattern = check_pattern(On("word", where=where), run)
    came = event(payload=payload)
    alone = wait(pattern={"where": where}).meets(came, parameters)
    keyed = wait(pattern={"where": where, "match": pattern.match}).meets(came, parameters)
    assert keyed == alone


def test_what_cancels_a_run_is_of_its_correlation_unless_it_says_more() -> None:
    assert cancel_pattern(On("stop"), RUN).match == {CORRELATION: "c-1"}
    assert cancel_pattern(On("stop", match={"id": 7}), RUN).match == {"id": 7}
    pattern = cancel_pattern(On("word"), RUN)
    mine = wait(mode="cancel", until=None, pattern={"match": pattern.match})
    assert mine.meets(event(), {}) and not mine.meets(event(correlation_id="c-2"), {})
    assert contained(pattern.match) == "{}"


@pytest.mark.parametrize(
    ("changes", "is_met"),
    [
        ({}, True), ({"after_sequence": 1}, False), ({"since": NOW}, True), ({"since": NOW + timedelta(1)}, False),
        ({"event_type": "other"}, False), ({"source": "sh*"}, True), ({"source": "erp.*"}, False),
    ],
)  # fmt: skip
def test_which_events_count(changes: dict[str, Any], is_met: bool) -> None:
    assert wait(**changes).meets(event(), {}) is is_met


def test_an_invalid_pattern_names_every_field_that_is_wrong() -> None:
    with pytest.raises(InvalidInput) as caught:
        check_pattern(On("a b", where="event.x", match={"": 1, "b": []}, source=""), RUN, "pattern 2")
    fields = {error.field for error in caught.value.errors}
    assert fields == {"pattern 2.type", "pattern 2.where", "pattern 2.match", "pattern 2.match.b", "pattern 2.source"}


def test_each_event_goes_to_the_oldest_wait_and_to_one_only() -> None:
    old, young = wait(created_at=NOW - timedelta(1)), wait()
    first, second, third = event(1), event(2), event(3)
    both = {old.id, young.id}
    given = give([young, old], [(first, both), (second, both), (third, both)], ())
    assert [(one.wait, one.event) for one in given] == [(old, first), (young, second)]
    assert [one.event for one in give([old], [(first, both), (second, both)], {first.id})] == [second]
    assert give([], [(first, both)], ()) == []


def test_the_first_of_several_ends_the_step_and_all_need_their_own() -> None:
    step = uuid7()
    one, two = (wait(step, number=n, mode="first") for n in (0, 1))
    came = [(event(n), {one.id, two.id}) for n in (1, 2)]
    assert [given.wait for given in give([one, two], came, ())] == [one]
    one, two = (wait(step, number=n, mode="all") for n in (0, 1))
    came = [(event(n), {one.id, two.id}) for n in (1, 2, 3)]
    assert [given.wait for given in give([one, two], came, ())] == [one, two]
    met = wait(step, mode="all", met_event_id=came[0][0].id)
    assert [given.event for given in give([met, two], came, ())] == [came[1][0]]


def test_of_all_the_narrowest_pattern_takes_an_event() -> None:
    step = uuid7()
    wide = wait(step, number=0, mode="all")
    source = wait(step, number=1, mode="all", source="sh*")
    exact = wait(step, number=2, mode="all", source="shop", pattern={"match": {"id": 1}})
    all_three = {wide.id, source.id, exact.id}
    came = [(event(1), all_three), (event(2), {wide.id, source.id}), (event(3), {wide.id})]
    assert [given.wait for given in give([wide, source, exact], came, ())] == [exact, source, wide]
    one, two = (msgspec.structs.replace(wait, mode="first") for wait in (wide, exact))
    assert [given.wait for given in give([one, two], came, ())] == [one], "of any, the first that is written"


def test_a_cancellation_comes_alone() -> None:
    cancel, other = wait(mode="cancel", until=None, created_at=NOW - timedelta(1)), wait()
    came = [(event(1), {other.id}), (event(2), {cancel.id, other.id})]
    assert [given.wait for given in give([other, cancel], came, ())] == [cancel]
