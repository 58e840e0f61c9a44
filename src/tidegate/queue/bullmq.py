"""Hints and wake-ups as BullMQ jobs in Redis. The only module that imports bullmq and redis.

A job carries ids and only makes a worker check for due rows. Everything in Redis may be lost at any moment:
`docs/queues.md` describes what happens then, and why each option of the library is set.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final

import bullmq
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tidegate.clock import monotonic, utc_now
from tidegate.queue.port import TOPICS, Topic, Wakeup
from tidegate.queue.sender import Sender
from tidegate.queue.wakeups import HORIZON, Spacing
from tidegate.store import installation
from tidegate.store.db import Database
from tidegate.telemetry.logs import logger

INGRESS: Final = "tidegate-event-ingress"
TRIGGERS: Final = "tidegate-event-triggers"
RUNS: Final = "tidegate-workflow-runs"
QUEUES: dict[Topic, str] = {
    "inbox": INGRESS,
    "retries": INGRESS,
    "plans": INGRESS,
    "deliveries": TRIGGERS,
    "runs": RUNS,
}

# The timeout must exceed a blocking wait (10 s): with redis-py's default of 5 s, jobs arrive minutes late.
SOCKET_OPTIONS: dict[str, Any] = {"socket_timeout": 30, "socket_connect_timeout": 5, "health_check_interval": 15}
# If a finished job were kept, the library would ignore the next job with the same id.
JOB_OPTIONS: dict[str, Any] = {"removeOnComplete": True, "removeOnFail": True}
WORKER_OPTIONS: dict[str, Any] = {
    "autorun": False,
    "concurrency": 1,
    "maxStalledCount": 1000,
    "runRetryDelay": 1000,
    "lockDuration": 30_000,
    "stalledInterval": 5000,
    "drainDelay": 1,
    **JOB_OPTIONS,
}
# Maximum number of waiting hints per topic in Redis; more carry no information.
HINT_IDS = 16
ASK_SECONDS = 1.0
SILENCE_SECONDS = 60.0
_WATCH_SECONDS = 5.0
_RESTART_SECONDS = (1.0, 2.0, 5.0)
_CLOSE_SECONDS = 1.0
_CANCEL_SECONDS = 0.2

_log = logger("queue")


class BullmqQueue:
    """Sends and receives jobs under a prefix of this installation."""

    def __init__(self, redis_url: str, database: Database) -> None:
        self._redis_url = redis_url
        self._database = database
        self._sender = Sender(self._deliver)
        self._spacing = Spacing()
        self._listeners: list[asyncio.Task[None]] = []
        self._wakes: dict[Topic, asyncio.Event] = {topic: asyncio.Event() for topic in TOPICS}
        self._hints = random.randrange(HINT_IDS)  # noqa: S311 - so that processes do not use the same ids at the same time
        self._prefix: str | None = None
        self._client: Any = None
        self._probe: Any = None  # for readiness, with shorter timeouts
        self._queues: dict[str, Any] = {}
        self._can_ask = True
        self._is_closing = False

    @property
    def holds_wakeups(self) -> bool:
        """True: delayed jobs are lost if Redis loses its data."""
        return True

    @property
    def dropped(self) -> int:
        """The number of hints and wake-ups that were not sent since the start."""
        return self._sender.dropped

    def wake(self, topic: Topic) -> asyncio.Event:
        """Set whenever there may be work on the topic; a waiter clears it before it checks for work."""
        return self._wakes[topic]

    def hint(self, topic: Topic) -> None:
        """Announce that there is work now; returns immediately and never raises."""
        self._wakes[topic].set()
        self._sender.hint(topic)

    def schedule(self, wakeups: Sequence[Wakeup]) -> None:
        """Announce when there will be work; returns immediately and never raises."""
        for topic in {wakeup.topic for wakeup in wakeups}:
            self._wakes[topic].set()  # this worker recomputes when the next row is due
        now = utc_now()
        self._spacing.forget_before(now)
        self._sender.schedule(w for w in wakeups if w.due_at - now <= HORIZON and self._spacing.admit(w))

    async def missing(self, wakeups: Sequence[Wakeup]) -> list[Wakeup]:
        """The wake-ups that have no job; empty if Redis does not answer."""
        if not wakeups or self._sender.is_backing_off:
            return []
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await self._open()
                async with self._client.pipeline(transaction=False) as pipe:
                    for wakeup in wakeups:
                        pipe.exists(self._queues[QUEUES[wakeup.topic]].toKey(wakeup.job_id))
                    found = await pipe.execute()
        except Exception as exc:  # noqa: BLE001 - losing Redis costs latency, never work
            if self._can_ask:  # logged once per outage
                _log.warning("queue.check_failed", error=exc)
            self._can_ask = False
            return []
        self._can_ask = True
        return [wakeup for wakeup, exists in zip(wakeups, found, strict=True) if not exists]

    async def trouble(self) -> str | None:
        """A problem with Redis, if there is one; never raises, and does not contain an address."""
        try:
            if self._probe is None:
                self._probe = self._connect(socket_timeout=ASK_SECONDS, socket_connect_timeout=ASK_SECONDS)
            async with asyncio.timeout(2 * ASK_SECONDS):
                memory = await self._probe.info("memory")
            policy = memory.get("maxmemory_policy", "noeviction")
        except Exception as exc:  # noqa: BLE001 - reported as a problem of the queue
            return f"Redis does not answer ({type(exc).__name__}): workers poll every poll_ms meanwhile"
        if policy != "noeviction":
            return f"Redis may evict jobs: maxmemory-policy is {policy}, but should be noeviction"
        if 0 < memory.get("maxmemory", 0) <= memory.get("used_memory", 0):
            return "Redis is full (maxmemory): it takes no jobs, and workers poll every poll_ms meanwhile"
        return None

    def start_listening(self) -> None:
        """Start receiving jobs; a listener that fails is restarted."""
        for name in sorted(set(QUEUES.values())):
            self._listeners.append(asyncio.create_task(self._listen(name), name=f"bullmq {name}"))

    async def close(self) -> None:
        """Stop sending and receiving."""
        self._is_closing = True
        listeners, self._listeners = self._listeners, []
        await asyncio.gather(*(_end(task) for task in listeners))
        await self._sender.close()
        clients, self._client, self._probe = (self._client, self._probe), None, None
        for client in clients:
            if client is not None:
                await _close(client)

    async def _open(self) -> str:
        """The prefix; the first call also creates the client and the queues."""
        if self._prefix is None:
            async with self._database.connection(wait_seconds=1) as connection:
                self._prefix = f"tidegate-{await installation.identity(connection)}"
        if self._client is None:
            self._client = self._connect()
            options = {"connection": self._client, "prefix": self._prefix, "defaultJobOptions": JOB_OPTIONS}
            self._queues = {name: bullmq.Queue(name, options) for name in set(QUEUES.values())}
        return self._prefix

    def _connect(self, **options: Any) -> Any:
        return _connect(self._redis_url, **options)

    async def _deliver(self, topics: Sequence[Topic], wakeups: Sequence[Wakeup]) -> None:
        prefix = await self._open()
        now = utc_now()
        jobs: dict[str, list[dict[str, Any]]] = {}
        for topic in topics:
            self._hints = (self._hints + 1) % HINT_IDS
            job = _job(topic, f"wake:{topic}:{self._hints}", prefix, [], 0)
            jobs.setdefault(QUEUES[topic], []).append(job)
        for wakeup in wakeups:
            delay_ms = max(0, round((wakeup.due_at - now).total_seconds() * 1000))
            job = _job(wakeup.topic, wakeup.job_id, prefix, [str(wakeup.row_id)], delay_ms)
            jobs.setdefault(QUEUES[wakeup.topic], []).append(job)
        for name, batch in jobs.items():
            await self._queues[name].addBulk(batch)

    async def _received(self, job: Any, _: str) -> None:
        """Never raises: an exception in a handler, even a cancellation, would end the library's loop."""
        try:
            if job.data.get("installation") != self._prefix or job.name not in self._wakes:
                _log.warning("queue.foreign_job_ignored", job_id=str(job.id))
                return
            self._wakes[job.name].set()
        except BaseException as exc:  # noqa: BLE001 - a bad job must not stop the listener
            _log.warning("queue.bad_job_ignored", error=exc)

    async def _listen(self, name: str) -> None:
        failures = 0
        while not self._is_closing:
            began_at = monotonic()
            try:
                await self._listen_once(name)
                reason: object = "the library's loop ended by itself"
            except Exception as exc:  # noqa: BLE001 - logged, and the listener is restarted
                reason = exc
            failures = 0 if monotonic() - began_at > SILENCE_SECONDS else failures + 1
            if failures <= 1:  # logged once per outage
                _log.warning("queue.listener_lost", queue=name, error=reason)
            await asyncio.sleep(_RESTART_SECONDS[min(failures, len(_RESTART_SECONDS) - 1)])

    async def _listen_once(self, name: str) -> None:
        """Receive jobs until the library's loop ends, fails, or has not fetched for `SILENCE_SECONDS`."""
        prefix = await self._open()
        client = self._connect()
        running: asyncio.Task[None] | None = None
        try:
            info = await client.info()
            if info.get("maxmemory_policy", "noeviction") != "noeviction":
                _log.warning("queue.redis_may_evict", reason="maxmemory-policy should be noeviction")
            worker = bullmq.Worker(name, self._received, {"connection": client, "prefix": prefix, **WORKER_OPTIONS})
            # Set here, because otherwise the library rounds waits up to whole seconds, and its own detection of these
            # capabilities emits Python warnings.
            is_recent = int(str(info.get("redis_version", "6")).split(".")[0]) >= 6
            worker.blockingRedisConnection.capabilities = {"canBlockFor1Ms": False, "canDoubleTimeout": is_recent}
            heard = _watch_fetches(worker)
            running = asyncio.create_task(worker.run())
            for wake in self._wakes.values():  # there may be work that was announced before we listened
                wake.set()
            while not running.done():
                await asyncio.wait({running}, timeout=_WATCH_SECONDS)
                if monotonic() - heard[0] > SILENCE_SECONDS:
                    raise TimeoutError(f"no fetch for {SILENCE_SECONDS:.0f} s")
            if not running.cancelled():
                running.result()
        finally:
            if running is not None:
                await _end(running)
            await _close(client)


