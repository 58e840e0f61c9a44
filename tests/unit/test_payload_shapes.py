"""Predicates, `where` and templates on events shaped like those that real systems send."""

from typing import Any

import pytest

from tidegate.errors import FieldError
from tidegate.model.expression import compile_expression
from tidegate.model.predicate import Predicate, compile_predicate
from tidegate.model.template import compile_template

PUSH = {
    "ref": "refs/heads/main",
    "before": "0" * 40,
    "after": "9f2c" * 10,
    "forced": False,
    "base_ref": None,
    "repository": {
        "full_name": "Acme/Shop",
        "private": True,
        "topics": ["python", "events"],
        "owner": {"login": "acme"},
    },
    "pusher": {"name": "zoë", "email": "zoe@example.com"},
    "commits": [
        {
            "id": "a1",
            "message": "Fix ÜBERGANG 🚀",
            "author": {"name": "Zoe\u0308"},
            "added": [],
            "modified": ["src/a.py"],
        },
        {"id": "b2", "message": "docs: typo", "author": {"name": "Zoë"}, "added": ["docs/x.md"], "modified": []},
        {"id": "c3", "message": "", "added": ["README.md", "docs/y.md"]},
    ],
    "head_commit": {"id": "c3", "distinct": True},
}
CHARGE = {
    "id": "evt_1",
    "object": "event",
    "api_version": "2026-01-01",
    "livemode": True,
    "data": {
        "object": {
            "id": "ch_1",
            "amount": 9007199254740993,
            "amount_refunded": 0,
            "currency": "EUR",
            "created": 1769851800,
            "exchange_rate": 1.0825,
            "failure_code": None,
            "outcome": {"risk_score": "17", "risk_level": "normal", "seller_message": "Payment complete."},
            "metadata": {"order_id": "000123", "total": "1e3", "version": "1.10"},
            "refunds": {"data": [], "has_more": False},
        },
        "previous_attributes": {"status": "pending"},
    },
    "request": {"id": None, "idempotency_key": "k-1"},
}
S3 = {
    "Records": [
        {
            "eventVersion": "2.1",
            "eventName": "ObjectCreated:Put",
            "eventTime": "2026-01-31T09:30:00.123Z",
            "s3": {
                "bucket": {"name": "uploads", "arn": "arn:aws:s3:::uploads"},
                "object": {"key": "in/B%C3%BCcher+2026.CSV", "size": 9223372036854775807, "eTag": "0e1"},
            },
        },
        {
            "eventName": "ObjectRemoved:Delete",
            "eventTime": "2026-01-31T09:31:00.000Z",
            "s3": {"bucket": {"name": "uploads"}, "object": {"key": "in/old.csv"}},
        },
    ]
}
TELEMETRY = {
    "device": {"id": "d-17", "site": "Łódź", "labels": {"floor": "2", "room.name": "B12", "": "empty"}},
    "batch": [
        {"sensor": "temp", "unit": "°C", "values": [[1769851800, 21.5], [1769851860, None], [1769851920, -3]]},
        {"sensor": "hum", "unit": "%", "values": [[1769851800, "48.2"], [1769851860, 51]]},
        {"sensor": "door", "values": [], "state": {"open": False, "since": None}},
        {"sensor": "temp", "unit": "°F", "values": [[1769851800, 70]], "error": {"code": 0}},
    ],
    "seq": 18446744,
}


def envelope(payload: dict[str, Any]) -> dict[str, Any]:
    return {"type": "t", "source": "s", "occurred_at": "2026-01-31T09:30:00+00:00", "metadata": {}, "payload": payload}


