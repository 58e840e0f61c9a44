"""`tidegate health`."""

from __future__ import annotations

import shutil
import sys
import textwrap
from datetime import datetime
from typing import Any

import click

from tidegate.cli.output import (
    client,
    json_option,
    kept_for,
    local_text,
    print_json,
    print_table,
    printable,
    short_eta,
    short_time,
    zoned_time,
)

_COLOURS = {"ok": "green", "degraded": "yellow", "critical": "red"}


@click.command()
@json_option
def health(as_json: bool) -> None:
    """Show the health of the cluster, with the cause of each problem. Exit status 0 if it is ok, 1 otherwise."""
    with client() as api:
        found = api.request("GET", "/admin/event-health")
    if as_json:
        print_json(found)
    else:
        _print(found)
    if found["status"] != "ok":
        sys.exit(1)


def _print(found: dict[str, Any]) -> None:
    # Lines are wrapped at the terminal's width, and not at all when piped.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    status = click.style(found["status"], fg=_COLOURS[found["status"]], bold=True)
    click.echo(f"{status} at {zoned_time(found['generated_at'])}")
    now = datetime.fromisoformat(found["generated_at"])
    for cause in found["causes"]:
        click.echo("")
        _print_cause(cause, now, width)
    if "queues" not in found:
        click.echo("\n" + _wrapped("only the sources that the token is bound to are shown", "", width))
        return
    for warning in found["warnings"]:
        click.echo("\n" + _wrapped(f"warning: {warning['message']}", "", width))
    rows = [
        (name, str(q["ready"]), str(q["delayed"]), str(q["active"]), short_eta(q["oldest_due_age_seconds"]))
        for name, q in found["queues"].items()
    ]
    click.echo("")
    print_table(("QUEUE", "READY", "DELAYED", "ACTIVE", "OLDEST DUE"), rows, "")
    letters = found["dead_letters"]
    click.echo(f"dead letters: {letters['total']} ({letters['last_24h']} in the last 24 h)")
    if history := found.get("history"):
        click.echo(f"history: {kept_for(history['retention_events_seconds'])}, since {history['oldest_day']}")


def _print_cause(cause: dict[str, Any], now: datetime, width: int | None) -> None:
    """One cause: severity, code, subject and since when; its message; what to do; the runbook."""
    since = ""
    if cause["since"]:
        age = max(0.0, (now - datetime.fromisoformat(cause["since"])).total_seconds())
        since = f", since {short_time(cause['since'])} ({short_eta(age)})"
    title = _wrapped(f"{cause['severity']}: {cause['code']} {_subject(cause)}{since}", "", width)
    severity = cause["severity"]
    click.echo(title.replace(severity, click.style(severity, fg=_COLOURS[severity], bold=True), 1))
    click.echo(_wrapped(local_text(cause["message"]), "  ", width))
    click.echo(_wrapped(f"do:  {cause['do']}", "  ", width))
    click.echo(_wrapped(f"see: {cause['runbook']}", "  ", width))


def _subject(cause: dict[str, Any]) -> str:
    """The subject as commands take it: for a trigger WORKFLOW/NAME, with which its message begins."""
    if cause["code"] not in ("trigger_paused", "trigger_breaker_open"):
        return str(cause["subject"])
    name, separator, _ = cause["message"].partition(": ")
    return name if separator and "/" in name else str(cause["subject"])


def _wrapped(text: str, indent: str, width: int | None) -> str:
    if width is None:
        return indent + printable(text)
    hanging = f"{indent}     " if text.startswith(("do: ", "see:")) else indent or "  "
    # Words are not broken, so that commands and URLs can be copied.
    return textwrap.fill(printable(text), max(20, width), initial_indent=indent, subsequent_indent=hanging,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip
