"""`python -m chaos.wire`: requests as bytes, in every framing that there is and some that there is not, in any pieces.

One that can be read gets one answer, its own, unless the one before it ended the connection; what cannot is refused, or
the connection ends; no byte of a body is ever taken for a request. Each connection carries a few requests whose bodies
are requests themselves; every answer must name the request that it answers, and afterwards the database must hold what
was answered and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import asyncpg
import msgspec
import uvloop

from chaos.cluster import Cluster
from tidegate.telemetry import logs

TOGETHER = 16
WAIT_SECONDS = 60.0
SMUGGLED = b"smuggled"
SOURCES = 8
# Of a body: the headers that say how long it is, and the body as it is sent.
Framing = Callable[[bytes], tuple[tuple[bytes, ...], bytes]]


class Sent(NamedTuple):
    """A request as bytes. One that is not whole cannot be read: it is refused, or the connection ends."""

    raw: bytes
    mark: bytes
    statuses: tuple[int, ...]
    is_whole: bool = True
    may_close: bool = False
    is_event: bool = False
    is_pause: bool = False


class Answer(NamedTuple):
    status: int
    closes: bool
    body: bytes


def smuggled(mark: bytes) -> bytes:
    """What an attacker puts into a body."""
    event = b'{"type":"smuggled","source":"smuggled","id":"smuggled-%b"}' % mark
    head = b"POST /v1/events HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(event) + event


class Target(NamedTuple):
    """Where a request goes: its first line, headers and body, and what it is answered once it can be read."""

    method: bytes
    path: bytes
    body: bytes
    statuses: tuple[int, ...]
    headers: tuple[bytes, ...] = ()
    is_event: bool = False
    is_pause: bool = False


def _publish(mark: bytes) -> Target:
    body = b'\r\n{"type": "wire", "source": "wire", "id": "%b"}\r\n\r\n' % mark
    return Target(b"POST", b"/v1/events", body, (202, 503), (b"content-type: application/json",), is_event=True)


def _pause(mark: bytes) -> Target:
    body = b'\r\n{"duration_ms": 60000, "reason": "%b"}\r\n\r\n' % mark
    path = b"/admin/sources/wire-%d/pause" % (zlib.crc32(mark) % SOURCES)
    return Target(b"POST", path, body, (200,), (b"content-type: application/json",), is_pause=True)


TARGETS: dict[str, Callable[[bytes], Target]] = {
    "publish": _publish,
    "admin verb": _pause,
    "not JSON": lambda mark: Target(b"POST", b"/v1/events", smuggled(mark), (400, 415)),
    "webhook": lambda mark: Target(b"POST", b"/v1/webhooks/wire", smuggled(mark), (401,)),
    "signed webhook": lambda mark: Target(
        b"POST", b"/v1/webhooks/wire", smuggled(mark), (401,), (b"webhook-signature: v1,x",)
    ),
    "read": lambda mark: Target(b"GET", b"/v1/events/%b" % mark, smuggled(mark), (404,)),
    "unknown path": lambda mark: Target(b"POST", b"/nowhere/%b" % mark, smuggled(mark), (404,)),
    "wrong method": lambda mark: Target(b"DELETE", b"/v1/events", smuggled(mark), (405,)),
    "alive": lambda mark: Target(b"GET", b"/livez", smuggled(mark), (200,)),
}
# Answers in which the mark of the request is to be found.
MARKED = {"publish", "admin verb", "unknown path"}


def chunked(body: bytes, size: int, extension: bytes = b"", last: bytes = b"0\r\n\r\n") -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts) + last


_CHUNKED = b"transfer-encoding: chunked"
# These can be read.
FRAMINGS: dict[str, Framing] = {
    "length": lambda body: ((b"content-length: %d" % len(body),), body),
    "length with space": lambda body: ((b"Content-Length:   %d " % len(body),), body),
    "one chunk": lambda body: ((_CHUNKED,), chunked(body, len(body) or 1)),
    "small chunks": lambda body: ((b"Transfer-Encoding:  Chunked",), chunked(body, 7)),
    "chunks with extensions": lambda body: ((_CHUNKED,), chunked(body, 50, b";a=b", b"000\r\n\r\n")),
}
# These cannot, or not by everyone alike.
BROKEN: dict[str, Framing] = {
    "length and chunks": lambda body: ((b"content-length: %d" % len(body), _CHUNKED), chunked(body, 50)),
    "chunks and length": lambda body: ((_CHUNKED, b"content-length: 4"), chunked(body, 50)),
    "two lengths": lambda body: ((b"content-length: 0", b"content-length: %d" % len(body)), body),
    "the same length twice": lambda body: ((b"content-length: %d" % len(body),) * 2, body),
    "a list of lengths": lambda body: ((b"content-length: %d, %d" % (len(body), len(body)),), body),
    "a length with a sign": lambda body: ((b"content-length: +%d" % len(body),), body),
    "a negative length": lambda body: ((b"content-length: -1",), body),
    "a hexadecimal length": lambda body: ((b"content-length: 0x%x" % len(body),), body),
    "a huge length": lambda body: ((b"content-length: 99999999999999999999999",), body),
    "an empty length": lambda body: ((b"content-length:",), body),
    "gzip": lambda body: ((b"transfer-encoding: gzip",), body),
    "identity": lambda body: ((b"transfer-encoding: identity",), body),
    "chunked, identity": lambda body: ((b"transfer-encoding: chunked, identity",), chunked(body, 50)),
    "identity, then chunked": lambda body: ((b"transfer-encoding: identity", _CHUNKED), chunked(body, 50)),
    "chunked twice": lambda body: ((_CHUNKED, _CHUNKED), chunked(body, 50)),
    "no encoding": lambda body: ((b"transfer-encoding:",), chunked(body, 50)),
    "xchunked": lambda body: ((b"transfer-encoding: xchunked",), chunked(body, 50)),
    "vertical tab": lambda body: ((b"transfer-encoding: \x0bchunked",), chunked(body, 50)),
    "space before the colon": lambda body: ((b"transfer-encoding : chunked",), chunked(body, 50)),
    "folded": lambda body: ((b"transfer-encoding:\r\n chunked",), chunked(body, 50)),
    "bare line feed": lambda body: ((b"x: y\ntransfer-encoding: chunked",), chunked(body, 50)),
    "bare return": lambda body: ((b"x: y\rtransfer-encoding: chunked",), chunked(body, 50)),
    "NUL": lambda body: ((b"x: \x00", b"content-length: %d" % len(body)), body),
    "not hexadecimal": lambda body: ((_CHUNKED,), b"xyz\r\n" + body + b"\r\n0\r\n\r\n"),
    "a chunk too long": lambda body: ((_CHUNKED,), b"2\r\n" + body + b"\r\n0\r\n\r\n"),
    "a huge chunk": lambda body: ((_CHUNKED,), b"fffffffffffffffff\r\n" + body + b"\r\n0\r\n\r\n"),
    "chunks without returns": lambda body: ((_CHUNKED,), chunked(body, 50).replace(b"\r\n", b"\n")),
    "a trailer": lambda body: ((_CHUNKED,), chunked(body, 50, last=b"0\r\nauthorization: Bearer x\r\n\r\n")),
    "two tokens": lambda body: (
        (b"authorization: Bearer a", b"authorization: Bearer b", b"content-length: %d" % len(body)), body,
    ),
    "no host": lambda body: ((b"content-length: %d" % len(body),), body),
    "a space in a name": lambda body: ((b"x y: z", b"content-length: %d" % len(body)), body),
    "no colon": lambda body: ((b"x", b"content-length: %d" % len(body)), body),
    "two hosts": lambda body: ((b"host: elsewhere", b"content-length: %d" % len(body)), body),
    "two types": lambda body: ((b"content-type: a/b", b"Content-Type: c/d", b"content-length: %d" % len(body)), body),
}  # fmt: skip

# Asking for another protocol changes nothing: none is spoken here.
UPGRADES: dict[str, tuple[bytes, ...]] = {
    "none": (),
    "h2c": (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"),
    "websocket": (b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13"),
    "upgrade first": (b"UPGRADE: anything", b"CONNECTION: keep-alive, UPGRADE"),
    "two protocols": (b"upgrade: h2c", b"upgrade: websocket", b"connection: keep-alive", b"connection: upgrade"),
    "without connection": (b"upgrade: h2c",),
    "without protocol": (b"connection: upgrade",),
    "and close": (b"connection: close, upgrade", b"upgrade: h2c"),
}
EXPECTS: dict[str, tuple[bytes, ...]] = {
    "none": (),
    "go on": (b"expect: 100-continue",),
    "Go On": (b"Expect: 100-Continue",),
    "something": (b"expect: the-unexpected",),
}


def request(mark: bytes, target: str, framing: str, upgrade: str = "none", expect: str = "none") -> Sent:
    """One request of the table."""
    made = TARGETS[target](mark)
    framed, body = (FRAMINGS.get(framing) or BROKEN[framing])(made.body)
    host = () if framing == "no host" else (b"host: localhost",)
    lines = [b"%b %b HTTP/1.1" % (made.method, made.path), *host, *UPGRADES[upgrade], *EXPECTS[expect]]
    raw = b"\r\n".join([*lines, *made.headers, *framed]) + b"\r\n\r\n" + body
    return Sent(
        raw, mark if target in MARKED else b"", made.statuses, framing in FRAMINGS,
        upgrade == "and close" or expect in ("go on", "Go On"), made.is_event, made.is_pause,
    )  # fmt: skip


def last(mark: bytes) -> Sent:
    """What ends a connection: whoever reads all before it, reads this."""
    raw = b"GET /nowhere/%b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % mark
    return Sent(raw, mark, (404,), may_close=True)


def connection(chance: random.Random, name: str) -> list[Sent]:
    """The requests of one connection, without waiting for answers."""
    sent = []
    for n in range(chance.choice([1, 1, 2, 2, 3, 5])):
        framings = list(BROKEN if chance.random() < 0.15 else FRAMINGS)
        expect = chance.choice(list(EXPECTS)) if chance.random() < 0.25 else "none"
        mark = f"{name}-{n}".encode()
        upgrade = chance.choice(list(UPGRADES))
        sent.append(request(mark, chance.choice(list(TARGETS)), chance.choice(framings), upgrade, expect))
    return [*sent, last(f"{name}-last".encode())]


def pieces(chance: random.Random, sent: Sequence[Sent]) -> list[bytes]:
    """The bytes, cut somewhere."""
    raw = b"".join(one.raw for one in sent)
    match chance.randrange(5):
        case 0:
            cuts: Iterable[int] = ()
        case 1:
            cuts = (chance.randrange(len(raw)),)
        case 2:
            cuts = sorted(chance.sample(range(len(raw)), min(8, len(raw))))
        case 3:  # each head by itself, as many clients do; and wherever a body has such an end too
            cuts = [at + 4 for at in range(len(raw)) if raw.startswith(b"\r\n\r\n", at)]
        case _:
            first = chance.randrange(len(raw))
            cuts = range(first, min(first + 60, len(raw)))
    ends = [0, *cuts, len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(ends) if a < b]


async def answers(port: int, parts: Sequence[bytes], *, gap_seconds: float = 0.0) -> list[Answer]:
    """Send the parts; everything that comes until the server closes. ValueError when that is no HTTP.

    ConnectionError when it resets the connection, which may cost an answer; EOFError when it ends in the middle of one.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found: list[Answer] = []

    async def send() -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(gap_seconds)

    sending = asyncio.create_task(send())
    try:
        while first := await reader.readline():
            status = int(first.split(b" ")[1])
            fields = {}
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                fields[name.strip().lower()] = value.strip()
            if status == 100:
                continue
            body = await reader.readexactly(int(fields[b"content-length"]))
            found.append(Answer(status, fields.get(b"connection", b"").lower() == b"close", body))
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    return found


