"""`python -m chaos.fences`: would anyone notice? Each fence is taken out of a cluster, and its verdict must find it.

The product has no switch for this. A process of such a cluster reads `chaos/patched/sitecustomize.py` first, which
changes the statements and functions that hold the fence as they are loaded, in that process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import uvloop

from chaos import run
from chaos.judge import Verdict
from tidegate.store import sql
from tidegate.telemetry import logs

if TYPE_CHECKING:
    from chaos import shared


class Fence(NamedTuple):
    """What holds it: patterns in the statements of an aggregate, and what stands there instead; functions, by module
    and name, and what is made of each. How it is found out."""

    edits: tuple[tuple[str, str, str], ...]
    verdicts: tuple[str, ...]
    seconds: float
    per_second: float
    faults: tuple[str, ...] = ()
    functions: tuple[tuple[str, str, Callable[[Any], Any]], ...] = ()
    is_shared: bool = False  # it is `chaos.shared` that finds it out


async def _nothing(*_: Any) -> int:
    return 0


async def _nobody(*_: Any) -> Any:
    from tidegate.store.slot_lines import Nudged  # not above: it loads statements

    return Nudged()


async def _never(*_: Any) -> None:
    await asyncio.Event().wait()


FENCES = {
    # Two events with one idempotency key: the second finds it taken.
    "idempotency": Fence(
        (("idempotency", r"where k\.expires_at <= tidegate\.now\(\)(?=\s+returning)", "where true"),),
        ("double launches",), seconds=6, per_second=60,
    ),
    # A worker that was thought dead and wakes up writes nothing: its claim has been raised. Before that stands another
    # fence: by its own clock, it has its functions leave.
    "claim": Fence(
        (
            ("runs", r"\b[rs]\.claim_generation = u\.claim_generation", "true"),
            ("steps", r"\bh\.claim_generation = u\.claim_generation", "true"),
        ),
        ("runs that ended as they should not",), seconds=10, per_second=120, faults=("freeze",),
        functions=(("tidegate.flow.run.leases", "LeaseKeeper._watch", lambda _: _never),),
    ),
    # Workers decide about a trigger one after the other: its throttle and its slots are counted under its row lock.
    "trigger lock": Fence(
        (("trigger_gates", r"for update of g\b", ""),),
        ("limits exceeded", "concurrency exceeded"), seconds=10, per_second=250,
    ),
    # The same for a source and its limit.
    "source lock": Fence(
        (("sources", r"for update of s\b", ""),),
        ("limits exceeded",), seconds=10, per_second=250,
    ),
    # Events of one batch with one idempotency key: those that are skipped name the run of the first, and claim nothing.
    # Behind that stands another fence: a worker takes up no claim twice.
    "one execution": Fence(
        (),
        ("effects repeated without a reason", "executions side by side"), seconds=6, per_second=60,
        functions=(
            ("tidegate.flow.decide.delivery_state", "claimed_with",
             lambda _: lambda one, created: created.get(one.run_id)),
            ("tidegate.flow.decide.delivery_state", "claimed_run",
             lambda made: lambda one, *others: made(one._replace(status="launched"), *others)),
            ("tidegate.flow.run.claiming", "Claims.take", lambda _: lambda _claims, _run: True),
        ),
    ),
    # A launch spends its cost, not 1.
    "budget cost": Fence(
        (), ("exceeded",), seconds=6, per_second=60, is_shared=True,
        functions=(("tidegate.model.budget", "CompiledBudget.need",
                    lambda made: lambda *given: made(*given)._replace(cost=1)),),
    ),
    # A run that is launched holds a slot of each of its budgets.
    "budget slot": Fence(
        (), ("crowded",), seconds=6, per_second=60, is_shared=True,
        functions=(("tidegate.store.budgets", "hold", lambda _: _nothing),),
    ),
    # Whoever is first in line is due when there is room, not at a time that was expected before.
    "budget turn": Fence(
        (), ("held_without_reason",), seconds=8, per_second=60, is_shared=True,
        functions=(("tidegate.store.budgets", "nudge", lambda _: _nobody),),
    ),
    # The run of a window is given all of its events, its first one too.
    "window event": Fence(
        (("windows", r"and d\.workflow_run_id is not null(?=\s+order by)", r"\g<0> and d.id <> d.window_id"),),
        ("event_in_no_run",), seconds=6, per_second=60, is_shared=True,
    ),
    # A window takes no event when it is full or its time is over.
    "window end": Fence(
        (), ("window_exceeded",), seconds=6, per_second=60, is_shared=True,
        functions=(("tidegate.model.window", "Window.takes", lambda _: lambda self, *_: self.state == "open"),),
    ),
}  # fmt: skip


def take_out(names: Sequence[str]) -> None:
    """In this process, before the statements are loaded: what holds the fences is not there."""
    original = sql.blocks
    edits = [edit for name in names for edit in FENCES[name].edits]

    def blocks(aggregate: str) -> list[sql.Block]:
        found = original(aggregate)
        for _, pattern, instead in (edit for edit in edits if edit[0] == aggregate):
            changed = [sql.Block(b.name, b.description, re.sub(pattern, instead, b.text)) for b in found]
            if changed == found:
                raise LookupError(f"nothing in {aggregate}.sql is like {pattern}: the fence is held in another way")
            found = changed
        return found

    sql.blocks = blocks
    for module, name, instead in (one for fence in names for one in FENCES[fence].functions):
        place, _, last = name.rpartition(".")
        owner = importlib.import_module(module)
        owner = getattr(owner, place) if place else owner
        setattr(owner, last, instead(getattr(owner, last)))


def without(names: Sequence[str], folder: Path, seed: int, queue: str = "postgres") -> run.Result:
    """A short run without the fences."""
    fences = [FENCES[name] for name in names]
    choice = run.Choice(
        seed=seed,
        queue=queue,
        seconds=max(fence.seconds for fence in fences),
        per_second=max(fence.per_second for fence in fences),
        faults=sorted({fault for fence in fences for fault in fence.faults}),
        apis=1,
        workers=3,
        drain_seconds=3,
        without=list(names),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run.run(choice, folder, lambda text: print(f"chaos: {text}", flush=True)))


def without_shared(names: Sequence[str], folder: Path, seed: int) -> shared.Found:
    """A short run of `chaos.shared` without the fences."""
    # Not above: a process without fences imports this module before it loads a statement, and that one loads an app.
    from chaos import shared

    fences = [FENCES[name] for name in names]
    choice = shared.Choice(
        seed=seed,
        seconds=max(fence.seconds for fence in fences),
        per_second=max(fence.per_second for fence in fences),
        faults=(),
        apis=1,
        workers=3,
        patience_seconds=5,
        without=list(names),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(shared.run(choice, folder))


def noticed_shared(name: str, found: shared.Found) -> list[str]:
    """The verdicts that found out, with how often."""
    counts = {verdict: len(getattr(found.verdicts, verdict)) for verdict in FENCES[name].verdicts}
    return [f"{verdict.replace('_', ' ')} {count}" for verdict, count in counts.items() if count]


def noticed(name: str, result: run.Result) -> list[Verdict]:
    """The verdicts that found out."""
    return [verdict for verdict in result.verdicts if verdict.count and verdict.name in FENCES[name].verdicts]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.fences", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FENCE", help=f"{', '.join(FENCES)} [all]")
    parser.add_argument("--tries", type=int, default=3, help="a race is not lost every time [%(default)s]")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - FENCES.keys():
        parser.error(f"no such fence: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logs.configure("warning", "console")
    missed = []
    for name in arguments.names or FENCES:
        for seed in range(1, arguments.tries + 1):
            folder = Path(tempfile.mkdtemp(prefix="tidegate-fence-"))
            try:
                if FENCES[name].is_shared:
                    found = noticed_shared(name, without_shared([name], folder, seed))
                else:
                    found = [f"{one.name} {one.count}" for one in noticed(name, without([name], folder, seed))]
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if found:
                print(f"NOTICED {name}: {'; '.join(found)}", flush=True)
                break
        else:
            missed.append(name)
    for name in missed:
        print(f"MISSED  {name}: taken out, and nobody noticed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
