"""The source of a workflow's function: a version of it, and the steps that can be read from it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from tokenize import TokenError
from types import CodeType, FunctionType

_DIGITS = 12
# What does not change what a function does.
_IGNORED = frozenset({"ctx", "type_comment", "kind", "decorator_list", "annotation", "returns", "type_params"})

Function = Callable[..., object]


def version_of(function: Function, context: str) -> str:
    """A hash of a function's code, and of the functions it names that take its context, the argument `context`.
    Comments, docstrings, annotations, decorators and the layout make no difference, nor does the version of Python.
    Where there is no source, it is a hash of the bytecode."""
    digest = hashlib.sha256()
    for one in _with_helpers(function, context):
        tree = tree_of(one)
        digest.update(_bytecode(one.__code__) if tree is None else _written(tree).encode())
    return digest.hexdigest()[:_DIGITS]


def tree_of(function: Function) -> ast.AST | None:
    """The syntax tree of a function; None where there is no source."""
    try:
        found = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError, ValueError, TokenError):
        return None
    is_it = isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and found.name == _code_name(function)
    return found if is_it else None  # the file may have changed, or not be the one that was compiled


def _code_name(function: Function) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_name if isinstance(code, CodeType) else ""


def steps_of(function: Function, context: str) -> Iterator[tuple[str, Function]]:
    """The steps whose name and function can be read: `ctx.step("charge", charge, …)`."""
    tree = tree_of(function)
    names = getattr(inspect.unwrap(function), "__globals__", {})
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call) or len(node.args) < 2 or not isinstance(node.func, ast.Attribute):
            continue
        owner, (name, called) = node.func.value, node.args[:2]
        if node.func.attr != "step" or not isinstance(owner, ast.Name) or owner.id != context:
            continue
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and isinstance(called, ast.Name):
            found = names.get(called.id)
            if isinstance(found, FunctionType) and not _is_assigned(tree, called.id):
                yield name.value, found


def _is_assigned(tree: ast.AST | None, name: str) -> bool:
    """Whether a function has a variable, argument or function of its own of that name."""
    nodes = list(ast.walk(tree)) if tree is not None else []
    own = {node.name for node in nodes[1:] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    return name in own


def _with_helpers(function: Function, context: str) -> list[FunctionType]:
    """The function, and those it names that take the context, directly or through each other."""
    first = inspect.unwrap(function)
    if not isinstance(first, FunctionType):
        return []
    found, at = [first], 0
    while at < len(found):
        one, at = found[at], at + 1
        for name in sorted(_names(one.__code__)):
            helper = one.__globals__.get(name)
            helper = inspect.unwrap(helper) if isinstance(helper, FunctionType) else None
            if isinstance(helper, FunctionType) and helper not in found and context in _arguments(helper.__code__):
                found.append(helper)
    return found


def _arguments(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _names(code: CodeType) -> set[str]:
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def _written(node: object) -> str:
    """A syntax tree as text that is the same on every version of Python."""
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({','.join(_joined(node.values))})"
    if isinstance(node, ast.Constant):
        return f"{type(node.value).__name__}:{node.value!r}"
    if isinstance(node, ast.AST):
        fields = [
            (name, value) for name, value in ast.iter_fields(node) if name not in _IGNORED and value not in (None, [])
        ]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            fields = [(name, _without_docstring(node.body) if name == "body" else value) for name, value in fields]
        return f"{type(node).__name__}({','.join(f'{name}={_written(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_written, node))}]"
    return repr(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_text else body


def _joined(values: list[ast.expr]) -> Iterator[str]:
    """The parts of an f-string; text that Python gives in pieces is one part."""
    text = ""
    for value in values:
        if isinstance(value, ast.Constant):
            text += str(value.value)
            continue
        if text:
            yield repr(text)
        yield _written(value)
        text = ""
    if text:
        yield repr(text)


def _bytecode(code: CodeType) -> bytes:
    inner = [_bytecode(one) if isinstance(one, CodeType) else repr(one).encode() for one in code.co_consts]
    return b"\0".join([code.co_code, repr(code.co_names).encode(), *inner])
