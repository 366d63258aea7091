"""Models in use: from samples as people have them to probabilities and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.data.columns import Table, is_frame
from fedkin.data.dataset import Array, Dataset, as_samples
from fedkin.data.encoding import encoded, lacking, table_of
from fedkin.data.huggingface import is_huggingface, new_samples
from fedkin.errors import DataError, UsageError
from fedkin.models.ready import Ready, Samples
from fedkin.tasks import Classification, Task, task_for


def outputs(model: Ready, x: Any, batch: int = 256) -> Tensor:
    """What a model gives for samples as they came, [n, ...]."""
    given = torch.from_numpy(as_given(x, model.samples))
    with torch.no_grad():
        try:
            return torch.cat([model(part) for part in torch.split(given, batch)])
        except IndexError as error:
            raise DataError(
                f"the model cannot take the samples ({error}): is there an id that its embedding has no row for?"
            ) from error


def probabilities(model: Ready, x: Any, batch: int = 256) -> Array:
    """What a model gives each class for samples as they came, [n, classes]; rows sum to 1."""
    if model.samples.targets != "classes":
        raise UsageError(f"the model's outputs are for targets that are {model.samples.targets}: no class has a share")
    return torch.softmax(outputs(model, x, batch)[:, : model.samples.classes].double(), 1).numpy()


def answers(model: Ready, x: Any, task: Task | None = None) -> Array:
    """What a model says of each sample, in the form of the data's targets: classes by name, numbers, labels as 0 or 1,
    tokens, or (survival) a risk. `task`: the one it learnt, where that is one of the user's own."""
    if model.samples.targets == "classes" and (task is None or isinstance(task, Classification)):
        return labels(model, x)
    return plain((task or task_for(model.samples.targets)).predict(outputs(model, x)))


def _is_table(x: Any) -> bool:
    return isinstance(x, Table | Mapping) or is_frame(x) or (isinstance(x, list) and bool(x) and isinstance(x[0], dict))


def _rows(x: Any, samples: Samples) -> Array:
    """A table's rows as the model takes them: numbers, and categories by the numbers of their words."""
    columns = samples.table
    names = [c.name for c in columns]
    table = table_of(x, names)
    if not len(table.rows):
        raise DataError("the samples: no samples")
    table = table.only(table.features((), names, "the model"), "the model")
    raw = encoded(table, columns)
    refused = [i for i, c in enumerate(columns) if c.fill is None]
    said = lacking(table, [columns[i] for i in refused], raw[:, refused])
    if said:
        raise DataError(f"{said}, and the model was trained without missing values there; drop such samples")
    return raw if samples.preparations else raw.astype(np.float32)


def _only_column(x: Any) -> Array:
    """The texts in a table that holds nothing else."""
    table = table_of(x, ())
    if len(table.header) != 1:
        raise DataError(f"the samples have the columns {', '.join(table.header)}: give the texts alone")
    return table.columns[0]


def plain(predicted: Tensor) -> Array:
    """Predictions as an array; a single number a sample without an axis of its own."""
    found = predicted.numpy()
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found


def labels(model: Ready, x: Any) -> Array:
    """The likeliest class of each sample, by its name; whole numbers where all classes are named by such."""
    names = model.names
    numbered = all(name.removeprefix("-").isdecimal() and str(int(name)) == name for name in names)  # "01" is a name
    words: Array = np.array([int(name) for name in names] if numbered else names)
    return np.asarray(words[probabilities(model, x).argmax(1)])


def as_given(x: Any, samples: Samples) -> Array:
    """An array, tensor, list (of each part, where samples have several) or data set of Hugging Face's as the array that
    the model takes; DataError where it is not of that kind."""
    x = new_samples("the samples", x) if is_huggingface(x) else x
    if isinstance(x, Mapping) and not samples.table:
        return samples.packed(x)
    if samples.texts is not None:
        return samples.tokens(_only_column(x) if _is_table(x) else x)
    if samples.parts:
        samples.check("", ())
    if samples.preparations or (samples.table and _is_table(x)):
        return _rows(x, samples)
    try:
        array = x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
    except ValueError as error:
        raise DataError(f"the samples are no array, perhaps of different lengths ({error})") from error
    if array.shape == samples.shape and array.ndim > 1:
        samples.check(array.dtype.name, array.shape)  # one sample without the axis of samples: says so
    whole = array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255
    if samples.kind == "uint8" and whole:
        array = array.astype(np.uint8)
    found = as_samples(array, samples.vocabulary)
    samples.check(found.dtype.name, found.shape)
    # the checks of a data set: finite numbers, token ids of the vocabulary, at least one sample
    return Dataset("the samples", found, np.zeros(len(found), np.int64), 1, vocabulary=samples.vocabulary).x
