"""What `promtool check metrics` and `promtool check rules` would say, on the real texts of an API and a worker."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import promql_parser as promql
import pytest

from tests.acceptance.conftest import DEMO
from tests.house.test_operations import DASHBOARD, RECORDED, RULES, SERIES
from tests.processes import PATIENCE_SECONDS, api, worker

# What a scrape adds to every series.
SCRAPED = {"job", "instance"}
# Units that promtool asks to write in base units, and abbreviations of units.
NOT_BASE = {
    "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "weeks", "kilobytes", "megabytes",
    "gigabytes", "bits", "kelvins", "percent", "ms", "us", "ns", "sec", "secs", "min", "mins", "kb", "mb", "gb",
}  # fmt: skip
TYPES = {"counter", "gauge", "histogram", "summary"}
SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)",?')


@pytest.fixture
def texts(database_url: str) -> Iterator[dict[str, str]]:
    """/metrics of an API and of a worker that have something to tell."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at = f"http://127.0.0.1:{port}/metrics"
    with (
        api(database_url) as (_, url),
        worker(database_url, DEMO, TIDEGATE_METRICS_PORT=str(port)),
        httpx.Client(trust_env=False) as http,
    ):
        http.put(f"{url}/admin/sources/held/limit", json={"limit": 1, "interval_ms": 3_600_000})
        for n in range(3):
            order = {"type": "order.created", "payload": {"id": n, "amount": 120}}
            http.post(f"{url}/v1/events", json=[order | {"source": "shop.api"}, order | {"source": "held"}])
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "tidegate_run_duration_seconds_bucket" not in (text := http.get(at).text):
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        yield {"api": http.get(f"{url}/metrics").text, "worker": text}


def lint(text: str) -> list[str]:
    """Everything that is wrong with a text of metrics."""
    helps: dict[str, str] = {}
    types: dict[str, str] = {}
    samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = defaultdict(dict)
    wrong: list[str] = []
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, family, described = line.split(" ", 3)
            wrong += [f"{family}: described twice"] if family in helps else []
            helps[family] = described.strip()
        elif line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            types[family] = kind
        elif line:
            found = SAMPLE.fullmatch(line)
            if found is None:
                wrong.append(f"cannot be read: {line}")
                continue
            name, labels, value = found.groups()
            if re.sub(LABEL, "", labels or ""):
                wrong.append(f"{name}: labels cannot be read: {labels}")
            if not re.fullmatch(rf"{re.escape(family)}(_bucket|_sum|_count)?", name):
                wrong.append(f"{name}: not below its own family, but below {family}")
            key = (name, tuple(sorted(LABEL.findall(labels or ""))))
            wrong += [f"{name}: twice with the same labels"] if key in samples[family] else []
            samples[family][key] = float(value)
    for name, kind in types.items():
        wrong += [f"{name}: {problem}" for problem in _names(name, kind, helps.get(name, ""))]
        wrong += [f"{name}: {problem}" for problem in _samples(name, kind, samples[name])]
    return wrong + [f"{name}: has no type" for name in samples.keys() - types.keys()]


def _names(name: str, kind: str, described: str) -> Iterator[str]:
    words = name.split("_")
    if not described:
        yield "no help text"
    if (kind == "counter") != name.endswith("_total"):
        yield "counters, and nothing else, end in _total"
    if kind not in ("histogram", "summary") and name.endswith(("_count", "_sum", "_bucket")):
        yield "the ending is for histograms and summaries"
    if TYPES & set(words):
        yield "the type is part of the name"
    if NOT_BASE & set(words):
        yield "not in base units"
    if ":" in name or name != name.lower():
        yield "colons are for recording rules, capitals for nobody"


def _samples(name: str, kind: str, samples: dict[Any, float]) -> Iterator[str]:
    used = {label for _, labels in samples for label, _ in labels}
    if ("le" in used and kind != "histogram") or ("quantile" in used and kind != "summary"):
        yield "a reserved label"
    if any(label != label.lower() or label in SCRAPED for label in used):
        yield "a label that is not in snake_case, or that a scrape sets"
    if kind != "histogram":
        return
    buckets: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for (sample, labels), value in samples.items():
        if sample.endswith("_bucket"):
            others = tuple(pair for pair in labels if pair[0] != "le")
            buckets[others].append((float(dict(labels)["le"]), value))
    for others, found in buckets.items():
        in_order = [value for _, value in sorted(found)]
        if in_order != sorted(in_order):
            yield "buckets are not cumulative"
        if max(found)[0] != float("inf") or in_order[-1] != samples.get((f"{name}_count", others)):
            yield "no bucket for everything"


def test_the_texts_have_no_lint(texts: dict[str, str]) -> None:
    for process, text in texts.items():
        assert "tidegate_" in text
        assert lint(text) == [], process


