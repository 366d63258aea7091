"""TOML tables as dataclasses: the fields are the keys, those without a default must be given, and values have their
types. Line breaks in a text mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fedkin.errors import DataError, unknown

WORDS = {str: "text", float: "a number", tuple: "a list", Mapping: "a table"}


def called(key: str, **given: Any) -> Any:
    """A field that the file calls otherwise: [[row]] is `rows`."""
    return field(metadata={"key": key}, **given)


def read_table(schema: Any, raw: Any, where: str) -> Any:
    """An instance of the dataclass `schema`. `where` says in errors which table it is; one that has a name is told
    apart by it."""
    if not isinstance(raw, Mapping):
        raise DataError(f"{where}: a table is needed, not {raw!r}")
    if raw.get("name"):
        where = f"{where} {raw['name']!r}"
    known, types = {f.metadata.get("key", f.name): f for f in fields(schema)}, _types(schema)
    for key in raw:
        if key not in known:
            raise DataError(f"{where}: {unknown('key', key, known)}")
    for key, of in known.items():
        if of.default is MISSING and of.default_factory is MISSING and not raw.get(key):
            raise DataError(f"{where}: {key!r} is missing")
    return schema(**{known[key].name: _value(types[known[key].name], raw[key], where, key) for key in raw})


_types = cache(get_type_hints)


def _value(kind: Any, value: Any, where: str, key: str) -> Any:
    if is_dataclass(kind):
        return read_table(kind, value, f"{where}: {key}")
    inner, origin = get_args(kind), get_origin(kind) or kind
    if origin is UnionType:
        return _value(inner[0], value, where, key)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], one, where, key) for one in value)
    if origin is Mapping and isinstance(value, Mapping):
        return {name: _value(inner[1], one, where, f"{key}.{name}") for name, one in value.items()}
    if origin is str and isinstance(value, str):
        return " ".join(value.split())
    if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if origin is Any or (origin is Literal and value in inner):
        return value
    accepted = ", ".join(inner) if origin is Literal else WORDS[origin]
    raise DataError(f"{where}: {key} = {value!r}: accepts {accepted}")
