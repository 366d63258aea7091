"""The frozen part of a network in a deployment: known by its hash, sent to a site once, and kept there for good.

The server says the hash with its invitation. A site whose network has the same frozen values joins at once; one that
kept them from an earlier run takes them from its disk; any other says that it lacks them, is invited once more with the
values beside the invitation, checks them against the hash and keeps them. Later messages hold what learns, alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fedkin.deploy.state import LARGEST, write_private
from fedkin.errors import FedKinError

FOLDER = "trunks"
MARK = "frozen:"  # before a parameter's name, in a message


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
    """The frozen parameters as values of a message."""
    return {MARK + name: value for name, value in frozen_of(network).items()}


def settle(network: nn.Module, wanted: object, sent: Mapping[str, object], folder: Path) -> str:
    """Give a network the frozen values that the server means, in place: its own, those in `folder`, or those that were
    `sent`; and what is to be said of it. `LacksFrozenWeights` where they are none of these."""
    own = frozen_of(network)
    if trunk_hash(own) == wanted:
        return ""
    if not own or not isinstance(wanted, str) or len(wanted) != 64 or not set(wanted) <= {*"0123456789abcdef"}:
        raise FedKinError("the server's network and this site's are not frozen alike: both sides need the same one")
    kept = folder / FOLDER / f"{wanted}.safetensors"
    arrived = {n.removeprefix(MARK): v for n, v in sent.items() if n.startswith(MARK) and isinstance(v, Tensor)}
    found = arrived or _read(kept)
    if found is None:
        raise LacksFrozenWeights(wanted)
    if {n: (v.shape, v.dtype) for n, v in found.items()} != {n: (v.shape, v.dtype) for n, v in own.items()}:
        raise FedKinError("the frozen values that came do not fit this site's network: both sides need the same one")
    if trunk_hash(found) != wanted:
        raise FedKinError("the frozen values that came are not those that the server announced")
    if arrived:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(kept, save({n: v.contiguous() for n, v in found.items()}))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in found:
                parameter.copy_(found[name])
    size = sum(v.numel() * v.element_size() for v in found.values())
    how = "came from the server and are kept" if arrived else "are those of an earlier run"
    return f"; the frozen weights ({size / 1e6:.1f} MB) {how}"


def _read(path: Path) -> dict[str, Tensor] | None:
    """What was kept; a file that cannot be read counts as none, and the values come again."""
    try:
        if path.stat().st_size > LARGEST:
            return None
        return load(path.read_bytes())
    except (OSError, SafetensorError, ValueError):
        return None


__all__ = ["LacksFrozenWeights", "as_values", "frozen_of", "settle", "trunk_hash"]
