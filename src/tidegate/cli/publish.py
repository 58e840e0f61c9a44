"""`tidegate publish`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from tidegate.cli.output import client, json_option, print_json


@click.command()
@click.argument("type")
@click.option("--source", required=True, help="The source of the event, e.g. shop.api.")
@click.option("--data", default=None, help="The payload: JSON, @FILE, or - for standard input.")
@click.option(
    "--id", "external_id", default=None, help="Your id for the event. Publishing it again stores no second event."
)
@click.option("--correlation-id", default=None, help="Correlation id, passed on to logs, runs and traces.")
@json_option
def publish(
    type: str, source: str, data: str | None, external_id: str | None, correlation_id: str | None, as_json: bool
) -> None:
    """Publish an event of TYPE. Returns after the event is committed."""
    payload = _payload(data)
    with client() as api:
        receipt = api.publish(type, source=source, payload=payload, id=external_id, correlation_id=correlation_id)
    if as_json:
        print_json(receipt)
    else:
        click.echo(f"{receipt.status} {receipt.id}")


def _payload(data: str | None) -> Any:
    if data is None:
        return None
    try:
        if data == "-":
            text = sys.stdin.read()
        elif data.startswith("@"):
            text = Path(data[1:]).read_text(encoding="utf-8")
        else:
            text = data
    except (OSError, UnicodeDecodeError) as exc:
        raise click.UsageError(f"--data: {data[1:]} cannot be read: {exc}") from exc
    try:
        payload = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise click.UsageError(f"--data is not JSON: {exc}") from exc
    if not isinstance(payload, dict):
        raise click.UsageError("--data must be a JSON object, such as '{\"id\": 7}'")
    return payload
