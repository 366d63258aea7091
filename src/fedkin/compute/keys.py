"""Randomness without state: every draw is a function of (seed, client, round, stream, position).

A batch order that depends on nothing else is the same whatever engine runs it, however many rows are trained
together, and after a crash. The hash is SplitMix64's finaliser (Steele et al., 2014) over a running sum.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: U64) -> U64:
    """A bijection of 64-bit integers whose output bits look independent."""
    with np.errstate(over="ignore"):
        z = values + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: U64 = z ^ (z >> np.uint64(31))
        return mixed


def key(*parts: int | str | NDArray[np.int64]) -> U64:
    """Fold any number of integers, names and integer arrays into keys (arrays broadcast)."""
    state: U64 = np.zeros((), np.uint64)
    for part in parts:
        word = zlib.crc32(part.encode()) if isinstance(part, str) else part
        as_bits = np.asarray(word, np.int64).astype(np.uint64)
        state = mix(np.asarray(state ^ mix(as_bits), np.uint64))
    return state


def uniform(keys: U64, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each key: shape [*keys.shape, count]."""
    with np.errstate(over="ignore"):
        counter = keys[..., None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    return (mix(counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(keys: U64, count: int) -> NDArray[np.int64]:
    """A random order of 0..count-1 for each key: shape [*keys.shape, count]."""
    with np.errstate(over="ignore"):
        counter = keys[..., None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    return np.argsort(mix(counter), axis=-1, kind="stable").astype(np.int64)


def generator(*parts: int | str) -> np.random.Generator:
    """An ordinary NumPy generator for code that needs many kinds of draws."""
    return np.random.Generator(np.random.PCG64(int(key(*parts))))
