"""Samples of several parts (token ids and a mask; numbers and categories), packed into one row of numbers each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import DataError

Array = NDArray[Any]

EXACT = 1 << 24  # whole numbers up to here are exact in float32


@dataclass(frozen=True)
class Part:
    """One of several inputs of a network: what it is called, its shape in one sample, what a network takes it as."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # int64, float32 or bool

    @property
    def width(self) -> int:
        return math.prod(self.shape)


def pack(x: Mapping[str, Any], where: str, parts: Sequence[Part] = ()) -> tuple[Array, tuple[Part, ...]]:
    """One row a sample, and how to take it apart: whole numbers where all parts are, else float32.

    `parts`: what they must be, where that is known."""
    arrays = {str(name): _array(where, name, value) for name, value in x.items()}
    if not arrays:
        raise DataError(f"{where}: a dictionary without arrays: give one array for each input of the network")
    counts = {name: len(a) for name, a in arrays.items()}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name!r} has {n}" for name, n in counts.items())
        raise DataError(f"{where}: the parts have different numbers of samples ({said})")
    kinds = {"b": "bool", "i": "int64", "u": "int64", "f": "float32"}
    found = tuple(Part(name, a.shape[1:], kinds[a.dtype.kind]) for name, a in arrays.items())
    if parts:
        named = {p.name: p for p in found}
        alike = set(named) == {p.name for p in parts} and all(
            named[p.name].shape == p.shape and (p.dtype == "float32" or named[p.name].dtype != "float32") for p in parts
        )
        if not alike:
            raise DataError(f"{where}: samples of {words_of(found)}, the network takes {words_of(parts)}")
        found = tuple(parts)
    flat = [arrays[p.name].reshape(len(arrays[p.name]), -1) for p in found]
    if all(p.dtype != "float32" for p in found):
        return np.concatenate([a.astype(np.int64) for a in flat], 1), found
    for part, a in zip(found, flat, strict=True):
        if part.dtype == "int64" and a.size and np.abs(a).max() >= EXACT:
            raise DataError(
                f"{where}: {part.name!r} holds {a.flat[np.abs(a).argmax()]}; beside numbers with a point, whole "
                f"numbers must stay below {EXACT:,}"
            )
    return np.concatenate([a.astype(np.float32) for a in flat], 1), found


def _array(where: str, name: str, value: Any) -> Array:
    try:
        array = np.asarray(value)
    except Exception as error:  # somebody else's class can fail in any way
        raise DataError(f"{where}: {name!r} does not become an array ({error}); all samples need one shape") from error
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise DataError(f"{where}: {name!r} is {array.dtype} of shape {array.shape}; give numbers, one row a sample")
    return array


def words_of(parts: Sequence[Part]) -> str:
    return ", ".join(f"{p.name!r} ({p.dtype} of shape {p.shape})" for p in parts) or "one array"
