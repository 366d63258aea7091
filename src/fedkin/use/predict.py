"""What a personal model says about new samples, and how often it is right where the labels are known."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.data.columns import Table, read_table
from fedkin.data.dataset import Array, numbered
from fedkin.data.encoding import encoded
from fedkin.data.image_folder import SUFFIXES, Shown, class_folders, read_classes, read_images
from fedkin.errors import DataError, UsageError
from fedkin.models import Samples
from fedkin.models.ready import WORDS
from fedkin.preparation import Column
from fedkin.use.model_file import Personal

DATA_FILES = (".csv", ".parquet", ".npz")


@dataclass(frozen=True, eq=False)
class Predictions:
    """One row a sample. `truth`: class numbers, -1 for a label that the model has no class for; None without labels."""

    classes: tuple[str, ...]
    probabilities: Array
    truth: Array | None
    foreign: tuple[str, ...] = ()
    """Labels in the data that the model does not know; such samples count as wrong."""

    @property
    def best(self) -> Array:
        return np.asarray(self.probabilities.argmax(1))

    @property
    def accuracy(self) -> float | None:
        """Percent, or None without labels."""
        return None if self.truth is None else float(100.0 * (self.best == self.truth).mean())

    def counts(self) -> dict[str, int]:
        """How often each class was predicted; those that occur."""
        found = Counter(self.best.tolist())
        return {self.classes[i]: found[i] for i in sorted(found)}

    def to_dict(self) -> dict[str, Any]:
        rows = zip(self.best.tolist(), self.probabilities.tolist(), strict=True)
        return {
            "classes": list(self.classes),
            "samples": len(self.probabilities),
            "accuracy": self.accuracy,
            "counts": self.counts(),
            "unknown_labels": list(self.foreign),
            "predictions": [
                {"row": i, "prediction": self.classes[b], "probability": p[b], "probabilities": p}
                for i, (b, p) in enumerate(rows)
            ],
        }

    def write_csv(self, path: str | Path) -> Path:
        path = Path(path).expanduser()
        label = [] if self.truth is None else ["label"]
        try:
            with path.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream)
                writer.writerow(["row", "prediction", "probability", *label, *(f"p({name})" for name in self.classes)])
                for i, (b, p) in enumerate(zip(self.best.tolist(), self.probabilities.tolist(), strict=True)):
                    known = [] if self.truth is None else [self.classes[self.truth[i]] if self.truth[i] >= 0 else "?"]
                    writer.writerow([i, self.classes[b], f"{p[b]:.6f}", *known, *(f"{v:.6f}" for v in p)])
        except OSError as error:
            raise UsageError(f"--out {path} cannot be written: {error.strerror}") from error
        return path


def predict(model: Personal, x: Any, labels: Any = None) -> Predictions:
    """The model's answers for samples as they came (not normalised)."""
    names = model.card.names()
    found = model.probabilities(x)
    if labels is None:
        return Predictions(names, found, None)
    labels = np.asarray(labels)
    if labels.shape[:1] != (len(found),):
        raise DataError(f"{len(found)} samples, but labels of shape {labels.shape}")
    return Predictions(names, found, *numbered(labels, names))


def read_pictures(path: str | Path, samples: Samples, convert: bool = False) -> tuple[Array, Array | None]:
    """One image, the images of a folder, or those of CLASS/* with their classes. `convert`: brings them to the size and
    mode that the model takes; without, others are refused."""
    path = Path(path).expanduser()
    tables = sorted(p.name for p in path.iterdir() if p.suffix in DATA_FILES) if path.is_dir() else []
    if tables:
        takes = f"; the model takes the columns {', '.join(c.name for c in samples.table)}" if samples.table else ""
        some = ", ".join([*tables[:3], *(["..."] if len(tables) > 3 else [])])
        raise UsageError(f"{path}: a folder with data files ({some}): give one of them, {path / tables[0]}{takes}")
    if samples.kind != "uint8" or samples.shape[0] not in (1, 3):
        raise UsageError(
            f"{path}: these are images, and the model takes {WORDS[samples.kind]} of shape {samples.shape}"
        )
    shown = Shown(samples.shape[1:], "grey" if samples.shape[0] == 1 else "rgb") if convert else Shown()  # type: ignore[arg-type]
    labels = None
    try:
        if path.is_dir() and class_folders(path):
            x, labels, _ = read_classes(path, shown)
        else:
            files = [path] if path.is_file() else sorted(p for p in path.iterdir() if not p.name.startswith("."))
            x = np.stack(read_images(files, shown)[0])
    except (DataError, ValueError, OSError, AssertionError) as error:
        raise DataError(str(error) if isinstance(error, DataError) else f"{path} holds no image") from error
    if x.shape[1:] != samples.shape:
        raise DataError(
            f"{path}: images of shape {x.shape[1:]}, the model takes {samples.shape}; --convert (convert=True) brings "
            "them to that"
        )
    return x, labels


def is_pictures(path: str | Path) -> bool:
    """Whether these are images, or a folder with them."""
    path = Path(path).expanduser()
    return path.is_dir() or path.suffix.lower() in SUFFIXES


def read_samples(
    path: str | Path, label: str = "label", columns: Sequence[str] = (), targets: str = "classes"
) -> tuple[Array | Table, Array | None]:
    """Samples and, where the file has them, labels (or `targets` of another kind): .npz (x, y; or x_test, y_test), .csv
    or .parquet.

    `columns`: those of the table that the model learnt from (`Card.samples.table`). They go by name, whatever their
    order in the file; a model that was not trained on a table takes them as they come."""
    from fedkin.data.files import MissingFile, read_npz

    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"{file}: no such data file; give an .npz, .csv or .parquet")
    if file.suffix == ".npz":
        try:
            arrays = read_npz(file)
        except MissingFile:
            raise UsageError(f"{file}: no such data file") from None
        key = "x" if "x" in arrays else "x_test"
        if key not in arrays:
            raise DataError(f"{file}: expected an array 'x' or 'x_test', found {', '.join(arrays) or 'nothing'}")
        return arrays[key], arrays.get(key.replace("x", "y", 1))
    if file.suffix not in (".csv", ".parquet"):
        raise UsageError(f"{file}: give an .npz, .csv or .parquet file")
    table = read_table(file)
    if not len(table.rows) or set(table.header) <= {label}:
        raise DataError(f"{file} holds no samples: expected a line of column names, then one line a sample")
    try:
        aside = table.target_columns(label, targets)  # type: ignore[arg-type]
    except DataError:  # nobody knows what is right
        aside = ()
    names = table.features(aside, columns or None, "the model")
    truth = table.labels(aside, targets) if aside else None  # type: ignore[arg-type]
    features = table.only(names, "the model")
    if columns:
        return features, truth
    return encoded(features, [Column(name) for name in names]).astype(np.float32), truth
