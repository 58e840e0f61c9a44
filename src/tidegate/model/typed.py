"""Typed values as JSON and back: what msgspec knows, and pydantic models (v2) anywhere in it.

Pydantic is never imported here: a value can only be a model if the program has imported it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, get_args, get_origin

import msgspec
from msgspec import inspect

Restore = Callable[[object], object]

# The kinds of keys that an object in JSON can have.
_KEYS = (
    inspect.AnyType, inspect.StrType, inspect.IntType, inspect.FloatType, inspect.EnumType, inspect.LiteralType,
    inspect.UUIDType, inspect.DateTimeType, inspect.DateType, inspect.TimeType, inspect.TimeDeltaType,
    inspect.DecimalType,
)  # fmt: skip
# Types that say nothing: values stay as JSON has them.
_UNTYPED = frozenset({Any, object, typing.NoReturn, typing.Never})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_UNIONS = (typing.Union, types.UnionType)


class Unsupported(Exception):
    """A type whose values cannot be restored from JSON; the message says why."""


class Model(Protocol):
    """A pydantic model."""

    def model_dump_json(self) -> str: ...


class DataclassInstance(Protocol):
    """An instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


# What can be published: an object in JSON, or a value with fields.
Payload = dict[str, Any] | msgspec.Struct | DataclassInstance | Model


def is_model(kind: object) -> bool:
    """Whether it is a class of pydantic models."""
    return isinstance(kind, type) and hasattr(kind, "__pydantic_validator__") and hasattr(kind, "model_validate_json")


def has_fields(kind: object) -> bool:
    """Whether it is a class whose values are objects in JSON: a dataclass, a Struct or a pydantic model."""
    if not isinstance(kind, type):
        return False
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or is_model(kind)


def plain(value: Any) -> object:
    """For msgspec: the parts of a value that it does not know. TypeError if we do not either."""
    if isinstance(value, tuple):  # which msgspec knows, but not as a key
        raise TypeError("Only dicts with str-like or number-like keys are supported")
    if not is_model(type(value)):
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    dumped: object = value.model_dump(mode="json", by_alias=True, round_trip=True)
    return dumped


encode = msgspec.json.Encoder(enc_hook=plain).encode


def payload_of(value: object) -> object:
    """A value with fields as an object in JSON, sets in a fixed order, so that publishing it twice is the same event;
    any other value as it is."""
    if not has_fields(type(value)):
        return value
    return msgspec.to_builtins(value, str_keys=True, order="deterministic", enc_hook=_ordered_plain)


def _ordered_plain(value: Any) -> object:
    return _ordered(plain(value), value.model_dump(by_alias=True, round_trip=True))


def _ordered(as_json: object, as_python: object) -> object:
    """The JSON of a model, with the elements of its sets in order."""
    if isinstance(as_json, dict) and isinstance(as_python, dict) and len(as_json) == len(as_python):
        pairs = zip(as_json.items(), as_python.values(), strict=True)
        return {name: _ordered(inner, of) for (name, inner), of in pairs}
    if isinstance(as_json, list) and isinstance(as_python, set | frozenset):
        return sorted(as_json, key=msgspec.json.Encoder(order="sorted").encode)
    if isinstance(as_json, list) and isinstance(as_python, list | tuple):
        return [_ordered(inner, of) for inner, of in zip(as_json, as_python, strict=False)]
    return as_json


class TypeRule(NamedTuple):
    """How values of a declared type come back from JSON. Those of the type `exact` are what JSON gives already."""

    name: str
    exact: type | None
    convert: Restore

    def restored(self, value: object) -> object:
        """A value from JSON as the declared type; ValueError says why it does not fit."""
        return value if type(value) is self.exact else self.convert(value)


def rule_of(kind: object) -> TypeRule | None:
    """The rule for a declared type; None if it says nothing about its values. Unsupported if they cannot be restored;
    NameError if it refers to a name that is not defined (yet)."""
    if kind in _UNTYPED if isinstance(kind, collections.abc.Hashable) else False:
        return None
    kind = str if kind is typing.LiteralString else type(None) if kind is None else kind
    if kind in (str, int, bool, dict, list, type(None)):
        return TypeRule(kind.__name__, kind, _converter(kind))
    try:
        info = inspect.type_info(kind)
        msgspec.json.Decoder(kind, dec_hook=_restore)
    except TypeError as exc:
        if (by_pydantic := _of_models(kind)) is not None:
            return TypeRule(type_name(kind), None, by_pydantic)
        raise Unsupported(str(exc).partition(" - type ")[0]) from exc
    if isinstance(info, inspect.AnyType):
        return None
    _check(info)
    return TypeRule(type_name(kind), None, _converter(kind))


