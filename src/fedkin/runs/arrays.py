"""Arrays out of an .npz file that anybody may have written: sizes are looked at before anything is unpacked or made."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from fedkin.errors import DataError, FedKinError
from fedkin.runs.reading import read_bytes


def read_arrays(path: Path, wanted: Mapping[str, str], packed: int, unpacked: int) -> dict[str, Any]:
    """Those of the `wanted` arrays that are there: their names, and the kinds of numbers or text they may hold as numpy
    has them ("iu": whole numbers). The file has at most `packed` bytes, the arrays together `unpacked`."""
    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(path, packed))) as archive:
            there = {m.filename.removesuffix(".npy"): m for m in archive.infolist() if m.filename.endswith(".npy")}
            members = {name: there[name] for name in wanted if name in there}
            size = sum(member.file_size for member in members.values())
            if size > unpacked:
                raise DataError(f"{path.name}: unpacked it has {size} bytes, larger than the limit of {unpacked}")
            found = {}
            for name, member in members.items():
                with archive.open(member) as file:
                    found[name] = _array(file, member.file_size, wanted[name], f"{path.name}: {name!r}")
            return found
    except FedKinError:
        raise
    except Exception as error:  # whatever a damaged or foreign zip file provokes
        raise DataError(f"{path.name} cannot be read: {str(error)[:200]}") from None


def _array(packed: IO[bytes], size: int, kinds: str, where: str) -> Any:
    """One array, if its header tells of no more than its bytes; nothing is unpickled."""
    import numpy as np

    file = io.BytesIO(packed.read(size))
    if np.lib.format.read_magic(file) != (1, 0):
        raise DataError(f"{where} is of another format than a run's")
    shape, _, kind = np.lib.format.read_array_header_1_0(file)
    if kind.kind not in kinds or not kind.itemsize:
        raise DataError(f"{where} holds other values than a run's")
    if not 1 <= len(shape) <= 2 or math.prod(max(1, n) for n in shape) * kind.itemsize > size:
        raise DataError(f"{where} has a shape that does not fit its size")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)
