"""`--local`: the times of every command in the zone of the machine, with its name."""

from __future__ import annotations

import json
import re
from typing import Any

import click
import httpx
import pytest

from tests.acceptance.test_sources import ok
from tests.processes import run
from tidegate.cli import cli
from tidegate.client import Client

TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: (\w+))?")


def act(address: str, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.request(method, f"{address}{path}", json=body)


@pytest.fixture(scope="module")
def scene(address: str) -> str:
    """Something of each kind that has a time."""
    workflow = {"slug": "post", "kind": "http", "url": "https://example.com/hook"}
    ok(act(address, "POST", "/v1/workflows", workflow), 201)
    made = ok(act(address, "POST", "/v1/workflows/post/triggers", {"name": "t", "event_type": "tick"}), 201)
    ok(act(address, "POST", f"/admin/triggers/{made['id']}/pause", {"duration_ms": 3_600_000, "reason": "x"}))
    ok(act(address, "POST", "/admin/sources/shop/pause", {"duration_ms": 3_600_000, "reason": "x"}))
    with Client(address) as client:
        client.publish("tick", source="shop", payload={}, id="e-1")
    return address


@pytest.mark.parametrize(
    "words",
    [
        "events list", "events show e-1", "explain e-1", "triggers show post/t", "triggers list",
        "triggers versions post/t",
        "sources list", "audit list", "health", "triggers test post/t --since 1h", "sources pause shop --for 1h",
        "top --once --interval 100ms",
    ],
)  # fmt: skip
def test_times_are_local_on_request(scene: str, words: str) -> None:
    env = {"TIDEGATE_URL": scene, "TZ": "Asia/Tokyo"}
    local, utc = run(*words.split(), "--local", env=env), run(*words.split(), env=env)
    zones = TIME.findall(local.stdout)
    assert zones and set(zones) == {"JST"}, local.stdout + local.stderr
    assert TIME.search(utc.stdout) and "JST" not in utc.stdout, utc.stdout
    assert "UTC" not in local.stdout


def test_json_stays_in_utc(scene: str) -> None:
    given = run("events", "show", "e-1", "--local", "--json", env={"TIDEGATE_URL": scene, "TZ": "Asia/Tokyo"})
    assert json.loads(given.stdout)["received_at"].endswith("Z")


def test_every_command_that_prints_what_the_api_says_has_it() -> None:
    def commands(command: click.Command) -> list[click.Command]:
        if not isinstance(command, click.Group):
            return [command]
        context = click.Context(command)
        return [one for name in command.list_commands(context) if (found := command.get_command(context, name))
                for one in commands(found)]  # fmt: skip

    missing = [
        command.name
        for command in commands(cli)
        if {"as_json"} <= {p.name for p in command.params}
        and "--local" not in {o for p in command.params for o in p.opts}
    ]
    assert missing == ["prune"], "what it deletes has no time of the day"
