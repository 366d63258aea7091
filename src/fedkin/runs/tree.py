"""Nested values as JSON plus tensors, and back: the same types, keys, dtypes, strides and shared tensors.

A value that JSON has is itself; anything else is an object with the key "!" that says what it is. Nothing is ever
looked up by name or called when reading."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.core.federation import Clients
from fedkin.errors import DataError, FedKinError

MARK = "!"
INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (64, 32, 16, 8))
DTYPES = {n: getattr(torch, n) for n in ("float64", "float32", "float16", "bfloat16", "bool", *INTEGERS)}
MOST_DEPTH = 60


class Packer:
    """Takes values apart; the tensors gather in `tensors`, one entry for each, however often it occurs."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._seen: dict[int, str] = {}
        self._alive: list[object] = []  # ids are only good while the objects are

    def pack(self, value: Any, path: str = "state") -> Any:
        """`path` names the value in an error."""
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {MARK: "float", "is": str(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return {MARK: "array", "of": self._tensor(_as_tensor(value, path), path)}
        if isinstance(value, np.generic):
            return {MARK: "scalar", "of": self._tensor(_as_tensor(np.asarray(value), path), path)}
        if isinstance(value, Clients):
            return {MARK: "clients", "is": value.ids.tolist()}
        if isinstance(value, torch.dtype):
            return {MARK: "dtype", "is": str(value).removeprefix("torch.")}
        if type(value) in (list, tuple, set, frozenset):
            items = [self.pack(v, f"{path}[{i}]") for i, v in enumerate(value)]
            return items if type(value) is list else {MARK: type(value).__name__, "is": items}
        if type(value) is dict:
            if all(isinstance(k, str) for k in value) and MARK not in value:
                return {k: self.pack(v, f"{path}.{k}") for k, v in value.items()}
            pairs = [[self.pack(k, f"a key of {path}"), self.pack(v, f"{path}[{k!r}]")] for k, v in value.items()]
            return {MARK: "dict", "is": pairs}
        raise FedKinError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: keep tensors, "
            "arrays, numbers, text, lists and dictionaries, or run with checkpoint_every=0"
        )

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        if str(value.dtype).removeprefix("torch.") not in DTYPES or value.layout != torch.strided:
            raise FedKinError(f"{path} is a tensor of type {value.dtype} ({value.layout}), which cannot be saved")
        name = self._seen.get(id(value))
        if name is None:
            name = self._seen[id(value)] = f"t{len(self.tensors)}"
            self._alive.append(value)
            self.tensors[name] = value.detach().cpu().contiguous()
        found: dict[str, Any] = {MARK: "tensor", "is": name}
        if value.device.type != "cpu":
            found["on"] = "device"
        if not value.is_contiguous() and value.numel() and 0 not in value.stride():
            found["strides"] = list(value.stride())
        return found


def _as_tensor(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(array))
    except TypeError:
        raise FedKinError(f"{path} is an array of type {array.dtype}, which cannot be saved") from None


class Unpacker:
    """Puts them together again. Tensors that lay on an accelerator go to `device`."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, samples: np.ndarray[Any, Any]) -> None:
        self._tensors, self._device, self._samples = tensors, device, samples
        self._made: dict[str, Tensor] = {}

    def unpack(self, value: Any, depth: int = 0) -> Any:
        if depth > MOST_DEPTH:
            raise DataError("the saved state is nested too deeply")
        if isinstance(value, list):
            return [self.unpack(v, depth + 1) for v in value]
        if not isinstance(value, dict):
            return value
        mark = value.get(MARK)
        if mark is None:
            return {k: self.unpack(v, depth + 1) for k, v in value.items()}
        if mark == "tensor":
            return self._tensor(value)
        if mark == "array":
            return self._tensor(value["of"]).numpy()
        if mark == "scalar":
            return self._tensor(value["of"]).numpy()[()]
        if mark == "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["is"]]
        if mark == "dtype":
            return DTYPES[value["is"]]
        if mark == "clients":
            return Clients(value["is"], self._samples)
        if mark == "dict":
            return {self.unpack(k, depth + 1): self.unpack(v, depth + 1) for k, v in value["is"]}
        if mark in ("tuple", "set", "frozenset"):
            made = {"tuple": tuple, "set": set, "frozenset": frozenset}[mark]
            return made(self.unpack(v, depth + 1) for v in value["is"])
        raise DataError(f"the saved state holds a {str(mark)[:40]!r}, which this version does not know")

    def _tensor(self, value: Mapping[str, Any]) -> Tensor:
        name = value["is"]
        if name not in self._made:
            loaded = self._tensors[name]
            device = self._device if value.get("on") == "device" else torch.device("cpu")
            if "strides" in value:
                made = torch.empty_strided(loaded.shape, tuple(value["strides"]), dtype=loaded.dtype, device=device)
                made.copy_(loaded)
            else:
                made = torch.empty_like(loaded, device=device).copy_(loaded)  # own memory, aligned as it was
            self._made[name] = made
        return self._made[name]
