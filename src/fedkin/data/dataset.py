"""What every data set becomes: one array of samples, one of labels, and what is known about each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkin.data.sample_keys import Keys
from fedkin.data.targets import WORDS, Ints, Targets, check_targets, strata
from fedkin.errors import DataError, UsageError
from fedkin.parts import Part, pack
from fedkin.preparation import Preparation, Texts

Array = NDArray[Any]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples with labels, before anybody has split them over clients.

    ``x`` are the samples, ``y`` their labels: numbers of ``classes`` called ``class_names``. ``user`` says whose a
    sample is (``users`` names them), ``official_test`` which are for testing; ``mean``, ``std``, ``vocabulary``,
    ``parts`` and ``targets`` what samples and labels are, ``columns``, ``preparations``, ``prepared`` and ``keys`` how
    a table became them, ``texts`` how texts did, ``model`` which network suits them, and ``note`` what to know of them.
    `name` is the set's.

    Pixels stay uint8 because the whole set then fits on one device; a network sees ``(x / 255 - mean) / std``.
    Float data are used as they are. Equality is identity: comparing gigabytes by accident helps nobody.
    """

    name: str
    x: Array
    y: Array
    classes: int
    """How many classes there are; with other targets, how many numbers a network has to give."""
    class_names: tuple[str, ...] = ()
    user: Ints | None = None
    official_test: Bools | None = None
    mean: float = 0.5
    std: float = 0.5
    vocabulary: int = 0
    note: str = ""
    columns: tuple[str, ...] = ()
    """What the features are called, where they came as a table."""
    preparations: tuple[Preparation, ...] = ()
    """What was done with the columns of a table to make these features: one for all clients, or one for each."""
    prepared: tuple[str, ...] = ()
    """The same in words, a sentence for each column."""
    parts: tuple[Part, ...] = ()
    """How a sample is taken apart, where a network has several inputs. Such an x may be given as a mapping."""
    targets: Targets = "classes"
    """What the samples are labelled with; y is stored as `read_targets` gives it."""
    users: tuple[str, ...] = ()
    """What the users are called, by their numbers in `user`."""
    model: str = ""
    """The network that suits these data, where it is not the usual one for samples of their shape."""
    texts: Texts | None = None
    """How texts became these samples, where they came as such."""
    keys: Keys | None = None
    """What tells samples from each other, as they came, where they depend on the split: rows of a table that was
    prepared, images that are shifted."""

    def __post_init__(self) -> None:
        if isinstance(self.x, Mapping):
            x, parts = pack(self.x, self.name)
            object.__setattr__(self, "x", x)
            object.__setattr__(self, "parts", parts)
        self._check_samples()
        check_targets(self.targets, self.y, len(self.x), self.classes, self.name)
        if self.class_names and len(self.class_names) != self.classes:
            raise DataError(f"{self.name}: {self.classes} classes, but {len(self.class_names)} class names")
        for column, values in (("user", self.user), ("official_test", self.official_test)):
            if values is not None and values.shape != (len(self.x),):
                raise DataError(f"{self.name}: {len(self.x)} samples, but column {column} has shape {values.shape}")
        if self.users and (self.user is None or not 0 <= self.user.min() <= self.user.max() < len(self.users)):
            raise DataError(f"{self.name}: {len(self.users)} names of users do not fit the column user")

    def _check_samples(self) -> None:
        kinds = {"uint8": 4, "float32": 0, "int64": 2}
        kind = self.x.dtype.name
        if kind not in kinds:
            raise DataError(f"{self.name}: x is {kind}; it must be uint8 (images), float32 or int64 (token ids)")
        if self.x.ndim < 2 or kinds[kind] not in (0, self.x.ndim):
            raise DataError(
                f"{self.name}: x of shape {self.x.shape} does not fit {kind}: images are [n, C, H, W], "
                "tokens [n, length], features and series at least [n, d]"
            )
        if not len(self.x):
            raise DataError(f"{self.name}: no samples")
        if kind == "float32" and not np.isfinite(self.x).all():
            row = int(np.argwhere(~np.isfinite(self.x))[0][0])
            raise DataError(f"{self.name}: sample {row} holds a value that is not finite; impute or drop such samples")
        if kind == "int64" and not self.parts and not (self.x.min() >= 0 and self.x.max() < self.vocabulary):
            raise DataError(
                f"{self.name}: token ids run from {self.x.min()} to {self.x.max()}, "
                f"but the vocabulary has {self.vocabulary}"
            )
        if not self.std > 0:
            raise DataError(f"{self.name}: std is {self.std}; it must be positive")

    def __len__(self) -> int:
        return len(self.x)

    @property
    def strata(self) -> Ints:
        """What splits keep the mix of: the classes, or one stratum for all."""
        return strata(self.targets, self.y)

    @property
    def groups(self) -> int:
        """How many strata there are."""
        return self.classes if self.targets == "classes" else 1

    def need_classes(self, who: str) -> None:
        """UsageError unless every sample has one class; `who` asks."""
        if self.targets != "classes":
            raise UsageError(
                f"{who} goes by the class of each sample, and the targets of {self.name} are {self.targets} "
                f"({WORDS[self.targets]}): take one that does not, such as iid or natural"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, channels first."""
        return tuple(self.x.shape[1:])

    @property
    def kind(self) -> str:
        """What a model must be made for: "image", "series", "features" or "text"."""
        if self.x.dtype == np.int64:
            return "text"
        if self.x.ndim == 2:
            return "features"
        return "image" if self.x.ndim == 4 and self.x.shape[2] > 1 else "series"


def as_samples(x: Any, vocabulary: int = 0) -> Array:
    """Arrays as people have them, as ``Dataset`` wants them.

    uint8 with three or four axes is pixels: a missing channel axis is added, a last axis of 1, 3 or 4 is moved to the
    front unless the second one is such already. Integers are token ids where a vocabulary is given, otherwise numbers.
    """
    x = np.asarray(x)
    if x.dtype.kind not in "biuf":
        raise DataError(f"samples of type {x.dtype} cannot be used: give numbers")
    if x.ndim == 0:
        raise DataError("samples are a single number: give an array with one row per sample")
    if vocabulary:
        odd = x[~np.isfinite(x) | (np.floor(x) != x)] if x.dtype.kind == "f" else x[:0]
        if odd.size:
            raise DataError(f"token ids are whole numbers, but {odd.flat[0]} is among them")
        return np.ascontiguousarray(x, dtype=np.int64)
    if x.ndim == 1:
        x = x[:, None]
    channels = (1, 3, 4)
    if x.dtype == np.uint8 and x.ndim == 3:
        return np.ascontiguousarray(x[:, None])
    if x.ndim == 4 and x.shape[-1] in channels and x.shape[1] not in channels and x.shape[2] > 1:
        x = np.moveaxis(x, -1, 1)
    if x.dtype == np.uint8 and x.ndim == 4:
        return np.ascontiguousarray(x)
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused with its place
        return np.ascontiguousarray(x, dtype=np.float32)


MISSING = ("", "None", "nan", "NaN", "null", "NULL", "<NA>", "NaT")
"""What programs write where a label is not known. A class of such a name needs another one."""


def checked_labels(labels: Any, where: str = "", place: Callable[[int], str] = lambda i: f"sample {i}") -> Array:
    """Labels as whole numbers or as text. Text that is whole numbers becomes numbers, so that 10 sorts after 9;
    numbers with a point are whole or refused. What is wrong is said with where and at which place it stands."""
    labels = np.asarray(labels)
    front = f"{where}: " if where else ""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise DataError(f"{front}labels have shape {labels.shape}; one label per sample is needed")
    if labels.dtype.kind not in "biufUSO":
        raise DataError(f"{front}labels of type {labels.dtype} cannot be used: give whole numbers or names")
    if labels.dtype.kind in "USO":
        labels = _from_words(labels, front, place)
    if labels.dtype.kind == "f":
        odd = ~np.isfinite(labels) | (labels != np.round(labels)) | (np.abs(labels) >= 2.0**63)
        if odd.any():
            i = int(np.argmax(odd))
            raise DataError(f"{front}label {labels[i]} is not a class ({place(i)}); labels are whole numbers or names")
    if labels.dtype == np.uint64 and len(labels) and labels.max() >= np.uint64(2**63):
        raise DataError(f"{front}label {labels.max()} is too large a number; labels fit into 64 bits")
    found: Array = labels if labels.dtype.kind in "bU" else labels.astype(np.int64)
    return found


def _from_words(labels: Array, front: str, place: Callable[[int], str]) -> Array:
    values = labels.tolist()
    kinds = {"words" if isinstance(v, str | bytes) else "numbers" for v in values if not _absent(v)}
    if len(kinds) > 1:
        raise DataError(f"{front}labels are numbers and words; use one kind")
    try:
        text = np.array([v.decode() if isinstance(v, bytes) else str(v) for v in values], dtype=str)
    except UnicodeDecodeError as error:
        raise DataError(f"{front}a label is not valid text ({error})") from None
    absent = np.isin(text, MISSING)
    if absent.any():
        i = int(np.argmax(absent))
        raise DataError(
            f"{front}no label in {place(i)} ({str(text[i])!r}); drop such samples, or call the class something else"
        )
    for kind in (np.int64, np.float64):
        try:
            return text.astype(kind)
        except (ValueError, OverflowError):
            continue
    return text


def _absent(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def encode_labels(labels: Any) -> tuple[Ints, tuple[str, ...]]:
    """Labels of any kind as 0..C-1, with the original values (sorted) as class names; numbers sort as numbers."""
    names, codes = np.unique(checked_labels(labels), return_inverse=True)
    return codes.astype(np.int64), tuple(str(name) for name in names.tolist())


def numbered(labels: Any, names: Sequence[str]) -> tuple[Ints, tuple[str, ...]]:
    """Labels as numbers of the classes with these names, -1 for those that are none; and which these are.

    Numbers that are no names stand for the classes in their order."""
    given = np.asarray(labels)
    codes, words = encode_labels(given)
    place = {name: i for i, name in enumerate(names)}
    if given.dtype.kind in "biu" and not any(word in place for word in words):
        place = {str(i): i for i in range(len(names))}
    found = np.array([place.get(word, -1) for word in words], np.int64)[codes]
    return found, tuple(word for word in words if word not in place)
