"""Load the user's application: `module:name`, or a path to a Python file with a Tidegate object."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import FunctionType, ModuleType

from tidegate.app import Tidegate
from tidegate.errors import AppError

# How many names of a module an error message lists.
MAX_NAMES = 5


def load_app(spec: str) -> Tidegate:
    """The Tidegate object that `spec` names. AppError says what was not found."""
    target, _, name = spec.partition(":")
    if target.endswith(".py") or "/" in target:
        module = _from_file(Path(target))
    else:
        _search_in(Path.cwd())
        try:
            module = importlib.import_module(target)
        except ModuleNotFoundError as exc:
            if exc.name is None or not target.startswith(exc.name):
                raise AppError(f"{target} cannot be imported: {exc}") from exc
            raise AppError(f"there is no module {target!r} (searched from {Path.cwd()})") from exc
        except Exception as exc:
            raise _failed(target, exc) from exc
    return _pick(module, target, name)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise AppError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise AppError(f"{path} is not a Python file")
    _search_in(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        raise _failed(str(path), exc) from exc
    return module


def _search_in(folder: Path) -> None:
    """Modules of this folder can be imported."""
    place = str(folder.absolute())
    if place not in sys.path:
        sys.path.insert(0, place)


def _failed(target: str, exc: Exception) -> AppError:
    if isinstance(exc, AppError):
        return AppError(f"{target}: {exc}")
    line, rest = exc.__traceback__, exc.__traceback__
    while rest is not None:  # the last line that somebody can read: not one of Python's own import machinery
        line = line if rest.tb_frame.f_code.co_filename.startswith("<frozen ") else rest
        rest = rest.tb_next
    if isinstance(exc, SyntaxError) and exc.filename:  # it names the place itself
        line = None
    where = f" (line {line.tb_lineno} of {line.tb_frame.f_code.co_filename})" if line else ""
    return AppError(f"{target} cannot be loaded: {type(exc).__name__}: {exc}{where}")


def _pick(module: ModuleType, target: str, name: str) -> Tidegate:
    candidates = {id(v): k for k, v in vars(module).items() if isinstance(v, Tidegate)}
    names = sorted(candidates.values())
    if name:
        found = getattr(module, name, None)
        if isinstance(found, Tidegate):
            return found
        is_what = f"{name!r} in {target} is not a Tidegate object, but {_kind(found)}" if hasattr(module, name) else ""
        raise AppError(f"{is_what or f'{target} has no {name!r}'}; {_instead(module, target, names)}")
    if len(names) != 1:
        what = f"contains several Tidegate objects ({', '.join(names)})" if names else "contains no Tidegate object"
        raise AppError(f"{target} {what}; {_instead(module, target, names)}")
    only: Tidegate = getattr(module, names[0])
    return only


def _instead(module: ModuleType, target: str, names: list[str]) -> str:
    """What to write instead, given the names in the module."""
    if names:
        return f"write {' or '.join(f'{target}:{name}' for name in names[:MAX_NAMES])}"
    found = [k for k, v in vars(module).items() if not k.startswith("_") and not _is_imported(k, v, module)]
    more = ", …" if len(found) > MAX_NAMES else ""
    has = f"it defines {', '.join(found[:MAX_NAMES])}{more}" if found else "it defines no names"
    return f"{has}. Create one at its top level: `from tidegate import Tidegate`, then `app = Tidegate()`"


def _is_imported(name: str, value: object, module: ModuleType) -> bool:
    if name in ("annotations", "TYPE_CHECKING"):  # what `from __future__` and `typing` leave
        return True
    is_code = isinstance(value, type | FunctionType)
    return isinstance(value, ModuleType) or (is_code and value.__module__ != module.__name__)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
