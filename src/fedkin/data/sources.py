"""The data sets FedKin knows by name, and how each becomes a ``Dataset``.

A source looks for files as they are usually distributed, under one folder (``data_dir``, else ``FEDKIN_DATA``, else the
user's cache). What is missing is downloaded where a public address is known, and otherwise the error says where to put
it. A new source is a function from that folder to a ``Dataset`` under the ``source`` decorator.
"""

from __future__ import annotations

import csv
import os
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fedkin.data.dataset import Array, Bools, Dataset, Ints, as_samples, encode_labels
from fedkin.data.download import Progress, Remote, fetch
from fedkin.data.files import (
    MissingFile,
    column,
    existing,
    read_cifar_binary,
    read_cifar_python,
    read_images,
    read_npz,
    read_plain_pickle,
)
from fedkin.data.sensors import read_arff, read_ucihar_text, read_wisdm_raw
from fedkin.data.text import build_vocabulary, encode, words
from fedkin.errors import DataError, UsageError
from fedkin.registry import Registry

Read = Callable[[Path], Dataset]

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
AG_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
MERGED = "".join(c for c in CHARACTERS if c not in "cijklmopsuvwxyz")
HAR_CLASSES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")
UCIHAR_TEST_USERS = (2, 4, 9, 10, 12, 13, 18, 20, 24)
WORDS, LENGTH = 32_000, 200


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
) -> Callable[[Read], Read]:
    """Registers the decorated reader under ``name``."""

    def add(read: Read) -> Read:
        entry = Source(name, about, citation, shape, classes, kind, files, read, tuple(remotes), package)
        SOURCES.register(name)(entry)
        return read

    return add


