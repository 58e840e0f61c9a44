"""Requests made from the OpenAPI document, valid and not, against a real server: no 500, and only what is documented.

The requests are the same each time. `TIDEGATE_FUZZ_EXAMPLES=500` makes more of them for each operation.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.acceptance.conftest import DEMO
from tests.processes import Process, api, run, worker
from tidegate.api import openapi
from tidegate.api.server import ROUTES

EXAMPLES = int(os.environ.get("TIDEGATE_FUZZ_EXAMPLES", "8"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
# A producer's id may contain slashes: GET /v1/events/x/replay asks for the event x/replay.
MAY_BE_AN_ID = ("POST /v1/events/{id}/replay", "POST /v1/events/{id}/cancel")
DOCUMENT = openapi.document(ROUTES)
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
LABELS = [f"{method.upper()} {path}" for path, operations in DOCUMENT["paths"].items() for method in operations]
WITHOUT_TOKEN = schemathesis.openapi.from_dict(DOCUMENT)
WITHOUT_TOKEN.config.phases.coverage.enabled = False  # who asks is checked before what they ask
BOUNDED = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


class Fuzzed:
    """A server, an admin's token, and the names of things that exist."""

    def __init__(self, process: Process, url: str, secret: str, known: dict[str, str]) -> None:
        self.process, self.url, self.known = process, url, known
        self.headers = {"authorization": f"Bearer {secret}"}
        self.session = requests.Session()
        self.session.trust_env = False
        self.answers: Counter[int] = Counter()


@pytest.fixture(scope="module")
def fuzzed(shared_url: str) -> Iterator[Fuzzed]:
    secret = run("token", "create", "fuzz", "--scope", "admin", env={"TIDEGATE_DATABASE_URL": shared_url})
    headers = {"authorization": f"Bearer {secret.stdout.strip()}"}
    with api(shared_url, TIDEGATE_AUTH="on") as (process, url), worker(shared_url, DEMO):
        with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
            order = {"type": "order.created", "source": "shop.api", "payload": {"id": 7, "amount": 120}}
            event = http.post("/v1/events", json=order).json()["id"]
            [trigger] = http.get("/v1/workflows/fulfil/triggers").json()["triggers"]
            http.put("/admin/sources/shop.api/limit", json={"limit": 9, "interval_ms": 1000})
            http.post("/admin/tokens", json={"name": "victim", "scopes": ["read"]})
        known = {"id": event, "slug": "fulfil", "trigger_id": trigger["id"], "source": "shop.api", "token": "victim"}
        made = Fuzzed(process, url, secret.stdout.strip(), known)
        yield made
        made.session.close()


def call(case: Case, fuzzed: Fuzzed, headers: dict[str, str]) -> Any:
    """Every other call is about something that exists, where we know of any."""
    if fuzzed.answers.total() % 2 and case.path_parameters:
        case.path_parameters = {n: fuzzed.known.get(n, value) for n, value in case.path_parameters.items()}
    answer = case.call(base_url=fuzzed.url, headers=headers, session=fuzzed.session)
    fuzzed.answers[answer.status_code] += 1
    return answer


def explore(label: str, schema: Any, examples: int, judge: Callable[[Case], None]) -> int:
    """Judge the requests that are made for one operation; how many.

    Its own parametrization gives all its tests one name, of which pytest-xdist runs only the first.
    """
    method, path = label.split(" ")
    operation = schema[path][method]
    judged = 0

    @settings(BOUNDED, max_examples=examples)
    def check(case: Case) -> None:
        nonlocal judged
        judged += 1
        judge(case)

    build_operation_test(
        config=schema.config, operation=operation, test_func=check, given_kwargs={},
        feedback=FeedbackSources(),
    )()  # fmt: skip
    return judged


@pytest.mark.parametrize("label", LABELS)
def test_only_documented_answers(fuzzed: Fuzzed, label: str) -> None:
    def judge(case: Case) -> None:
        checks = [check for check in CHECKS if check is not unsupported_method or label not in MAY_BE_AN_ID]
        case.validate_response(call(case, fuzzed, fuzzed.headers), checks=checks)

    assert explore(label, SCHEMA, EXAMPLES, judge) > 1


@pytest.mark.parametrize("label", LABELS)
def test_without_a_token_nobody_learns_anything(fuzzed: Fuzzed, label: str) -> None:
    method, path = label.split(" ")
    is_public = not DOCUMENT["paths"][path][method.lower()]["security"]

    def judge(case: Case) -> None:
        answer = call(case, fuzzed, {})
        case.validate_response(answer, checks=[not_a_server_error])
        if not is_public and answer.status_code != 404:  # a path that no route has
            assert answer.status_code == 401, (label, answer.status_code)

    assert explore(label, WITHOUT_TOKEN, 3, judge) >= 1


def test_nothing_unexpected_was_logged(fuzzed: Fuzzed) -> None:
    assert "api.unexpected" not in fuzzed.process.output


def test_the_document_is_the_one_that_is_served(fuzzed: Fuzzed) -> None:
    assert httpx.get(f"{fuzzed.url}/openapi.json", trust_env=False).json() == DOCUMENT
