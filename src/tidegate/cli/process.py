"""`tidegate dev`, `serve` and `worker`: the long-running processes, their signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop

from tidegate import settings as settings_module
from tidegate.api.server import bind, serving
from tidegate.app import Tidegate
from tidegate.cli.load import load_app
from tidegate.embedded import EmbeddedPostgres
from tidegate.model.masking import masked
from tidegate.settings import Settings
from tidegate.store import migrate
from tidegate.store.db import Database
from tidegate.telemetry import logs
from tidegate.worker.scrape import scrapable

# How long busy threads get to finish at exit; idle ones end at once.
LEAVE_SECONDS = 0.5


@click.command()
@click.argument("app", required=False)
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Port of the API and console [8700].")
@click.option("--data", type=click.Path(path_type=Path), default=Path(".tidegate"), show_default=True,
              help="Data directory of the embedded Postgres.")  # fmt: skip
def dev(app: str | None, port: int | None, data: Path) -> None:
    """Run everything in one process, on an embedded Postgres: API, console and a worker for APP.

    APP is module:name or a Python file with a Tidegate object. If TIDEGATE_DATABASE_URL is set, that database is used
    instead of the embedded one.
    """
    # No authentication: it listens on loopback only, for local development.
    settings = _settings({"port": port}, {"auth": "off", "log_format": "console", "log_level": "warning"})
    application = load_app(app) if app else Tidegate()
    listening = bind(settings)
    if settings.database_url is not None:
        _run(lambda stop: _dev(application, settings, listening, stop))
        return
    postgres = EmbeddedPostgres(data)
    try:
        url = postgres.start(lambda message: click.echo(f"tidegate: {message} …"))
        ready = msgspec.structs.replace(settings, database_url=url)
        _run(lambda stop: _dev(application, ready, listening, stop))
    finally:
        postgres.stop()


@click.command()
@click.option("--host", default=None, help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Port to listen on [8700].")
def serve(host: str | None, port: int | None) -> None:
    """Run the API."""
    settings = _settings({"host": host, "port": port})
    _run(lambda stop: _serve(settings, stop))


@click.command()
@click.argument("app")
@click.option(
    "--concurrency", type=click.IntRange(1, 1000), default=None, help="Maximum number of concurrent runs [20]."
)
def worker(app: str, concurrency: int | None) -> None:
    """Run a worker: dispatch events and execute the workflows of APP (module:name or a Python file)."""
    settings = _settings({"worker_concurrency": concurrency})
    application = load_app(app)
    _run(lambda stop: _worker(application, settings, stop))
    _leave_threads_behind()


def _settings(overrides: dict[str, Any], defaults: dict[str, Any] | None = None) -> Settings:
    """The settings; the user's values take precedence over a command's own defaults."""
    settings = settings_module.load(overrides, defaults)
    logs.configure(settings.log_level, settings.log_format)
    return settings


def _run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
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


async def _dev(application: Tidegate, settings: Settings, listening: socket.socket, stop: asyncio.Event) -> None:
    application.configure(settings)
    database = Database(settings.require_database_url(), "migrate", size=1)
    applied = await migrate.migrate(database)
    await database.close()
    if applied:
        click.echo(f"tidegate: schema at version {migrate.latest()}")
    working = await application.worker()
    async with serving(settings, listening) as server:
        _welcome(application, settings, server.port)
        async with _supervised(working.run(), working.stop) as work:
            await _first(stop.wait(), server.wait(), work)
        click.echo("tidegate: stopping …")


async def _serve(settings: Settings, stop: asyncio.Event) -> None:
    async with serving(settings, bind(settings)) as server:
        click.echo(
            f"tidegate: API on http://{settings.host}:{server.port}"
        )  # on standard output: standard error has only log lines
        await _first(stop.wait(), server.wait())


async def _worker(application: Tidegate, settings: Settings, stop: asyncio.Event) -> None:
    application.configure(settings)
    working = await application.worker()
    await working.log_secret_warnings()
    async with scrapable(application.settings), _supervised(working.run(), working.stop) as work:
        await _first(stop.wait(), work)


@contextlib.asynccontextmanager
async def _supervised(main: Coroutine[Any, Any, None], stop: Callable[[], None]) -> Any:
    """A background task: stopped and awaited when the context ends; its error is raised."""
    task = asyncio.create_task(main)
    try:
        yield task
    finally:
        stop()
        await task


async def _first(*waits: Any) -> None:
    """Wait until the first of them ends; its error is raised."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        if task.get_coro().__name__ in ("wait",):  # only ours; supervised tasks are stopped by their owner
            task.cancel()
    for task in done:
        task.result()


def _own_command() -> str:
    """The command that starts this program from the current directory."""
    if shutil.which("tidegate"):
        return "tidegate"
    program = Path(sys.argv[0]).absolute()
    return str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else str(program)


def _welcome(application: Tidegate, settings: Settings, port: int) -> None:
    url = f"http://{settings.host}:{port}"
    command = ("" if port == 8700 else f"TIDEGATE_URL={url} ") + _own_command()
    click.echo(f"\nTidegate is running: API and console on {url} (docs: {url}/docs)")
    click.echo(f"  workflows: {', '.join(sorted(application.workflows)) or 'none'}")
    click.echo(f"  database:  {masked(settings.database_url or '')}")
    click.echo("\nTry it in another terminal:")
    click.echo(f"""  {command} publish order.created --source shop.api --data '{{"id": 7, "amount": 120}}'""")
    click.echo(f"  {command} runs list")
    click.echo("\nPress Ctrl-C to stop; the data is kept.")