def complaint(sent: Sequence[Sent], found: Sequence[Answer]) -> str | None:
    """What is wrong with the answers to the requests of a connection."""
    for n, answer in enumerate(found):
        if n >= len(sent):
            return f"{len(found)} answers to {len(sent)} requests"
        if SMUGGLED in answer.body and b"smuggled-" in answer.body:
            return f"answer {n} is to what was in a body"
        if not sent[n].is_whole:
            # Where its head can be read and needs no body, it may be answered before the rest has come.
            is_early = answer.status in sent[n].statuses and not (sent[n].is_event or sent[n].is_pause)
            if not (is_early or (400 <= answer.status < 500 and answer.closes)):
                return f"request {n} cannot be read and was answered {answer.status}"
            return None if n + 1 == len(found) else f"answers behind request {n}, which cannot be read"
        if answer.status not in sent[n].statuses or (sent[n].mark not in answer.body and answer.status != 503):
            return f"answer {n} is not to request {n}: {answer.status} {answer.body[:200]!r}"
        if sent[n].is_pause and b'"paused_until":null' in answer.body:
            return f"the body of request {n} was not read"
        if answer.closes:
            is_before_broken = n + 1 < len(sent) and not sent[n + 1].is_whole
            if not (sent[n].may_close or is_before_broken):
                return f"the connection ended with request {n}, which did not ask for it"
            return None if n + 1 == len(found) else f"answers behind request {n}, the last of its connection"
    readable = next((n for n, one in enumerate(sent) if not one.is_whole), len(sent))
    if len(found) < readable:
        return f"{len(found)} answers, though the first {readable} requests can be read"
    return None


