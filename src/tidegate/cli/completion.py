"""`tidegate completion`: the script that has a shell complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
# A shell asks for completions by this variable.
VARIABLE = "_TIDEGATE_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of a shell: `eval "$(tidegate completion bash)"` in ~/.bashrc.

    Workflows, sources, triggers, schedules, and the newest runs and events are completed from the API at TIDEGATE_URL.
    """
    kind = get_completion_class(shell)
    assert kind is not None, f"{shell} is one of click's"
    root = click.get_current_context().find_root().command
    # Not `source()`: of bash, that runs the version of the PATH, which may be another one than the caller's.
    asking = kind(root, {}, "tidegate", VARIABLE)
    click.echo(asking.source_template % asking.source_vars())
