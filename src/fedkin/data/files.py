"""Readers for the formats that data sets are published in.

A reader trusts nothing: sizes and magic numbers are checked, arrays are never unpickled, and the pickles that CIFAR
comes as are read by an unpickler that knows arrays and plain values only. What is wrong with a file is said with its
name, what was expected and what was found.
"""

from __future__ import annotations

import gzip
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.data.dataset import Array
from fedkin.data.targets import Ints
from fedkin.errors import DataError

IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


class MissingFile(Exception):
    """A file that a source needs is not there: the one failure that a download can mend."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


def existing(*candidates: Path) -> Path:
    """The first candidate that exists; the first of all is the one to name when none does."""
    for path in candidates:
        if path.exists():
            return path
    raise MissingFile(candidates[0])


def read_idx(path: Path) -> Array:
    """An idx file (MNIST and its relatives), plain or gzipped, whichever of the two exists."""
    path = existing(path, path.with_name(path.name + ".gz"))
    raw = _bytes(path)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_TYPES or not raw[3]:
        raise DataError(f"{path}: expected an idx file (two zero bytes, type, dimensions), found {raw[:4].hex(' ')!r}")
    kind, dimensions = np.dtype(IDX_TYPES[raw[2]]), raw[3]
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4))
    expected = start + int(np.prod(shape, dtype=object)) * kind.itemsize
    if len(raw) < start or len(raw) != expected:
        raise DataError(f"{path}: expected {expected} bytes for shape {shape}, found {len(raw)}; fetch it again")
    return np.frombuffer(raw, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


def read_images(images: Path, labels: Path) -> tuple[Array, Ints]:
    """A pair of idx files as uint8 [n, 1, H, W] and labels."""
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or x.dtype != np.uint8:
        raise DataError(f"{images}: expected uint8 images [n, H, W], found {x.dtype} of shape {x.shape}")
    if y.shape != (len(x),):
        raise DataError(f"{labels}: expected {len(x)} labels as {images.name} has images, found shape {y.shape}")
    return x[:, None], y.astype(np.int64)


def read_cifar_binary(path: Path, label_bytes: int) -> tuple[Array, Ints]:
    """A CIFAR binary batch: per record the label byte(s), the last of which counts, then 3 x 32 x 32 pixels."""
    raw, record = _bytes(existing(path)), label_bytes + 3072
    if not raw or len(raw) % record:
        raise DataError(
            f"{path}: expected a multiple of {record} bytes (one record each), found {len(raw)}; fetch it again"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1].astype(np.int64)


def read_cifar_python(path: Path, label_key: str) -> tuple[Array, Ints]:
    """A CIFAR python batch, without running anything that the pickle may ask for."""
    batch = read_plain_pickle(path)
    data = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    labels = batch.get(label_key.encode(), batch.get(label_key)) if isinstance(batch, dict) else None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise DataError(f"{path}: expected 'data' as uint8 [n, 3072], found {_kind(data)}")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(v) is int for v in labels):
        raise DataError(f"{path}: expected {label_key!r} as a list of {len(data)} whole numbers, found {_kind(labels)}")
    return data.reshape(-1, 3, 32, 32), np.asarray(labels, np.int64)


def read_npz(path: Path) -> dict[str, Array]:
    """All arrays of an .npz file. Arrays of Python objects are refused: loading them would run code."""
    try:
        with np.load(existing(path), allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: expected an .npz archive, found a single array")
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: expected an .npz archive of plain arrays, found: {error}") from error


def column(arrays: dict[str, Array], key: str, path: Path) -> Array:
    if key not in arrays:
        raise DataError(f"{path}: expected an array {key!r}, found {', '.join(sorted(arrays)) or 'nothing'}")
    return arrays[key]


def read_plain_pickle(path: Path) -> Any:
    """A pickle of dictionaries, lists, strings, numbers and arrays; anything else is refused before it runs."""
    try:
        with existing(path).open("rb") as stream:
            return _PlainUnpickler(stream, encoding="bytes").load()
    except (MissingFile, DataError):
        raise
    except Exception as error:  # a damaged pickle can fail in any way the pickle machine knows
        raise DataError(f"{path}: expected a pickle of plain values, found damage ({error}); fetch it again") from error


def _array(kind: type, shape: tuple[int, ...], typecode: bytes) -> Array:
    """The empty array that a pickled one is filled into; numpy itself would make one of any class."""
    if kind is not np.ndarray:
        raise DataError(f"a pickle asks for an array of class {kind!r}")
    return np.ndarray.__new__(np.ndarray, shape, dtype="b")


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into old pickles; no other codec than latin1 is needed or allowed."""
    if encoding not in ("latin1", "latin-1"):
        raise DataError(f"a pickle asks for the codec {encoding!r}")
    return text.encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler whose whole world is arrays: every other name, however harmless it looks, is refused."""

    known = {
        ("numpy.core.multiarray", "_reconstruct"): _array,
        ("numpy._core.multiarray", "_reconstruct"): _array,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise DataError(f"a pickle asks for {module}.{name}, which no data set needs: refused, nothing was run")
        return self.known[module, name]


def _bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); fetch it again") from error


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