class Found(msgspec.Struct, kw_only=True):
    """What came of it."""

    seed: int
    requests: int = 0
    connections: int = 0
    answered: int = 0
    broken: int = 0
    statuses: dict[int, int] = {}
    complaints: list[str] = []
    server_errors: int = 0
    smuggled: int = 0
    events_missing: int = 0
    events_unasked: int = 0

    @property
    def is_clean(self) -> bool:
        return not (
            self.complaints or self.server_errors or self.smuggled or self.events_missing or self.events_unasked
        )


async def attack(port: int, database_url: str, count: int, seed: int) -> Found:
    """At least so many requests, a few connections at a time."""
    chance, found, statuses = random.Random(seed), Found(seed=seed), Counter[int]()
    sent_events, accepted = set[bytes](), set[bytes]()

    async def client() -> None:
        while found.requests < count:
            sent = connection(chance, f"wire{seed}-{found.connections}")
            parts = pieces(chance, sent)
            gap_seconds = chance.choice([0.0, 0.0, 0.0, 0.001])
            found.connections += 1
            found.requests += len(sent)
            found.broken += sum(not one.is_whole for one in sent)
            sent_events.update(one.mark for one in sent if one.is_event and one.is_whole)
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    got = await answers(port, parts, gap_seconds=gap_seconds)
            except (TimeoutError, ValueError, LookupError, OSError, EOFError) as exc:
                found.complaints.append(f"{type(exc).__name__} {exc} {b''.join(parts)[:1000]!r}")
                continue
            found.answered += len(got)
            statuses.update(answer.status for answer in got)
            found.server_errors += sum(answer.status == 500 for answer in got)
            accepted.update(one.mark for one, answer in zip(sent, got, strict=False) if answer.status == 202)
            if (wrong := complaint(sent, got)) is not None:
                found.complaints.append(f"{wrong} {b''.join(parts)[:1000]!r}")

    await asyncio.gather(*(client() for _ in range(TOGETHER)))
    found.statuses = dict(sorted(statuses.items()))
    database = await asyncpg.connect(database_url)
    try:
        stored = {str(row[0]).encode() for row in await database.fetch(
            "select external_id from tidegate.workflow_events where source in ('wire', 'smuggled')")}  # fmt: skip
        found.smuggled = sum(SMUGGLED in one for one in stored)
        found.events_missing = len(accepted - stored)
        found.events_unasked = len({one for one in stored if SMUGGLED not in one} - sent_events)
    finally:
        await database.close()
    return found


