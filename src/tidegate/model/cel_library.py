"""The CEL library, without the command line and the terminal that it loads with itself.

Those are a sixth of the time that every process takes to start, and nobody here uses them.
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
    del sys.modules[_NAME], cel.cli  # whoever wants it loads the real one

__all__ = ["cel"]
