"""What tells one sample from another, whatever was made of it and wherever it stands: a hash of 64 bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.preparation import Column, Floats

Keys = NDArray[np.uint64]


def row_keys(rows: NDArray[Any]) -> Keys:
    """Of each row of an array, by its values."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    digests = b"".join(hashlib.blake2b(row.data, digest_size=8).digest() for row in flat)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def word_keys(words: Sequence[str]) -> Keys:
    """Of each word."""
    digests = b"".join(hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def table_keys(raw: Floats, columns: Sequence[Column]) -> Keys:
    """Of each row of a table as it came, before anything is filled or scaled: by the names of its columns and the words
    of its categories, so that neither their order nor what other rows hold counts."""
    told = []
    for place in sorted(range(len(columns)), key=lambda i: columns[i].name):
        column, values = columns[place], raw[:, place]
        if column.categories:
            words = np.append(word_keys(column.categories), np.uint64(0))
            told.append(words[np.where(np.isnan(values), len(column.categories), values).astype(np.int64)])
        else:
            told.append(np.where(np.isnan(values), np.nan, values + 0.0).view(np.uint64))
    names = word_keys([column.name for column in columns])
    found: Keys = row_keys(np.stack(told, axis=1)) ^ np.bitwise_xor.reduce(names)
    return found


def with_targets(samples: Keys, targets: NDArray[Any], names: Sequence[str] = ()) -> Keys:
    """Of samples with what they are labelled with; `names` are those of the classes, where targets are such."""
    labels = word_keys(names)[targets] if len(names) else row_keys(targets)
    both: Keys = samples * np.uint64(0x9E3779B97F4A7C15) + labels
    return both
