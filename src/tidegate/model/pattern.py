"""Regular expressions with RE2: the time of a search is linear in the length of the text, for every pattern.

But the factor varies a thousandfold and RE2 cannot be interrupted. So a search is charged to the work limit before it
runs, by the size of RE2's program and the length of the text.
"""

from __future__ import annotations

from functools import lru_cache

import re2

from tidegate.model.work_limit import MAX_STEPS, WorkLeft

MAX_PATTERN_LENGTH = 512
# A pattern that could not search a text of this many bytes within the work limit is refused.
MIN_TEXT_BYTES = 1024
# Maximum memory for the states of a search.
_MAX_MEMORY = 1 << 20
# A program of up to this many instructions keeps all its states in that memory and reads 70 bytes per microsecond.
_SMALL = 14


class Pattern:
    """A compiled pattern."""

    __slots__ = ("_compiled", "_ns_per_byte")

    def __init__(self, text: str, *, case_sensitive: bool) -> None:
        options = re2.Options()
        options.case_sensitive, options.log_errors, options.max_mem = case_sensitive, False, _MAX_MEMORY
        options.never_capture = True  # groups are not used, and capturing takes several times as long
        try:
            self._compiled = re2.compile(text, options)
        except re2.error as exc:
            raise ValueError(exc.args[0].decode() if isinstance(exc.args[0], bytes) else str(exc)) from exc
        size = self._compiled.programsize
        # An upper bound, measured on texts that make RE2 build new states all the time.
        self._ns_per_byte = 14 if size <= _SMALL else min(8 * size, 400 + size)
        if self._steps(MIN_TEXT_BYTES) > MAX_STEPS:
            raise ValueError(
                f"it is too large ({size} instructions): a text of {MIN_TEXT_BYTES} bytes would exceed the work limit "
                f"of {MAX_STEPS} steps; use smaller repetitions, such as {{0,50}} instead of {{0,1000}}"
            )

    def is_in(self, text: str, work_left: WorkLeft) -> bool:
        """Whether the pattern is found anywhere in the text."""
        work_left.pay(self._steps(_bytes(text)))
        return self._compiled.search(text) is not None

    def is_whole(self, text: str, work_left: WorkLeft) -> bool:
        """Whether the pattern matches the whole text."""
        work_left.pay(self._steps(_bytes(text)))
        return self._compiled.fullmatch(text) is not None

    def _steps(self, length: int) -> int:
        return 10 + self._ns_per_byte * length // 100


@lru_cache(maxsize=256)
def compile_pattern(text: str, *, case_sensitive: bool = True) -> Pattern:
    """The compiled pattern. ValueError says which part is invalid."""
    if len(text) > MAX_PATTERN_LENGTH + len("(?ms)"):
        raise ValueError(f"it is longer than {MAX_PATTERN_LENGTH} characters")
    return Pattern(text, case_sensitive=case_sensitive)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
