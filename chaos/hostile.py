"""`python -m chaos.hostile`: thousands of requests that nobody in his right mind would send, to every route there is.

Nothing may be answered with a 500, nothing may be left without an answer, and the process must answer others meanwhile.
Afterwards an honest event still goes all the way.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import asyncpg
import msgspec
import uvloop

from chaos.cluster import Cluster
from chaos.http import request
from tidegate.telemetry import logs

PATIENCE_SECONDS = 120.0
WAIT_SECONDS = 30.0
TOGETHER = 16

TEXTS = [
    "", " ", "\x00", "a\x00b", "\ud800", "\u202egnp.exe", "😀" * 300, "x" * 5000, "../../etc/passwd", "%00",
    "%ff", "*", ".*",
    "'; drop table tidegate.workflow_events; --", "{{ event }}", "${jndi:ldap://x}", "1e400", "9" * 400, "null", "-1",
    "00000000-0000-0000-0000-000000000000", "2016-12-31T23:59:60Z", "9999-12-31T23:59:59Z", "\r\nx-injected: 1", "🏳️‍🌈",
]  # fmt: skip
NUMBERS: list[Any] = [0, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**400, 1e308, -0.0, 5e-324, True, None]
PATTERNS = [
    "(a+)+$",
    "(a|a)*$",
    "(.*a){20}",
    "([a-z]+)*[A-Z]",
    "(?=a)",
    "\\1",
    "[",
    "a{1000}{1000}",
    "(x+x+)+y",
    "(?i)(a?){50}a{50}",
]
TEMPLATES = [
    "{% for a in (1..1000000) %}{% for b in (1..1000000) %}x{% endfor %}{% endfor %}",
    "{{ event.payload.text | append: event.payload.text | append: event.payload.text }}" * 50,
    "{% assign x = 'aaaaaaaaaa' %}" + "{% assign x = x | append: x %}" * 40 + "{{ x }}",
    "{% include 'secret' %}", "{{ event.__class__ }}", "{{ 'x' | times: 9999999999 }}", "{% raw %}", "{{",
    "{% cycle %}",
]  # fmt: skip
EXPRESSIONS = [
    "event.payload.text.matches('(a+)+$')", "[1,2,3].map(a, [1,2,3].map(b, [1,2,3].map(c, a*b*c)))", "1/0", "event.",
    "(" * 500 + "1" + ")" * 500, "event.payload.a.b.c.d.e", "'a' * 1000000000", "size(event) > 0 && " * 200 + "true",
    "timestamp('x')", "event.payload.text + event.payload.text",
]  # fmt: skip
PATHS = [
    "$..*..*..*",
    "$" + "[*]" * 100,
    "$['" + "a" * 5000 + "']",
    "$.x[?(@.a == @.b)]",
    "$[::-1]",
    "not a path",
    "$..[?@..*]",
]
RAW = [
    b"", b"{", b"[]", b"{}{}", b"\xef\xbb\xbf{}", b"\xff\xfe", b"null", b'"x"', b"[" * 100_000, b'{"a":' * 20_000,
    b"[" * 5000 + b"]" * 5000, b'{"type":"a","source":"s","payload":{"x":NaN}}', b"1e999", b" " * 1_100_000,
    b'{"type":"a","type":"b","source":"s"}', b'{"x":"\\ud800"}', gzip.compress(b" " * 1_000_000), b"\x00" * 1000,
]  # fmt: skip
MEDIA = [
    "application/json",
    "application/cloudevents+json",
    "application/cloudevents-batch+json",
    "text/plain",
    "x",
    "",
]


class Route(NamedTuple):
    method: str
    path: str


class Hostile:
    """Makes requests from a seed."""

    def __init__(self, seed: int, routes: list[Route]) -> None:
        self._chance = random.Random(seed)
        self._routes = routes

    def request(self) -> tuple[str, str, bytes | None, dict[str, str]]:
        """A method, a path, a body and headers."""
        chance = self._chance
        if (fate := chance.random()) < 0.15:  # what can be saved and what it is then given
            return "POST", "/v1/workflows/plain/triggers", _encoded(self._trigger(1)), {}
        if fate < 0.3:
            payload = {"text": chance.choice(["a" * 5000, "ab" * 3000 + "!", *TEXTS[:8]]), "x": self._value(3)}
            return "POST", "/v1/events", _encoded({"type": "chaos.hostile", "source": "shop", "payload": payload}), {}
        route = chance.choice(self._routes) if chance.random() < 0.6 else Route("POST", "/v1/events")
        path = route.path
        while "{" in path:
            head, _, rest = path.partition("{")
            path = head + self._segment() + rest.partition("}")[2]
        if chance.random() < 0.3:
            names = ["limit", "cursor", "type", "source", "from", "kind", "status", "x"]
            path += f"?{chance.choice(names)}={self._segment()}"
        headers = {"content-type": chance.choice(MEDIA)} if chance.random() < 0.3 else {}
        if chance.random() < 0.1:
            headers |= {f"ce-{name}": self._header() for name in ("id", "type", "source", "specversion", "time")}
        if chance.random() < 0.05:
            headers["content-encoding"] = "gzip"
        method = route.method if chance.random() < 0.9 else chance.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
        return method, path, None if method == "GET" else self._body(route), headers

    def _segment(self) -> str:
        text = self._chance.choice([*TEXTS, "stopped", "plain", "shop"])
        return quote(text.encode("utf-8", "surrogatepass")[:1000], safe="") or "x"

    def _header(self) -> str:
        text = self._chance.choice(TEXTS).encode("ascii", "ignore").decode()
        return "".join(c for c in text if c.isprintable())[:500]

    def _body(self, route: Route) -> bytes:
        chance = self._chance
        if chance.random() < 0.2:
            return chance.choice(RAW)
        if "trigger" in route.path:
            return _encoded(self._trigger(chance.randrange(1, 4)))
        if route.path == "/v1/events":
            made = self._event()
            return _encoded([made] * chance.choice([1, 3, 1500]) if chance.random() < 0.1 else made)
        fields = [
            "limit",
            "interval_ms",
            "until",
            "duration_ms",
            "reason",
            "slug",
            "url",
            "secret",
            "name",
            "scopes",
            "config",
        ]
        return _encoded({name: self._value(2) for name in chance.sample(fields, 3)})

    def _event(self) -> dict[str, Any]:
        chance = self._chance
        made: dict[str, Any] = {"type": "chaos.hostile", "source": "shop", "payload": {"text": "a" * 40 + "!"}}
        for name in chance.sample(["type", "source", "id", "payload", "occurred_at", "ttl_ms", "metadata", "extra"], 2):
            made[name] = self._value(4)
        return made

    def _trigger(self, wild_fields: int) -> dict[str, Any]:
        chance = self._chance
        made: dict[str, Any] = {"name": f"t{chance.randrange(10**9)}", "event_type": "chaos.hostile"}
        wild: dict[str, Any] = {
            "predicates": [
                {"path": chance.choice([*PATHS, "$.text"]), "operator": "regex", "value": chance.choice(PATTERNS)}
            ],
            "where": chance.choice(EXPRESSIONS),
            "parameter_template": {"x": chance.choice(TEMPLATES)},
            "idempotency_key": chance.choice(TEMPLATES),
            "concurrency_key": chance.choice(TEMPLATES),
            "throttle_count": chance.choice(NUMBERS),
            "max_concurrency": chance.choice(NUMBERS),
            "event": self._event(),
            "status": self._value(1),
        }
        return made | {name: wild[name] for name in chance.sample(list(wild), wild_fields)}

    def _value(self, depth: int) -> Any:
        chance = self._chance
        kind = chance.random()
        if depth and kind < 0.25:
            return {chance.choice(TEXTS): self._value(depth - 1) for _ in range(chance.randrange(4))}
        if depth and kind < 0.45:
            return [self._value(depth - 1) for _ in range(chance.randrange(4))]
        return chance.choice(TEXTS if kind < 0.75 else NUMBERS)


def _encoded(value: Any) -> bytes:
    """JSON as Python writes it: with surrogates and numbers of any size, as hostile clients do."""
    return json.dumps(value).encode()


class Found(msgspec.Struct, kw_only=True):
    """What came of it."""

    seed: int
    requests: int
    statuses: dict[int, int]
    server_errors: list[str] = []
    unanswered: list[str] = []
    unsigned_webhooks: int = 0
    shut_out: list[str] = []
    longest_seconds: float = 0.0
    probes: int = 0
    probes_unanswered: int = 0
    longest_probe_seconds: float = 0.0
    honest_run_succeeded: bool = False

    @property
    def is_clean(self) -> bool:
        return (
            not self.server_errors
            and not self.unanswered
            and not self.shut_out
            and not self.probes_unanswered
            and self.honest_run_succeeded
        )


async def attack(url: str, count: int, seed: int) -> Found:
    """Send so many requests, a few at a time, while somebody else asks whether the process lives."""
    document = (await request(url, "GET", "/openapi.json", seconds=WAIT_SECONDS)).json()
    methods = ("get", "post", "put", "patch", "delete")
    routes = [Route(m.upper(), path) for path, item in document["paths"].items() for m in item if m in methods]
    hostile, statuses = Hostile(seed, routes), Counter[int]()
    found = Found(seed=seed, requests=count, statuses={})
    left = iter(range(count))
    is_over = asyncio.Event()

    async def client() -> None:
        for n in left:
            method, path, body, headers = hostile.request()
            at = time.monotonic()
            response = await request(url, method, path, body, headers=headers, seconds=WAIT_SECONDS)
            found.longest_seconds = max(found.longest_seconds, time.monotonic() - at)
            statuses[response.status] += 1
            if response.status == 401 and response.headers.get("www-authenticate", "").startswith("Signature "):
                found.unsigned_webhooks += 1  # as it must be: webhooks have no token, and nobody signed this
            elif response.status in (401, 403):
                found.shut_out.append(f"{n}: {response.status} to {method} {path[:200]} without any authentication")
            elif response.status == 0:
                found.unanswered.append(f"{n}: {method} {path[:200]} {(body or b'')[:200]!r}")
            elif response.status >= 500 and response.status != 503:
                found.server_errors.append(f"{n}: {response.status} to {method} {path[:200]} {(body or b'')[:300]!r}")

    async def probe() -> None:
        while not is_over.is_set():
            at = time.monotonic()
            response = await request(url, "GET", "/livez", seconds=WAIT_SECONDS)
            found.probes += 1
            found.probes_unanswered += response.status != 200
            found.longest_probe_seconds = max(found.longest_probe_seconds, time.monotonic() - at)
            await asyncio.sleep(0.1)

    probing = asyncio.create_task(probe())
    await asyncio.gather(*(client() for _ in range(TOGETHER)))
    is_over.set()
    await probing
    found.statuses = dict(sorted(statuses.items()))
    return found


async def honest(cluster: Cluster) -> bool:
    """An event of somebody who means no harm is launched and run, whatever the others left behind."""
    body = msgspec.json.encode({"type": "chaos.plain", "source": "honest", "id": "honest-1", "payload": {}})
    response = await request(cluster.urls[0], "POST", "/v1/events", body, seconds=WAIT_SECONDS)
    if response.status != 202:
        return False
    connection = await asyncpg.connect(cluster.database_url)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if await connection.fetchval(
                "select r.status = 'succeeded' from tidegate.workflow_runs r "
                "  join tidegate.workflow_events e on e.id = r.event_id where e.external_id = 'honest-1' "
                "   and r.workflow_definition_id = (select id from tidegate.workflow_definitions where slug = 'plain')"
            ):
                return True
            await asyncio.sleep(0.2)
        return False
    finally:
        await connection.close()


async def run(folder: Path, count: int, seed: int) -> Found:
    """On a cluster of its own: one API, one worker."""
    cluster = Cluster(folder, queue="postgres", apis=1, workers=1)
    try:
        await cluster.start()
        found = await attack(cluster.urls[0], count, seed)
        found.honest_run_succeeded = await honest(cluster)
        return found
    finally:
        cluster.stop()


def table(found: Found) -> str:
    """For people."""
    rows: Mapping[str, Any] = {
        "hostile requests, seed": f"{found.requests}, {found.seed}",
        "answers by status": ", ".join(f"{status} {count}" for status, count in found.statuses.items()),
        "500s": len(found.server_errors),
        "without an answer": len(found.unanswered),
        "401 to unsigned webhooks, to others": f"{found.unsigned_webhooks} (as it must be), {len(found.shut_out)}",
        "longest answer": f"{found.longest_seconds:.2f} s",
        "probes beside it, unanswered": f"{found.probes}, {found.probes_unanswered}",
        "longest probe": f"{found.longest_probe_seconds:.2f} s",
        "an honest event afterwards": "ran" if found.honest_run_succeeded else "DID NOT RUN",
    }
    lines = [f"{name:<43} {value}" for name, value in rows.items()]
    return "\n".join([*lines, *found.server_errors[:10], *found.unanswered[:10], *found.shut_out[:10]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.hostile", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run [random]")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    logs.configure("warning", "console")
    seed = random.randrange(1, 1_000_000) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="tidegate-hostile-", ignore_cleanup_errors=True) as folder:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(run(Path(folder), arguments.requests, seed))
        if arguments.out is not None:
            arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        print(table(found))
        if not found.is_clean:
            for log in sorted((Path(folder) / "logs").glob("*.log")):
                print(f"\n{log.name}:\n{log.read_text(errors='replace')[-3000:]}")
    sys.exit(0 if found.is_clean else 1)


if __name__ == "__main__":
    main()
