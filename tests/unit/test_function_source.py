"""The version of a function: the same on every version of Python, and blind to what does not change the code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tidegate.model.function_source import steps_of, version_of


async def helper(ctx: Any, x: int = 1, /, *a: int, k: int = 2, **kw: int) -> Any:
    return await ctx.step(f"h-{x!r:>{10}}-{k=}tail{a}{{}}", lambda: x)


async def work(ctx: Any, a: Any, *rest: str) -> Any:
    """A docstring."""
    b = f"{a:0{a}d} and {'x'!r}z"  # a comment
    try:
        async with asyncio.timeout(3):
            await helper(ctx, a)
    except* ValueError:
        pass
    match a:
        case {"x": [1, *_]}:
            return (found := [i async for i in b if not i], found)  # type: ignore[attr-defined]
        case _:
            pass
    return -1.5e10 if a else (b, b"x", 1j, ..., (None, True, "ä"))


def charge() -> int:
    return 1


async def with_steps(ctx: Any, given: Any) -> None:
    await ctx.step("charge", charge)
    await ctx.step("given", given)
    await ctx.step(given, charge)


def compiled(text: str, tmp_path: Path, name: str) -> Any:
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), names)
    return names["work"]


def test_it_is_the_same_on_every_python() -> None:
    assert version_of(work, "ctx") == "eb332ff5c407"


def test_what_it_ignores_and_what_it_notices(tmp_path: Path) -> None:
    text = "async def help(ctx):\n    await ctx.step('a', int)\n\nasync def work(ctx, n):\n    await help(ctx)\n"
    first = version_of(compiled(text, tmp_path, "first"), "ctx")
    same = text.replace(
        "(ctx, n):\n", "(\n    ctx: object,\n    n: int = 1\n) -> None:\n    '''Text.'''  # and more\n\n"
    )
    same = same.replace("int = 1", "int")
    assert version_of(compiled(same, tmp_path, "same"), "ctx") == first
    for n, (old, new) in enumerate([("'a'", "'b'"), ("await help(ctx)", "await help(ctx); n"), ("n)", "n=1)")]):
        assert version_of(compiled(text.replace(old, new), tmp_path, f"other{n}"), "ctx") != first, new


def test_without_source_it_is_of_the_bytecode() -> None:
    names: dict[str, Any] = {}
    for n, text in enumerate(("def work(ctx): ctx.step('a', int)", "def work(ctx): ctx.step('b', int)")):
        exec(text, names)
        names[f"version{n}"] = version_of(names["work"], "ctx")
    assert len({names["version0"], names["version1"]}) == 2


def test_the_steps_that_can_be_read() -> None:
    assert list(steps_of(with_steps, "ctx")) == [("charge", charge)]
