"""Pictures: handwritten characters, clothes, small photographs, in the form in which they are published."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedkin.data.dataset import Array, Bools, Dataset
from fedkin.data.files import (
    column,
    existing,
    read_cifar_binary,
    read_cifar_python,
    read_images,
    read_npz,
    read_plain_pickle,
)
from fedkin.data.sources import both, named_arrays, published
from fedkin.data.targets import Ints
from fedkin.errors import DataError

DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
MERGED = "".join(c for c in CHARACTERS if c not in "cijklmopsuvwxyz")


@published("digits")
def read_digits(root: Path) -> Dataset:
    """The file that comes with scikit-learn, which itself is not imported: that would take each process a second."""
    (installed,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    table = np.loadtxt(Path(installed) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x = np.round(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return Dataset("digits", x, table[:, -1].astype(np.int64), 10, tuple(string.digits))


# ---------------------------------------------------------------- idx files: MNIST and its relatives


def _idx_names(parts: Sequence[str]) -> list[str]:
    return [f"{part}-{kind}-ubyte" for part in parts for kind in ("images-idx3", "labels-idx1")]


def _read_idx_files(folders: Sequence[Path], parts: Sequence[str]) -> tuple[Path, Array, Ints, Bools]:
    """The first folder that has them, and the images of the training part and the test part."""
    names = _idx_names(parts)
    folder = existing(*(folder / file for folder in folders for file in (names[0], names[0] + ".gz"))).parent
    return folder, *both(*(read_images(folder / names[i], folder / names[i + 1]) for i in (0, 2)))


def _read_mnist(root: Path, name: str, folders: Sequence[str], class_names: Sequence[str]) -> Dataset:
    elsewhere = [DEBIAN_FASHION] if name == "fashion-mnist" else []
    folder, x, y, official = _read_idx_files([*(root / f for f in folders), *elsewhere], ("train", "t10k"))
    return Dataset(name, x, y, 10, tuple(class_names), user=_writers(folder, official), official_test=official)


def _writers(folder: Path, official: Bools) -> Ints | None:
    """Who wrote each image, from ``writers.npz`` (arrays train, test) beside the images or one folder up."""
    for path in (folder / "writers.npz", folder.parent / "writers.npz"):
        if path.exists():
            arrays = read_npz(path)
            writers = np.concatenate([column(arrays, "train", path), column(arrays, "test", path)]).astype(np.int64)
            if writers.shape != official.shape:
                raise DataError(f"{path}: expected {len(official)} writers, one per image, found {len(writers)}")
            return writers
    return None


for _name, _folder, _classes in (("mnist", "MNIST", string.digits), ("fashion-mnist", "FashionMNIST", FASHION_CLASSES)):
    _folders = (f"{_folder}/raw", _name)
    published(_name)(partial(_read_mnist, name=_name, folders=_folders, class_names=_classes))


def _read_emnist(root: Path, name: str, variant: str, class_names: str) -> Dataset:
    folders = [root / folder for folder in ("EMNIST/raw", "EMNIST/raw/gzip", "EMNIST", "emnist")]
    _, x, y, official = _read_idx_files(folders, [f"emnist-{variant}-{part}" for part in ("train", "test")])
    if variant == "letters":
        y = y - 1  # published as 1..26
    upright = np.ascontiguousarray(x.swapaxes(2, 3))  # published with rows and columns exchanged
    return Dataset(name, upright, y, len(class_names), tuple(class_names), official_test=official)


for _name, _variant, _characters in (
    ("emnist", "byclass", CHARACTERS),
    ("emnist-balanced", "balanced", MERGED),
    ("emnist-letters", "letters", string.ascii_lowercase),
    ("emnist-digits", "digits", string.digits),
):
    published(_name)(partial(_read_emnist, name=_name, variant=_variant, class_names=_characters))


# ---------------------------------------------------------------- CIFAR


def _read_cifar(
    root: Path, folders: tuple[str, str], files: Sequence[str], label: tuple[int, str]
) -> tuple[Array, Ints, Bools]:
    """Either distribution, the binary one and Python's; the last file is the test set."""
    binary, python = (root / folder for folder in folders)
    if python.is_dir() and not binary.is_dir():
        batches = [read_cifar_python(python / file, label[1]) for file in files]
    else:
        batches = [read_cifar_binary(binary / f"{file}.bin", label[0]) for file in files]
    x, y = (np.concatenate(arrays) for arrays in zip(*batches[:-1], strict=True))
    return both((x, y), batches[-1])


CIFAR10_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


@published("cifar10")
def read_cifar10(root: Path) -> Dataset:
    folders = ("cifar-10-batches-bin", "cifar-10-batches-py")
    x, y, official = _read_cifar(root, folders, CIFAR10_FILES, (1, "labels"))
    return Dataset("cifar10", x, y, 10, CIFAR10_CLASSES, official_test=official)


@published("cifar100")
def read_cifar100(root: Path) -> Dataset:
    folders = ("cifar-100-binary", "cifar-100-python")
    x, y, official = _read_cifar(root, folders, ("train", "test"), (2, "fine_labels"))
    return Dataset("cifar100", x, y, 100, _cifar100_names(root), official_test=official)


def _cifar100_names(root: Path) -> tuple[str, ...]:
    listed, pickled = root / "cifar-100-binary" / "fine_label_names.txt", root / "cifar-100-python" / "meta"
    if listed.exists():
        return tuple(listed.read_text(encoding="utf-8").split())
    if pickled.exists():
        meta = read_plain_pickle(pickled)
        names = meta.get(b"fine_label_names", []) if isinstance(meta, dict) else []
        return tuple(n.decode() if isinstance(n, bytes) else str(n) for n in names)
    return ()


@published("chars74k")
def read_chars74k(root: Path) -> Dataset:
    path = root / "chars74k.npz"
    return named_arrays("chars74k", path, read_npz(path), note="stands in for EMNIST")
