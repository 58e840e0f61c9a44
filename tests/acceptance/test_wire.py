"""One request, one answer, whatever the bytes and however they are cut; on the short way as on the long one."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Sequence

import pytest
from chaos import wire
from chaos.wire import Sent

from tidegate.api.server import Api, Server, bind
from tidegate.settings import Settings
from tidegate.store.db import Connection

AT_ONCE = 16


@pytest.fixture
async def ways(served: tuple[Api, Server]) -> AsyncIterator[tuple[int, int]]:
    """The ports of two servers of one API: one that has the short way, one that has not."""
    api, short = served
    long = Server(api.app, bind(Settings(port=0)))
    await long.start()
    yield short.port, long.port
    await long.stop()


def alike(answers: Sequence[wire.Answer]) -> list[wire.Answer]:
    """Without what is another each time: ids, times, and the mark of the way."""
    names = rb'[0-9a-f]{8}-[0-9a-f-]{27}|\d{4}-\d\d-\d\dT[0-9:.]+Z|way[01]|wire-\d|(?<="version":)\d+'
    return [answer._replace(body=re.sub(names, b"*", answer.body)) for answer in answers]


async def both(ways: tuple[int, int], make: object, cut: object) -> str | None:
    """What is wrong with the answers to the same bytes on the two ways, or between them."""
    found = []
    for n, port in enumerate(ways):
        sent: list[Sent] = make(b"way%d" % n)  # type: ignore[operator]
        parts: list[bytes] = cut(b"".join(one.raw for one in sent))  # type: ignore[operator]
        async with asyncio.timeout(60):
            answers = await wire.answers(port, parts)
        if (wrong := wire.complaint(sent, answers)) is not None:
            return f"{wrong}: {parts}"
        found.append((alike(answers), [one.is_whole for one in sent]))
    (short, is_whole), (long, _) = found
    # A request that cannot be read is answered, or not, as the other one before it was done with in time or not.
    whole = is_whole.index(False) if False in is_whole else len(is_whole)
    differ = [pair for pair in zip(short[:whole], long[:whole], strict=True) if pair[0] != pair[1]]
    return f"{differ}" if differ else None


async def judged(cases: Sequence[object]) -> None:
    """All of them, a few at a time."""
    left = iter(cases)
    wrong: list[str] = []

    async def some() -> None:
        for case in left:
            if (found := await case) is not None:  # type: ignore[misc]
                wrong.append(found)

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    assert not wrong, wrong[0]


async def smuggled(connection: Connection) -> int:
    count: int = await connection.fetchval("select count(*) from tidegate.workflow_events where source = 'smuggled'")
    return count


CASES = [
    (target, framing, upgrade, expect)
    for target in wire.TARGETS
    for framing in (*wire.FRAMINGS, *wire.BROKEN)
    for upgrade in (wire.UPGRADES if framing in wire.FRAMINGS else ("none", "h2c"))
    for expect in (wire.EXPECTS if upgrade in ("none", "h2c") and framing == "length" else ("none",))
]


async def test_every_target_framing_and_upgrade_gets_its_own_answer(
    ways: tuple[int, int], connection: Connection
) -> None:
    chance = random.Random(1)

    def case(n: int) -> object:
        target, framing, upgrade, expect = CASES[n]
        at = chance.random()

        def make(way: bytes) -> list[Sent]:
            mark = b"%b-%d" % (way, n)
            return [wire.request(mark, target, framing, upgrade, expect), wire.last(mark + b"-last")]

        def cut(raw: bytes) -> list[bytes]:
            middle = int(at * len(raw))
            return [raw[:middle], raw[middle:]] if n % 2 else [raw]

        return both(ways, make, cut)

    await judged([case(n) for n in range(len(CASES))])
    assert await smuggled(connection) == 0


@pytest.mark.parametrize(
    ("target", "framing"),
    [("publish", "length"), ("publish", "small chunks"), ("admin verb", "length"), ("webhook", "small chunks")],
)
async def test_an_upgrade_is_read_alike_wherever_it_is_cut(
    ways: tuple[int, int], connection: Connection, target: str, framing: str
) -> None:
    def make(way: bytes, n: int = 0) -> list[Sent]:
        mark = b"%b-%04d" % (way, n)
        return [wire.request(mark, target, framing, "h2c"), wire.last(mark + b"-last")]

    length = len(b"".join(one.raw for one in make(b"way0")))

    def case(n: int) -> object:
        return both(ways, lambda way: make(way, n), lambda raw: [raw[:n], raw[n:]])

    await judged([case(n) for n in range(1, length)])
    assert await smuggled(connection) == 0


@pytest.mark.parametrize(
    ("path", "status", "stays"),
    [
        (b"/v1/events", 202, True),
        (b"/nowhere", 404, False),
        (b"/v1/webhooks/nobody", 401, False),
        (b"/livez", 405, False),
    ],
)
async def test_who_waits_to_be_asked_and_is_not_has_no_further_request(
    ways: tuple[int, int], path: bytes, status: int, stays: bool
) -> None:
    """It may send its body or not: another's request, which a proxy sends next, would be taken for it."""
    event = b'{"type": "a", "source": "b"}'
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path
    head += b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(event)
    for port in ways:
        answers = await wire.answers(port, [head, event, wire.last(b"next").raw], gap_seconds=0.2)
        assert [answer.status for answer in answers] == ([status, 404] if stays else [status])
        assert answers[0].closes != stays