GOOD = "# HELP a_total Help.\n# TYPE a_total counter\na_total 1\n"
HISTOGRAM = (
    '# HELP a_seconds Help.\n# TYPE a_seconds histogram\na_seconds_bucket{le="1"} 2\n'
    'a_seconds_bucket{le="+Inf"} 3\na_seconds_count 3\na_seconds_sum 1\n'
)


@pytest.mark.parametrize("text", [GOOD, HISTOGRAM])
def test_what_is_right_has_no_lint(text: str) -> None:
    assert lint(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD.replace(" Help.", " "), "no help"),
        (GOOD.replace("a_total", "a"), "_total"),
        (GOOD.replace("counter", "gauge"), "_total"),
        (GOOD.replace("a_total", "a_counter_total"), "the type"),
        (GOOD.replace("a_total", "a_ms_total"), "base units"),
        (GOOD.replace("a_total", "a:b_total"), "colons"),
        (GOOD.replace("a_total 1", 'a_total{le="1"} 1'), "reserved"),
        (GOOD.replace("a_total 1", 'a_total{job="x"} 1'), "a scrape"),
        (GOOD.replace("a_total 1", "b_total 1"), "family"),
        (GOOD.replace("a_total 1", "a_total 1\na_total 2"), "twice"),
        (HISTOGRAM.replace('"1"} 2', '"1"} 9'), "cumulative"),
        (HISTOGRAM.replace('a_seconds_bucket{le="+Inf"} 3\n', ""), "everything"),
        (HISTOGRAM.replace("count 3", "count 4"), "everything"),
    ],
)
def test_what_is_wrong_is_found(text: str, problem: str) -> None:
    assert any(problem in found for found in lint(text)), lint(text)


def labels_of(node: Any) -> set[str] | None:
    """The labels that an expression's result may have; None for a number. AssertionError where one cannot exist."""
    match node:
        case promql.NumberLiteral() | promql.StringLiteral():
            return None
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return labels_of(node.expr)
        case promql.MatrixSelector():
            return labels_of(node.vector_selector)
        case promql.VectorSelector():
            known = labels_of(promql.parse(RECORDED[node.name])) if node.name in RECORDED else SERIES.get(node.name)
            assert known is not None, f"{node.name} does not exist"
            found = known | (set() if node.name in RECORDED else SCRAPED)
            asked = {matcher.name for matcher in node.matchers.matchers}
            assert asked <= found, f"{node.name} has no {asked - found}"
            return found
        case promql.Call():
            vectors = [found for found in map(labels_of, node.args) if found is not None]
            if node.func.name == "histogram_quantile":
                assert "le" in vectors[0], "histogram_quantile without le"
                return vectors[0] - {"le"}
            return vectors[0] if vectors else None
        case promql.AggregateExpr():
            inner = labels_of(node.expr)
            assert inner is not None, "nothing to aggregate"
            named = set(node.modifier.labels) if node.modifier else set()
            assert named <= inner, f"{named - inner} cannot be grouped by"
            is_by = node.modifier is None or node.modifier.type == promql.AggModifierType.By
            return named if is_by else inner - named
        case promql.BinaryExpr():
            return _joined(node)
    raise AssertionError(f"what is {node}?")


def _joined(node: Any) -> set[str] | None:
    left, right = labels_of(node.lhs), labels_of(node.rhs)
    if left is None or right is None:
        return left if right is None else right
    matching = node.modifier.matching if node.modifier else None
    if matching is not None:
        assert set(matching.labels) <= left | right, f"nothing has {set(matching.labels) - left - right}"
    elif str(node.op) not in ("or", "unless"):
        assert left == right, f"{left} and {right} never match"
    return left | (right if str(node.op) == "or" else set())


EXPRESSIONS = [rule["expr"] for rule in RULES] + [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_promql_about_labels_that_exist(expression: str) -> None:
    plain = re.sub(r"\$__(rate_)?interval|\$\{?__(rate_)?interval\}?", "5m", expression)
    plain = re.sub(r"\$\{?\w+\}?", ".*", plain)
    labels_of(promql.parse(plain))


def test_every_expression_of_the_dashboard_is_looked_at() -> None:
    assert len(EXPRESSIONS) == json.dumps(DASHBOARD).count('"expr"') + len(RULES) > 40


@pytest.mark.parametrize(
    "expression",
    [
        "sum by (nothing) (tidegate_queue_depth)",
        'tidegate_queue_depth{colour="red"}',
        "tidegate_no_such_thing",
        "sum by (source) (rate(tidegate_events_received_total[5m])) / sum(rate(tidegate_runs_total[5m]))",
        "histogram_quantile(0.9, sum by (source) (rate(tidegate_event_ingress_lag_seconds_bucket[5m])))",
    ],
)
def test_wrong_expressions_are_found(expression: str) -> None:
    with pytest.raises(AssertionError):
        labels_of(promql.parse(expression))


def test_what_is_not_promql_is_found() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        promql.parse("sum by (source")
