"""How samples as people have them become the numbers that a network takes. Of a table's rows missing values are filled,
numbers standardised, and a category is one input for each of its words: fitted in `fedkin.data.fitting`, kept with a
model, used wherever it is. Texts become token ids, by a tokenizer of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import DataError, FedKinError, UsageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Encoded = tuple[list[int], list[int] | None]  # token ids, and which of them count, where a tokenizer says so


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


ALIKE = 0.25
"""By how much of a standard deviation two preparations may differ that were fitted on other rows of the same tables."""


def scaled_otherwise(there: Sequence[Preparation], here: Sequence[Preparation]) -> str:
    """The first column that becomes other inputs by one preparation (of all clients, or of each) than by another, and
    how, in words; empty if there is none. None at all are those that do nothing."""
    if not there and not here:
        return ""
    mine = (here or there)[0].columns
    for place, column in enumerate(mine):
        (a, fill_a), (b, fill_b) = (_done_with(place, each) for each in (there, here))
        if not column.categories and not _alike(a, b):
            said = (
                f"mean {mean:.4g}, deviation {std:.4g}" if (mean, std) != (0, 1) else "as it is" for mean, std in (a, b)
            )
            return "column {!r} is scaled by {} there, {} here".format(column.name, *said)
        if (fill_a is None) != (fill_b is None) or (
            fill_a is not None
            and fill_b is not None
            and abs(fill_a - fill_b) > ALIKE * (1 if column.categories else b[1])
        ):
            said = ("not at all" if fill is None else f"with {fill:.4g}" for fill in (fill_a, fill_b))
            return "what is missing in column {!r} is filled {} there, {} here".format(column.name, *said)
    return ""


def _done_with(place: int, each: Sequence[Preparation]) -> tuple[tuple[float, float], float | None]:
    """Mean, deviation and filling of a column, on average over clients."""
    columns = [p.columns[place] for p in each] or [Column("")]
    fills = [c.fill for c in columns if c.fill is not None]
    middle = (float(np.mean([c.mean for c in columns])), float(np.mean([c.std for c in columns])))
    return middle, float(np.mean(fills)) if fills else None


def _alike(a: tuple[float, float], b: tuple[float, float]) -> bool:
    if (0.0, 1.0) in (a, b):
        return a == b
    return abs(a[0] - b[0]) <= ALIKE * max(a[1], b[1]) and abs(math.log(a[1] / b[1])) <= 2 * ALIKE


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


# ---------------------------------------------------------------- texts

IDS, MASK = "input_ids", "attention_mask"
"""What the inputs are called that texts become, as tokenizers call them."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts as token ids of one length: longer ones are cut, shorter ones padded.

    The tokenizer is a `tokenizers.Tokenizer`, one as of `transformers`, or any function from a text to its ids, or to
    an object or a mapping that has them. Where it has a mask, so have the samples."""

    tokenizer: Any
    length: int

    def __post_init__(self) -> None:
        if isinstance(self.length, bool) or not isinstance(self.length, int) or self.length < 1:
            raise UsageError(f"length={self.length!r}: give the number of tokens of a text, 1 or more")
        if not callable(self.tokenizer) and not _has_encode(self.tokenizer):
            raise UsageError(
                f"tokenizer is a {type(self.tokenizer).__name__}: give a tokenizers.Tokenizer, one of transformers, or "
                "a function from a text to its token ids"
            )

    @property
    def padding(self) -> int:
        """The token that texts are padded with: the tokenizer's own, or else 0."""
        own = getattr(self.tokenizer, "pad_token_id", None)
        if own is None and _has_encode(self.tokenizer):
            said = self.tokenizer.padding or {}
            known = [self.tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>")]
            own = said.get("pad_id", next((i for i in known if i is not None), None))
        return 0 if own is None else int(own)

    def __call__(self, texts: Iterable[Any], where: str) -> tuple[dict[str, Ints], int]:
        """The ids [n, length], with the mask if there is one, and how many texts were cut. What is wrong is said with
        where and at which sample."""
        if isinstance(texts, str | bytes | Mapping):
            raise DataError(f"{where}: a single {type(texts).__name__}; give a list of texts")
        each = texts.tolist() if isinstance(texts, np.ndarray) else list(texts)
        for i, text in enumerate(each):
            if not isinstance(text, str):
                raise DataError(f"{where}: sample {i} is no text ({str(text)[:40]!r}), as the tokenizer takes it")
            if not text.strip():
                raise DataError(f"{where}: no text in sample {i}; leave such samples out")
        encode = _encoder(self.tokenizer, self.length)
        ids, mask = np.full((len(each), self.length), self.padding, np.int64), np.zeros((len(each), self.length), int)
        masked, cut = False, 0
        for i, text in enumerate(each):
            try:
                (found, counts), short = encode(text)
                row = np.asarray(found)
            except FedKinError:
                raise
            except Exception as error:  # somebody else's function can fail in any way
                raise DataError(
                    f"{where}: the tokenizer fails at sample {i} ({type(error).__name__}: {error})"
                ) from error
            if not row.size:
                raise DataError(f"{where}: the tokenizer finds no token in sample {i}; leave such samples out")
            if row.ndim != 1 or row.dtype.kind not in "iu" or (row < 0).any():
                made = f"of sample {i} the tokenizer makes {str(found)[:60]}"
                raise DataError(f"{where}: {made}; token ids are whole numbers, 0 or more")
            if len(row) > self.length:
                raise UsageError(f"length={self.length} is too short for the tokens that the tokenizer adds to a text")
            cut += short
            ids[i, : len(row)], mask[i, : len(row)] = row, 1 if counts is None else counts
            masked = counts is not None
        return {IDS: ids, MASK: mask} if masked else {IDS: ids}, cut

    def told(self) -> str:
        """What is done with a text, in a sentence."""
        return f"texts: {self.length} token ids each, padded with {self.padding}"


def texts_of(tokenizer: Any, length: int | None) -> Texts | None:
    """From what was given; UsageError where only one of the two was."""
    if tokenizer is None and length is not None:
        raise UsageError(f"length={length} would change nothing: it is that of texts, and they need a tokenizer")
    if tokenizer is None:
        return None
    if length is None:
        raise UsageError("a tokenizer needs length=, the number of tokens of a text, for example length=64")
    return Texts(tokenizer, length)


def _has_encode(tokenizer: Any) -> bool:
    """Whether it is a `tokenizers.Tokenizer`, or behaves like one."""
    return all(hasattr(tokenizer, name) for name in ("encode", "token_to_id", "to_str", "padding"))


def _encoder(tokenizer: Any, length: int) -> Callable[[str], tuple[Encoded, bool]]:
    """From a text to at most so many ids, and whether it was cut. What ends a text (as [SEP] does) stays at its end
    where the tokenizer cuts."""
    if _has_encode(tokenizer):
        try:
            own = type(tokenizer).from_str(tokenizer.to_str())  # a copy: it pads no more, and cuts to our length
            own.no_padding()
            own.enable_truncation(length)
        except Exception as error:
            raise UsageError(f"the tokenizer cannot cut texts to length={length} ({error})") from error

        def encode(text: str) -> tuple[Encoded, bool]:
            found = own.encode(text)
            return (found.ids, found.attention_mask), bool(found.overflowing)

        return encode

    def called(text: str) -> tuple[Encoded, bool]:
        ids, mask = _said(tokenizer(text))
        if len(ids) <= length:
            return (ids, mask), False
        try:
            shorter = _said(tokenizer(text, truncation=True, max_length=length))
        except TypeError:  # a plain function: it takes a text and nothing else
            shorter = ids, mask
        return (shorter[0][:length], None if mask is None else (shorter[1] or mask)[:length]), True

    return called


def _said(answer: Any) -> Encoded:
    """The ids and the mask in what a tokenizer gives."""
    if isinstance(answer, Mapping):
        return list(answer[IDS]), list(answer[MASK]) if MASK in answer else None
    if hasattr(answer, "ids"):
        return list(answer.ids), list(getattr(answer, MASK, [1] * len(answer.ids)))
    return list(answer), None
