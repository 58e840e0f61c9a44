"""The client: publishes events at an even rate over all APIs, and writes every answer to the ledger.

`python -m chaos.publisher` reads a Job as one line of JSON. What has an id is sent again, to whichever API, until it is
accepted; a few are sent once, whatever becomes of them. Beside it an operator pauses and resumes. SIGTERM: no new
events, everything is resumed and answered, then it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from chaos.http import request
from chaos.records import Answer, Verb, Writer
from chaos.traffic import Event, events

WAIT_SECONDS = 5.0
MAX_OPEN = 400
PAUSED_SOURCE, PAUSED_WORKFLOW = "pausable", "stopped"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Where to publish, how much, and where to write it down."""

    urls: list[str]
    folder: str
    seed: int
    per_second: float
    pause_every_seconds: float = 5.0


class Publisher:
    """Publishes until it is stopped, then waits for the last answers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ledger = Writer(Path(job.folder) / "ledger.jsonl")
        self._open: set[asyncio.Task[None]] = set()
        self._chance = random.Random(job.seed)
        self.stopping = asyncio.Event()

    async def run(self) -> None:
        began_at, n = time.monotonic(), 0
        while not self.stopping.is_set():
            wait = began_at + n / self._job.per_second - time.monotonic()
            if wait > 0 or len(self._open) >= MAX_OPEN:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), max(wait, 0.01))
                continue
            task = asyncio.create_task(self._publish(events(self._job.seed, n)))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            n += 1
        await asyncio.gather(*self._open)
        self._ledger.close()

    async def _publish(self, made: list[Event]) -> None:
        for attempt in itertools.count(1):
            answers = await self._send(made)
            for answer in answers:
                self._ledger.write(answer)
            if answers[0].status == 202 or made[0].is_once:
                return
            await asyncio.sleep(self._chance.uniform(0.2, 0.5) * min(attempt, 5))

    async def _send(self, made: list[Event]) -> list[Answer]:
        """One request: a single event, or several, which are accepted all or none."""
        sent_at, url = time.monotonic(), self._chance.choice(self._job.urls)
        body = made[0].body if len(made) == 1 else [one.body for one in made]
        response = await request(url, "POST", "/v1/events", msgspec.json.encode(body), seconds=WAIT_SECONDS)
        receipts: list[dict[str, Any]] = [{}] * len(made)
        if response.status == 202:
            receipts = [response.json()] if len(made) == 1 else response.json()["events"]
        return [
            Answer(
                key=one.key,
                type=one.body["type"],
                source=one.body["source"],
                has_id=one.has_id,
                dedupe_key=one.body["payload"].get("order"),
                sent_at=sent_at,
                answered_at=time.monotonic(),
                status=response.status,
                event_id=receipt.get("id"),
                outcome=receipt.get("status"),
            )
            for one, receipt in zip(made, receipts, strict=True)
        ]


class Operator:
    """Pauses a source and a trigger now and then, and resumes them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._log = Writer(Path(job.folder) / "operator.jsonl")
        self._chance = random.Random(job.seed + 1)

    async def run(self, stopping: asyncio.Event) -> None:
        trigger_id = await self._trigger_id()
        paths = {
            ("source", PAUSED_SOURCE): f"/admin/sources/{PAUSED_SOURCE}",
            ("trigger", PAUSED_WORKFLOW): f"/admin/triggers/{trigger_id}",
        }
        while not await self._rest(stopping, self._job.pause_every_seconds):
            for (kind, subject), path in paths.items():
                await self._until_done("pause", kind, subject, path)
            await self._rest(stopping, self._chance.uniform(1, 3))
            for (kind, subject), path in paths.items():
                await self._until_done("resume", kind, subject, path)
        for (kind, subject), path in paths.items():  # a pause whose answer was lost may have come after its resume
            await self._until_done("resume", kind, subject, path)
        self._log.close()

    async def _rest(self, stopping: asyncio.Event, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), seconds)
        return stopping.is_set()

    async def _until_done(self, verb: str, kind: str, subject: str, path: str) -> None:
        while True:
            called_at = time.monotonic()
            status, _ = await self._request("POST", f"{path}/{verb}", {} if verb == "resume" else {"reason": "chaos"})
            self._log.write(
                Verb(
                    verb=verb,
                    kind=kind,
                    subject=subject,
                    called_at=called_at,
                    answered_at=time.monotonic(),
                    status=status,
                )
            )
            if 200 <= status < 300 or (verb == "resume" and status == 404):  # it was never paused, and is not known
                return
            await asyncio.sleep(0.2)

    async def _trigger_id(self) -> str:
        while True:
            _, answer = await self._request("GET", f"/v1/workflows/{PAUSED_WORKFLOW}/triggers", None)
            if isinstance(answer, dict) and answer.get("triggers"):
                return str(answer["triggers"][0]["id"])
            await asyncio.sleep(0.2)

    async def _request(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        content = None if body is None else msgspec.json.encode(body)
        response = await request(self._chance.choice(self._job.urls), method, path, content, seconds=WAIT_SECONDS)
        return response.status, response.json()


async def work(job: Job) -> None:
    publisher, operator = Publisher(job), Operator(job)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, publisher.stopping.set)
    await asyncio.gather(publisher.run(), operator.run(publisher.stopping))


def main() -> None:
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(job))


if __name__ == "__main__":
    main()