@pytest.mark.parametrize(
    ("payload", "path", "operator", "operand", "expected"),
    [
        (PUSH, "ref", "regex", "^refs/heads/(main|release/.+)$", True),
        (PUSH, "repository.full_name", "equals", "acme/shop", True),
        (PUSH, "repository.topics", "contains", "Events", True),
        (PUSH, "base_ref", "exists", None, True),
        (PUSH, "base_ref", "not_equals", "main", True),
        (PUSH, "base_ref", "contains", "main", False),
        (PUSH, "base_ref.name", "not_equals", "main", False),
        (PUSH, "forced", "equals", False, True),
        (PUSH, "forced", "equals", 0, False),
        (PUSH, "pusher.name", "equals", "ZOË", True),
        (PUSH, "commits[*].message", "contains", "übergang 🚀", True),
        (PUSH, "commits[*].message", "equals", "", True),
        (PUSH, "commits[0].author.name", "equals", "Zoë", False),  # two characters here, one there
        (PUSH, "commits[0].author.name", "equals", "ZOE\u0308", True),
        (PUSH, "commits[*].author.name", "equals", "zoë", True),
        (PUSH, "commits[*].author.name", "not_equals", "Bob", True),
        (PUSH, "commits[*].added[*]", "regex", r"^docs/", True),
        (PUSH, "commits[*].modified[*]", "regex", r"\.md$", False),
        (PUSH, "commits[?@.id == $.payload.head_commit.id].added[0]", "equals", "readme.md", True),
        (PUSH, "commits[-1].modified", "exists", None, False),
        (PUSH, "commits", "gt", 1, False),
        (CHARGE, "data.object.amount", "equals", 9007199254740993, True),
        (CHARGE, "data.object.amount", "gt", 9007199254740992, True),
        (CHARGE, "data.object.amount", "lte", 9007199254740992.0, False),
        (CHARGE, "data.object.currency", "in", ["eur", "usd"], True),
        (CHARGE, "data.object.outcome.risk_score", "lt", 65, True),
        (CHARGE, "data.object.outcome.risk_score", "equals", 17, False),
        (CHARGE, "data.object.outcome.risk_level", "gt", 5, False),
        (CHARGE, "data.object.metadata.order_id", "equals", "123", False),
        (CHARGE, "data.object.metadata.order_id", "gte", "123", True),
        (CHARGE, "data.object.metadata.total", "gte", 1000, True),
        (CHARGE, "data.object.metadata.version", "lt", "1.9", True),  # as numbers, not as versions
        (CHARGE, "data.object.failure_code", "equals", None, True),
        (CHARGE, "data.object.failure_code", "lt", 1, False),
        (CHARGE, "data.object.refunds.data[*]", "exists", None, False),
        (CHARGE, "data.object.refunds", "equals", {"has_more": False, "data": []}, True),
        (CHARGE, "api_version", "gte", "2025-12-31", True),
        (S3, "Records[*].eventName", "regex", "^ObjectCreated:", True),
        (S3, "Records[0].s3.object.size", "equals", 9223372036854775807, True),
        (S3, "Records[*].s3.object.size", "gt", 1, True),
        (S3, "Records[1].s3.object.size", "gt", 1, False),
        (S3, "Records[*].s3.object.key", "regex", r"\.csv$", True),
        (S3, "Records[0].eventTime", "lt", "2026-01-31T09:30:01Z", True),
        (S3, "Records[0].s3.object.eTag", "equals", 0, False),
        (S3, "records[0]", "exists", None, False),  # names keep their case
        (TELEMETRY, "device.site", "equals", "łÓDŹ", True),
        (TELEMETRY, "device.labels['room.name']", "equals", "b12", True),
        (TELEMETRY, "device.labels['']", "exists", None, True),
        (TELEMETRY, "device.labels.floor", "gte", 2, True),
        (TELEMETRY, "batch[*].values[*][1]", "gt", 60, True),
        (TELEMETRY, "batch[?@.sensor == 'hum'].values[*][1]", "lt", 50, True),
        (TELEMETRY, "batch[?@.error].error.code", "equals", 0, True),
        (TELEMETRY, "batch[*].values[*][1]", "not_equals", None, False),
        (TELEMETRY, "batch[2].values[*]", "exists", None, False),
        (TELEMETRY, "batch[*].unit", "not_in", ["K"], True),
    ],
)
def test_predicates(payload: dict[str, Any], path: str, operator: Any, operand: Any, expected: bool) -> None:
    errors: list[FieldError] = []
    operands = {"values": operand} if operator in ("in", "not_in") else {"value": operand}
    compiled = compile_predicate(Predicate(path=f"$.payload.{path}", operator=operator, **operands), "p", errors)
    assert compiled is not None, errors
    reason = compiled.reason(envelope(payload))
    assert (reason is None) is expected, reason


