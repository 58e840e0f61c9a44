"""`python -m chaos`: break a real cluster for a while, and say whether any promise was broken."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop

from chaos import run
from chaos.faults import FAULTS, NEED_REDIS
from tidegate.telemetry import logs

QUEUES = ("postgres", "bullmq")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="for how long things are broken [%(default)s]")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; its number is printed [random]")
    parser.add_argument("--rate", type=float, default=120.0, help="events a second [%(default)s]")
    parser.add_argument("--queue", choices=QUEUES, default="postgres", help="[%(default)s]")
    parser.add_argument("--both", action="store_true", help="one run on each queue, one after the other")
    parser.add_argument("--only", choices=FAULTS, action="append", help="one kind of fault; may be repeated [all]")
    parser.add_argument("--apis", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--workers", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--folder", type=Path, help="where the run leaves its evidence; kept [a temporary one]")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="judge what an earlier run left, and nothing else")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything we started is taken down
    logs.configure("warning", "console")
    if arguments.check is not None:
        choice = msgspec.json.decode((arguments.check / "choice.json").read_bytes(), type=run.Choice)
        sys.exit(_tell(run.judged(choice, arguments.check, 0.0), arguments.check))
    seed = random.randrange(1, 1_000_000) if arguments.seed is None else arguments.seed
    queues = QUEUES if arguments.both else (arguments.queue,)
    choices = [_choice(parser, arguments, seed, queue) for queue in queues]
    results = [_run(choice, arguments.folder) for choice in choices]
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        found = [result for result, _ in results]
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    sys.exit(max(status for _, status in results))


def _choice(parser: argparse.ArgumentParser, arguments: argparse.Namespace, seed: int, queue: str) -> run.Choice:
    faults = [fault for fault in arguments.only or FAULTS if queue == "bullmq" or fault not in NEED_REDIS]
    if not faults:
        parser.error(f"--only {' '.join(arguments.only)} needs --queue bullmq")
    return run.Choice(
        seed=seed,
        seconds=arguments.seconds,
        per_second=arguments.rate,
        queue=queue,
        faults=faults,
        apis=arguments.apis,
        workers=arguments.workers,
    )


def _run(choice: run.Choice, kept: Path | None) -> tuple[run.Result, int]:
    """One run, and its exit status. Its folder goes when all is well and nobody asked for it."""
    folder = kept / choice.queue if kept is not None else Path(tempfile.mkdtemp(prefix="tidegate-chaos-"))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(run.run(choice, folder, lambda text: print(f"chaos: {text}", flush=True)))
    except BaseException:
        print(f"chaos: the run failed; seed {choice.seed}, all that it left is in {folder}", file=sys.stderr)
        raise
    status = _tell(result, folder)
    if status == 0 and kept is None:
        shutil.rmtree(folder, ignore_errors=True)
    return result, status


def _tell(result: run.Result, folder: Path) -> int:
    print(run.table(result))
    if result.is_clean:
        return 0
    again = f"python -m chaos --seed {result.choice.seed} --seconds {result.choice.seconds:g}"
    print(f"\nA promise was broken. Seed {result.choice.seed}; ledger, faults, effects, logs and rows are in {folder}")
    print(f"Judge them again: python -m chaos --check {folder}; run it again: {again} --queue {result.choice.queue}")
    return 1


if __name__ == "__main__":
    main()
