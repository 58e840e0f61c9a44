"""Declarations that no event could satisfy are refused where they are written, and say what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tidegate import Context, Tidegate
from tidegate.errors import AppError


@dataclass
class Order:
    id: int


async def takes_p(ctx: Context, p: int) -> None: ...


async def takes_scheduled(ctx: Context, scheduled: str) -> None: ...


async def takes_order(ctx: Context, order: Order) -> None: ...


async def takes_any(ctx: Context, p: int = 0, **more: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (takes_p, {"on": "x", "params": {"q": "1"}}, "argument p has no default, and params gives only q"),
        (takes_p, {"on": "x", "params": {}}, "argument p has no default, and params gives only nothing"),
        (takes_scheduled, {"every": "5s"}, r"argument scheduled has no default, and a tick of a schedule gives only "
         r"scheduled_at and workflow; .* \(did you mean scheduled_at\?\)"),
        (takes_p, {"on": ["x", "y"]}, r"on: must be text, not \['x', 'y'\]; \* matches any characters"),
        (takes_p, {"on": "x", "source": ["a"]}, r"source: must be text, not \['a'\]"),
        (takes_p, {"on": "x", "where": True}, "where: must be text, not True"),
        (takes_p, {"on": 7}, "on: must be text, not 7"),
        (takes_p, {"on": "x", "throttle": 5}, "throttle: must be text, not 5"),
        (takes_p, {"on": "x", "overlap": "skip"}, 'while_running="skip"'),
        (takes_p, {"on": "x", "key": "{{ event.payload.p }}"}, "requires debounce or batch .* while_running"),
    ],
)  # fmt: skip
def test_what_cannot_work_names_the_workflow_and_the_field(function: Any, options: Any, told: str) -> None:
    with pytest.raises(AppError, match=f"workflow {function.__name__}: .*{told}"):
        Tidegate().workflow(**options)(function)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (takes_p, {"on": "x"}),
        (takes_p, {"on": "x", "params": {"p": "{{ event.payload.q }}"}}),
        (takes_p, {"every": "5s", "params": {"p": "1"}}),
        (takes_p, {}),
        (takes_order, {"on": "x", "params": {"id": "{{ event.payload.q }}"}}),
        (takes_any, {"on": "x", "params": {"q": "1"}}),
        (takes_any, {"every": "5s"}),
    ],
)
def test_what_can_work_is_taken(function: Any, options: Any) -> None:
    app = Tidegate()
    app.workflow(**options)(function)
    assert list(app.workflows) == [function.__name__]
