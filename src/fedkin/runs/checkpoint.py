"""Checkpoints: one safetensors file and a small JSON file with its hash beside it, written so that a crash at any
moment leaves either the whole thing or nothing.

The file is written as a stream, hashed on the way, flushed to the disk and then renamed; the JSON file comes last, so
a checkpoint without one does not count."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sqlite3
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.errors import DataError, FedKinError
from fedkin.runs.folder import read_json
from fedkin.runs.tree import DTYPES, Packer, Unpacker

KEEP = 2
NAME = re.compile(r"round-(\d{6,9})|final")
KINDS = {  # as safetensors calls them
    kind: {"bool": "BOOL", "bfloat16": "BF16"}.get(name, name[0].upper() + re.sub(r"\D", "", name))
    for name, kind in DTYPES.items()
}


class DiskFull(FedKinError):
    """Nothing more can be written."""


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Says in words why something could not be written."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        no_room = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        full = no_room or (isinstance(error, sqlite3.Error) and "full" in str(error))
        if full:
            raise DiskFull(f"the disk is full: {what} could not be written") from error
        raise FedKinError(f"{what} could not be written: {getattr(error, 'strerror', None) or error}") from error


def replace_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write beside it, flush to the disk, rename: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # a system whose folders cannot be opened
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    replace_file(path, [json.dumps(value, indent=1, default=str).encode()])


# ---------------------------------------------------------------- writing


def save(folder: Path, name: str, round: int, state: Mapping[str, Any]) -> int:
    """Write the checkpoint `name` ("round-000010", "final"), drop all but the newest; returns its size."""
    packer = Packer()
    tree = np.frombuffer(json.dumps(packer.pack(dict(state)), allow_nan=False).encode(), np.uint8)
    tensors = {**packer.tensors, "tree": torch.from_numpy(tree.copy())}
    digest, total = hashlib.sha256(), 0

    def stream() -> Iterator[bytes | memoryview]:
        nonlocal total
        for chunk in safetensors_stream(tensors, {"fedkin": "1", "round": str(round)}):
            digest.update(chunk)
            total += len(chunk)
            yield chunk

    folder.mkdir(exist_ok=True)
    replace_file(folder / f"{name}.safetensors", stream())
    write_json(folder / f"{name}.json", {"round": round, "sha256": digest.hexdigest(), "bytes": total})
    for old in names(folder)[KEEP:]:
        remove(folder, old)
    return total


def safetensors_stream(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """A safetensors file piece by piece, so that nothing is held in memory twice."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    order = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))  # the widest first: all stay aligned
    at = 0
    for name in order:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        if tensors[name].numel():
            yield tensors[name].reshape(-1).view(torch.uint8).numpy().data


def remove(folder: Path, name: str) -> None:
    for ending in (".json", ".safetensors"):  # in this order: what is left over does not count
        (folder / f"{name}{ending}").unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove what a crash has left half done."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    good = set(names(folder))
    for path in folder.glob("*.safetensors"):
        if path.stem not in good and NAME.fullmatch(path.stem):
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------- reading


def names(folder: Path) -> list[str]:
    """The checkpoints in a folder, newest first; whether they are sound shows when they are read."""
    found = [p.stem for p in folder.glob("*.json") if NAME.fullmatch(p.stem)] if folder.is_dir() else []
    return sorted(found, key=lambda n: (n == "final", len(n), n), reverse=True)


def load(folder: Path, name: str, device: torch.device, samples: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The state in a checkpoint; DataError if it is damaged, with what is wrong."""
    about = read_json(folder / f"{name}.json", 1 << 16)
    path = folder / f"{name}.safetensors"
    if path.is_symlink() or not path.is_file() or not stat.S_ISREG(path.stat().st_mode):
        raise DataError(f"{path.name} is missing")
    size = path.stat().st_size
    if size != about.get("bytes"):
        raise DataError(f"{path.name} has {size} bytes instead of {about.get('bytes')}")
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != about.get("sha256"):
            raise DataError(f"{path.name} does not match its hash")
    try:
        from safetensors.torch import load_file

        tensors = load_file(path)
        tree = json.loads(tensors.pop("tree").numpy().tobytes())
        state: dict[str, Any] = Unpacker(tensors, device, samples).unpack(tree)
        return state
    except Exception as error:  # whatever a file that somebody made up provokes
        raise DataError(f"{path.name} cannot be read: {error}") from None
