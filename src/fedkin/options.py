"""Options as frozen dataclasses: the config schema, the command line's help and the docs row are all read off them."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedkin.errors import UsageError, unknown

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    infinite: bool = False,
    group: str = "",
    search: str = "",
) -> Any:
    """A dataclass field with its help and range: low <= value <= high, or value > above; `infinite`: inf means
    something (no bound, say), where otherwise only finite numbers do. `group`: what it is about, where options are
    many. `search`: where `fedkin tune` looks for a good value unless told, as in "0.01..10:log"."""
    meta = {"help": help, "low": low, "high": high, "above": above, "infinite": infinite, "group": group}
    meta |= {"search": search}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True)
class Described:
    """One option as shown to a user."""

    name: str
    type: str
    default: Any
    help: str
    accepts: str
    group: str = ""


def describe(schema: type[Any]) -> list[Described]:
    hints = _hints(schema)  # type: ignore[arg-type]
    return [
        Described(
            f.name, _type_name(kind), _default(f), about.get("help", ""), _accepts(f, kind), about.get("group", "")
        )
        for f, kind, about in ((f, hints[f.name], f.metadata) for f in dataclasses.fields(schema))
    ]


def validated(schema: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build `schema` from names and values; text is converted; unknown names and bad values are refused."""
    fields = {f.name: f for f in dataclasses.fields(schema)}  # type: ignore[arg-type]
    hints = _hints(schema)  # type: ignore[arg-type]
    built: dict[str, Any] = {}
    for raw, value in values.items():
        name = raw.replace("-", "_")
        if name not in fields:
            raise unknown(f"option{' of ' + where if where else ''}", raw, fields)
        built[name] = _convert(name, hints[name], value, fields[name])
    try:
        return schema(**built)
    except TypeError as error:
        raise UsageError(f"{where or schema.__name__}: {error}") from error


def named_spec(spec: str) -> tuple[str, dict[str, str]]:
    """A name and its options: "lie:z=0.5,other=1"."""
    name, _, rest = spec.partition(":")
    pairs = [part.partition("=") for part in rest.split(",") if part]
    for key, equals, _value in pairs:
        if not equals:
            raise UsageError(f"{spec!r}: options are written name:key=value,key=value; {key!r} has no value")
    return name, {key: value for key, _, value in pairs}


def said(value: float, unit: str = "%") -> str:
    """A metric as people read it: two decimals of a percentage, four digits of anything else."""
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if unit == "%" else f"{value:.4g}"


@functools.cache
def _hints(schema: type[Any]) -> dict[str, Any]:
    """The types of a schema's fields. Working them out takes longer than all the rest; they do not change."""
    return get_type_hints(schema)


def _convert(name: str, kind: Any, value: Any, field: dataclasses.Field[Any]) -> Any:
    accepted = _accepts(field, kind)
    refuse = UsageError(f"{name}={value!r}: accepts {accepted}")
    for one in _alternatives(kind):
        try:
            converted = _as(one, value)
        except (TypeError, ValueError):
            continue
        low, high, above = (field.metadata.get(k) for k in ("low", "high", "above"))
        for number in converted if isinstance(converted, tuple) else (converted,):
            if isinstance(number, float) and not math.isfinite(number):
                if number == math.inf and field.metadata.get("infinite"):
                    continue
                raise UsageError(f"{name}={value!r}: accepts {accepted}, and it must be finite")
        if isinstance(converted, int | float) and not isinstance(converted, bool):
            if low is not None and converted < low:
                raise refuse
            if (high is not None and converted > high) or (above is not None and not converted > above):
                raise refuse
        return converted
    raise refuse


def _alternatives(kind: Any) -> Sequence[Any]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _as(kind: Any, value: Any) -> Any:
    """`value` as `kind`, or ValueError. Never guesses: "False" is not true, 2.5 is not an integer."""
    if kind is type(None):
        if value is None or value in ("none", "None", ""):
            return None
        raise ValueError
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "yes", "on", "1"):
            return True
        if str(value).lower() in ("false", "no", "off", "0"):
            return False
        raise ValueError
    if kind is int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    if kind is float:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    if kind is str:
        if isinstance(value, str) and "\0" not in value:
            return value
        raise ValueError
    if get_origin(kind) in (tuple, list):
        items = value.split(",") if isinstance(value, str) else list(value)
        return tuple(_as(get_args(kind)[0], i) for i in items)
    if kind is Any or (isinstance(kind, type) and isinstance(value, kind)):
        return value
    raise ValueError


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _accepts(field: dataclasses.Field[Any], kind: Any) -> str:
    words = [_type_name(k) for k in _alternatives(kind)]
    low, high, above = (field.metadata.get(k) for k in ("low", "high", "above"))
    span = ""
    if low is not None and high is not None:
        span = f" from {low} to {high}"
    elif low is not None:
        span = f" of at least {low}"
    elif above is not None:
        span = f" above {above}" + (f" up to {high}" if high is not None else "")
    elif high is not None:
        span = f" up to {high}"
    others = [*words[1:], "inf"] if field.metadata.get("infinite") else words[1:]
    return (", or " if span else " or ").join([words[0] + span, *others])


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    if get_origin(kind) is Literal:
        return ", ".join(str(a) for a in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_type_name(k) for k in get_args(kind))
    if get_origin(kind) in (tuple, list):
        return f"a list of {_type_name(get_args(kind)[0])}"
    return names.get(kind, getattr(kind, "__name__", str(kind)))


__all__ = ["Described", "describe", "named_spec", "option", "validated"]