PATHS = {
    b"/v1/events": 202, b"/v1/%65vents": 202, b"/%761/events": 202, b"http://elsewhere/v1/events": 202,
    b"/v1/events?x=1": 202, b"/v1%2Fevents": 202, b"/v1/events/": 405, b"//v1/events": 404, b"/v1//events": 404,
    b"/v1/./events": 404, b"/x/../v1/events": 404, b"/V1/EVENTS": 404, b"/v1/events%00": 404, b"/v1/%2565vents": 404,
    b"/v1/events%ff": 404, b"/%ff/..%2f": 404, b"/%ef%bf%bd": 404, b"*": 404, b"v1/events": 400,
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=str)
async def test_a_path_has_one_meaning(ways: tuple[int, int], path: bytes) -> None:
    """The octets it stands for, decoded once: nothing is cleaned up, and nobody is sent elsewhere."""
    event = b'{"type": "a", "source": "b"}'
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path
    raw = head + b"content-length: %d\r\n\r\n%b" % (len(event), event) + wire.last(b"next").raw
    short, long = [alike(await wire.answers(port, [raw])) for port in ways]
    assert [answer.status for answer in short[:1]] == [PATHS[path]]
    assert [answer.status for answer in short] == [answer.status for answer in long]


HEAD = b"POST /v1/events HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
# Bytes that cannot be read, and what the answer says of them.
FAULTS = {
    b"\x16\x03\x01\x02\x00\x01canary": "it is TLS",
    b"\x16": "it is TLS",
    b"\x00\x01canary\r\n\r\n": "does not begin with an HTTP method",
    b"canary / HTTP/1.1\r\n\r\n": "does not begin with an HTTP method",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": "it is HTTP/2",
    b"GET /canary HTTP/2.0\r\nhost: localhost\r\n\r\n": "HTTP/2.0 is not supported",
    b"GET /canary HTTP/9.9\r\n\r\n": "its version is not HTTP/1.1",
    b"GET /canary\r\n\r\n": "HTTP/0.9 is not supported",
    b"GET / canary HTTP/1.1\r\n\r\n": "does not end with HTTP/1.1",
    b"GET canary HTTP/1.1\r\n\r\n": "its address",
    b"GET /canary\xff HTTP/1.1\r\n\r\n": "its address",
    b"GET http://canary:x/ HTTP/1.1\r\nhost: canary\r\n\r\n": "its address",
    HEAD + b"canary canary: x\r\n\r\n": "a header name",
    HEAD + b"canary : x\r\n\r\n": "a space before the colon",
    HEAD + b": canary\r\n\r\n": "a header name is empty",
    HEAD + b"canary\r\n\r\n": "a header name",
    HEAD + b"x: y\r\n canary\r\n\r\n": "on a second line",
    HEAD + b"x: canary\x00\r\n\r\n": "a control character",
    b"GET /canary HTTP/1.1\nhost: localhost\n\n": "does not end with CR LF",
    HEAD + b"x: canary\ny: z\r\n\r\n": "does not end with CR LF",
    HEAD + b"x: canary\ry: z\r\n\r\n": "does not end with CR LF",
    HEAD + b"content-length: canary\r\n\r\n": "content-length is not a number",
    HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n": "Duplicate Content-Length",
    HEAD + b"transfer-encoding: chunked\r\n\r\ncanary": "chunk size",
    b"POST /v1/events HTTP/1.1\r\ncontent-length: 6\r\n\r\ncanary": "the header host is missing",
    b"GET /livez HTTP/1.1\r\nx: canary\r\n\r\n": "the header host is missing",
    HEAD + b"Host: localhost\r\ncontent-length: 0\r\n\r\n": "the header host occurs more than once",
    HEAD + b"host: canary\r\ncontent-length: 0\r\n\r\n": "the header host occurs more than once",
}


@pytest.mark.parametrize("raw", FAULTS, ids=str)
async def test_a_refusal_says_what_is_wrong_and_repeats_nothing(ways: tuple[int, int], raw: bytes) -> None:
    for port in ways:
        for parts in ([raw], [raw[:1], raw[1:]]):
            [answer] = await wire.answers(port, parts)
            assert (answer.status, answer.closes) == (400, True)
            assert FAULTS[raw] in json.loads(answer.body)["detail"] and b"canary" not in answer.body, answer.body


async def test_the_version_before_needs_no_host(ways: tuple[int, int]) -> None:
    for port in ways:
        assert [one.status for one in await wire.answers(port, [b"GET /livez HTTP/1.0\r\n\r\n"])] == [200]


async def test_random_connections(address: str, shared_url: str) -> None:
    found = await wire.attack(int(address.rpartition(":")[2]), shared_url, 2000, random.randrange(1_000_000))
    assert found.is_clean, wire.table(found)
    assert found.requests >= 2000
