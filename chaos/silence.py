"""All connections to the database fall silent, again and again; new ones work at once or after a while.

`python -m chaos.silence` publishes meanwhile and judges the effects: none of an accepted event is missing, and the
first event is accepted within ten seconds after new connections work.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx

from chaos.members import is_ready, served, started
from chaos.proxy import Proxy
from tidegate.embedded import EmbeddedPostgres

APP = Path(__file__).parent / "effects_app.py"
BACK_SECONDS = 10
PATIENCE_SECONDS = 120


class Producer(threading.Thread):
    """Publishes one event after the other, each until it is accepted."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._address = address
        self._stopping = threading.Event()
        self.accepted: list[tuple[str, float]] = []

    def run(self) -> None:
        number = 0
        while not self._stopping.wait(0.05):
            key = f"{self.name}-{number}"
            while not self._is_accepted(key):
                time.sleep(0.05)
            self.accepted.append((key, time.monotonic()))
            number += 1

    def stop(self) -> None:
        self._stopping.set()

    def _is_accepted(self, key: str) -> bool:
        event = {"type": "chaos.effect", "source": "chaos", "id": key, "payload": {"key": key}}
        try:
            return httpx.post(f"{self._address}/v1/events", json=event, timeout=60).status_code == 202
        except httpx.HTTPError:
            return False


def broken(folder: Path, rounds: int, seed: int) -> tuple[list[str], int, float]:
    """What was broken, how many events were accepted, and the longest time until the first was after a silence."""
    chance, found, slowest = random.Random(seed), list[str](), 0.0
    server, effects = EmbeddedPostgres(folder / "postgres"), folder / "effects"
    try:
        with Proxy(server.start()) as proxy, served(proxy.url, folder) as address:
            worker = started("worker", proxy.url, folder, "worker", str(APP), CHAOS_EFFECTS=str(effects))
            with worker:
                producers = [Producer(address, f"p{n}") for n in range(4)]
                for producer in producers:
                    producer.start()
                _until(lambda: len(_done(effects)) > 10)
                for _ in range(rounds):
                    if is_blocked := chance.random() < 0.5:
                        proxy.block()
                    proxy.freeze(answers_only=chance.random() < 0.5)
                    if is_blocked and not _until(lambda: not is_ready(address)):
                        found.append("/readyz says that all is well while nothing can be stored")
                    proxy.unblock()
                    back_at = time.monotonic()
                    if not _until(partial(_accepted, producers, back_at)):
                        found.append("nothing was accepted any more")
                        break
                    slowest = max(slowest, min(_accepted(producers, back_at)) - back_at)
                    seen = len(_done(effects))
                    if not _until(partial(_went_on, effects, seen + 10)):
                        found.append("no run went on")
                        break
                for producer in producers:
                    producer.stop()
                for producer in producers:
                    producer.join(PATIENCE_SECONDS)
                keys = {key for producer in producers for key, _ in producer.accepted}
                _until(lambda: keys <= _done(effects))
        lost = sorted(keys - _done(effects))
        if lost:
            found.append(f"{len(lost)} accepted events have no effect: {lost[:5]}")
        if slowest > BACK_SECONDS:
            found.append(f"the first event was accepted {slowest:.1f} s after new connections worked")
        return found, len(keys), slowest
    finally:
        server.stop()


def _accepted(producers: list[Producer], after: float) -> list[float]:
    return [at for producer in producers for _, at in producer.accepted if at > after]


def _went_on(effects: Path, count: int) -> bool:
    return len(_done(effects)) > count


def _done(effects: Path) -> set[str]:
    return set(effects.read_text().split()) if effects.exists() else set()


def _until(question: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not question():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.silence", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="how often all connections fall silent [%(default)s]")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 1_000_000), help="[random]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-silence-", ignore_cleanup_errors=True) as folder:
        found, accepted, slowest = broken(Path(folder), arguments.rounds, arguments.seed)
    print(
        f"silence: {arguments.rounds} times, seed {arguments.seed}: {accepted} events accepted, "
        f"again after {slowest:.1f} s at the latest"
    )
    print("\n".join(f"silence: BROKEN {text}" for text in found) or "silence: no effect is missing")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