async def run(folder: Path, count: int, seed: int) -> Found:
    """On a cluster of its own: one API."""
    cluster = Cluster(folder, queue="postgres", apis=1, workers=0)
    try:
        await cluster.start()
        return await attack(int(cluster.urls[0].rpartition(":")[2]), cluster.database_url, count, seed)
    finally:
        cluster.stop()


def table(found: Found) -> str:
    """For people."""
    rows = {
        "requests on the wire, seed": f"{found.requests}, {found.seed}",
        "connections": found.connections,
        "of the requests, not readable": found.broken,
        "answers": found.answered,
        "answers by status": ", ".join(f"{status} {count}" for status, count in found.statuses.items()),
        "500s": found.server_errors,
        "wrong, missing or further answers": len(found.complaints),
        "bodies taken for requests": found.smuggled,
        "accepted events that are missing": found.events_missing,
        "events that nobody sent": found.events_unasked,
    }
    return "\n".join([*(f"{name:<43} {value}" for name, value in rows.items()), *found.complaints[:10]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.wire", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run [random]")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    logs.configure("warning", "console")
    seed = random.randrange(1, 1_000_000) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="tidegate-wire-", ignore_cleanup_errors=True) as folder:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(run(Path(folder), arguments.requests, seed))
        if arguments.out is not None:
            arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        print(table(found))
    sys.exit(0 if found.is_clean else 1)


if __name__ == "__main__":
    main()