def data_home(data_dir: str | Path | None = None) -> Path:
    """Where data lie: the argument, else FEDKIN_DATA, else the user's cache folder."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    if os.environ.get("FEDKIN_DATA"):
        return Path(os.environ["FEDKIN_DATA"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedkin" / "data"


def load(
    name: str, data_dir: str | Path | None = None, download: bool = True, progress: Progress | None = None
) -> Dataset:
    """The data set of that name, or from the ``.npz`` file of that path, fetched first where need be."""
    if name.startswith("npz:") or name.endswith(".npz"):
        return read_npz_file(Path(name.removeprefix("npz:")).expanduser())
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
    third = " or ".join(way for way in (allow, package) if way) or "fetch them by hand: no public address is known"
    return (
        f"{entry.name}: {reason}. Three ways to get the data:\n"
        f"  1. put {entry.files} into {root}\n"
        f"  2. say where they are: --data-dir DIR or FEDKIN_DATA=DIR\n"
        f"  3. {third}"
    )


def _both(train: tuple[Array, Ints], test: tuple[Array, Ints]) -> tuple[Array, Ints, Bools]:
    """Training and test rows one after the other, with the mark that tells them apart."""
    official = np.repeat([False, True], [len(train[0]), len(test[0])])
    return np.concatenate([train[0], test[0]]), np.concatenate([train[1], test[1]]), official


def _gz_remotes(base: str, folder: str, hashes: dict[str, str]) -> list[Remote]:
    return [Remote((f"{base}{name}.gz",), md5, f"{folder}/{name}.gz") for name, md5 in hashes.items()]


def _tar_remote(url: str, md5: str, members: Sequence[str]) -> Remote:
    """An archive whose members keep their names under the data folder."""
    return Remote((url,), md5, "", {member: member for member in members})


@source(
    "digits",
    about="handwritten digits, comes with scikit-learn",
    shape=(1, 8, 8),
    classes=10,
    citation="E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI 1998",
)
def read_digits(root: Path) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = np.round(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    return Dataset("digits", x, bunch.target.astype(np.int64), 10, tuple(string.digits))


def _mnist_like(name: str, folders: Sequence[Path], class_names: tuple[str, ...]) -> Dataset:
    first = "train-images-idx3-ubyte"
    folder = existing(*(folder / file for folder in folders for file in (first, first + ".gz"))).parent
    parts = [
        read_images(folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte")
        for part in ("train", "t10k")
    ]
    x, y, official = _both(*parts)
    return Dataset(name, x, y, 10, class_names, user=_writers(folder, official), official_test=official)


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


@source(
    "mnist",
    about="handwritten digits",
    shape=(1, 28, 28),
    classes=10,
    citation="Y. LeCun, C. Cortes, C. Burges: The MNIST database of handwritten digits, 1998",
    files="MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz], for users also MNIST/writers.npz",
    remotes=_gz_remotes(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST/raw",
        {
            "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
)
def read_mnist(root: Path) -> Dataset:
    return _mnist_like("mnist", [root / "MNIST" / "raw", root / "mnist"], tuple(string.digits))


@source(
    "fashion-mnist",
    about="pictures of clothes",
    shape=(1, 28, 28),
    classes=10,
    citation="H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST, arXiv:1708.07747, 2017",
    files="FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]",
    package="dataset-fashion-mnist",
    remotes=_gz_remotes(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "FashionMNIST/raw",
        {
            "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
)
def read_fashion_mnist(root: Path) -> Dataset:
    folders = [root / "FashionMNIST" / "raw", root / "fashion-mnist", DEBIAN_FASHION]
    return _mnist_like("fashion-mnist", folders, FASHION_CLASSES)


def _read_emnist(root: Path, variant: str, class_names: str) -> Dataset:
    stem = f"emnist-{variant}"
    first = f"{stem}-train-images-idx3-ubyte"
    folders = [root / "EMNIST" / "raw", root / "EMNIST" / "raw" / "gzip", root / "EMNIST", root / "emnist"]
    folder = existing(*(folder / file for folder in folders for file in (first, first + ".gz"))).parent
    parts = [
        read_images(folder / f"{stem}-{part}-images-idx3-ubyte", folder / f"{stem}-{part}-labels-idx1-ubyte")
        for part in ("train", "test")
    ]
    x, y, official = _both(*parts)
    if variant == "letters":
        y = y - 1  # published as 1..26
    upright = np.ascontiguousarray(x.swapaxes(2, 3))  # published with rows and columns exchanged
    name = "emnist" if variant == "byclass" else stem
    return Dataset(name, upright, y, len(class_names), tuple(class_names), official_test=official)


for _variant, _names in (
    ("byclass", CHARACTERS),
    ("balanced", MERGED),
    ("letters", string.ascii_lowercase),
    ("digits", string.digits),
):
    _files = [
        f"emnist-{_variant}-{part}-{kind}-ubyte"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    ]
    source(
        "emnist" if _variant == "byclass" else f"emnist-{_variant}",
        about=f"handwritten characters, {_variant}",
        shape=(1, 28, 28),
        classes=len(_names),
        citation="G. Cohen, S. Afshar, J. Tapson, A. van Schaik: EMNIST, IJCNN 2017",
        files=f"EMNIST/raw/emnist-{_variant}-{{train,test}}-{{images-idx3,labels-idx1}}-ubyte[.gz]",
        remotes=[
            Remote(
                (
                    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                    "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
                ),
                "58c8d27c78d21e728a6bc7b3cc06412e",
                "",
                {f"gzip/{file}.gz": f"EMNIST/raw/{file}.gz" for file in _files},
            )
        ],
    )(partial(_read_emnist, variant=_variant, class_names=_names))


def _cifar(
    root: Path, binary: tuple[str, Sequence[str]], python: tuple[str, Sequence[str]], label: tuple[int, str]
) -> tuple[Array, Ints, Bools]:
    """Either distribution; the last file of each list is the test set."""
    if (root / python[0]).is_dir() and not (root / binary[0]).is_dir():
        batches = [read_cifar_python(root / python[0] / file, label[1]) for file in python[1]]
    else:
        batches = [read_cifar_binary(root / binary[0] / f"{file}.bin", label[0]) for file in binary[1]]
    train = (np.concatenate([x for x, _ in batches[:-1]]), np.concatenate([y for _, y in batches[:-1]]))
    return _both(train, batches[-1])


_CIFAR10_FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


@source(
    "cifar10",
    about="small photographs of ten kinds of things",
    shape=(3, 32, 32),
    classes=10,
    citation="A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009",
    files="cifar-10-batches-bin/ or cifar-10-batches-py/",
    remotes=[
        _tar_remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            [f"cifar-10-batches-bin/{file}.bin" for file in _CIFAR10_FILES],
        )
    ],
)
def read_cifar10(root: Path) -> Dataset:
    x, y, official = _cifar(
        root, ("cifar-10-batches-bin", _CIFAR10_FILES), ("cifar-10-batches-py", _CIFAR10_FILES), (1, "labels")
    )
    return Dataset("cifar10", x, y, 10, CIFAR10_CLASSES, official_test=official)


@source(
    "cifar100",
    about="small photographs of a hundred kinds of things",
    shape=(3, 32, 32),
    classes=100,
    citation="A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009",
    files="cifar-100-binary/ or cifar-100-python/",
    remotes=[
        _tar_remote(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            [f"cifar-100-binary/{f}" for f in ("train.bin", "test.bin", "fine_label_names.txt")],
        )
    ],
)
def read_cifar100(root: Path) -> Dataset:
    x, y, official = _cifar(
        root, ("cifar-100-binary", ("train", "test")), ("cifar-100-python", ("train", "test")), (2, "fine_labels")
    )
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


@source(
    "wisdm",
    about="WISDM v1.1: activities by phone accelerometer, the published 43 features, 36 users",
    citation="J. Kwapisz, G. Weiss, S. Moore: Activity Recognition using Cell Phone Accelerometers, 2010",
    shape=(43,),
    classes=6,
    kind="features",
    files="wisdm11.npz (x, y, user) or WISDM_ar_v1.1/WISDM_ar_v1.1_transformed.arff",
)
def read_wisdm(root: Path) -> Dataset:
    path = existing(root / "wisdm11.npz", root / "WISDM_ar_v1.1" / "WISDM_ar_v1.1_transformed.arff")
    arrays = read_npz(path) if path.suffix == ".npz" else read_arff(path)
    raw = column(arrays, "x", path).astype(np.float64)
    missing = np.isnan(raw)
    filled = np.where(missing, np.nanmedian(raw, axis=0), raw)
    spread = filled.std(axis=0)
    x = (filled - filled.mean(axis=0)) / np.where(spread > 0, spread, 1)
    note = f"{int(missing.sum())} missing values imputed by the median of the feature; features standardised"
    return _from_arrays("wisdm", path, {**arrays, "x": x.astype(np.float32)}, note=note)


@source(
    "wisdm-raw",
    about="WISDM v1.1: activities by phone accelerometer, windows of 10 s at 20 Hz, 36 users",
    citation="J. Kwapisz, G. Weiss, S. Moore: Activity Recognition using Cell Phone Accelerometers, 2010",
    shape=(3, 1, 200),
    classes=6,
    kind="series",
    files="WISDM_ar_v1.1/WISDM_ar_v1.1_raw.txt",
)
def read_wisdm_series(root: Path) -> Dataset:
    path = root / "WISDM_ar_v1.1" / "WISDM_ar_v1.1_raw.txt"
    arrays, damaged = read_wisdm_raw(path)
    return _series("wisdm-raw", path, arrays, note=f"{damaged} damaged records left out" if damaged else "")


@source(
    "wisdm51",
    about="WISDM 2019: activities by watch accelerometer, windows of 10 s at 20 Hz, 46 users",
    citation="G. Weiss, K. Yoneda, T. Hayajneh: Smartphone and Smartwatch-Based Biometrics, IEEE Access 2019",
    shape=(3, 1, 200),
    classes=18,
    kind="series",
    files="wisdm51.npz (x, y, user)",
)
def read_wisdm51(root: Path) -> Dataset:
    path = root / "wisdm51.npz"
    return _series("wisdm51", path, read_npz(path))


@source(
    "ucihar",
    about="UCI HAR: activities by phone, accelerometer and gyroscope, 30 users",
    citation="D. Anguita et al.: A Public Domain Dataset for Human Activity Recognition, ESANN 2013",
    shape=(9, 1, 128),
    classes=6,
    kind="series",
    files="ucihar.npz (x, y, user) or UCI HAR Dataset/",
)
def read_ucihar(root: Path) -> Dataset:
    path = existing(root / "ucihar.npz", root / "UCI HAR Dataset")
    arrays = read_npz(path) if path.suffix == ".npz" else {**read_ucihar_text(path), "classes": np.array(HAR_CLASSES)}
    dataset = _series("ucihar", path, arrays)
    official = None if dataset.user is None else np.isin(dataset.user, UCIHAR_TEST_USERS)
    return replace(dataset, official_test=official)


def _series(name: str, path: Path, arrays: dict[str, Array], note: str = "") -> Dataset:
    """Windows [n, channels, length] as pictures of height one, which is what networks for series take."""
    x = column(arrays, "x", path)
    if x.ndim != 3:
        raise DataError(f"{path}: expected windows x [n, channels, length], found shape {x.shape}")
    return _from_arrays(name, path, {**arrays, "x": x[:, :, None, :]}, note)


@source(
    "chars74k",
    about="handwritten characters, 55 writers; stands in for EMNIST",
    shape=(1, 28, 28),
    classes=62,
    citation="T. de Campos, B. Babu, M. Varma: Character Recognition in Natural Images, VISAPP 2009",
    files="chars74k.npz (x, y, writer)",
)
def read_chars74k(root: Path) -> Dataset:
    path = root / "chars74k.npz"
    return _from_arrays("chars74k", path, read_npz(path), note="stands in for EMNIST")


@source(
    "agnews",
    about="news in four topics",
    shape=(LENGTH,),
    classes=4,
    kind="text",
    citation="X. Zhang, J. Zhao, Y. LeCun: Character-level Convolutional Networks, NeurIPS 2015",
    files="ag_news_csv/train.csv and ag_news_csv/test.csv",
    remotes=[
        Remote(
            (f"https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/{f}",),
            md5,
            f"ag_news_csv/{f}",
        )
        for f, md5 in (
            ("train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
            ("test.csv", "d52ea96a97a2d943681189a97654912d"),
        )
    ],
)
def read_agnews(root: Path) -> Dataset:
    train, y_train = _news(root / "ag_news_csv" / "train.csv")
    test, y_test = _news(root / "ag_news_csv" / "test.csv")
    ids = build_vocabulary(train, WORDS)
    x, y, official = _both((encode(train, ids, LENGTH), y_train), (encode(test, ids, LENGTH), y_test))
    return Dataset("agnews", x, y, 4, AG_CLASSES, official_test=official, vocabulary=len(ids) + 2)


def _news(path: Path) -> tuple[list[list[str]], Ints]:
    """Rows of class (1..4) and one or more columns of text."""
    texts: list[list[str]] = []
    labels: list[int] = []
    try:
        with existing(path).open(encoding="utf-8", newline="") as stream:
            for row in csv.reader(stream):
                if len(row) < 2 or row[0] not in ("1", "2", "3", "4"):
                    raise DataError(
                        f"{path}: expected rows of class 1..4 and text, found {row[:2]!r} in row {len(texts) + 1}"
                    )
                labels.append(int(row[0]) - 1)
                texts.append(words(" ".join(row[1:])))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: expected a CSV file in UTF-8, found: {error}") from error
    return texts, np.asarray(labels, np.int64)


def read_npz_file(path: Path) -> Dataset:
    """Any ``.npz`` with x, y and optionally user (or writer), is_test, classes (names), vocabulary (for token ids)."""
    try:
        return _from_arrays(path.stem, path, read_npz(path))
    except MissingFile:
        raise UsageError(f"{path} does not exist: give the path of an .npz file with arrays x and y") from None
    except (DataError, TypeError, ValueError, OverflowError) as error:
        front = "" if str(error).startswith(str(path)) else f"{path}: "
        raise DataError(f"{front}{error}") from error


def _from_arrays(name: str, path: Path, arrays: dict[str, Array], note: str = "") -> Dataset:
    """A data set from named arrays. Labels that fit the given class names keep their numbers, others are numbered."""
    vocabulary = int(arrays["vocabulary"]) if "vocabulary" in arrays else 0
    x = as_samples(column(arrays, "x", path), vocabulary)
    labels, named = column(arrays, "y", path), arrays.get("classes")
    if named is not None and named.ndim == 1 and labels.dtype.kind in "iu":
        y, class_names = labels.astype(np.int64), tuple(str(n) for n in named.tolist())
    else:
        y, class_names = encode_labels(labels)
    user, official = arrays.get("user", arrays.get("writer")), arrays.get("is_test")
    return Dataset(
        name,
        x,
        y,
        len(class_names),
        class_names,
        user=None if user is None else encode_users(user, path),
        official_test=None if official is None else official.astype(np.bool_),
        vocabulary=vocabulary,
        note=note,
    )


def encode_users(user: Array, path: Path) -> Ints:
    """User numbers as they are; names as numbers in alphabetical order."""
    if user.dtype.kind in "biu":
        return user.astype(np.int64)
    if user.dtype.kind == "U":
        return np.unique(user, return_inverse=True)[1].astype(np.int64)
    raise DataError(f"{path}: expected user as whole numbers or names, found {user.dtype}")