def type_name(kind: object) -> str:
    """A type as its author wrote it, nearly."""
    return kind.__qualname__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _converter(kind: object) -> Restore:
    def convert(value: object) -> object:
        found: object = msgspec.convert(value, typing.cast(type[object], kind), str_keys=True, dec_hook=_restore)
        return found

    return convert


def _restore(kind: Any, value: object) -> object:
    """For msgspec: a value of a type that it does not know."""
    if kind is object:
        return value
    if is_model(kind):
        return _validated(kind.model_validate_json, value)
    raise TypeError(f"values of type {type_name(kind)} cannot be restored from JSON")


def _validated(validate: Callable[[bytes], Any], value: object) -> object:
    """What pydantic makes of a value; its first error in one line."""
    try:
        return validate(msgspec.json.encode(value))
    except ValueError as exc:
        for one in getattr(exc, "errors", list)():
            at = ".".join(str(part) for part in one["loc"])
            raise ValueError(f"{at}: {one['msg']}" if at else one["msg"]) from exc
        raise


def _check(root: inspect.Type) -> None:
    """Unsupported if a part of the type cannot be stored or restored."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, inspect.CustomType) and one.cls is not object:
            _check_custom(one.cls)
        if isinstance(one, inspect.DictType) and not all(isinstance(key, _KEYS) for key in _members(one.key_type)):
            raise Unsupported("the keys of an object in JSON are text: use str, int, an enum, UUID or a time")
        stack += _parts(one)


def _check_custom(cls: type) -> None:
    if not is_model(cls):
        hint = "; use list[…]" if issubclass(cls, collections.abc.Iterable) else ""
        use = "use a dataclass, a msgspec Struct or a pydantic model"
        raise Unsupported(f"{type_name(cls)} is not a type that can be restored from JSON{hint or f'; {use}'}")
    try:
        typing.cast(Any, cls).model_json_schema(mode="serialization")
    except NameError:
        raise
    except Exception as exc:
        if type(exc).__name__ in ("PydanticUndefinedAnnotation", "PydanticUserError"):
            raise NameError(str(exc)) from exc  # it is not defined completely yet
        raise Unsupported(f"{cls.__qualname__} holds what JSON has not: {str(exc).partition(chr(10))[0]}") from exc


def _members(one: inspect.Type) -> tuple[inspect.Type, ...]:
    return one.types if isinstance(one, inspect.UnionType) else (one,)


def _parts(one: object) -> Iterator[inspect.Type]:
    """The types that a type is made of."""
    for name in ("item_type", "item_types", "key_type", "value_type", "types", "type", "fields"):
        found = getattr(one, name, ())
        for inner in found if isinstance(found, tuple) else (found,):
            if isinstance(inner, inspect.Field):
                yield inner.type
            elif isinstance(inner, inspect.Type):
                yield inner


def _of_models(kind: object) -> Restore | None:
    """For unions of pydantic models that msgspec cannot tell apart, and pydantic can: by a field of Literals that all
    models have, or since the others are not objects in JSON."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not _is_told_apart(kind):
        return None
    adapter = pydantic.TypeAdapter(kind)

    return lambda value: _validated(adapter.validate_json, value)


def _is_told_apart(kind: object) -> bool:
    args = get_args(kind)
    if get_origin(kind) is typing.Annotated:
        return _is_told_apart(args[0])
    if get_origin(kind) in _UNIONS:
        models = [one for one in args if is_model(one)]
        others = [one for one in args if not is_model(one) and one not in _SCALARS]
        is_one_list = len(others) < 2 and all(get_origin(one) in (list, tuple) for one in others)
        return is_one_list and all(map(_is_told_apart, others)) and (len(models) < 2 or _has_tag(models))
    if get_origin(kind) in (list, dict, tuple):
        return all(one is Ellipsis or _is_told_apart(one) for one in args)
    return kind in _SCALARS or is_model(kind)


def _has_tag(models: Iterable[Any]) -> bool:
    """Whether all models have a field of Literals, of which no two share a value."""
    tags = [
        {name: get_args(field.annotation) for name, field in model.model_fields.items() if _is_literal(field)}
        for model in models
    ]
    for name in set.intersection(*(set(one) for one in tags)):
        values = [value for one in tags for value in one[name]]
        if len(values) == len(set(values)):
            return True
    return False


def _is_literal(field: Any) -> bool:
    return get_origin(field.annotation) is typing.Literal
