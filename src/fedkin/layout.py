"""How a network becomes a row of numbers, and back.

A client is a row: every float parameter and buffer of the network has its columns, ordered so that each part a
method may send is one slice. With BatchNorm statistics averaged like weights (`buffers="average"`) the order is
body | buffers | head, and the buffers belong to the body; with `buffers="local"` it is body | head | buffers, and
the buffers belong to no part that travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from fedkin.errors import UsageError, unknown

Part = Literal["model", "body", "head", "buffers"]
PARTS: tuple[Part, ...] = ("model", "body", "head", "buffers")


@dataclass(frozen=True)
class Slot:
    """The columns of one named tensor."""

    name: str
    shape: torch.Size
    start: int
    kind: Literal["body", "head", "buffer"]

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


@dataclass(frozen=True, eq=False)
class Layout:
    slots: tuple[Slot, ...]
    head_name: str
    buffers_policy: Literal["average", "local"]
    slices: Mapping[Part, slice]
    width: int

    @classmethod
    def of(
        cls, model: nn.Module, head: str | None = None, buffers: Literal["average", "local"] = "average"
    ) -> Layout:
        """`head` names a module (default: the last linear layer); the empty string means that all is body."""
        if buffers not in ("average", "local"):
            raise UsageError(f"buffers={buffers!r}: choose 'average' (sent with the body) or 'local' (never sent)")
        name = _last_linear(model) if head is None else head
        if name:
            modules = dict(model.named_modules())
            if name not in modules:
                raise unknown("head (module of the network)", name, [m for m in modules if m])
            if not any(True for _ in modules[name].parameters()):
                raise UsageError(f"head {name!r} is a {type(modules[name]).__name__} without parameters; name a layer")
        params = [(n, p) for n, p in model.named_parameters()]
        wrong = [n for n, p in params if p.dtype != torch.float32]
        if wrong:
            raise UsageError(f"parameter {wrong[0]!r} is not float32; call model.float() first")

        def in_head(param: str) -> bool:
            return bool(name) and (param == name or param.startswith(name + "."))

        body = [(n, p.shape, "body") for n, p in params if not in_head(n)]
        top = [(n, p.shape, "head") for n, p in params if in_head(n)]
        stats = [(n, b.shape, "buffer") for n, b in model.named_buffers() if b.is_floating_point()]
        order = body + stats + top if buffers == "average" else body + top + stats

        slots: list[Slot] = []
        at = 0
        for slot_name, shape, kind in order:
            slots.append(Slot(slot_name, shape, at, kind))  # type: ignore[arg-type]
            at = slots[-1].stop
        n_body, n_head, n_stats = (sum(s.numel() for _, s, _ in g) for g in (body, top, stats))
        end_body = n_body + (n_stats if buffers == "average" else 0)
        slices: dict[Part, slice] = {
            "model": slice(0, end_body + n_head),
            "body": slice(0, end_body),
            "head": slice(end_body, end_body + n_head),
            "buffers": slice(n_body, n_body + n_stats) if buffers == "average" else slice(end_body + n_head, at),
        }
        return cls(tuple(slots), name, buffers, slices, at)

    def columns(self, part: Part) -> slice:
        if part not in self.slices:
            raise unknown("part of a model", part, PARTS)
        return self.slices[part]

    def size(self, part: Part = "model") -> int:
        """How many numbers travel when this part is sent."""
        columns = self.columns(part)
        return int(columns.stop - columns.start)

    @cached_property
    def parameters(self) -> int:
        """How many numbers can learn."""
        return sum(s.shape.numel() for s in self.slots if s.kind != "buffer")

    def body(self, rows: Tensor) -> Tensor:
        return rows[..., self.slices["body"]]

    def head(self, rows: Tensor) -> Tensor:
        return rows[..., self.slices["head"]]

    def tensors(self, rows: Tensor) -> dict[str, Tensor]:
        """Views with the row axis in front: {"conv1.weight": [K, 32, 3, 5, 5], ...}; no copies."""
        lead = rows.shape[:-1]
        return {s.name: rows[..., s.start : s.stop].view(*lead, *s.shape) for s in self.slots}

    def row(self, model: nn.Module) -> Tensor:
        """The network's present weights and statistics as one row."""
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            parts = [own[s.name].detach().reshape(-1).to("cpu", torch.float32) for s in self.slots]
            return torch.cat(parts) if parts else torch.zeros(0)

    def load(self, model: nn.Module, row: Tensor) -> nn.Module:
        """Write a row into a network of the same shape; returns it."""
        if row.shape != (self.width,):
            raise UsageError(f"a row of this network has {self.width} columns, got shape {tuple(row.shape)}")
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for slot_name, value in self.tensors(row).items():
                own[slot_name].copy_(value)
        return model


def _last_linear(model: nn.Module) -> str:
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise UsageError("the network has no nn.Linear to take as its head: name a module, or give head='' for none")
    return str(linears[-1])
