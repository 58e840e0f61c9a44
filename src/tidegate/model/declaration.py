"""What cannot work in the declaration of a workflow, whatever events come. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from tidegate.model.schedule import TICK_FIELDS

# The arguments of `@app.workflow` that are text, and are not checked where they are parsed.
_TEXTS = frozenset({"on", "source", "where", "throttle", "key", "concurrency_key", "idempotency_key"})


def require_text(fields: Mapping[str, object]) -> None:
    """ValueError names an argument that is given, must be text and is not."""
    for name, value in fields.items():
        if name not in _TEXTS or value is None or isinstance(value, str):
            continue
        hint = ""
        if name in ("on", "source") and isinstance(value, list | tuple | set | frozenset):
            hint = "; * matches any characters, and each further pattern is a workflow, or a trigger, of its own"
        raise ValueError(f"{name}: must be text, not {value!r:.60}{hint}")


def require_given(required: Iterable[str], params: Mapping[str, object] | None, *, is_scheduled: bool) -> None:
    """ValueError names an argument without a default that no event will give: `params` or the ticks of a schedule
    leave it out. (Other events may have any field.)"""
    if params is None and not is_scheduled:
        return
    given = TICK_FIELDS if params is None else tuple(params)
    missing = [name for name in required if name not in given]
    if not missing:
        return
    near = difflib.get_close_matches(missing[0], given, 1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    who = f"params gives only {', '.join(given) or 'nothing'}" if params is not None else _of_a_tick()
    raise ValueError(f"argument {missing[0]} has no default, and {who}{meant}")


def _of_a_tick() -> str:
    return f"a tick of a schedule gives only {' and '.join(TICK_FIELDS)}; give it a default, or use params"
