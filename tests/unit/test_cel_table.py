"""CEL's own cases, as its specification has them: each gives what it says, or is refused on save with the reason.

None is accepted and then silently false for every event: FALSE lists what is false, or cannot be answered, on this one.
"""

import pytest

from tidegate.errors import FieldError
from tidegate.model.expression import compile_expression

EVENT = {
    "type": "t",
    "occurred_at": "2026-01-31T09:30:00+02:00",
    "payload": {
        "n": 7, "f": 7.5, "t": "2026-01-31T01:30:00.250Z", "tz": "2026-01-31T01:30:00-08:00", "s": "abc",
        "l": [1, 2, 3], "o": {"a": 1}, "d": "90s", "neg": -7, "b": True, "e": "", "u": "é",
    },
}  # fmt: skip

TRUE = [
    "timestamp(event.occurred_at).getHours() == 7",
    "timestamp(event.payload.tz).getHours() == 9",
    "timestamp(event.payload.t).getHours() == 1",
    "timestamp(event.payload.t).getMilliseconds() == 250",
    "timestamp(event.payload.t).getDayOfWeek() == 6",
    "timestamp(event.payload.t).getMonth() == 0",
    "timestamp(event.payload.t).getDate() == 31",
    "timestamp(event.payload.t).getDayOfMonth() == 30",
    "timestamp(event.payload.t).getDayOfYear() == 30",
    "timestamp(event.payload.t).getFullYear() == 2026",
    "event.payload.n in {7: true, 8: false}",
    "'a' in event.payload.o",
    "'a' in {'a': 1} && event.payload.n == 7",
    "event.payload.s in {'abc': 1}",
    "event.payload.n in [7, 8]",
    "timestamp(1700000000) < timestamp(event.payload.t)",
    "timestamp(event.payload.n) < timestamp(event.payload.t)",
    "int(timestamp(event.payload.t)) == 1769823000",
    "int(timestamp(event.payload.t)) > 5",
    "timestamp(event.payload.t) + duration('1h') > timestamp(event.payload.t)",
    "timestamp(event.payload.t) - duration('1h') < timestamp(event.payload.t)",
    "timestamp(event.payload.t) - timestamp(event.payload.tz) < duration('1h')",
    "duration('1h') + duration(event.payload.d) == duration('3690s')",
    "duration('1h').getHours() == 1 && event.payload.n == 7",
    "duration(event.payload.d).getMinutes() == 1",
    "duration(event.payload.d).getSeconds() == 90",
    "duration('1.5s').getMilliseconds() == 1500 && event.payload.n == 7",
    "string(timestamp(event.payload.t)) == '2026-01-31T01:30:00.25Z'",
    "string(duration(event.payload.d)) == '90s'",
    "string(event.payload.n) == '7'",
    "string(event.payload.f) == '7.5'",
    "string(event.payload.b) == 'true'",
    "int(event.payload.f) == 7",
    "int('7') == event.payload.n",
    "uint(event.payload.n) == 7u",
    "double(event.payload.n) == 7.0",
    "event.payload.n == 7.0",
    "event.payload.n == 7u",
    "event.payload.n % 2 == 1",
    "event.payload.neg % 2 == -1",
    "event.payload.neg / 2 == -3",
    "-event.payload.n == event.payload.neg",
    "event.payload.n > 5 ? event.payload.b : false",
    "event.payload.l + [4] == [1,2,3,4]",
    "event.payload.s + 'd' == 'abcd'",
    "event.payload.l[0] == 1",
    "event.payload.o['a'] == 1",
    "event.payload.o.a == 1",
    "event.payload.o == {'a': 1}",
    "size(event.payload.l) == 3",
    "event.payload.l.size() == 3",
    "size(event.payload.o) == 1",
    "type(event.payload.n) == int",
    "type(event.payload.s) == string",
    "type(event.payload.f) == double",
    "bytes('abc') == b'abc' && event.payload.n == 7",
    "event.payload.s.startsWith('a')",
    "event.payload.s.endsWith('c')",
    "event.payload.s.contains('b')",
    "event.payload.s.matches('^a.c$')",
    "event.payload.s < 'abd'",
    "event.payload.l.exists(x, x == 2)",
    "event.payload.l.all(x, x > 0)",
    "event.payload.l.exists_one(x, x == 2)",
    "event.payload.l.filter(x, x > 1) == [2,3]",
    "event.payload.l.map(x, x * 2) == [2,4,6]",
    "event.payload.l.map(x, x > 1, x * 2) == [4,6]",
    "event.payload.o.exists(k, k == 'a')",
    "event.payload.o.all(k, event.payload.o[k] == 1)",
    "event.payload.o.map(k, k) == ['a']",
    "has(event.payload.o.a)",
    "!has(event.payload.o.b)",
    "event.payload.e == ''",
    "null == null && event.payload.b",
    "dyn(event.payload.n) == 7",
    "2 in event.payload.l",
    "event.payload.l in [[1,2,3]]",
    "[1,2,3] == event.payload.l",
    "1 < event.payload.f",
    "event.payload.n < event.payload.f",
    "event.payload.n + 1 == 8",
    "timestamp('2026-01-31T01:30:00.250Z') == timestamp(event.payload.t)",
    "duration('1h30m') == duration('5400s') && event.payload.b",
    "{'a': 1}.a == event.payload.o.a",
    "{'a': event.payload.n}['a'] == 7",
    'event.payload.u == "\\u00e9"',
    "event.payload.s == r'abc'",
    "event.payload.n == 0x7",
    "(event.payload.n) in {7: 1}",
    "event.payload.n in ({7: 1})",
    "!(event.payload.n in {8: 1})",
    "timestamp(event.payload.t) - duration('1h') + duration('2h') > timestamp(event.payload.t)",
    "timestamp(timestamp(event.payload.t)) == timestamp(event.payload.t)",
    "timestamp('2026-01-31T01:30:00.123456789Z') < timestamp(event.payload.t)",
    "int(timestamp('2026-01-31T01:30:00Z')) + event.payload.n == 1769823007",
    "timestamp(event.payload.t) + duration('1h') > timestamp(event.payload.t) && [1].all(x, x == 1)",
    "5 + timestamp(event.payload.t).getHours() == 6",
    "duration('1h') + (timestamp(event.payload.t) - timestamp(event.payload.t)) == duration('1h')",
    "timestamp('2026-01-31T01:30:00.123456789+02:00').getHours() == 23 && event.payload.b",
    "timestamp('2026-01-31T01:30:00.123456789Z') < timestamp('2026-01-31T01:30:00.123456790Z') && event.payload.b",
]
FALSE = [
    "event.payload.n / 0 == 1",
    "!event.payload.b",
    "event.payload.l[-1] == 3",
    "size(event.payload.u) == 1",
    "event.payload.u.size() == 1",
    "event.payload.n == null",
    "event.payload.n in event.payload.l",
    "event.payload.n + 1.0 == 8.0",
    "event.payload.n * 9223372036854775807 > 0",
    "duration(event.payload.n) == duration('7s')",
    "timestamp(event.payload.t) == event.payload.t",
    "event.payload.t < timestamp('2027-01-01T00:00:00Z')",
    "timestamp(event.payload.s) < timestamp(event.payload.t)",
    "event.payload.n in {}",
]
REFUSED = [
    "timestamp(event.payload.t).getHours('America/New_York') == 20",
    "timestamp(event.payload.t).getHours('+02:00') == 3",
    "duration('1h') + timestamp(event.payload.t) > timestamp(event.payload.t)",
    "type(event.payload.l) == list",
    "type(event.payload.o) == map",
    "type(event.payload.b) == bool",
    "bool('true') == event.payload.b",
    "matches(event.payload.s, '^a.c$')",
    "duration('1d') == duration('24h') && event.payload.b",
    "event.payload.o.exists(k, v, v == 1)",
    "[event.payload.n, 1].exists(x, x == 7)",
    "(duration('1h')) + timestamp(event.payload.t) > timestamp(event.payload.t)",
    "duration('1h') + (timestamp(event.payload.t)) > timestamp(event.payload.t)",
    "duration('1h') + duration('2h') + timestamp(event.payload.t) > timestamp(event.payload.t)",
    "timestamp('nonsense') < timestamp(event.payload.t)",
    "duration(7) < duration(event.payload.d)",
    "timestamp(event.payload.t) - timestamp(event.payload.t) + timestamp(event.payload.t) == timestamp(0)",
]


@pytest.mark.parametrize("source", TRUE)
def test_true(source: str) -> None:
    errors: list[FieldError] = []
    compiled = compile_expression(source, "where", errors)
    assert compiled is not None, errors
    assert compiled.reason(EVENT) is None


@pytest.mark.parametrize("source", FALSE)
def test_false_with_a_reason(source: str) -> None:
    compiled = compile_expression(source, "where", [])
    assert compiled is not None
    assert (compiled.reason(EVENT) or "").startswith("where")


@pytest.mark.parametrize("source", REFUSED)
def test_refused_on_save(source: str) -> None:
    errors: list[FieldError] = []
    assert compile_expression(source, "where", errors) is None
    assert errors[0].field == "where" and "(line 1, column " in errors[0].message


def test_getters_do_not_ask_the_machine_for_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    test_true("timestamp(event.occurred_at).getHours() == 7")
