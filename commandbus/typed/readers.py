"""From JSON to dataclasses and what they are made of. Pydantic models are read by pydantic."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from commandbus.exceptions import ConfigurationError, InvalidDataError
from commandbus.messages import printable
from commandbus.typed import pydantic_models
from commandbus.typed.scalars import SCALARS, Reader, anything, expected, wrong

ARRAYS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    Sequence: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    Set: frozenset,
}
OBJECTS = (dict, Mapping)
UNIONS = (Union, UnionType)


def reader_of(kind: Any) -> Reader:
    """The reader of a dataclass, a pydantic model or a dict. A ConfigurationError names what cannot be read."""
    if not _is_object(kind):
        raise ConfigurationError(f"the data of a command cannot be {_name(kind)}; use a dataclass or a pydantic model")
    reader = _reader(kind, _name(kind), {})

    def read(value: Any) -> Any:
        try:
            return reader(value)
        except RecursionError:
            raise wrong("is nested too deeply") from None

    return read


def is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _is_object(kind: Any) -> bool:
    kind = _unnamed(kind)
    if get_origin(kind) in UNIONS:
        return all(map(_is_object, get_args(kind)))
    return is_dataclass(kind) or pydantic_models.is_pydantic(kind) or (get_origin(kind) or kind) in OBJECTS


def _unnamed(kind: Any) -> Any:
    """The type behind a NewType or a `type X = …`."""
    while inner := getattr(kind, "__supertype__", None) or getattr(kind, "__value__", None):
        kind = inner
    return kind


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def _reader(kind: Any, where: str, known: dict[type, _Dataclass]) -> Reader:
    """`where`: for the error if there is none. `known`: the readers of dataclasses, for these may hold themselves."""
    kind = _unnamed(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    shape = origin or kind
    if not isinstance(shape, Hashable):
        raise _unreadable(kind, where)
    if shape in SCALARS:
        return SCALARS[shape]
    if shape in UNIONS:
        return _union([(one, _reader(one, where, known)) for one in arguments])
    if shape is Literal and all(map(_is_scalar, map(_value, arguments))):
        return _choice(arguments)
    if pydantic_models.is_pydantic(kind):
        return pydantic_models.reader(kind)
    if is_dataclass(kind):
        return _dataclass(kind, known)
    if isinstance(kind, type) and issubclass(kind, Enum) and all(map(_is_scalar, map(_value, kind))):
        return _enum(kind)
    if shape is tuple and arguments and arguments[1:] != (...,):
        return _row([_reader(one, where, known) for one in arguments])
    if shape in ARRAYS:
        return _array(ARRAYS[shape], _reader(arguments[0], where, known) if arguments else anything)
    if shape in OBJECTS and (not arguments or _unnamed(arguments[0]) is str):
        return _object(_reader(arguments[1], where, known) if arguments else anything)
    raise _unreadable(kind, where)


def _unreadable(kind: Any, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} has the type {_name(kind)}, which cannot be read from JSON; "
        f"take one of those in docs/how-to.md (Typed data), or a pydantic model"
    )


def _value(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _is_scalar(value: object) -> bool:
    return type(value) in (str, int, float, bool, NoneType)


def _each(items: Iterable[tuple[object, Reader, Any]]) -> list[Any]:
    """Read items, each with its key and reader. Raises the errors of all of them."""
    read, errors = [], []
    for key, reader, item in items:
        try:
            read.append(reader(item))
        except InvalidDataError as error:
            errors += error.under(key)
    if errors:
        raise InvalidDataError(errors)
    return read


def _array(make: Callable[[list[Any]], Any], reader: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise expected("an array", value)
        items = _each((number, reader, item) for number, item in enumerate(value))
        try:
            return make(items)
        except TypeError:
            raise wrong("holds what cannot be in a set") from None

    return read


def _row(readers: Sequence[Reader]) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list):
            raise expected("an array", value)
        if len(value) != len(readers):
            raise wrong(f"must have {len(readers)} items, not {len(value)}")
        return tuple(_each(zip(range(len(readers)), readers, value, strict=True)))

    return read


def _object(reader: Reader) -> Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise expected("an object", value)
        return dict(zip(value, _each((key, reader, item) for key, item in value.items()), strict=True))

    return read


def _union(readers: Sequence[tuple[Any, Reader]]) -> Reader:
    """The first that fits."""

    def read(value: Any) -> Any:
        failed = []
        for kind, reader in readers:
            try:
                return reader(value)
            except InvalidDataError as error:
                if kind is not NoneType:
                    failed.append((kind, error))
        if len(failed) == 1:
            raise failed[0][1]
        raise InvalidDataError([one for kind, error in failed for one in error.under(_name(kind))])

    return read


def _choice(values: Iterable[Any]) -> Reader:
    known = {(type(_value(value)), _value(value)): value for value in values}
    message = _one_of(value for _, value in known)

    def read(value: Any) -> Any:
        if not _is_scalar(value) or (type(value), value) not in known:
            raise wrong(message)
        return known[(type(value), value)]

    return read


def _enum(kind: type[Enum]) -> Reader:
    kinds = {type(member.value) for member in kind}
    message = _one_of(member.value for member in kind)

    def read(value: Any) -> Any:
        if type(value) not in kinds:  # to Python, True is 1
            raise wrong(message)
        try:
            return kind(value)
        except ValueError:
            raise wrong(message) from None

    return read


def _one_of(values: Iterable[object]) -> str:
    return f"must be one of {', '.join(json.dumps(value, ensure_ascii=False) for value in values)}"


class _Dataclass:
    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.fields: dict[str, Reader] = {}
        self.required: set[str] = set()

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise expected("an object", value)
        present = [name for name in self.fields if name in value]
        errors = [(name, "missing") for name in self.fields if name in self.required and name not in value]
        errors += [one for key in value if key not in self.fields for one in wrong("unknown").under(key)]
        try:
            read = _each((name, self.fields[name], value[name]) for name in present)
        except InvalidDataError as error:
            raise InvalidDataError([*error.errors, *errors]) from None
        if errors:
            raise InvalidDataError(errors)
        try:
            return self.kind(**dict(zip(present, read, strict=True)))
        except (TypeError, ValueError) as error:  # of its __post_init__
            raise wrong(printable(error) or type(error).__name__) from None


def _dataclass(kind: type, known: dict[type, _Dataclass]) -> Reader:
    if kind in known:
        return known[kind]
    reader = known[kind] = _Dataclass(kind)
    try:
        hints = get_type_hints(kind, include_extras=True)
    except Exception as error:
        raise ConfigurationError(
            f"the annotations of {kind.__name__} cannot be resolved: {error}; have all of its types at the top level "
            f"of its module, at run time and above the handler"
        ) from error
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    for parameter in inspect.signature(kind).parameters.values():
        name, is_required = parameter.name, parameter.default is parameter.empty
        if name in fields:
            reader.fields[name] = _reader(hints[name], f"{kind.__name__}.{name}", known)
            reader.required |= {name} if is_required else set()
        elif is_required:
            raise ConfigurationError(
                f"{kind.__name__} cannot be made without {name}, which is no field of it and so never sent; "
                f"give it a default"
            )
    return reader
