"""Reload: the user's code again after a change, for `tidegate dev`. Files are compared by time and size; nothing is
installed for it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tidegate.app import Tidegate
from tidegate.cli.load import load_app

# Folders of a project that hold no code of its own.
_FOREIGN = {"site-packages", "node_modules", "__pycache__"}
# How many files are watched while the code cannot be loaded: then any of them may be the reason.
MAX_FILES = 2000

_Signature = dict[str, tuple[int, int]]


class Code:
    """The code of an application: the file that names it, and the modules it has imported from the same folder."""

    def __init__(self, spec: str) -> None:
        target = spec.partition(":")[0]
        is_file = target.endswith(".py") or "/" in target
        self._spec = spec
        self._folder = (Path(target).absolute().parent if is_file else Path.cwd()).resolve()
        self._is_broken = False
        self._seen: _Signature = {}

    def load(self) -> Tidegate:
        """Load the application. AppError says why it cannot be loaded."""
        # Python tells a compiled file from an older one by the second in which the source was changed.
        sys.dont_write_bytecode = True
        before = self._modules()
        for name in before:
            del sys.modules[name]
        importlib.invalidate_caches()
        self._is_broken = True
        try:
            application = load_app(self._spec)
            self._is_broken = False
            return application
        finally:
            if self._is_broken:  # what is running goes on with the modules that it has
                for name in self._modules():
                    del sys.modules[name]
                sys.modules.update(before)
            self._seen = self._signature()

    def has_changed(self) -> bool:
        """Whether a file has changed since it was last loaded. What was imported since then is watched from now on."""
        now = self._signature()
        if self._is_broken:  # a file that was missing may be there now
            return now != self._seen
        self._seen = {**now, **self._seen}
        return any(now.get(file, seen) != seen for file, seen in self._seen.items())

    def _modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in tuple(sys.modules.items()) if self._is_mine(module)}

    def _is_mine(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        if not file or module.__name__ == "__main__":
            return False
        path = Path(file).resolve()
        return path.is_relative_to(self._folder) and not _is_foreign(path.relative_to(self._folder))

    def _signature(self) -> _Signature:
        files = self._all_files() if self._is_broken else (str(m.__file__) for m in self._modules().values())
        found: _Signature = {}
        for file in files:
            try:
                stat = Path(file).stat()
            except OSError:  # an editor is replacing it
                found[file] = self._seen.get(file, (0, 0))
                continue
            found[file] = (stat.st_mtime_ns, stat.st_size)
        return found

    def _all_files(self) -> Iterator[str]:
        count = 0
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if not _is_foreign(Path(name))]
            for name in files:
                if name.endswith(".py") and count < MAX_FILES:
                    count += 1
                    yield str(Path(folder) / name)


def _is_foreign(path: Path) -> bool:
    return any(part in _FOREIGN or (part.startswith(".") and part != "..") for part in path.parts)
