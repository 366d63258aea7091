"""What samples are labelled with: a class, several labels, numbers, the tokens to come, or a time and whether something
happened then. Read from what people have, checked, and stored in one form each; nothing here knows a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import DataError, UsageError

Array = NDArray[Any]
Ints = NDArray[np.int64]
Targets = Literal["classes", "labels", "numbers", "tokens", "survival"]
TARGETS: tuple[Targets, ...] = get_args(Targets)

WORDS: dict[Targets, str] = {
    "classes": "one class for each sample",
    "labels": "a 0 or 1 for each label of a sample, [n, labels]",
    "numbers": "one number or more for each sample, [n] or [n, d]",
    "tokens": "a token id for each position, [n, length]; -100 does not count",
    "survival": "a time and whether the event happened then (1) or was not seen by then (0), [n, 2]",
}
IGNORED = -100
"""The token id of a position that does not count, as in PyTorch."""

Place = Callable[[int], str]


def sample(i: int) -> str:
    """How errors speak of the sample of this number."""
    return f"sample {i}"


def read_targets(kind: Targets, values: Any, where: str, place: Place = sample) -> Array:
    """Targets other than classes in the form in which they are stored; DataError with where and at which sample they
    are wrong. `place` names a sample."""
    y = _array(values, where)
    if kind == "numbers":
        return _numbers(y, where, place)
    if kind == "labels":
        return _labels(y, where, place)
    if kind == "tokens":
        return _tokens(y, where, place)
    if kind == "survival":
        return _survival(y, where, place)
    raise AssertionError("classes are read by `checked_labels`")


def _array(values: Any, where: str) -> Array:
    try:
        y = np.asarray(values)
    except Exception as error:  # somebody else's class can fail in any way
        raise DataError(f"{where}: the targets do not become an array ({error}); all need one shape") from error
    if y.dtype.kind == "O":
        try:
            y = y.astype(np.float64)
        except (TypeError, ValueError):
            raise DataError(f"{where}: the targets are not all numbers, or not of one length") from None
    if y.dtype.kind not in "biuf":
        raise DataError(f"{where}: targets of type {y.dtype} cannot be used: give numbers")
    return y


def _finite(y: Array, where: str, place: Place) -> None:
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        i = int(np.argwhere(~np.isfinite(y))[0][0])
        raise DataError(f"{where}: the target of {place(i)} is missing or not finite; drop such samples")


def _numbers(y: Array, where: str, place: Place) -> Array:
    if y.ndim not in (1, 2) or (y.ndim == 2 and not y.shape[1]):
        raise DataError(f"{where}: targets of shape {y.shape}; numbers are [n] or [n, d]")
    _finite(y, where, place)
    with np.errstate(over="ignore"):
        found = y.astype(np.float32).reshape(len(y), -1)
    _finite(found, where, place)  # what is too large for 32 bits
    return found


def _labels(y: Array, where: str, place: Place) -> Array:
    if y.ndim == 1:
        y = y[:, None]
    if y.ndim != 2 or not y.shape[1]:
        raise DataError(f"{where}: targets of shape {y.shape}; give a 0 or 1 for each label of a sample, [n, labels]")
    odd = ~np.isin(y, (0, 1))
    if odd.any():
        i, label = (int(v) for v in np.argwhere(odd)[0])
        raise DataError(f"{where}: label {label} of {place(i)} is {y[i, label]}; labels are 0 or 1")
    return y.astype(np.float32)


def _tokens(y: Array, where: str, place: Place) -> Array:
    if y.ndim != 2 or not y.shape[1]:
        raise DataError(f"{where}: targets of shape {y.shape}; tokens are [n, length], one for each position")
    if y.dtype.kind == "f" and (not np.isfinite(y).all() or (y != np.round(y)).any()):
        i = int(np.argwhere(~np.isfinite(y) | (y != np.round(y)))[0][0])
        raise DataError(f"{where}: {place(i)} has a target that is no whole number; tokens are ids")
    found = y.astype(np.int64)
    odd = (found < 0) & (found != IGNORED)
    if odd.any():
        i = int(np.argwhere(odd)[0][0])
        raise DataError(
            f"{where}: {place(i)} has the token {found[odd][0]}; ids are 0 or more, {IGNORED} where a position does "
            "not count"
        )
    if len(found) and (found == IGNORED).all(1).any():
        i = int(np.argmax((found == IGNORED).all(1)))
        raise DataError(f"{where}: no position of {place(i)} counts; leave such samples out")
    return found


def _survival(y: Array, where: str, place: Place) -> Array:
    if y.ndim != 2 or y.shape[1] != 2:
        raise DataError(f"{where}: targets of shape {y.shape}; give the time and the event of each sample, [n, 2]")
    _finite(y, where, place)
    odd = (y[:, 0] < 0) | ~np.isin(y[:, 1], (0, 1))
    if odd.any():
        i = int(np.argmax(odd))
        raise DataError(
            f"{where}: {place(i)} has time {y[i, 0]:g} and event {y[i, 1]:g}; times are 0 or more, events 0 or 1"
        )
    return y.astype(np.float32)


def check_targets(kind: Targets, y: Array, samples: int, outputs: int, name: str) -> None:
    """DataError unless stored targets are of this kind and fit so many samples and outputs of a network."""
    if kind not in TARGETS:
        raise UsageError(f"{name}: targets={kind!r}: choose one of {', '.join(TARGETS)}")
    whole = kind in ("classes", "tokens")
    if y.dtype != (np.int64 if whole else np.float32) or len(y) != samples or y.ndim != (1 if kind == "classes" else 2):
        said = "int64 labels" if kind == "classes" else f"targets ({WORDS[kind]}) as {'int64' if whole else 'float32'}"
        raise DataError(f"{name}: {samples} samples need as many {said}, found {y.dtype} of shape {y.shape}")
    if kind == "classes":
        wrong = y[(y < 0) | (y >= outputs)]
        if len(wrong):
            raise DataError(f"{name}: label {wrong[0]} is outside 0..{outputs - 1}")
        return
    read_targets(kind, y, name)
    if kind == "tokens" and y.max(initial=0) >= outputs:
        raise DataError(f"{name}: the targets hold token {y.max()}, but there are {outputs} tokens")
    if kind in ("numbers", "labels") and y.shape[1] != outputs:
        raise DataError(f"{name}: {y.shape[1]} targets a sample, but {outputs} outputs")


def outputs_of(kind: Targets, y: Array, vocabulary: int = 0) -> int:
    """How many numbers a network has to give for such targets: a sample, or (tokens) a position."""
    if kind == "tokens":
        return max(int(y.max(initial=0)) + 1, vocabulary)
    return 1 if kind == "survival" else int(y.shape[1])


def made_up(kind: Targets, samples: int, outputs: int, width: int) -> Array:
    """Stored targets that are nobody's, of so many numbers each, to try things out with: every class that so few can
    have, labels that are there and not, events and none."""
    place = np.arange(samples)
    if kind == "classes":
        return place % outputs
    if kind == "survival":
        return np.stack([1.0 + place, place % 2 == 0], 1).astype(np.float32)
    each = place[:, None] + np.arange(width)
    if kind == "tokens":
        return each % outputs
    return (each % 2 if kind == "labels" else each / samples).astype(np.float32)


def strata(kind: Targets, y: Array) -> Ints:
    """What splits keep the mix of: classes; of other targets there is no mix to be kept."""
    return y if kind == "classes" else np.zeros(len(y), np.int64)


def alike(kind: Targets, found: Sequence[tuple[str, Array]]) -> None:
    """DataError unless all clients' targets have one width."""
    if kind == "classes" or not found:
        return
    first, y = found[0]
    for name, other in found[1:]:
        if other.shape[1:] != y.shape[1:]:
            raise DataError(
                f"client {first!r} has targets of shape {y.shape[1:]} a sample, client {name!r} of "
                f"{other.shape[1:]}; they must be alike"
            )
