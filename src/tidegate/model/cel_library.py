"""The CEL library, without the command line and terminal packages that it imports.

They are not used here and would take a sixth of the start-up time of every process.
"""

from __future__ import annotations

import sys
from types import ModuleType

_NAME = "cel.cli"
_is_loaded = _NAME in sys.modules
if not _is_loaded:
    sys.modules[_NAME] = ModuleType(_NAME)

import cel  # noqa: E402

if not _is_loaded:
    del sys.modules[_NAME], cel.cli  # importing it later loads the real one

__all__ = ["cel"]
