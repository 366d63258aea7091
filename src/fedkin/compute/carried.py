"""What a network keeps from one pass to the next where no row has it: looked for once, when a run is prepared.

Weights and float buffers are in a client's row. A counter, a frozen weight that training moves, an attribute or a
generator of Python are not: clients would share them, and lose them. Such a network is refused by name.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkin.errors import UsageError

_USUAL = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}
_DEEP = 4  # how far into attributes of attributes

Kept = dict[str, Any]
"""By name, what a network has besides its row."""


def kept(module: nn.Module, row: set[str]) -> Kept:
    """A copy of all that it has besides the tensors with these names."""
    found: Kept = {}
    for prefix, owner in module.named_modules():
        path = f"{prefix}." if prefix else ""
        for held in (owner._parameters, owner._buffers):
            for leaf, tensor in held.items():
                if path + leaf not in row and not _only_counts(owner, leaf):
                    found[path + leaf] = _value(tensor)
        for name, value in vars(owner).items():
            if name not in _USUAL:
                found[path + name] = _value(value)
    return found


def _only_counts(owner: nn.Module, leaf: str) -> bool:
    """BatchNorm counts its batches, and looks at the count if it has no momentum."""
    return leaf == "num_batches_tracked" and getattr(owner, "momentum", None) is not None


def refuse_carried(module: nn.Module, name: str, later: Kept, fresh: Kept, start: Kept) -> None:
    """`later`: after a pass that came behind another; `fresh`: after the same pass alone. They must be the same."""
    tensors = _tensors(module)
    for key in later:
        if _same(later[key], fresh.get(key)) and (key not in tensors or _untouched(later[key], start[key])):
            continue
        prefix, _, leaf = key.rpartition(".")
        owner = module.get_submodule(prefix)
        if leaf == "num_batches_tracked":
            raise UsageError(
                f"{type(owner).__name__} {prefix!r} of {name} has momentum=None: it averages over all batches that it "
                "has counted, and the count is not kept for each client: give it a momentum, such as 0.1"
            )
        if leaf in owner._parameters:
            raise UsageError(
                f"{name} changes its frozen parameter {key!r} in training, and frozen parameters are the same for all "
                "clients: register it as a float buffer (register_buffer), of which every client has its own"
            )
        if leaf in owner._buffers and owner._buffers[leaf].is_floating_point():  # type: ignore[union-attr]
            raise UsageError(
                f"{name} changes its buffer {key!r} in training, which is taken for a constant as it is not "
                "persistent, not float32 or not finite: register it as one that is, of which every client has its own"
            )
        what = f"its buffer {key!r} ({owner._buffers[leaf].dtype})" if leaf in owner._buffers else f"self.{key}"  # type: ignore[union-attr]
        raise UsageError(
            f"{name} changes {what} in training, and what it becomes depends on the batches before, which FedKin "
            "keeps for each client in float32 buffers alone: put it into one "
            f"(self.register_buffer({leaf!r}, torch.zeros(1))), or do without"
        )


def _tensors(module: nn.Module) -> set[str]:
    both = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name for name, _ in both}


def refuse_change(name: str, buffers: Iterable[str], before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """No statistics may change while a model is evaluated. (Weights may: `max_norm` of an embedding.)"""
    for key in buffers:
        if not _same(after[key], before[key]):
            raise UsageError(
                f"{name} changes {key!r} in evaluation mode, so that looking at a model would change it: change it "
                "only while self.training"
            )


class Generators:
    """The random generators that a network could draw from behind our back. A context: they are left as they were."""

    def __enter__(self) -> Generators:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._numpy = np.random.get_state()  # noqa: NPY002 (that is the one others draw from)
        return self

    def moved(self) -> str:
        """Which of them was drawn from; nothing if none was."""
        if random.getstate() != self._python:
            return "Python's random"
        if not _same(_value(np.random.get_state()), _value(self._numpy)):  # noqa: NPY002
            return "NumPy's generator"
        return "" if torch.equal(torch.get_rng_state(), self._torch) else "PyTorch's global generator"

    def __exit__(self, *_: object) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        torch.set_rng_state(self._torch)


def _value(given: Any, depth: int = _DEEP) -> Any:
    """A copy that later changes do not reach; of what cannot be compared, nothing."""
    if isinstance(given, Tensor):
        return given.detach().clone()
    if given is None or isinstance(given, bool | int | float | complex | str | bytes):
        return given
    if isinstance(given, np.ndarray):
        return given.copy()
    if isinstance(given, torch.Generator):
        return given.get_state()
    if isinstance(given, random.Random):
        return given.getstate()
    if isinstance(given, np.random.Generator):
        return copy.deepcopy(given.bit_generator.state)
    if not depth or isinstance(given, nn.Module | type) or callable(given):
        return None
    if isinstance(given, Mapping):
        return {(k if isinstance(k, str | int) else i): _value(v, depth - 1) for i, (k, v) in enumerate(given.items())}
    if isinstance(given, list | tuple | deque):
        return [_value(v, depth - 1) for v in given]
    if isinstance(given, itertools.count):
        return repr(given)  # where it stands can be read from it
    if isinstance(given, set | frozenset):
        return sorted(repr(_value(v, 1)) for v in given)
    own = getattr(given, "__dict__", None)
    return {k: _value(v, depth - 1) for k, v in own.items()} if own else None


def _untouched(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal to the last digit: a slow copy may move by very little."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 1e-5, 1e-8, equal_nan=True)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or a != a)
