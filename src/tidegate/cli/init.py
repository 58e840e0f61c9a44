"""`tidegate init`: a small project to begin with: a workflow, its test, and what they need."""

from __future__ import annotations

from pathlib import Path

import click

from tidegate import __version__
from tidegate.errors import AppError

_APP = '''\
"""Orders: the card is charged, and an hour later the customer gets a letter.

    tidegate dev app.py
    tidegate publish order.created --source shop.api --data '{"id": 7, "amount": 120}'
"""

from tidegate import Context, NonRetryable, Retry, Tidegate

app = Tidegate()


async def charge(ctx: Context, amount: float) -> str:
    """Ask the bank. The key is the same in each attempt, so that the bank can tell a repeated request."""
    if amount <= 0:
        raise NonRetryable(f"an order of {amount:g} cannot be charged")
    return f"receipt for {amount:g}, key {ctx.idempotency_key}"


async def send_letter(order: int) -> str:
    return f"letter about order {order}"


@app.workflow(on="order.created", source="shop.*")
async def fulfil(ctx: Context, id: int, amount: float) -> dict[str, str]:
    """The results of steps are stored: after a crash, or the hour, the run resumes after the last completed step."""
    receipt = await ctx.step("charge", charge, ctx, amount, retry=Retry(max_attempts=5, base="2s"))
    await ctx.sleep("1h")
    letter = await ctx.step("letter", send_letter, id)
    return {"receipt": receipt, "letter": letter}
'''

_TEST = '''\
"""Each test has a temporary database and a clock of its own: an hour takes milliseconds (pytest plugin of Tidegate)."""


async def test_an_order_is_charged_and_an_hour_later_a_letter_is_sent(tidegate):
    await tidegate.publish("order.created", source="shop.api", payload={"id": 7, "amount": 120})
    await tidegate.run_until_idle()
    assert (await tidegate.only_run("fulfil")).status == "pending"
    await tidegate.advance("1h")
    run = await tidegate.only_run("fulfil")
    assert run.status == "succeeded"
    assert run.output["letter"] == "letter about order 7"


async def test_a_bank_that_is_away_is_asked_again(tidegate):
    tidegate.fail_step("charge", times=2, error=ConnectionError("the bank is away"))
    await tidegate.publish("order.created", source="shop.api", payload={"id": 7, "amount": 120})
    await tidegate.advance("2h")
    assert (await tidegate.only_run("fulfil")).steps["charge"].attempts == 3


async def test_an_order_without_an_amount_fails_and_says_why(tidegate):
    accepted = await tidegate.publish("order.created", source="shop.api", payload={"id": 7, "amount": 0})
    await tidegate.run_until_idle()
    assert "an order of 0 cannot be charged" in (await tidegate.explain(accepted)).summary
'''

_PROJECT = """\
[project]
name = "orders"
version = "0.1.0"
requires-python = ">=3.11"

[tool.pytest.ini_options]
testpaths = ["tests"]
tidegate_app = "app.py"
"""

_README = """\
# Orders

A project of Tidegate: a workflow in `app.py`, its tests in `tests/`. Install Tidegate {version} with its extra
`embedded` into the project's environment (docs/installing.md of Tidegate), and the rest with pip:

```console
pip install -r requirements.txt
pytest
tidegate dev app.py
```

`tidegate dev` runs the API, the console and a worker on a Postgres of its own, loads `app.py` again when you
change it, and prints a line for each event and run. In another terminal:

```console
tidegate publish order.created --source shop.api --data '{"id": 7, "amount": 120}'
tidegate runs list
```

In production: set `TIDEGATE_DATABASE_URL`, run `tidegate migrate`, then `tidegate serve` and `tidegate worker app.py`.
"""

# Without Tidegate itself, which is on no index: a package of that name there is another one.
_REQUIREMENTS = "pytest>=8.2\n"
_IGNORED = ".tidegate/\n.venv/\n__pycache__/\n.pytest_cache/\n"

FILES = {
    "app.py": _APP,
    "tests/test_app.py": _TEST,
    "pyproject.toml": _PROJECT,
    "requirements.txt": _REQUIREMENTS,
    "README.md": _README.replace("{version}", __version__),
    ".gitignore": _IGNORED,
}


@click.command()
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path, file_okay=False), default=Path())
def init(folder: Path) -> None:
    """Write a small project into DIR (default: here): a workflow, its test, and what they need.

    Nothing is overwritten: if one of the files exists, none is written.
    """
    if found := [name for name in FILES if (folder / name).exists()]:
        raise AppError(f"{folder / found[0]} exists already; choose another folder: tidegate init DIR")
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as opened:  # also if it was created just now
            opened.write(text)
    click.echo(f"tidegate: wrote {', '.join(FILES)} in {folder.absolute()}")
    go = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    click.echo(f"\nTry it:\n  {go}pytest\n  {go}tidegate dev app.py")
