"""What a site keeps between exchanges, on its own disk: a crash at any moment leaves what the last finished one left.

For each run there is a folder with

    state.safetensors         after the last finished exchange
    previous.safetensors      before it: for a server that asks the same again
    round-000010.safetensors  at the start of a round that the server can go back to
    personal.safetensors      this site's model as of the last evaluation
    data                      the fingerprint of the data that the run began with
    finished                  the run is over: nothing here changes any more

Each file says in its header which exchange it is of. Files are written whole and then put in place; those that hold
the same are one file under two names. Nobody but their owner can read them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedkin.errors import DataError

RUN = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}")
LARGEST = 4 << 30  # bytes of a state, at most
KEY = "fedkin"
FINISHED = "finished"
ASIDE = 5  # earlier beginnings of one run that are kept


@dataclass(frozen=True, order=True)
class Stamp:
    """The exchange after which a state holds: `call` counts those of a round; -1: before the first."""

    round: int
    call: int
    attempt: int = 0
    phase: str = ""


class Vault:
    """One run's private state on this machine."""

    def __init__(self, folder: Path, run: str) -> None:
        if not RUN.fullmatch(run):
            raise DataError(f"run {run!r}: not a name that a run can have")
        self.folder = folder / "runs" / run
        if (self.folder / FINISHED).exists():
            raise DataError(f"run {run!r} is over at this site; what it left in {self.folder} is kept as it is")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.folder.glob(".*.partial"):
            left.unlink(missing_ok=True)

    def same_data(self, found: str) -> None:
        """A run goes on with the data that it began with."""
        path = self.folder / "data"
        if not path.exists():
            write_private(path, found.encode())
        elif path.read_text() != found:
            raise DataError("this site's data are not those it began the run with")

    def set_aside(self) -> Path:
        """What the run left here so far, under another name: a server that begins it anew wipes nothing."""
        free = (self.folder.with_name(f"{self.folder.name}~{n}") for n in range(1, ASIDE + 1))
        to = next((path for path in free if not path.exists()), None)
        if to is None:
            raise DataError(
                f"run {self.folder.name!r} was begun anew {ASIDE} times; look at {self.folder}~1 and those "
                "after it, and delete some to go on"
            )
        data = (self.folder / "data").read_bytes() if (self.folder / "data").exists() else None
        os.rename(self.folder, to)
        self.folder.mkdir(mode=0o700)
        if data is not None:
            write_private(self.folder / "data", data)
        return to

    def finish(self) -> Path | None:
        """The run is over; its model, if one was kept."""
        write_private(self.folder / FINISHED, b"")
        model = self.folder / "personal.safetensors"
        return model if model.exists() else None

    def stamp(self) -> Stamp | None:
        """Of the state as it is now; None: there is none."""
        path = self.folder / "state.safetensors"
        return _read(path, None)[0] if path.exists() else None

    def load(self, expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """The tensors as they are now; `DataError` unless names, shapes and types are among those expected."""
        return _read(self.folder / "state.safetensors", expected)[1]

    def begin(self, stamp: Stamp) -> None:
        """The empty state that every run starts from."""
        self._put("state.safetensors", stamp, {})

    def save(self, stamp: Stamp, tensors: Mapping[str, Tensor]) -> None:
        """After an exchange."""
        if (self.folder / "state.safetensors").exists():
            self._link("state.safetensors", "previous.safetensors")
        self._put("state.safetensors", stamp, tensors)

    def mark(self, rounds: Iterable[int], now: Stamp, coming: int) -> None:
        """Before an exchange of round `coming`: keep the state as it is for those of the server's checkpoints that it
        belongs to, and let go of what no checkpoint needs."""
        wanted = set(rounds)
        for number in wanted:
            if now.round < number <= coming and not self._at(number).exists():
                self._link("state.safetensors", self._at(number).name)
        for path in self.folder.glob("round-*.safetensors"):
            if path not in {self._at(number) for number in wanted}:
                path.unlink()

    def go_back(self, number: int) -> bool:
        """To the start of a round; False if that state is not here."""
        return self._restore(self._at(number))

    def undo(self) -> bool:
        """To before the last exchange."""
        return self._restore(self.folder / "previous.safetensors")

    def _at(self, number: int) -> Path:
        return self.folder / f"round-{number:06d}.safetensors"

    def _restore(self, path: Path) -> bool:
        if not path.exists():
            return False
        self._link(path.name, "state.safetensors")
        return True

    def _link(self, old: str, new: str) -> None:
        partial = self.folder / f".{new}.partial"
        partial.unlink(missing_ok=True)
        os.link(self.folder / old, partial)
        os.replace(partial, self.folder / new)

    def _put(self, name: str, stamp: Stamp, tensors: Mapping[str, Tensor]) -> None:
        plain = {k: t.detach().cpu().contiguous() for k, t in tensors.items()}
        write_private(self.folder / name, save(plain, {KEY: json.dumps(asdict(stamp))}))


def write_private(path: Path, content: bytes) -> None:
    """A file of which a reader sees the old or the new whole, and nobody but the owner anything."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _read(
    path: Path, expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None
) -> tuple[Stamp, dict[str, Tensor]]:
    """A state's stamp and, where it is said what they must look like, its tensors."""
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"{path} is larger than {LARGEST} bytes: that is no state of a site")
        with safe_open(str(path), framework="pt") as file:
            stamp = _stamp((file.metadata() or {}).get(KEY, ""))
            names = list(file.keys())
            if expected is None:
                return stamp, {}
            for name in names:
                if name not in expected:
                    raise DataError(f"{path} keeps {name!r}, which this method does not")
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged ({error}): delete the folder {path.parent} to start anew") from error
    for name, tensor in tensors.items():
        shape, dtype = expected[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise DataError(
                f"{path}: {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected {dtype} of "
                f"shape {shape}: is it of another experiment?"
            )
    return stamp, tensors


def _stamp(text: str) -> Stamp:
    values: dict[str, Any] = json.loads(text)
    stamp = Stamp(**values)
    if not all(isinstance(n, int) for n in (stamp.round, stamp.call, stamp.attempt)):
        raise ValueError("its stamp is none")
    return stamp
