"""The operations pack is true: it parses, and every metric, panel, alert and runbook section that it names exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tidegate.telemetry import metrics

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
PAGE = "docs/operations/event-scheduler.md"
TEXT = (ROOT / PAGE).read_text()
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "tidegate.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
SECTIONS = {
    re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-"): body
    for title, body in re.findall(r"^## (.+)\n((?:(?!^#).*\n)*)", TEXT, re.MULTILINE)
}


def series() -> dict[str, set[str]]:
    """Every series that can be scraped, with its labels."""
    found: dict[str, set[str]] = {"up": {"job", "instance"}}
    for collector in metrics.REGISTRY._collector_to_names:
        labels = set(collector._labelnames)  # type: ignore[attr-defined]
        for family in collector.describe():
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
            for suffix in suffixes:
                found[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


SERIES = series()


def check(expression: str) -> set[str]:
    """An expression names only series and labels that exist, and its brackets match; the series that it uses."""
    for pair in ("()", "{}", "[]"):
        assert expression.count(pair[0]) == expression.count(pair[1]), expression
    unquoted = re.sub(r'"[^"]*"', "", expression)
    names = set(re.findall(r"(?<![\w:])(?:tidegate[\w:]*|up)(?![\w:(])", unquoted))
    assert names, expression
    labels: set[str] = set()
    for name in names:
        assert name in SERIES or name in RECORDED, f"{name} does not exist: {expression}"
        labels |= SERIES[name] if name in SERIES else labels_of(RECORDED[name])
    for by in re.findall(r"\bby \(([^)]*)\)", expression):
        assert set(by.replace(" ", "").split(",")) <= labels, expression
    for matcher in re.findall(r"\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*[=!]", matcher)) <= labels, expression
    return names


def labels_of(expression: str) -> set[str]:
    return {label for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.replace(" ", "").split(",")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_use_metrics_that_exist(rule: dict[str, Any]) -> None:
    check(rule["expr"])
    if "for" in rule:
        assert re.fullmatch(r"\d+[smh]", rule["for"])


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alerts_have_a_runbook_with_a_drill(alert: dict[str, Any]) -> None:
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert page == PAGE
    for part in ("**Check:**", "**Do:**", "**Drill:**"):
        assert part in SECTIONS[anchor], f"{anchor} has no {part}"
    assert alert["labels"]["severity"] in ("warning", "critical") and alert["annotations"]["summary"]
    assert f"`{alert['alert']}`" in TEXT
    used = re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])
    known = labels_of(alert["expr"])
    for name in () if known else check(alert["expr"]):
        known |= SERIES[name] if name in SERIES else labels_of(RECORDED[name])
    assert set(used) <= known


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_use_metrics_that_exist_and_are_explained(panel: dict[str, Any]) -> None:
    assert panel["description"] and panel["targets"]
    for target in panel["targets"]:
        check(target["expr"])
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= (
            labels_of(target["expr"]) or set().union(*(labels_of(RECORDED.get(n, "")) for n in check(target["expr"])))
        )
    assert panel["title"] in SECTIONS["panels"]


def test_panels_have_their_own_ids_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        mine = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & mine and at["x"] + at["w"] <= 24, panel["title"]
        cells |= mine


def test_every_metric_is_shown_somewhere() -> None:
    shown = " ".join([t["expr"] for p in PANELS for t in p["targets"]] + list(RECORDED.values()))
    families = {family.name for family in text_string_to_metric_families(metrics.text().decode())}
    assert [name for name in sorted(families) if name not in shown and not name.endswith("_created")] == []


def test_yaml_parses_and_the_demo_is_scraped() -> None:
    for file in [*DEPLOY.rglob("*.yml")]:
        assert yaml.safe_load(file.read_text()), file
    compose = yaml.safe_load((DEPLOY / "compose.demo.yml").read_text())
    assert {"postgres", "api", "worker", "prometheus", "grafana"} <= compose["services"].keys()
    port = compose["services"]["worker"]["environment"]["TIDEGATE_METRICS_PORT"]
    assert f"127.0.0.1:{port}" in (DEPLOY / "prometheus" / "prometheus.yml").read_text()


def test_every_health_cause_is_in_the_table_of_thresholds() -> None:
    source = (ROOT / "src" / "tidegate" / "flow" / "look" / "verdict.py").read_text()
    codes = set(re.findall(r'_cause\(\s*"(\w+)"', source)) | {"ingress_stalled", "triggers_stalled", "runs_stalled"}
    assert len(codes) == 21
    for code in codes:
        assert f"`{code}`" in SECTIONS["thresholds"], code


def test_every_check_of_doctor_is_documented() -> None:
    source = (ROOT / "src" / "tidegate" / "flow" / "look" / "doctor.py").read_text()
    names = set(re.findall(r'name="([^"]+)"', source))
    assert len(names) > 10
    rows = (ROOT / "docs" / "operations" / "doctor.md").read_text().split("\n## Checks\n")[1].split("\n## ")[0]
    documented = {
        name for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for name in re.findall("`(.+?)`", row)
    }
    assert documented == names | {"due lag of …"}


def test_every_alert_is_tried_before_and_after_its_time() -> None:
    """The cases that `promtool test rules` runs: each alert is silent at first, and fires later."""
    cases = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yml").read_text())["tests"]
    checks = [
        (check["alertname"], bool(check.get("exp_alerts"))) for case in cases for check in case["alert_rule_test"]
    ]
    for rule in ALERTS:
        assert checks.count((rule["alert"], False)) >= 2 and checks.count((rule["alert"], True)) == 1, rule["alert"]


def test_failures_of_loops_count_only_if_they_go_on() -> None:
    """A few seconds of failures are seen for the length of the window: the alert must wait for longer than that."""
    [rule] = [rule for rule in ALERTS if "tidegate_loop_failures_total" in rule["expr"]]
    window, waits = re.findall(r"\[(\d+)m\]", rule["expr"]), re.fullmatch(r"(\d+)m", rule["for"])
    assert waits is not None and [int(minutes) < int(waits[1]) for minutes in window] == [True]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH")
def test_promtool_agrees() -> None:
    for command in (
        ["check", "rules", "rules.yml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["test", "rules", "rules_test.yml"],
    ):
        done = subprocess.run(
            ["promtool", *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
