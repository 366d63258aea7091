"""One client's data as Python objects or arrays, brought into one form and checked as far as one client can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedkin.data.clients import OwnClient
from fedkin.data.dataset import Array, as_samples, checked_labels
from fedkin.data.manner import USUAL, Reading
from fedkin.data.precision import blurred
from fedkin.data.targets import Targets, read_targets
from fedkin.errors import DataError, UsageError
from fedkin.parts import Part, pack

PAIR, FOUR = ("x", "y"), ("x_train", "y_train", "x_test", "y_test")


def arrays_of(where: str, data: Any, how: Reading = USUAL) -> Sequence[Any]:
    """What a client's data hold, two or four arrays."""
    if how.texts is not None and isinstance(data, list) and data and all(map(_is_pair, data)):
        return [[text for text, _ in data], [label for _, label in data]]
    if isinstance(data, Mapping):
        keys = next((keys for keys in (PAIR, FOUR) if set(keys) == set(data)), None)
        if keys is None:
            raise UsageError(
                f"{where} is a dictionary with {', '.join(map(repr, data)) or 'nothing'}: give (x, y), or "
                "the keys 'x' and 'y', or 'x_train', 'y_train', 'x_test' and 'y_test'"
            )
        return [data[key] for key in keys]
    if isinstance(data, list | tuple):
        return data
    if isinstance(data, np.ndarray | str | bytes | int | float) or data is None:
        what = f"{where} is a single {type(data).__name__}"
        raise UsageError(f"{what}: give a list with (x, y), samples and their labels, for each client")
    return torch_arrays(where, data)


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2


def one_client(name: str, where: str, arrays: Sequence[Any], how: Reading) -> OwnClient:
    """One client's arrays in one form, checked as far as one client can be."""
    if len(arrays) not in (2, 4):
        single = bool(arrays) and all(map(_is_pair, arrays))
        hint = "; of single samples, each an (x, y), zip(*samples) makes one" if single else ""
        raise UsageError(f"{where} has {len(arrays)} arrays: give (x, y) or (x_train, y_train, x_test, y_test){hint}")
    pairs, cut = [], 0
    parts: tuple[Part, ...] = ()
    for i in range(0, len(arrays), 2):
        given = arrays[i]
        if how.texts is not None and not isinstance(given, Mapping):
            given, few = how.texts(given, where)
            cut += few
        if isinstance(given, Mapping):
            x, parts = pack(given, where, parts)
        else:
            x = _samples(where, given, how.vocabulary)
        pairs.append((x, _targets_of(where, arrays[i + 1], len(x), how.targets)))
    if not len(pairs[0][0]):
        raise DataError(f"{where} has no samples: leave it out or give it some")
    if len(pairs) == 2 and len(pairs[1][0]) and pairs[0][0].shape[1:] != pairs[1][0].shape[1:]:
        raise DataError(
            f"{where}: training samples of shape {pairs[0][0].shape[1:]}, test samples of shape {pairs[1][0].shape[1:]}"
        )
    filled = [(x, y) for x, y in pairs if len(x)]
    if len({y.dtype.kind == "U" for _, y in filled}) > 1:
        raise DataError(f"{where} labels with numbers and with words; use one kind")
    tests = len(pairs[1][0]) if len(pairs) == 2 else None
    x, y = (np.concatenate([pair[i] for pair in filled]) for i in (0, 1))
    note = "" if how.texts is not None else _noted(where, arrays, x, how)
    return OwnClient(name, x, y, tests, parts=parts, note=note, cut=cut)


def _noted(where: str, arrays: Sequence[Any], taken: Array, how: Reading) -> str:
    came = () if isinstance(arrays[0], Mapping) else np.shape(arrays[0])[1:]
    if len(came) == 3 and taken.dtype == np.float32 and came != taken.shape[1:]:
        return (
            f"samples of shape {came} are taken for images with their channels last, and turned to "
            f"{taken.shape[1:]}; give them as {taken.shape[1:]}, or with another axis, if they are none"
        )
    given: list[tuple[Any, str]] = []
    for x, y in zip(arrays[::2], arrays[1::2], strict=True):
        named = x.items() if isinstance(x, Mapping) else [] if how.vocabulary else [("feature", x)]
        floats = isinstance(x, Mapping) and all(np.asarray(v).dtype.kind != "f" for v in x.values())
        given += [] if floats else [(v, f"{where}: {name if name == 'feature' else repr(name)}") for name, v in named]
        given += [(y, f"{where}: the target")] if how.targets in ("numbers", "survival") else []
    return next((said for values, what in given if (said := blurred(values, what))), "")


