"""How a row of a table becomes the numbers that a network takes: missing values are filled, numbers standardised, and a
category is one input for each of its words. Fitted in `fedkin.data.fitting`, kept with a model, used wherever it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """A column of a table. A category's value is the number of its word in `categories`; missing values are NaN."""

    name: str
    categories: tuple[str, ...] = ()  # none: a column of numbers
    fill: float | None = None  # what a missing value becomes; None: there may be none
    mean: float = 0.0
    std: float = 1.0

    @property
    def codes(self) -> int:
        """How many inputs a category becomes: one more than it has words where a missing value has an input, too."""
        return max(len(self.categories), 0 if self.fill is None else int(self.fill) + 1)

    def inputs(self) -> tuple[str, ...]:
        """What the inputs of a network are called that this becomes."""
        if not self.categories:
            return (self.name,)
        words = (*self.categories, "(missing)")[: self.codes]
        return tuple(f"{self.name}={word}" for word in words)


@dataclass(frozen=True)
class Preparation:
    """What is done with all columns, in their order."""

    columns: tuple[Column, ...]

    @property
    def plain(self) -> bool:
        """Whether nothing is done: all are numbers and stay what they are."""
        return all(c == Column(c.name) for c in self.columns)

    def inputs(self) -> tuple[str, ...]:
        return tuple(name for c in self.columns for name in c.inputs())

    def tables(self) -> dict[str, Floats]:
        """For each input: the column it is made of, the code it stands for (NaN: it is a number), the column's mean and
        deviation; for each column what a missing value becomes (NaN: it stays missing)."""
        rows = [
            (float(place), float(code) if c.categories else math.nan, c.mean, c.std)
            for place, c in enumerate(self.columns)
            for code in range(c.codes if c.categories else 1)
        ]
        source, code, mean, std = (np.array(v, np.float64) for v in zip(*rows, strict=True))
        fill = np.array([math.nan if c.fill is None else c.fill for c in self.columns])
        return {"source": source, "code": code, "mean": mean, "std": std, "fill": fill}

    def __call__(self, raw: Floats) -> NDArray[np.float32]:
        """The inputs [n, width] of rows [n, columns]."""
        t = self.tables()
        full = np.where(np.isnan(raw), t["fill"], raw)[:, t["source"].astype(np.int64)]
        found = np.where(np.isnan(t["code"]), (full - t["mean"]) / t["std"], full == t["code"])
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused with its place
            return found.astype(np.float32)

    @classmethod
    def of(cls, values: Any) -> Preparation:
        """From what `asdict` made of one; ValueError for anything that it never makes."""
        if not isinstance(values, Mapping) or set(values) != {"columns"} or not isinstance(values["columns"], list):
            raise ValueError("no proper preparation of columns")
        return cls(tuple(_column(value) for value in values["columns"]))


def _column(values: Any) -> Column:
    if not isinstance(values, Mapping) or set(values) != {"name", "categories", "fill", "mean", "std"}:
        raise ValueError("no proper column")
    words = values["categories"]
    if not isinstance(words, list | tuple) or not _texts([values["name"], *words]) or len(set(words)) < len(words):
        raise ValueError(f"column {values['name']!r} with improper words")
    numbers = [v for v in (values["fill"], values["mean"], values["std"]) if v is not None]
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in numbers):
        raise ValueError(f"column {values['name']!r} with improper numbers")
    made = Column(values["name"], tuple(words), values["fill"], values["mean"], values["std"])
    if not made.std > 0 or (words and not 0 <= (made.fill or 0) <= len(words)):
        raise ValueError(f"column {made.name!r} with std={made.std!r}, fill={made.fill!r}")
    return made


def _texts(values: Sequence[Any]) -> bool:
    return all(isinstance(v, str) and len(v) <= 1000 for v in values)
