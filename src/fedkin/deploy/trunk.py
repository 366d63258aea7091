"""The frozen part of a network in a deployment: known by its hash, sent to a site once, and kept there for good.

The server says the hash with its invitation. A site whose network has the same frozen values joins at once; one that
kept them from an earlier run takes them from its disk; any other says that it lacks them, is invited once more with the
values beside the invitation, checks them against the hash and keeps them. Later messages hold what learns, alone.

The values travel as the bytes of one safetensors file, which has room for networks of any depth. A site takes them only
where names, shapes and types are those of the network that it built itself, so their size is known before it looks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedkin.deploy.state import write_private
from fedkin.errors import FedKinError

FOLDER = "trunks"
VALUE = "frozen"  # what the values are called in a message
KEPT = 4  # trunks in a site's folder, at most: the ones used last
HEADER = 1 << 20  # bytes beside the values, at most


class LacksFrozenWeights(FedKinError):
    """The site has not the frozen values that the server means."""


def frozen_of(network: nn.Module) -> dict[str, Tensor]:
    """The frozen parameters by name, on the CPU."""
    return {n: p.detach().cpu().contiguous() for n, p in network.named_parameters() if not p.requires_grad}


def trunk_hash(frozen: Mapping[str, Tensor]) -> str:
    """sha256 over names, shapes and values; empty where nothing is frozen."""
    if not frozen:
        return ""
    found = hashlib.sha256()
    for name, value in sorted(frozen.items()):
        found.update(f"{name}\0{list(value.shape)}\0{value.dtype}\0".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def as_values(network: nn.Module) -> dict[str, Tensor]:
    """The frozen parameters as a value of a message."""
    return {VALUE: torch.frombuffer(bytearray(_file_of(frozen_of(network))), dtype=torch.uint8)}


def settle(network: nn.Module, wanted: object, sent: Mapping[str, object], folder: Path) -> str:
    """Give a network the frozen values that the server means, in place: its own, those in `folder`, or those that were
    `sent`; and what is to be said of it. `LacksFrozenWeights` where they are none of these."""
    own = frozen_of(network)
    if trunk_hash(own) == wanted:
        return ""
    if not own or not isinstance(wanted, str) or len(wanted) != 64 or not set(wanted) <= {*"0123456789abcdef"}:
        raise FedKinError("the server's network and this site's are not frozen alike: both sides need the same one")
    kept = folder / FOLDER / f"{wanted}.safetensors"
    if VALUE in sent:
        found = _opened(sent[VALUE], own, wanted)
        _keep(kept, found)
        how = "came from the server and are kept"
    else:
        found = _sound(kept, own, wanted)
        how = "are those of an earlier run"
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in found:
                parameter.copy_(found[name])
    return f"; the frozen weights ({_size(own) / 1e6:.1f} MB) {how}"


def _opened(value: object, own: Mapping[str, Tensor], wanted: str) -> dict[str, Tensor]:
    """What the server sent, if it is what the server announced, and fits."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        raise FedKinError("the frozen values that came are no file of values")
    if value.numel() > _size(own) + HEADER:
        raise FedKinError(f"{value.numel()} bytes of frozen values came: this site's network has {_size(own)}")
    try:
        found: dict[str, Tensor] = load(value.numpy().tobytes())
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise FedKinError(f"the frozen values that came cannot be read ({str(error)[:100]})") from error
    if {n: (v.shape, v.dtype) for n, v in found.items()} != {n: (v.shape, v.dtype) for n, v in own.items()}:
        raise FedKinError("the frozen values that came do not fit this site's network: both sides need the same one")
    if trunk_hash(found) != wanted:
        raise FedKinError("the frozen values that came are not those that the server announced")
    if not all(bool(v.isfinite().all()) for v in found.values()):
        raise FedKinError("the frozen values that came are not all finite")
    return found


def _sound(path: Path, own: Mapping[str, Tensor], wanted: str) -> dict[str, Tensor]:
    """What was kept. A file that is not there, not whole or no longer what it was counts as none: the values come
    again."""
    try:
        if path.stat().st_size > _size(own) + HEADER:
            raise LacksFrozenWeights(wanted)
        found = _opened(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8), own, wanted)
        os.utime(path)
    except (OSError, ValueError, FedKinError) as error:
        raise LacksFrozenWeights(wanted) from error
    return found


def _keep(path: Path, values: Mapping[str, Tensor]) -> None:
    """On the disk, in place of the one that was used longest ago where there are too many: no server fills it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    others = [p for p in path.parent.glob("*.safetensors") if p != path]
    for old in sorted(others, key=lambda p: p.stat().st_mtime)[: max(0, len(others) - KEPT + 1)]:
        old.unlink(missing_ok=True)
    write_private(path, _file_of(values))


def _file_of(values: Mapping[str, Tensor]) -> bytes:
    return save({n: v.contiguous().clone() for n, v in values.items()})  # each in memory of its own, or it is refused


def _size(values: Mapping[str, Tensor]) -> int:
    return sum(v.numel() * v.element_size() for v in values.values())


__all__ = ["LacksFrozenWeights", "as_values", "frozen_of", "settle", "trunk_hash"]
