"""The primary is killed under load and its standby promoted, again and again, with and without synchronous replication.

`python -m chaos.failover` publishes to an API and two workers that know both hosts. With synchronous replication no
event that was answered 202 may be lost, and an effect may be repeated only for a run that a worker began twice. Without
it, what was lost is counted and not judged. Before each failure the standby receives nothing for a while; in every
other case the API gives up waiting for it, somebody ends the waiting sessions, and producers publish again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import asyncpg
import msgspec

from chaos.members import is_ready, run, served, started
from chaos.replica import PATIENCE_SECONDS, Pair, until
from chaos.silence import Producer
from tidegate.embedded import ROLE

APP = Path(__file__).parent / "effects_app.py"
PRODUCERS = 4
# How many events are accepted before the standby receives nothing any more; how many then, if none waits for it.
BEFORE, BEHIND = 100, 20
_STORY = """
select e.external_id as key, max(r.attempts)::int as attempts, bool_and(r.status = 'succeeded') as is_done
  from tidegate.workflow_events e left join tidegate.workflow_runs r on r.event_id = e.id
 where e.type = 'chaos.effect' group by 1
"""


_WAITING = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
_END_WAITING = "select count(pg_terminate_backend(pid)) from pg_stat_activity where wait_event = 'SyncRep'"


class Found(msgspec.Struct, kw_only=True):
    """What became of the events of one run."""

    is_synchronous: bool
    failovers: int
    accepted: int = 0
    lost: int = 0
    without_effect: int = 0
    repeated: int = 0
    repeated_without_reason: int = 0
    unfinished: int = 0
    publishing_again_after_seconds: list[float] = []
    is_ready: bool = False
    doctor: list[str] = []

    @property
    def broken(self) -> list[str]:
        """What breaks a promise."""
        names = ["unfinished", "repeated_without_reason"]
        if self.is_synchronous:
            names += ["lost", "without_effect"]
        found = [f"{getattr(self, name)} {name}" for name in names if getattr(self, name)]
        found += [f"doctor: {text}" for text in self.doctor]
        return found + ([] if self.is_ready else ["/readyz is not ok at the end"])


def failed_over(folder: Path, rounds: int, *, is_synchronous: bool) -> Found:
    """Let the primary fail so many times while events are published; what became of them."""
    effects, found = folder / "effects", Found(is_synchronous=is_synchronous, failovers=rounds)
    pair = Pair(folder, is_synchronous=is_synchronous)
    producers = list[Producer]()
    sink = {"CHAOS_EFFECTS": str(effects), "TIDEGATE_LEASE_MS": "5000"}
    try:
        with (
            served(pair.url, folder) as address,
            started("worker-0", pair.url, folder, "worker", str(APP), **sink),
            started("worker-1", pair.url, folder, "worker", str(APP), **sink),
        ):
            producers += [Producer(address, f"p{n}") for n in range(PRODUCERS)]
            for producer in producers:
                producer.start()
            for number in range(rounds):
                if number:
                    pair.make_standby()
                until(partial(_has_more, producers, time.monotonic(), BEFORE))
                _fail(pair, producers, found, folder / "api.log" if number % 2 or rounds == 1 else None)
            for producer in producers:
                producer.stop()
            for producer in producers:
                producer.join(PATIENCE_SECONDS)
            _judge(pair, producers, effects, found)
            found.is_ready = is_ready(address)
            checks = json.loads(run(pair.url, "doctor", "--json").stdout)["checks"]
            found.doctor = [f"{check['name']}: {check['detail']}" for check in checks if not check["is_ok"]]
        return found
    finally:
        for producer in producers:
            producer.stop()
        pair.stop()


def _fail(pair: Pair, producers: list[Producer], found: Found, log: Path | None) -> None:
    pair.hold_back()
    since, given_up = time.monotonic(), _given_up(log)
    if not found.is_synchronous:
        until(partial(_has_more, producers, since, BEHIND))
    elif log is None:
        until(lambda: pair.primary.ask(_WAITING) > 0)
    else:
        until(lambda: _given_up(log) > given_up)
        pair.primary.ask(_END_WAITING)
        until(lambda: pair.primary.ask(_WAITING) > 0)
    pair.fail_over()
    back_at = time.monotonic()
    until(partial(_has_more, producers, back_at, 1))
    first = min(at for producer in producers for _, at in producer.accepted if at > back_at)
    found.publishing_again_after_seconds.append(round(first - back_at, 2))


def _given_up(log: Path | None) -> int:
    """How often the API has stopped waiting for an answer of the database."""
    return log.read_text().count("store.connections_replaced") if log else 0


def _has_more(producers: list[Producer], since: float, count: int) -> bool:
    return sum(at > since for producer in producers for _, at in producer.accepted) >= count


def _judge(pair: Pair, producers: list[Producer], effects: Path, found: Found) -> None:
    accepted = {key for producer in producers for key, _ in producer.accepted}
    story: dict[str, tuple[int | None, bool | None]] = {}

    def is_quiet() -> bool:
        story.update(asyncio.run(_story(pair)))
        return all(is_done for _, is_done in story.values())

    try:
        until(is_quiet)
    except TimeoutError:
        found.unfinished = sum(not is_done for _, is_done in story.values())
    seen = Counter(effects.read_text().split())
    repeated = [key for key, count in seen.items() if count > 1]
    found.accepted = len(accepted)
    found.lost = len(accepted - story.keys())
    found.without_effect = len({key for key in accepted & story.keys() if key not in seen})
    found.repeated = len(repeated)
    # A run that was begun once may have been begun before, too, by a claim that was lost with the old primary.
    known = [key for key in repeated if (story.get(key, (None, None))[0] or 0) < 2]
    found.repeated_without_reason = len(known) if found.is_synchronous else 0


async def _story(pair: Pair) -> dict[str, tuple[int | None, bool | None]]:
    connection = await asyncpg.connect(f"postgresql://postgres@{pair.primary.place}/{ROLE}")
    try:
        return {row["key"]: (row["attempts"], row["is_done"]) for row in await connection.fetch(_STORY)}
    finally:
        await connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.failover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="how often the primary is killed, each [%(default)s]")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    results = list[Found]()
    for is_synchronous in (True, False):
        with tempfile.TemporaryDirectory(prefix="tidegate-failover-", ignore_cleanup_errors=True) as folder:
            found = failed_over(Path(folder), arguments.rounds, is_synchronous=is_synchronous)
        results.append(found)
        print(
            f"failover: {'with' if is_synchronous else 'without'} synchronous replication, {found.failovers} times: "
            f"{found.accepted} events accepted, {found.lost} lost, {found.repeated} effects repeated, publishing again "
            f"{max(found.publishing_again_after_seconds)} s after the promotion at the latest"
        )
        print("\n".join(f"failover: BROKEN {text}" for text in found.broken) or "failover: nothing is broken")
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    sys.exit(any(found.broken for found in results))


if __name__ == "__main__":
    main()
