"""Configs (dataclasses, NamedTuples) as what JSON and TOML say, and back: by type hints, in one sentence if
something is wrong. One codec for headers, descriptions, traces and files of settings."""

import functools
import inspect
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import IntEnum
from typing import Any, TypeVar

from esper.leyline.errors import EsperError

T = TypeVar("T")
LARGEST = 2**63 - 1  # whole numbers must fit into an int64


def to_dict(value: Any) -> Any:
    """The plain form of a config."""
    if isinstance(value, IntEnum):
        return value.name
    if is_dataclass(value) or hasattr(value, "_asdict"):
        kind: Any = type(value)
        return {name: to_dict(getattr(value, name)) for name in _fields(kind)}
    if isinstance(value, Mapping):
        return {key.name if isinstance(key, IntEnum) else key: to_dict(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_dict(each) for each in value]
    return value


def from_dict(kind: type[T], data: Any, where: str, complete: bool = True) -> T:
    """A config from its plain form. With `complete`, fields that have defaults must be there as well."""
    return typing.cast(T, _decode(kind, data, where, complete))


def override(config: T, keys: Any, where: str) -> T:
    """A config with some keys changed, tables of keys inside it too; false takes an optional part away."""
    return from_dict(type(config), merged(to_dict(config), keys, away=True), where, complete=False)


def merged(base: Any, keys: Any, away: bool = False) -> Any:
    """Keys over base, table by table; with `away`, false takes a table away, if it was not already."""
    if away and keys is False and (base is None or isinstance(base, dict)):
        return None
    if not (isinstance(base, dict) and isinstance(keys, dict)):
        return keys
    return base | {name: merged(base.get(name), value, away) for name, value in keys.items()}


_hints = functools.cache(typing.get_type_hints)


@functools.cache
def _fields(kind: type) -> dict[str, bool]:
    """name -> must it be given? Of everything that the constructor takes."""
    return {name: each.default is each.empty for name, each in inspect.signature(kind).parameters.items()}


def _decode(kind: Any, data: Any, where: str, complete: bool) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        _check(data is not None or type(None) in inner, where, data, "a value")
        (kept,) = (each for each in inner if each is not type(None))
        return None if data is None else _decode(kept, data, where, complete)
    if origin in (tuple, list):
        _check(isinstance(data, (list, tuple)), where, data, "a list")
        kinds = inner[:1] * len(data) if origin is list or inner[1:] == (...,) else inner
        _check(len(data) == len(kinds), where, data, f"{len(kinds)} values")
        return origin(_decode(each, data[n], f"{where}, {n}", complete) for n, each in enumerate(kinds))
    if origin in (Mapping, dict):
        _check(isinstance(data, dict), where, data, "a table")
        return {_decode(inner[0], key, where, complete): _decode(inner[1], each, f"{where}: {key}", complete)
                for key, each in data.items()}
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _table(kind, data, where, complete)
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        known = kind.__members__
        _check(isinstance(data, str) and data in known, where, data, f"one of {', '.join(known)}")
        return kind[data]
    return _number(kind, data, where)


def _number(kind: Any, data: Any, where: str) -> Any:
    if kind is float and type(data) in (int, float):
        _check(abs(data) <= LARGEST and math.isfinite(data), where, data, "a finite number")
        return float(data)
    names = {int: "a whole number", str: "a text", bool: "true or false", float: "a number"}
    _check(type(data) is kind, where, data, names.get(kind, str(kind)))
    _check(kind is not int or abs(data) <= LARGEST, where, data, "a whole number of at most 63 bits")
    return data


def _table(kind: Any, data: Any, where: str, complete: bool) -> Any:
    _check(isinstance(data, dict), where, data, "a table of keys")
    known = _fields(kind)
    if unknown := sorted(set(map(str, data)) - set(known)):
        raise EsperError(f"{where} has no use for {', '.join(unknown)}; there are {', '.join(known)}")
    if missing := [name for name, needed in known.items() if name not in data and (complete or needed)]:
        raise EsperError(f"{where} lacks {', '.join(missing)}; "
                         "it is not complete, or of another version of Esper")
    if not complete:  # what was taken away is as if it had not been said
        data = {name: value for name, value in data.items() if value is not None or known[name]}
    return kind(**{name: _decode(_hints(kind)[name], value, f"{where}: {name}", complete)
                   for name, value in data.items()})


def _check(right: bool, where: str, data: Any, expected: str) -> None:
    if not right:
        said = repr(data)
        raise EsperError(f"{where} is {said if len(said) < 60 else said[:57] + '...'}; expected {expected}")
