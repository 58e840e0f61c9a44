"""Every way to publish ends in the same finished run: CLI, HTTP, clients, CloudEvents SDK, SQL, SDK."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import operator
import os
import subprocess
import sys
import time
from typing import Any

import asyncpg
import httpx
import pytest
from cloudevents.core.bindings.http import to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent

from tests.processes import run
from tidegate import AsyncClient, Client, Tidegate

_ids = itertools.count(1000)
_http = httpx.Client(timeout=30, trust_env=False)


def finished_run(address: str, event_id: str, workflow: str = "fulfil") -> dict[str, Any]:
    """The run of the demo that the event launched, once it has ended."""
    with Client(address) as client:
        for _ in range(2000):
            for found in client.request("GET", "/v1/runs", event_id=event_id)["runs"]:
                if found["workflow"] == workflow and found["finished_at"]:
                    return dict(found)
            time.sleep(0.005)
    raise AssertionError(f"no finished run for {event_id}")


def order() -> dict[str, Any]:
    return {"id": next(_ids), "amount": 120}


def test_cli(demo: str) -> None:
    env = {"TIDEGATE_URL": demo}
    payload = order()
    told = ("publish", "order.created", "--source", "shop.api", "--data", json.dumps(payload))
    published = run(*told, env=env)
    assert published.returncode == 0 and published.stdout.startswith("accepted ")
    event_id = published.stdout.split()[1]
    assert finished_run(demo, event_id)["output"] == {
        "order": payload["id"],
        "charged": 120.0,
        "receipt": f"r-{payload['id']}",
    }
    listed = run("runs", "list", env=env).stdout
    assert "fulfil" in listed and "succeeded" in listed and f"r-{payload['id']}" in listed
    assert event_id in run("events", "list", "--type", "order.created", env=env).stdout
    assert json.loads(run("events", "show", event_id, "--json", env=env).stdout)["payload"] == payload
    shown = run("events", "show", event_id, env=env).stdout
    assert event_id in shown and "  payload " in shown
    story = run("explain", event_id, env=env).stdout
    assert "fulfil succeeded" in story and "audit succeeded" in story
    assert json.loads(run("runs", "list", "--json", env=env).stdout)["runs"]
    assert "order.created" in run("workflows", "list", env=env).stdout


def test_cli_payload_from_file_and_standard_input(demo: str, tmp_path: Any) -> None:
    file = tmp_path / "order.json"
    file.write_text(json.dumps(order()))
    for given in ({"data": f"@{file}"}, {"data": "-", "input": json.dumps(order())}):
        data = given.pop("data")
        told = ("publish", "order.created", "--source", "shop.api", "--data", data, "--json")
        published = run(*told, env={"TIDEGATE_URL": demo}, **given)
        assert published.returncode == 0, published.stderr
        assert finished_run(demo, json.loads(published.stdout)["id"])["status"] == "succeeded"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("publish", "a.b", "--source", "s", "--data", "{"), 2, "--data is not JSON"),
        (("publish", "a.b", "--source", "s", "--data", "[1]"), 2, "must be a JSON object"),
        (("publish", "a.b", "--source", "s", "--data", "@/no/such/file"), 2, "/no/such/file cannot be read"),
        (("publish", "a.b"), 2, "Missing option '--source'"),
        (("publish", "a b", "--source", "s"), 1, "TYPE: contains ' '; expected 1 to 200 letters"),
        (("events", "show", "no-such"), 1, "no event 'no-such'"),
        (("nonsense",), 2, "No such command 'nonsense'"),
    ],
)
def test_cli_refusals(address: str, arguments: tuple[str, ...], status: int, says: str) -> None:
    refused = run(*arguments, env={"TIDEGATE_URL": address})
    assert (refused.returncode, says in refused.stderr) == (status, True), refused.stderr


def test_cli_without_a_server_says_so() -> None:
    refused = run("runs", "list", env={"TIDEGATE_URL": "http://127.0.0.1:9"})
    assert refused.returncode == 1
    assert "no answer from Tidegate at http://127.0.0.1:9" in refused.stderr


def test_http_with_headers_for_correlation(demo: str) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    for headers, expected in (
        ({"traceparent": f"00-{trace}-b7ad6b7169203331-01", "x-request-id": "r-1"}, trace),
        ({"x-request-id": "r-2"}, "r-2"),
        ({"traceparent": "nonsense", "x-request-id": "r-3"}, "r-3"),
        ([("traceparent", f"00-{trace}-b7ad6b7169203331-01")] * 2 + [("x-request-id", "r-5")], "r-5"),
    ):
        body = {"type": "order.created", "source": "shop.api", "payload": order()}
        answer = _http.post(f"{demo}/v1/events", json=body, headers=headers).json()
        assert _http.get(f"{demo}/v1/events/{answer['id']}").json()["correlation_id"] == expected
    own = {"type": "a.b", "source": "s", "correlation_id": "mine"}
    answer = _http.post(f"{demo}/v1/events", json=own, headers={"x-request-id": "r-4"}).json()
    assert _http.get(f"{demo}/v1/events/{answer['id']}").json()["correlation_id"] == "mine"


def test_batch_answers_in_order(demo: str) -> None:
    events = [{"type": "a.b", "source": "s", "id": f"batch-{next(_ids)}"} for _ in range(20)]
    answer = _http.post(f"{demo}/v1/events", json=events)
    assert answer.status_code == 202
    assert [e["external_id"] for e in answer.json()["events"]] == [e["id"] for e in events]
    again = _http.post(f"{demo}/v1/events", json=events).json()["events"]
    assert {e["status"] for e in again} == {"duplicate"}
    assert [e["id"] for e in again] == [e["id"] for e in answer.json()["events"]]


async def test_clients(demo: str) -> None:
    with Client(demo) as client:
        receipt = client.publish("order.created", source="shop.api", payload=order(), id=f"sync-{next(_ids)}")
        assert receipt.status == "accepted"
        assert finished_run(demo, receipt.id)["status"] == "succeeded"
        many = client.publish_many([{"type": "a.b", "source": "s"}] * 3)
        assert [r.status for r in many] == ["accepted"] * 3
    async with AsyncClient(demo) as client:
        receipts = await asyncio.gather(
            *(client.publish("order.created", source="shop.api", payload=order()) for _ in range(5))
        )
        assert len({r.id for r in receipts}) == 5
        assert len(await client.publish_many([{"type": "a.b", "source": "s"}] * 2)) == 2


async def test_sdk_publishes_into_the_database(demo: str, shared_url: str) -> None:
    async with Tidegate(database_url=shared_url) as app:
        accepted = await app.publish("order.created", source="shop.sdk", payload=order(), id=f"sdk-{next(_ids)}")
    assert accepted.status == "accepted"
    assert finished_run(demo, str(accepted.id))["status"] == "succeeded"


def cloud_event(**attributes: Any) -> CloudEvent:
    given = {"type": "order.created", "source": "shop.cloud", "id": f"ce-{next(_ids)}"}
    return CloudEvent(given | attributes, order())


@pytest.mark.parametrize("mode", [to_binary_event, to_structured_event])
def test_cloudevents_sdk_binary_and_structured(demo: str, mode: Any) -> None:
    event = cloud_event(subject="orders/7", correlationid="corr-ce")
    message = mode(event)
    answer = _http.post(f"{demo}/v1/events", content=message.body, headers=message.headers)
    assert answer.status_code == 202, answer.text
    assert answer.json()["external_id"] == event.get_id()
    assert finished_run(demo, answer.json()["id"])["output"]["order"] == event.get_data()["id"]
    shown = _http.get(f"{demo}/v1/events/{event.get_id()}").json()
    assert shown["payload"] == event.get_data()
    assert (shown["metadata"]["subject"], shown["correlation_id"]) == ("orders/7", "corr-ce")
    again = _http.post(f"{demo}/v1/events", content=message.body, headers=message.headers)
    assert again.json()["status"] == "duplicate"


def test_cloudevents_batch_of_sdk_events(demo: str) -> None:
    messages = [to_structured_event(cloud_event()) for _ in range(3)]
    body = b"[" + b",".join(m.body for m in messages) + b"]"
    answer = _http.post(
        f"{demo}/v1/events", content=body, headers={"content-type": "application/cloudevents-batch+json"}
    )
    assert answer.status_code == 202, answer.text
    for published in answer.json()["events"]:
        assert finished_run(demo, published["id"])["status"] == "succeeded"


def test_cloudevents_uri_sources_other_data_and_mistakes(demo: str) -> None:
    plain = CloudEvent({"type": "com.example.sample", "source": "https://example.com/producer?x=1"}, {"message": "hi"})
    message = to_binary_event(plain)
    assert _http.post(f"{demo}/v1/events", content=message.body, headers=message.headers).status_code == 202
    headers = {"ce-specversion": "1.0", "ce-type": "img", "ce-source": "cam", "ce-id": f"img-{next(_ids)}"}
    image = _http.post(f"{demo}/v1/events", content=b"\x89PNG", headers=headers | {"content-type": "image/png"})
    assert _http.get(f"{demo}/v1/events/{image.json()['id']}").json()["payload"] == {"data_base64": "iVBORw=="}
    wrong = _http.post(f"{demo}/v1/events", content=b"{}", headers=headers | {"ce-specversion": "0.3"})
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "ce-specversion")
    missing = {k: v for k, v in headers.items() if k != "ce-id"}
    refused = _http.post(f"{demo}/v1/events", content=b"{}", headers=missing)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "id")


CE = {"ce-specversion": "1.0", "ce-type": "t", "ce-source": "edges"}


def shown_event(demo: str, answer: httpx.Response) -> Any:
    assert answer.status_code == 202, answer.text
    return _http.get(f"{demo}/v1/events/{answer.json()['id']}").json()


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"a%20b%C3%A9", "a bé"),
        ("bé".encode(), "bé"),
        (b'"quoted \\"x\\" %41"', 'quoted "x" A'),
        (b"100%25", "100%"),
        (b"%2541", "%41"),
        (b'"', '"'),
    ],
)
def test_cloudevents_headers_are_unescaped_once(demo: str, header: bytes, expected: str) -> None:
    headers = {**CE, "ce-id": f"h-{next(_ids)}", "ce-subject": header}
    answer = _http.post(f"{demo}/v1/events", content=b"{}", headers=headers)  # type: ignore[arg-type]
    assert shown_event(demo, answer)["metadata"]["subject"] == expected


@pytest.mark.parametrize("header", [b"%FF", b"%C3", b"a\xffb", b"%ED%A0%80"])
def test_cloudevents_headers_that_are_not_utf8_are_refused(demo: str, header: bytes) -> None:
    """Or two ids that differ would become one event."""
    answer = _http.post(f"{demo}/v1/events", content=b"{}", headers={**CE, "ce-id": header})  # type: ignore[arg-type]
    assert answer.status_code == 422, answer.text
    assert "ce-id" in {error["field"] for error in answer.json()["errors"]}


@pytest.mark.parametrize(
    ("media", "body", "payload"),
    [
        (None, b'{"a": 1}', {"a": 1}),
        (None, b"\x89PNG", {"data_base64": "iVBORw=="}),
        (None, b"", {}),
        ("text/json", b"[1]", {"data": [1]}),
        ("application/vnd.x+json; charset=utf-8", b'{"a": 1}', {"a": 1}),
        ("application/json", b"null", {}),
        ("text/plain", b'{"a": 1}', {"data_base64": "eyJhIjogMX0="}),
    ],
)
def test_cloudevents_data_in_binary_mode(demo: str, media: str | None, body: bytes, payload: Any) -> None:
    headers = {**CE, "ce-id": f"d-{next(_ids)}"} | ({"content-type": media} if media else {})
    assert shown_event(demo, _http.post(f"{demo}/v1/events", content=body, headers=headers))["payload"] == payload


def test_cloudevents_structured_edges(demo: str) -> None:
    kind = {"content-type": "application/cloudevents+json"}
    event = {
        "specversion": "1.0",
        "type": "t",
        "source": "edges",
        "id": f"s-{next(_ids)}",
        "time": None,
        "subject": None,
    }
    answer = _http.post(f"{demo}/v1/events", json=event | {"data": {"a": 1}, "data_base64": None}, headers=kind)
    found = shown_event(demo, answer)
    assert found["payload"] == {"a": 1} and "subject" not in found["metadata"]
    both = _http.post(f"{demo}/v1/events", json=event | {"data": 1, "data_base64": "eA=="}, headers=kind)
    assert (both.status_code, both.json()["errors"][0]["field"]) == (422, "data_base64")
    unset = _http.post(f"{demo}/v1/events", json=event | {"id": None}, headers=kind)
    assert (unset.status_code, unset.json()["errors"][0]["field"]) == (422, "id")
    empty = _http.post(
        f"{demo}/v1/events", content=b"[]", headers={"content-type": "application/cloudevents-batch+json"}
    )
    assert (empty.status_code, empty.json()) == (202, {"events": []})
    assert _http.post(f"{demo}/v1/events", json=[]).status_code == 422


async def test_sql_inside_a_transaction(demo: str, shared_url: str) -> None:
    connection = await asyncpg.connect(shared_url)
    try:
        publish = "select tidegate.publish('order.created', 'shop.sql', $1::jsonb)"
        async with connection.transaction():
            kept = await connection.fetchval(publish, json.dumps(order()))
        with pytest.raises(RuntimeError, match="changed my mind"):
            async with connection.transaction():
                lost = await connection.fetchval(publish, json.dumps(order()))
                raise RuntimeError("changed my mind")
        assert finished_run(demo, kept)["status"] == "succeeded"
        assert _http.get(f"{demo}/v1/events/{lost}").status_code == 404
    finally:
        await connection.close()


def test_a_producers_id_shared_by_two_sources_is_ambiguous(demo: str) -> None:
    shared = f"shared-{next(_ids)}"
    with Client(demo) as client:
        ours = [client.publish("a.b", source=source, id=shared).id for source in ("one", "two")]
    refused = _http.get(f"{demo}/v1/events/{shared}")
    assert refused.status_code == 409
    assert {e["message"].split()[0] for e in refused.json()["errors"]} == set(ours)


def test_pages_do_not_skip_or_repeat(demo: str) -> None:
    with Client(demo) as client:
        ids = [r.id for r in client.publish_many([{"type": "page.test", "source": "pages"}] * 25)]
        seen, cursor = [], None
        while True:
            page = client.request("GET", "/v1/events", type="page.test", limit=7, cursor=cursor)
            seen += [e["id"] for e in page["events"]]
            client.publish("page.test", source="pages")  # newer ones arrive while we read
            cursor = page["next_cursor"]
            if cursor is None:
                break
    assert [e for e in seen if e in ids] == ids[::-1]
    assert len(seen) == len(set(seen))


def test_openapi_describes_every_route(address: str) -> None:
    document = _http.get(f"{address}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {"get", "post"} <= document["paths"]["/v1/events"].keys()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"] and operation["responses"], path
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"#/')[1:]}:
        assert functools.reduce(operator.getitem, reference.split("/"), document), reference


@pytest.mark.parametrize(
    "path", ["/", "/docs", "/static/console.js", "/static/panels.js", "/static/docs.js", "/static/style.css"]
)
def test_pages_are_served_with_a_strict_policy(address: str, path: str) -> None:
    response = _http.get(f"{address}{path}")
    assert response.status_code == 200 and len(response.content) > 100
    assert "default-src 'self'" in response.headers["content-security-policy"]


def test_a_program_that_publishes_keeps_its_own_output(shared_url: str) -> None:
    program = """
import asyncio
from tidegate import Tidegate
from tidegate.telemetry.logs import logger

app = Tidegate()
print(asyncio.run(app.publish("order.created", source="program", payload={})).status)
logger("test").warning("thing.wrong", reason="a warning")
"""
    environment = {"TIDEGATE_DATABASE_URL": shared_url, "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "accepted\n"
    assert "event.accepted" not in done.stderr
    assert "thing.wrong" in done.stderr and "a warning" in done.stderr
