"""The `tidegate` command. Exit status: 0 success, 1 the server refused the request, 2 wrong usage or settings."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import ClassVar

import click

from tidegate import __version__
from tidegate.errors import AppError, InvalidInput, RequestRefused, SchemaError, SettingsError, TidegateError


class _LazyGroup(click.Group):
    """Loads a command's module when it is used, so that `tidegate publish` does not import the server."""

    _homes: ClassVar[dict[str, str]] = {
        "init": "init",
        "dev": "dev",
        "serve": "process",
        "worker": "process",
        "migrate": "migrate",
        "publish": "publish",
        "run": "run",
        "events": "events",
        "explain": "events",
        "runs": "runs",
        "workflows": "workflows",
        "approvals": "approvals",
        "schedules": "schedules",
        "workers": "workers",
        "sources": "sources",
        "budgets": "budgets",
        "webhooks": "webhooks",
        "triggers": "triggers",
        "deliveries": "deliveries",
        "retries": "retries",
        "dlq": "dlq",
        "prune": "prune",
        "health": "health",
        "doctor": "doctor",
        "top": "top",
        "token": "token",
        "secrets": "secrets",
        "audit": "audit",
        "completion": "completion",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = self._homes.get(cmd_name)
        if home is None:
            return None
        command: click.Command = getattr(_loaded(f"tidegate.cli.{home}"), cmd_name)
        if ctx.resilient_parsing:  # a shell completes it
            from tidegate.cli.names import complete_names

            return complete_names(command)
        return command


def _loaded(name: str) -> ModuleType:
    """The module. Garbage is not collected meanwhile, nor looked for in what was loaded: modules stay, and looking at
    them again and again took a sixth of the time."""
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tidegate")
def cli() -> None:
    """A durable event gate and scheduler.

    Try it: `tidegate dev`, then `tidegate publish order.created --source shop.api --data '{"id": 7, "amount": 120}'`.
    """


def main() -> None:
    """The entry point. Every error is one sentence on standard error."""
    try:
        cli(standalone_mode=False, complete_var="_TIDEGATE_COMPLETE")
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as exc:
        exc.show()
        sys.exit(2)
    except RequestRefused as exc:  # before InvalidInput, which it may be too: the command line was in order
        click.echo(f"tidegate: {exc}", err=True)
        sys.exit(1)
    except (SettingsError, SchemaError, AppError, InvalidInput) as exc:
        click.echo(f"tidegate: {exc}", err=True)
        sys.exit(2)
    except TidegateError as exc:
        click.echo(f"tidegate: {exc}", err=True)
        sys.exit(1)
