"""The verbs about what waits, and what it is called when they are done."""

from __future__ import annotations

from typing import Final, Literal

RetryVerb = Literal["cancel", "force"]
RetryDone = Literal["cancelled", "forced"]

DONE: Final[dict[RetryVerb, RetryDone]] = {"cancel": "cancelled", "force": "forced"}
