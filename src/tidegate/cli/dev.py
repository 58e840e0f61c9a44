"""`tidegate dev`: everything in one process, on an embedded Postgres; the code is reloaded when it changes."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
from pathlib import Path

import click
import msgspec

from tidegate.api.server import bind, serving
from tidegate.app import Tidegate
from tidegate.cli import live_lines, try_it
from tidegate.cli.output import kept_for
from tidegate.cli.process import first, read_settings, run, supervised
from tidegate.cli.reload import Code
from tidegate.embedded import EmbeddedPostgres
from tidegate.errors import TidegateError
from tidegate.flow.look import explain
from tidegate.model.masking import masked
from tidegate.settings import Settings
from tidegate.store import migrate
from tidegate.store.db import Database
from tidegate.worker.supervisor import Worker

# How often `tidegate dev` checks that its Postgres is running, and whether the code has changed.
POSTGRES_CHECK_SECONDS = 0.5
CODE_CHECK_SECONDS = 0.3
# How long runs may continue with the old code when it is reloaded.
RELOAD_SHUTDOWN_MS = 2000


@click.command()
@click.argument("app", required=False)
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Port of the API and console [8700].")
@click.option("--data", type=click.Path(path_type=Path), default=Path(".tidegate"), show_default=True,
              help="Data directory of the embedded Postgres.")  # fmt: skip
@click.option("--no-reload", is_flag=True, help="Do not reload APP when its code changes.")
@click.option("--verbose", is_flag=True, help="Print the log instead of one short line for each event and run.")
def dev(app: str | None, port: int | None, data: Path, no_reload: bool, verbose: bool) -> None:
    """Run everything in one process, on an embedded Postgres: API, console and a worker for APP.

    APP is module:name or a Python file with a Tidegate object; it is loaded again when its file, or a module it imports
    from the same folder, changes. If TIDEGATE_DATABASE_URL is set, that database is used instead of the embedded one.
    """
    # No authentication: it listens on loopback only, for local development.
    defaults = {"auth": "off", "log_format": "console", "log_level": "info" if verbose else "warning",
                "shutdown_ms": RELOAD_SHUTDOWN_MS}  # fmt: skip
    settings = read_settings({"port": port}, defaults, None if verbose else live_lines.show)
    code = Code(app) if app else None
    application = code.load() if code else Tidegate()
    watched = None if no_reload else code
    listening = bind(settings)
    address = _address(settings, listening.getsockname()[1])
    settings = msgspec.structs.replace(settings, public_url=settings.public_url or address)
    if settings.database_url is not None:
        run(lambda stop: _dev(application, watched, settings, listening, stop, None))
        return
    postgres = EmbeddedPostgres(data)
    try:
        url = postgres.start(lambda message: click.echo(f"tidegate: {message} …"))
        ready = msgspec.structs.replace(settings, database_url=url, database_direct_url=None)
        run(lambda stop: _dev(application, watched, ready, listening, stop, postgres))
    except TidegateError as exc:
        if postgres.has_ended(within_seconds=POSTGRES_CHECK_SECONDS):
            raise TidegateError(
                f"the embedded Postgres has stopped; {postgres.log} says why. Start `tidegate dev` again: what was "
                "committed is kept"
            ) from exc
        raise
    finally:
        postgres.stop()


class _LiveWorker:
    """A worker that is replaced by one with the new code when the code has changed and can be loaded."""

    def __init__(self, worker: Worker, code: Code | None, settings: Settings) -> None:
        self._worker = worker
        self._code = code
        self._settings = settings
        self._is_stopping = False

    def stop(self) -> None:
        self._is_stopping = True
        self._worker.stop()

    async def run(self) -> None:
        """Work until stopped; raises the error of a worker that fails."""
        while not self._is_stopping:
            work = asyncio.create_task(self._worker.run())
            renewed = asyncio.create_task(self._renewed())
            await asyncio.wait([work, renewed], return_when=asyncio.FIRST_COMPLETED)
            self._worker.stop()
            await work
            if not renewed.done():
                renewed.cancel()
                break
            self._worker = renewed.result()

    async def _renewed(self) -> Worker:
        """A worker with the new code, once there is some that can be loaded."""
        while True:
            await asyncio.sleep(CODE_CHECK_SECONDS)
            if self._code is None or not self._code.has_changed():
                continue
            try:
                application = self._code.load()
                application.configure(self._settings)
                worker = await application.worker()
            except Exception as exc:  # noqa: BLE001 - whatever is wrong with the new code, the old continues
                click.echo(f"tidegate: not reloaded, the old code continues: {exc or type(exc).__name__}")
                continue
            click.echo(f"tidegate: reloaded; workflows: {', '.join(sorted(application.workflows)) or 'none'}")
            return worker


async def _dev(
    application: Tidegate,
    code: Code | None,
    settings: Settings,
    listening: socket.socket,
    stop: asyncio.Event,
    postgres: EmbeddedPostgres | None,
) -> None:
    application.configure(settings)
    database = Database(settings.require_direct_url(), "migrate", size=1)
    applied = await migrate.migrate(database)
    await database.close()
    if applied:
        click.echo(f"tidegate: schema at version {migrate.latest()}")
    working = _LiveWorker(await application.worker(), code, settings)
    async with serving(settings, listening) as server:
        _welcome(application, settings, server.port)
        async with supervised(working.run(), working.stop) as work:
            ended = [_ended(postgres)] if postgres else []
            await first(stop.wait(), server.wait(), work, _explain_nothing(settings), *ended)
        click.echo("tidegate: stopping …")


async def _explain_nothing(settings: Settings) -> None:
    """Print why events launched nothing, until this is cancelled."""
    database = Database(settings.require_database_url(), "dev", size=1)

    async def summary(event_id: str) -> str:
        async with database.connection() as connection:
            return (await explain.explain(connection, event_id)).summary

    try:
        await live_lines.explain_nothing(summary)
    finally:
        await database.close()


async def _ended(postgres: EmbeddedPostgres) -> None:
    """Wait until the server has ended by itself; raises TidegateError then."""
    while not postgres.has_ended():  # noqa: ASYNC110 - the end of another process sets no event
        await asyncio.sleep(POSTGRES_CHECK_SECONDS)
    raise TidegateError("the embedded Postgres has stopped")


def _own_command() -> str:
    """The command that starts this program from the current directory."""
    if shutil.which("tidegate"):
        return "tidegate"
    program = Path(sys.argv[0]).absolute()
    return str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else str(program)


def _address(settings: Settings, port: int) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{port}"


def _welcome(application: Tidegate, settings: Settings, port: int) -> None:
    url = _address(settings, port)
    command = ("" if port == 8700 else f"TIDEGATE_URL={url} ") + _own_command()
    click.echo(f"\nTidegate is running: API and console on {url} (docs: {url}/docs)")
    click.echo(f"  workflows: {', '.join(sorted(application.workflows)) or 'none'}")
    click.echo(f"  database:  {masked(settings.database_url or '')}")
    click.echo(f"  history:   {kept_for(settings.retention_events_seconds)} (TIDEGATE_RETENTION_EVENTS_SECONDS)")
    example = try_it.example(application.workflows.values())
    if example is not None:
        click.echo(f"\nTry it in another terminal:\n  {command} {example}\n  {command} runs list")
    click.echo("\nPress Ctrl-C to stop; the data is kept.")
