"""`tidegate serve` and `worker`: the long-running processes, their signals and shutdown (`dev` is in `cli/dev.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import click
import uvloop

from tidegate import settings as settings_module
from tidegate.api.server import bind, serving
from tidegate.app import Tidegate
from tidegate.cli.given_settings import advice
from tidegate.cli.load import load_app
from tidegate.settings import Settings
from tidegate.telemetry import logs
from tidegate.worker.scrape import scrapable

_log = logs.logger("process")

# How long busy threads get to finish at exit; idle ones end at once.
LEAVE_SECONDS = 0.5


@click.command()
@click.option("--host", default=None, help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Port to listen on [8700].")
def serve(host: str | None, port: int | None) -> None:
    """Run the API."""
    settings = read_settings({"host": host, "port": port})
    run(lambda stop: _serve(settings, stop))


@click.command()
@click.argument("app")
@click.option(
    "--concurrency", type=click.IntRange(1, 1000), default=None, help="Maximum number of concurrent runs [20]."
)
@click.option(
    "--reserve",
    multiple=True,
    metavar="WORKFLOW=SLOTS",
    help="Keep slots for a workflow, such as fulfil=4; repeatable.",
)
@click.option(
    "--only", multiple=True, metavar="WORKFLOWS", help="Take the runs of these workflows only (a,b); repeatable."
)
def worker(app: str, concurrency: int | None, reserve: tuple[str, ...], only: tuple[str, ...]) -> None:
    """Run a worker: dispatch events and execute the workflows of APP (module:name or a Python file)."""
    given = {"worker_reserve": ",".join(reserve) or None, "worker_only": ",".join(only) or None}
    settings = read_settings({"worker_concurrency": concurrency, **given})
    application = load_app(app)
    run(lambda stop: _worker(application, settings, stop))
    _leave_threads_behind()


def read_settings(
    overrides: dict[str, Any], defaults: dict[str, Any] | None = None, observer: logs.Observer | None = None
) -> Settings:
    """The settings; the user's values take precedence over a command's own defaults. Logs are configured by them."""
    settings = settings_module.load(overrides, defaults)
    logs.configure(settings.log_level, settings.log_format, observer)
    for variable, meant in settings_module.unknown_variables():
        reason = f"not a setting, ignored; {advice(meant)}"
        _log.warning("settings.unknown_variable", variable=variable, reason=reason)
    return settings


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run until SIGINT or SIGTERM; a second signal ends the process at once."""

    async def body() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def asked() -> None:
            if stop.is_set():
                raise SystemExit(130)
            stop.set()

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, asked)
        await main(stop)

    # Loaded modules stay: a garbage collection that scans them stops the process for 70 ms. Objects in use are no
    # garbage either: with the default threshold of 700 objects, collections took a fifth of a busy worker's time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


def _leave_threads_behind() -> None:
    """Exit although a thread still executes a workflow's function: its run was released already."""
    busy = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in busy:
        thread.join(LEAVE_SECONDS / len(busy))
    if any(thread.is_alive() for thread in busy):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _serve(settings: Settings, stop: asyncio.Event) -> None:
    async with serving(settings, bind(settings)) as server:
        click.echo(
            f"tidegate: API on http://{settings.host}:{server.port}"
        )  # on standard output: standard error has only log lines
        await first(stop.wait(), server.wait())


async def _worker(application: Tidegate, settings: Settings, stop: asyncio.Event) -> None:
    application.configure(settings)
    working = await application.worker()
    await working.log_secret_warnings()
    async with scrapable(application.settings), supervised(working.run(), working.stop) as work:
        await first(stop.wait(), work)


@contextlib.asynccontextmanager
async def supervised(main: Coroutine[Any, Any, None], stop: Callable[[], None]) -> Any:
    """A background task: stopped and awaited when the context ends; its error is raised."""
    task = asyncio.create_task(main)
    try:
        yield task
    finally:
        stop()
        await task


async def first(*waits: Any) -> None:
    """Wait until the first of them ends; its error is raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending.difference(waits):  # supervised tasks are stopped by their owner
        task.cancel()
    for task in done:
        task.result()