@pytest.mark.parametrize(
    ("payload", "source", "expected"),
    [
        (PUSH, "event.payload.ref == 'refs/heads/main' && !event.payload.forced", True),
        (PUSH, "event.payload.commits.exists(c, c.added.exists(f, f.startsWith('docs/')))", True),
        (PUSH, "event.payload.commits.exists(c, c.modified.exists(f, f.endsWith('.md')))", False),
        (PUSH, "event.payload.commits.all(c, has(c.author))", False),
        (PUSH, "event.payload.commits.filter(c, has(c.author)).all(c, c.author.name.matches('^Zo'))", True),
        (PUSH, "event.payload.commits[0].author.name == 'Zoë'", False),
        (PUSH, "event.payload.commits[0].message.contains('🚀')", True),
        (PUSH, "event.payload.commits.map(c, c.id) == ['a1', 'b2', 'c3']", True),
        (PUSH, "event.payload.base_ref == null", True),
        (PUSH, "event.payload.base_ref.startsWith('x')", False),
        (PUSH, "size(event.payload.commits) == 3 && 'python' in event.payload.repository.topics", True),
        (PUSH, "event.payload.commits.exists_one(c, c.id == event.payload.head_commit.id)", True),
        (CHARGE, "event.payload.data.object.amount > 9007199254740992", True),
        (CHARGE, "event.payload.data.object.amount - event.payload.data.object.amount_refunded > 0", True),
        (CHARGE, "event.payload.data.object.exchange_rate > 1", True),
        (CHARGE, "event.payload.data.object.outcome.risk_score < 65", False),
        (CHARGE, "int(event.payload.data.object.outcome.risk_score) < 65", True),
        (CHARGE, "has(event.payload.data.object.failure_code)", True),
        (CHARGE, "has(event.payload.data.object.dispute)", False),
        (CHARGE, "!has(event.payload.data.object.dispute.reason)", False),
        (CHARGE, "event.payload.data.object.refunds.data.all(r, r.amount > 0)", True),
        (CHARGE, "event.payload.data.previous_attributes.status in ['pending', 'failed']", True),
        (S3, "event.payload.Records.exists(r, has(r.s3.object.size) && r.s3.object.size > 1000)", True),
        (S3, "event.payload.Records.all(r, r.s3.bucket.name == 'uploads')", True),
        (S3, "event.payload.Records[0].s3.object.size + 1 > 0", False),
        (S3, "event.payload.Records[5].eventName == 'x'", False),
        (S3, "event.payload.Records.all(r, timestamp(r.eventTime) > timestamp('2026-01-31T09:00:00Z'))", True),
        (TELEMETRY, "event.payload.batch.exists(b, b.values.exists(v, v[1] == null))", True),
        (TELEMETRY, "event.payload.batch.exists(b, b.sensor == 'temp' && b.values.exists(v, v[1] < 0))", False),
        (TELEMETRY, "event.payload.batch[0].values.exists(v, v[1] != null && v[1] < 0)", True),
        (TELEMETRY, "event.payload.device.labels['room.name'] == 'B12'", True),
        (TELEMETRY, "'' in event.payload.device.labels", True),
        (TELEMETRY, "event.payload.device.site == 'Łódź'", True),
    ],
)
def test_expressions(payload: dict[str, Any], source: str, expected: bool) -> None:
    errors: list[FieldError] = []
    compiled = compile_expression(source, "where", errors)
    assert compiled is not None, errors
    reason = compiled.reason(envelope(payload))
    assert (reason is None) is expected, reason


@pytest.mark.parametrize(
    ("payload", "source", "expected"),
    [
        (PUSH, "{{ event.payload.commits | map: 'id' | join: ',' }}", "a1,b2,c3"),
        (PUSH, "{{ event.payload.ref | split: '/' | last }}", "main"),
        (PUSH, "{{ event.payload.base_ref | default: 'none' }}", "none"),
        (CHARGE, "{{ event.payload.data.object.amount }}", 9007199254740993),
        (CHARGE, "{{ event.payload.data.object.refunds }}", {"data": [], "has_more": False}),
        (S3, "{{ event.payload.Records[0].s3.object.key | url_decode }}", "in/Bücher 2026.CSV"),
        (
            S3,
            "{% for r in event.payload.Records %}{{ r.s3.object.key }};{% endfor %}",
            "in/B%C3%BCcher+2026.CSV;in/old.csv;",
        ),
        (TELEMETRY, "{{ event.payload.batch | where: 'sensor', 'temp' | size }}", 2),
        (TELEMETRY, "{{ event.payload.batch | map: 'sensor' | uniq }}", ["temp", "hum", "door"]),
        (TELEMETRY, "{{ event.payload.device.labels['room.name'] }} in {{ event.payload.device.site }}", "B12 in Łódź"),
    ],
)
def test_templates(payload: dict[str, Any], source: str, expected: Any) -> None:
    errors: list[FieldError] = []
    render = compile_template(source, "t", errors)
    assert render is not None, errors
    assert render(envelope(payload)) == expected
