"""Restate's side of the start figure: a service whose handler records when it begins, and then does one step.

`python -m bench.restate_side PORT` serves it; the environment names the file for marks. Runs in the environment of the
other queues.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config

from bench import marks

SERVICE = restate.Service("bench")


@SERVICE.handler()  # type: ignore[untyped-decorator]  # not installed where it is checked
async def start(ctx: restate.Context, event: dict[str, Any]) -> int:
    """As little as a handler with a step can do; the event is the one that Tidegate is given."""
    number: int = event["payload"]["id"]
    marks.write(number, time.monotonic())
    await ctx.run_typed("nothing", _same, number=number)
    return number


async def _same(number: int) -> int:
    return number


def main() -> None:
    config = Config()
    config.bind = [f"127.0.0.1:{sys.argv[1]}"]
    asyncio.run(serve(restate.app([SERVICE]), config))


if __name__ == "__main__":
    main()
