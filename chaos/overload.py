"""`python -m chaos.overload`: ten times as many events as the API can take, then peace again.

What cannot be taken is refused, with 429 or 503 and Retry-After; what was accepted is there; memory stays bounded, and
a second wave needs no more of it than the first; afterwards everything is as before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import uvloop

from chaos.cluster import ROOT, Cluster, Member
from chaos.http import Response, request
from chaos.probe import Probed
from tidegate.telemetry import logs

TIMES = 10
BATCH = 500
TOGETHER = 4
MAX_OPEN = 2000
WAIT_SECONDS = 60.0
NORMAL = 10
# Bounds on the API's memory, as ratios: of the peak to what it had before, of the second wave's peak to the first's.
MAX_GROWTH, MAX_SECOND = 6.0, 1.5
# How long a refusal and the way back may take. A client beside the load is to be refused within 50 ms, 99 times in a
# hundred; it shares the processors with the load, so what fails a run is ten times that, and half of the load's own.
MAX_SHED_SECONDS, MAX_PROBE_SECONDS, MAX_NORMAL_SECONDS = 0.05, 0.5, 10.0
# Of what it takes when nobody sends more: the load itself costs some of it.
MIN_ACCEPTED = 0.5


# A batch as it is sent, with @ for its number: who makes ten times as much as another can take must be quick about it.
_BODY = msgspec.json.encode(
    [{"type": "overload.none", "source": "overload", "id": f"o-@-{i}", "payload": {"n": i}} for i in range(BATCH)]
)


class Wave(msgspec.Struct, frozen=True, kw_only=True):
    """One time of overload."""

    offered_per_second: float
    accepted_events: int
    statuses: dict[int, int]
    without_retry_after: int
    accepted_per_second: float
    shed_p50_seconds: float | None
    shed_p99_seconds: float | None
    probe_refused: int
    probe_refused_p50_seconds: float | None
    probe_refused_p99_seconds: float | None
    probe_accepted_p99_seconds: float | None
    peak_mb: float
    normal_after_seconds: float


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    capacity_per_second: float
    calm_mb: float
    calm_p50_seconds: float
    waves: list[Wave]
    accepted: int
    stored: int

    @property
    def complaints(self) -> list[str]:
        """What must not be; none when all is well."""
        made = []
        for n, wave in enumerate(self.waves, 1):
            if not any(wave.statuses.get(status) for status in (429, 503)):
                made.append(f"wave {n}: nothing was refused")
            if wrong := {s: c for s, c in wave.statuses.items() if s not in (0, 202, 429, 503)}:
                made.append(f"wave {n}: unexpected answers {wrong}")
            if wave.without_retry_after:
                made.append(f"wave {n}: {wave.without_retry_after} refusals without Retry-After")
            if (wave.shed_p50_seconds or 0.0) > MAX_SHED_SECONDS:
                made.append(f"wave {n}: half of the refusals took longer than {wave.shed_p50_seconds} s")
            if (wave.probe_refused_p99_seconds or 0.0) > MAX_PROBE_SECONDS:
                made.append(f"wave {n}: a client beside it was refused after {wave.probe_refused_p99_seconds} s")
            if wave.normal_after_seconds > MAX_NORMAL_SECONDS:
                made.append(f"wave {n}: normal again only after {wave.normal_after_seconds} s")
            if wave.accepted_per_second < self.capacity_per_second * MIN_ACCEPTED:
                made.append(
                    f"wave {n}: {wave.accepted_per_second:.0f} events a second of {self.capacity_per_second:.0f}"
                )
        if self.stored < self.accepted:
            made.append(f"{self.accepted - self.stored} acknowledged events are not there")
        peaks = [wave.peak_mb for wave in self.waves]
        if peaks[0] > self.calm_mb * MAX_GROWTH:
            made.append(f"memory grew from {self.calm_mb:.0f} to {peaks[0]:.0f} MB")
        if peaks[-1] > peaks[0] * MAX_SECOND:
            made.append(f"the last wave needed {peaks[-1]:.0f} MB, the first {peaks[0]:.0f} MB")
        return made


def resident_mb(member: Member) -> float:
    """What a process holds in memory."""
    lines = Path(f"/proc/{member.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) / 1024


class Load:
    """Batches of events to one API; every event has an id, so that what was accepted can be counted."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = itertools.count()
        self.accepted = 0

    async def send(self) -> Response:
        body = _BODY.replace(b"@", b"%d" % next(self._numbers))
        response = await request(self._url, "POST", "/v1/events", body, seconds=WAIT_SECONDS)
        if response.status == 202:
            self.accepted += BATCH
        return response

    async def single(self) -> tuple[float, int]:
        """How long one event takes, and the answer."""
        at = time.monotonic()
        body = msgspec.json.encode({"type": "overload.none", "source": "overload.single", "payload": {}})
        response = await request(self._url, "POST", "/v1/events", body, seconds=WAIT_SECONDS)
        return time.monotonic() - at, response.status

    async def capacity(self, seconds: float) -> float:
        """Events a second when nobody sends before he is answered."""
        began_at, before = time.monotonic(), self.accepted

        async def client() -> None:
            while time.monotonic() - began_at < seconds:
                await self.send()

        await asyncio.gather(*(client() for _ in range(TOGETHER)))
        return (self.accepted - before) / (time.monotonic() - began_at)

    async def wave(self, per_second: float, seconds: float, api: Member, calm_seconds: float) -> Wave:
        """Send at that rate, whatever comes back; then wait until all is normal again."""
        began_at, n, before = time.monotonic(), 0, self.accepted
        answers: list[tuple[float, Response]] = []
        open_requests: set[asyncio.Task[None]] = set()
        peak = resident_mb(api)
        probe = subprocess.Popen(
            [sys.executable, "-m", "chaos.probe", self._url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )

        async def one() -> None:
            at = time.monotonic()
            response = await self.send()
            answers.append((time.monotonic() - at, response))

        while (elapsed := time.monotonic() - began_at) < seconds:
            while n * BATCH < elapsed * per_second and len(open_requests) < MAX_OPEN:
                task = asyncio.create_task(one())
                open_requests.add(task)
                task.add_done_callback(open_requests.discard)
                n += 1
            peak = max(peak, resident_mb(api))
            await asyncio.sleep(0.02)
        sent_at = time.monotonic()
        offered = n * BATCH / (sent_at - began_at)
        while open_requests:
            peak = max(peak, resident_mb(api))
            await asyncio.wait(open_requests, timeout=0.1)
        answered_at = ended_at = time.monotonic()
        in_a_row = 0
        while in_a_row < NORMAL and time.monotonic() - ended_at < WAIT_SECONDS:
            taken, status = await self.single()
            in_a_row = in_a_row + 1 if status == 202 and taken < max(10 * calm_seconds, 0.1) else 0
        shed = [taken for taken, r in answers if r.status in (429, 503)]
        output, _ = await asyncio.to_thread(probe.communicate)
        probed = [p for p in msgspec.json.decode(output, type=list[Probed]) if p.at < sent_at]
        refused = [p.seconds for p in probed if p.status in (429, 503)]
        return Wave(
            offered_per_second=round(offered),
            accepted_events=self.accepted - before,
            statuses=dict(sorted(Counter(r.status for _, r in answers).items())),
            without_retry_after=sum(r.status in (429, 503) and "retry-after" not in r.headers for _, r in answers),
            accepted_per_second=round((self.accepted - before) / (answered_at - began_at)),
            shed_p50_seconds=_part(shed, 0.5),
            shed_p99_seconds=_part(shed, 0.99),
            probe_refused=len(refused),
            probe_refused_p50_seconds=_part(refused, 0.5),
            probe_refused_p99_seconds=_part(refused, 0.99),
            probe_accepted_p99_seconds=_part([p.seconds for p in probed if p.status == 202], 0.99),
            peak_mb=round(peak, 1),
            normal_after_seconds=round(time.monotonic() - ended_at, 2),
        )


async def run(folder: Path, seconds: float) -> Found:
    """On a cluster of its own: one API, one worker."""
    cluster = Cluster(folder, queue="postgres", apis=1, workers=1)
    try:
        await cluster.start()
        load, api = Load(cluster.urls[0]), cluster.apis[0]
        calm = sorted([(await load.single())[0] for _ in range(50)])[25]
        capacity = await load.capacity(min(seconds, 5.0))
        before = resident_mb(api)
        waves = [await load.wave(TIMES * capacity, seconds, api, calm) for _ in range(2)]
        connection = await asyncpg.connect(cluster.database_url)
        try:
            stored = await connection.fetchval(
                "select count(*) from tidegate.workflow_events where source = 'overload'", timeout=WAIT_SECONDS
            )
        finally:
            await connection.close()
        return Found(
            capacity_per_second=round(capacity),
            calm_mb=round(before, 1),
            calm_p50_seconds=round(calm, 4),
            waves=waves,
            accepted=load.accepted,
            stored=stored,
        )
    finally:
        cluster.stop()


def table(found: Found) -> str:
    """For people."""
    rows: dict[str, Any] = {
        "events a second that it takes": f"{found.capacity_per_second:.0f} (in batches of {BATCH})",
        "one event in peace, memory": f"{found.calm_p50_seconds * 1000:.1f} ms, {found.calm_mb:.0f} MB",
    }
    for n, wave in enumerate(found.waves, 1):
        rows[f"wave {n}: offered"] = f"{wave.offered_per_second:.0f} events a second"
        rows[f"wave {n}: accepted events, answers"] = f"{wave.accepted_events}; {_counts(wave.statuses)}"
        rows[f"wave {n}: accepted a second"] = f"{wave.accepted_per_second:.0f}"
        rows[f"wave {n}: refused after, p50 and p99"] = f"{wave.shed_p50_seconds} s, {wave.shed_p99_seconds} s"
        rows[f"wave {n}: a client beside it, p50 and p99"] = (
            f"{wave.probe_refused_p50_seconds} s, {wave.probe_refused_p99_seconds} s ({wave.probe_refused} refused)"
        )
        rows[f"wave {n}: accepted beside it, p99"] = f"{wave.probe_accepted_p99_seconds} s"
        rows[f"wave {n}: memory at most"] = f"{wave.peak_mb:.0f} MB"
        rows[f"wave {n}: normal again after"] = f"{wave.normal_after_seconds} s"
    rows["accepted / stored"] = f"{found.accepted} / {found.stored}"
    return "\n".join([*(f"{name:<43} {value}" for name, value in rows.items()), *found.complaints])


def _part(seconds: list[float], part: float) -> float | None:
    ordered = sorted(seconds)
    return round(ordered[int(len(ordered) * part)], 4) if ordered else None


def _counts(found: Mapping[int, int]) -> str:
    return ", ".join(f"{status} {count}" for status, count in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.overload", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long each of the two waves lasts [%(default)s]"
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()
    logs.configure("warning", "console")
    with (
        tempfile.TemporaryDirectory(prefix="tidegate-overload-", ignore_cleanup_errors=True) as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(run(Path(folder), arguments.seconds))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    print(table(found))
    sys.exit(1 if found.complaints else 0)


if __name__ == "__main__":
    main()
