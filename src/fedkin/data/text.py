"""Words as numbers: a small tokenizer, so that text needs no further package."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from fedkin.data.dataset import Ints

PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+")
_ENTITY = re.compile(r"\s?#39;|\\?&?\b(?:quot|amp|lt|gt|nbsp);|\\")


def words(text: str) -> list[str]:
    """Lower-case words and numbers. AG News holds remains of HTML (``#39;``, ``quot;``): an apostrophe, or nothing."""
    return _WORD.findall(_ENTITY.sub(lambda m: "'" if "39" in m[0] else " ", text.lower()))


def build_vocabulary(texts: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Ids for the most frequent words, ties in alphabetical order; 0 is padding, 1 any other word, ``size`` in all."""
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: i for i, word in enumerate(ranked[: size - 2], start=2)}


def encode(texts: Sequence[Sequence[str]], ids: dict[str, int], length: int) -> Ints:
    """Token ids [n, length], cut or padded at the end."""
    out = np.full((len(texts), length), PADDING, np.int64)
    for row, text in zip(out, texts, strict=True):
        tokens = [ids.get(word, UNKNOWN) for word in text[:length]]
        row[: len(tokens)] = tokens
    return out