def _targets_of(where: str, given: Any, samples: int, targets: Targets) -> Array:
    """A client's targets, one for each of its samples."""
    y = _array(where, given, "label" if targets == "classes" else "target")
    if y.ndim == 0 or len(y) != samples:
        raise DataError(
            f"{where}: {samples} samples, but {'labels' if targets == 'classes' else 'targets'} of shape {y.shape}"
        )
    if targets != "classes":
        return read_targets(targets, y, where)
    if y.ndim != 1 and y.shape[1:] != (1,):
        raise DataError(
            f"{where}: {samples} samples, but labels of shape {y.shape}; if they are no classes, say what they are "
            "for, as in task='multi-label'"
        )
    return checked_labels(y, where)


def _array(where: str, value: Any, what: str = "sample") -> Array:
    if isinstance(value, Iterator):
        raise UsageError(
            f"{where}: its {what}s come as a {type(value).__name__}, which is read only once: give a list or an array"
        )
    try:
        found = np.asarray(value)
        if found.dtype == object:
            _check_shapes(where, found, what)
        return found
    except DataError:
        raise
    except Exception as error:  # somebody else's class can fail in any way
        if isinstance(value, list | tuple):
            _check_shapes(where, value, what)
        raise DataError(
            f"{where}: a {type(value).__name__} that does not become an array ({error}); all samples need "
            "one shape, and tensors must be on the CPU without gradients"
        ) from error


def _check_shapes(where: str, rows: Sequence[Any] | Array, what: str) -> None:
    """A sentence with the first row that is not like the first of all."""
    first = None
    for i, row in enumerate(rows):
        try:
            shape = tuple(np.shape(row))
        except Exception:  # rows of rows that differ
            raise DataError(f"{where}: {what} {i} has parts of different lengths; all need one shape") from None
        first = shape if first is None else first
        if shape != first:
            raise DataError(
                f"{where}: {what} {i} has shape {shape}, {what} 0 {first}; all need one shape: cut or fill them up"
            )


def _samples(where: str, x: Any, vocabulary: int) -> Array:
    try:
        samples = as_samples(_array(where, x), vocabulary)
    except (DataError, ValueError, OverflowError) as error:
        front = "" if str(error).startswith(where) else f"{where}: "
        raise DataError(f"{front}{error}") from error
    if samples.dtype == np.float32 and not np.isfinite(samples).all():
        row = int(np.argwhere(~np.isfinite(samples))[0][0])
        raise DataError(f"{where}: sample {row} holds a value that is not finite; impute or drop such samples")
    return samples


def torch_arrays(where: str, data: Any) -> tuple[Array, Array]:
    """All items of a map-style data set, stacked."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(
            f"{where} is a {type(data).__name__}: give (x, y), or a data set with a length and items by number"
        )
    if not len(data):
        raise DataError(f"{where} has no samples: leave it out or give it some")
    samples, labels = [], []
    for i in range(len(data)):
        x, y = _item(where, data, i)
        samples.append(x)
        labels.append(y)
    try:
        return np.stack(samples), np.stack(labels)
    except ValueError as error:
        raise DataError(f"{where}: items must be (x, y) of one shape ({error})") from error


def _item(where: str, data: Any, i: int) -> tuple[Array, Array]:
    try:
        item = data[i]
    except Exception as error:  # somebody else's class can fail in any way
        raise DataError(f"{where}: item {i} cannot be had ({type(error).__name__}: {error})") from error
    if isinstance(item, Mapping):
        raise UsageError(
            f"{where}: items are dictionaries with {', '.join(map(repr, item))}; give pairs (x, y), for "
            "example [(item['x'], item['label']) for item in data] turned into two arrays"
        )
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise DataError(f"{where}: items must be (x, y) of one shape (item {i} is a {type(item).__name__})")
    return _array(where, item[0]), _array(where, item[1])
