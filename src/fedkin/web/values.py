"""Values from a run folder that may be anybody's, as JSON has them and of a size that a page can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

Row = dict[str, Any]


def number(value: Any) -> int | float | None:
    """A finite number of a size that JavaScript can hold, else nothing."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and -1e300 < value < 1e300 else None


def text(value: Any, most: int = 200) -> str:
    """At most so many characters, all of which UTF-8 can write."""
    found = "" if value is None else str(value)[: most + 1]
    cut = found if len(found) <= most else found[: most - 1] + "…"
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()


def clean(value: Any, depth: int = 6) -> Any:
    """Nested values as JSON has them, cut to a size that a page can show."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, str):
        return text(value, 2000)
    if depth and isinstance(value, Mapping):
        return {text(k): clean(v, depth - 1) for k, v in list(value.items())[:500]}
    if depth and isinstance(value, list | tuple):
        return [clean(v, depth - 1) for v in value[:2000]]
    return "…"


def columns(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [cell(row[i]) for row in rows] for i, name in enumerate(names)}


def cell(value: Any) -> Any:
    return number(value) if isinstance(value, int | float) else None if value is None else text(value, 500)


def record(names: Sequence[str], row: Sequence[Any]) -> Row:
    return dict(zip(names, map(cell, row), strict=True))


def shown(value: Any) -> Any:
    """A figure, or what it is made of, as JSON has it: what is no number is null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **{f.name: shown(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, np.ndarray):
        return (
            [shown(row) for row in value] if value.ndim > 1 else [v if abs(v) < 1e300 else None for v in value.tolist()]
        )
    if isinstance(value, Mapping):
        return {text(k): shown(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [shown(v) for v in value]
    return text(value, 500) if isinstance(value, str) else number(value) if isinstance(value, float) else value