def _connect(redis_url: str, **options: Any) -> Any:
    """A client with our own timeouts: the library's would retry for minutes before reporting that Redis is down."""
    keepalive = {} if redis_url.startswith("unix://") else {"socket_keepalive": True}
    return redis.asyncio.Redis.from_url(
        redis_url,
        decode_responses=True,
        retry=Retry(NoBackoff(), 1),  # retry once, for a dead connection in the pool
        **keepalive,
        **SOCKET_OPTIONS | options,
    )


async def eviction_policy(redis_url: str) -> str:
    """The eviction policy of Redis (maxmemory-policy). OSError if Redis does not answer."""
    client = _connect(redis_url)
    try:
        return str((await client.info("memory")).get("maxmemory_policy", "noeviction"))
    except redis.exceptions.RedisError as exc:
        raise OSError(str(exc) or type(exc).__name__) from exc
    finally:
        await _close(client)


def _watch_fetches(worker: Any) -> list[float]:
    """The time of the library's last fetch; it fetches at least every ten seconds."""
    heard = [monotonic()]
    fetch = worker.getNextJob

    async def watched(token: str) -> Any:
        heard[0] = monotonic()
        return await fetch(token)

    worker.getNextJob = watched
    return heard


def _job(topic: Topic, job_id: str, prefix: str, ids: list[str], delay_ms: int) -> dict[str, Any]:
    return {"name": topic, "data": {"installation": prefix, "ids": ids}, "opts": {"jobId": job_id, "delay": delay_ms}}


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel until the task has ended: the Redis client swallows a cancellation while it connects."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_SECONDS)


async def _close(client: Any) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await client.aclose()
    except Exception as exc:  # noqa: BLE001 - closing is best effort
        _log.debug("queue.close_failed", error=exc)
