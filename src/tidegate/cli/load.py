"""Find the user's application: `module:name`, or a path to a Python file that holds a Tidegate object."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from tidegate.app import Tidegate
from tidegate.errors import AppError


def load_app(spec: str) -> Tidegate:
    """The Tidegate object that `spec` names. AppError says what was looked for and not found."""
    target, _, name = spec.partition(":")
    if target.endswith(".py") or "/" in target:
        module = _from_file(Path(target))
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = importlib.import_module(target)
        except ModuleNotFoundError as exc:
            if exc.name is None or not target.startswith(exc.name):
                raise AppError(f"{target} cannot be imported: {exc}") from exc
            raise AppError(f"there is no module {target!r} (looked for from {Path.cwd()})") from exc
        except Exception as exc:
            raise _failed(target, exc) from exc
    return _pick(module, target, name)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise AppError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise AppError(f"{path} is not a Python file")
    sys.path.insert(0, str(path.parent.absolute()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        raise _failed(str(path), exc) from exc
    return module


def _failed(target: str, exc: Exception) -> AppError:
    if isinstance(exc, AppError):
        return AppError(f"{target}: {exc}")
    line = exc.__traceback__
    while line is not None and line.tb_next is not None:
        line = line.tb_next
    where = f" (line {line.tb_lineno} of {line.tb_frame.f_code.co_filename})" if line else ""
    return AppError(f"{target} cannot be loaded: {type(exc).__name__}: {exc}{where}")


def _pick(module: ModuleType, target: str, name: str) -> Tidegate:
    if name:
        found = getattr(module, name, None)
        if not isinstance(found, Tidegate):
            raise AppError(f"{target} has no Tidegate object named {name!r}")
        return found
    candidates = {id(v): k for k, v in vars(module).items() if isinstance(v, Tidegate)}
    if len(candidates) != 1:
        what = "no Tidegate object" if not candidates else f"several ({', '.join(sorted(candidates.values()))})"
        raise AppError(f"{target} holds {what}; write {target}:name")
    only: Tidegate = getattr(module, next(iter(candidates.values())))
    return only
