"""The data sets FedKin knows by name: what is said of each, where its files are looked for, and how they are fetched.

A source looks for files as they are usually distributed, under one folder (``data_dir``, else ``FEDKIN_DATA``, else the
user's cache). What is missing is downloaded where a public address is known, and otherwise the error says where to put
it. A new source is a function from that folder to a ``Dataset`` under the ``source`` decorator; FedKin's own are in
``pictures``, ``sensors``, ``medical`` and ``text``, and what is said of them in ``sources.toml``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.data.dataset import Array, Bools, Dataset, as_samples, encode_labels
from fedkin.data.download import Progress, Remote, fetch
from fedkin.data.files import MissingFile, column, read_npz
from fedkin.data.targets import Ints, Targets, outputs_of, read_targets
from fedkin.errors import DataError, UsageError
from fedkin.registry import Registry

Read = Callable[[Path], Dataset]


@dataclass(frozen=True)
class Source:
    """What can be said about a data set without reading it, and how to read it."""

    name: str
    about: str
    citation: str
    shape: tuple[int, ...]
    classes: int
    kind: str
    files: str
    read: Read
    remotes: tuple[Remote, ...] = ()
    package: str = ""
    targets: Targets = "classes"
    origin: str = ""


SOURCES: Registry[Source] = Registry("data set")


def source(
    name: str,
    *,
    about: str,
    citation: str,
    shape: tuple[int, ...],
    classes: int,
    kind: str = "image",
    files: str = "",
    remotes: Sequence[Remote] = (),
    package: str = "",
    targets: Targets = "classes",
    origin: str = "",
) -> Callable[[Read], Read]:
    """Registers the decorated reader under ``name``. `origin`: where the files come from, if nowhere by an address."""

    def add(read: Read) -> Read:
        SOURCES.register(name)(
            Source(name, about, citation, shape, classes, kind, files, read, tuple(remotes), package, targets, origin)
        )
        return read

    return add


@cache
def _published() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("fedkin.data").joinpath("sources.toml").read_text(encoding="utf-8"))


def published(name: str) -> Callable[[Read], Read]:
    """Registers the decorated reader of a data set that ``sources.toml`` describes."""
    facts = _published()[name]
    remotes = [Remote(**{**remote, "urls": tuple(remote["urls"])}) for remote in facts.get("remotes", ())]
    return source(name, **{**facts, "shape": tuple(facts["shape"]), "remotes": remotes})


def data_home(data_dir: str | Path | None = None) -> Path:
    """Where data lie: the argument, else FEDKIN_DATA, else the user's cache folder."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    if os.environ.get("FEDKIN_DATA"):
        return Path(os.environ["FEDKIN_DATA"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedkin" / "data"


def load(
    name: str,
    data_dir: str | Path | None = None,
    download: bool = True,
    progress: Progress | None = None,
    targets: Targets = "classes",
) -> Dataset:
    """The data set of that name, or from the ``.npz`` file of that path, fetched first where need be. `targets`: what
    such a file's y are; a data set that has a name has its own."""
    if name.startswith("npz:") or name.endswith(".npz"):
        return read_npz_file(Path(name.removeprefix("npz:")).expanduser(), targets)
    entry, root = SOURCES[name], data_home(data_dir)
    try:
        return entry.read(root)
    except MissingFile as missing:
        if not (download and entry.remotes):
            raise DataError(how_to_get(entry, root, f"{missing.path} does not exist")) from None
    try:
        for remote in entry.remotes:
            if remote.members or not (root / remote.target).exists():
                fetch(remote, root, progress)
    except DataError as error:
        raise DataError(how_to_get(entry, root, str(error))) from error
    try:
        return entry.read(root)
    except MissingFile as missing:
        raise DataError(how_to_get(entry, root, f"{missing.path} is missing after the download")) from None


def how_to_get(entry: Source, root: Path, reason: str) -> str:
    """Why the data are not there, and the three ways to change that."""
    package = f"install Debian's package {entry.package}" if entry.package else ""
    allow = f"allow the download of {entry.remotes[0].urls[0]}" if entry.remotes else ""
    by_hand = f"fetch them by hand: {entry.origin or 'no public address is known'}"
    third = " or ".join(way for way in (allow, package) if way) or by_hand
    return (
        f"{entry.name}: {reason}. Three ways to get the data:\n"
        f"  1. put {entry.files} into {root}\n"
        f"  2. say where they are: --data-dir DIR or FEDKIN_DATA=DIR\n"
        f"  3. {third}"
    )


def read_npz_file(path: Path, targets: Targets = "classes") -> Dataset:
    """Any ``.npz`` with x, y and optionally user (or writer), is_test, classes (names), vocabulary (for token ids)."""
    try:
        return named_arrays(path.stem, path, read_npz(path), targets=targets)
    except MissingFile:
        raise UsageError(f"{path} does not exist: give the path of an .npz file with arrays x and y") from None
    except (DataError, TypeError, ValueError, OverflowError) as error:
        front = "" if str(error).startswith(str(path)) else f"{path}: "
        raise DataError(f"{front}{error}") from error


def named_arrays(
    name: str, path: Path, arrays: dict[str, Array], note: str = "", targets: Targets = "classes"
) -> Dataset:
    """A data set from named arrays. Labels that fit the given class names keep their numbers, others are numbered."""
    vocabulary = int(arrays["vocabulary"]) if "vocabulary" in arrays else 0
    x = as_samples(column(arrays, "x", path), vocabulary)
    labels, named = column(arrays, "y", path), arrays.get("classes")
    classes: int | None = None
    class_names: tuple[str, ...] = ()
    if targets != "classes":
        y = read_targets(targets, labels, str(path))
        classes = outputs_of(targets, y, vocabulary)
    elif named is not None and named.ndim == 1 and labels.dtype.kind in "iu":
        y, class_names = labels.astype(np.int64), tuple(str(n) for n in named.tolist())
    else:
        y, class_names = encode_labels(labels)
    user, official = arrays.get("user", arrays.get("writer")), arrays.get("is_test")
    return Dataset(
        name,
        x,
        y,
        len(class_names) if classes is None else classes,
        class_names,
        user=None if user is None else encode_users(user, path),
        official_test=None if official is None else official.astype(np.bool_),
        vocabulary=vocabulary,
        note=note,
        targets=targets,
    )


def encode_users(user: Array, path: Path) -> Ints:
    """User numbers as they are; names as numbers in alphabetical order."""
    if user.dtype.kind in "biu":
        return user.astype(np.int64)
    if user.dtype.kind == "U":
        return np.unique(user, return_inverse=True)[1].astype(np.int64)
    raise DataError(f"{path}: expected user as whole numbers or names, found {user.dtype}")


def both(train: tuple[Array, Ints], test: tuple[Array, Ints]) -> tuple[Array, Ints, Bools]:
    """Training and test rows one after the other, with the mark that tells them apart."""
    official = np.repeat([False, True], [len(train[0]), len(test[0])])
    return np.concatenate([train[0], test[0]]), np.concatenate([train[1], test[1]]), official
