"""How a network becomes a row of numbers, and back.

A client is a row: every float parameter and buffer of the network has its columns, ordered so that each part a
method may send is one slice. With BatchNorm statistics averaged like weights (`buffers="average"`) the order is
body | buffers | head, and the buffers belong to the body; with `buffers="local"` it is body | head | buffers, and
the buffers belong to no part that travels. Frozen parameters (`requires_grad=False`) and buffers that are constants
have no columns: they are the same in every row, so nobody learns or sends them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

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
    """Which columns of a row are which tensors of a network: `Layout.of(network)` makes one.

    `width` is the length of a row, D; `slots` lists the tensors in the order of their columns, and `slices` has the
    columns of each part ("model", "body", "head", "buffers"). `head_name` names the module that is the head,
    `buffers_policy` says whether BatchNorm statistics travel with the body ("average") or never ("local"), `frozen` has
    the parameters that do not learn, and `tied` those that body and head share."""

    slots: tuple[Slot, ...]
    head_name: str
    buffers_policy: Literal["average", "local"]
    slices: Mapping[Part, slice]
    width: int
    frozen: Mapping[str, torch.Size] = field(default_factory=dict)  # parameters that keep their values
    tied: tuple[str, ...] = ()  # parameters that head and body share

    @classmethod
    def of(
        cls,
        model: nn.Module,
        head: str | None = None,
        buffers: Literal["average", "local"] = "average",
        *,
        example: Tensor | None = None,
    ) -> Layout:
        """`head` names a module; the empty string means that all is body. `example`: some inputs, by which the head
        is found where none is named (see `find_head`) and checked where one is."""
        if buffers not in ("average", "local"):
            raise UsageError(f"buffers={buffers!r}: choose 'average' (sent with the body) or 'local' (never sent)")
        params = list(model.named_parameters())
        wrong = [n for n, p in params if p.dtype != torch.float32]
        if wrong:
            raise UsageError(f"parameter {wrong[0]!r} is not float32; call model.float() first")
        frozen = {n: p.shape for n, p in params if not p.requires_grad}
        if frozen and len(frozen) == len(params):
            raise UsageError(
                f"all parameters of {type(model).__name__} are frozen (requires_grad=False), so nothing "
                "can learn: leave those that should train unfrozen"
            )
        name = find_head(model, example) if head is None else head
        if name and head is not None:
            _check_head(model, name, example)
        elif head is not None and example is not None:
            _followed(model, example, [])  # a network that cannot take the samples says so here

        body = [(n, p.shape, "body") for n, p in params if n not in frozen and not inside(n, name)]
        top = [(n, p.shape, "head") for n, p in params if n not in frozen and inside(n, name)]
        fixed = constants(model)
        stats = [(n, b.shape, "buffer") for n, b in model.named_buffers() if n not in fixed]
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
        return cls(tuple(slots), name, buffers, slices, at, frozen, _tied(model, name))

    def columns(self, part: Part) -> slice:
        """The columns of a part: "model", "body", "head" or "buffers"."""
        if part not in self.slices:
            raise unknown("part of a model", part, PARTS)
        if part in ("body", "head"):
            self.require(part)
        return self.slices[part]

    def require(self, *parts: Literal["body", "head"]) -> None:
        """UsageError unless each of these can be told from the other and has something to learn."""
        for part in parts:
            if self.tied:
                raise UsageError(
                    f"the head {self.head_name!r} and the body share {self.tied[0]!r}, so they cannot be "
                    "told apart: untie them, or take a method that shares the whole model"
                )
            if any(s.kind == part for s in self.slots) or (part == "head" and not self.head_name):
                continue  # with head='' the user said that all is body: nothing is private, and that is what was asked
            frozen = any(inside(n, self.head_name) == (part == "head") for n in self.frozen)
            why = (
                "is frozen (requires_grad=False): leave some of it unfrozen"
                if frozen
                else f"is empty, all is head {self.head_name!r}: name a smaller head"
            )
            raise UsageError(
                f"this method learns the {part}, but the network's {part} {why}, or take a method that "
                "shares the whole model"
            )

    def learnt(self, part: Literal["model", "body", "head"]) -> tuple[str, ...]:
        """The names of the parameters that move when this part learns."""
        if part != "model":
            self.require(part)
        if part == "head" and not self.head_name:
            raise UsageError("learn='head': this network has no such part (its head is ''); name one with head=")
        return tuple(s.name for s in self.slots if s.kind == part or (part == "model" and s.kind != "buffer"))

    def size(self, part: Part = "model") -> int:
        """How many numbers travel when this part is sent."""
        if part not in self.slices:
            raise unknown("part of a model", part, PARTS)
        columns = self.slices[part]
        return int(columns.stop - columns.start)

    @cached_property
    def outputs(self) -> int:
        """How many numbers the network gives (classes that it tells apart), by its last parameter."""
        learnt = {s.name: s.shape for s in self.slots if s.kind != "buffer"}
        last = {n: shape for n, shape in {**self.frozen, **learnt}.items() if inside(n, self.head_name)} or learnt
        return list(last.values())[-1][0]

    @cached_property
    def parameters(self) -> int:
        """How many numbers can learn."""
        return sum(s.shape.numel() for s in self.slots if s.kind != "buffer")

    @cached_property
    def weights(self) -> int:
        """How many numbers a forward pass uses, frozen ones and statistics among them."""
        return self.width + sum(shape.numel() for shape in self.frozen.values())

    def body(self, rows: Tensor) -> Tensor:
        """The columns below the head, of one row or of many (a view)."""
        return rows[..., self.columns("body")]

    def head(self, rows: Tensor) -> Tensor:
        """The head's columns, of one row or of many (a view)."""
        return rows[..., self.columns("head")]

    def tensors(self, rows: Tensor) -> dict[str, Tensor]:
        """Views with the row axis in front: {"conv1.weight": [K, 32, 3, 5, 5], ...}; no copies."""
        lead = rows.shape[:-1]
        return {s.name: rows[..., s.start : s.stop].view((*lead, *s.shape)) for s in self.slots}

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


def constants(model: nn.Module) -> set[str]:
    """Buffers that are no columns, the same for all: those that are no part of a network's state (`persistent=False`),
    whole numbers, other precisions than float32, and masks that hold infinities."""
    derived = {
        f"{prefix}.{leaf}" if prefix else leaf
        for prefix, owner in model.named_modules()
        for leaf in owner._non_persistent_buffers_set
    }
    return {
        n
        for n, b in model.named_buffers()
        if n in derived or b.dtype != torch.float32 or not (b.is_meta or bool(b.isfinite().all()))
    }


def inside(name: str, module: str) -> bool:
    """Does this parameter or module belong to that module?"""
    return bool(module) and (name == module or name.startswith(module + "."))


# ---------------------------------------------------------------- which module is the head


def find_head(model: nn.Module, example: Tensor | None) -> str:
    """The linear layer whose result becomes the network's output, found by following the output back to it.

    The order in which layers were defined says nothing; a layer whose result is not used is passed over, and what
    comes after the head without weights of its own (a softmax, a dropout) does not hide it."""
    if example is None:
        raise UsageError(
            "which module is the head? Name it (head='fc'; '' for none), or give example= inputs, by which it is found"
        )
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    output, made = _followed(model, example, linears)
    wide = int(output.shape[-1])
    found = {name: width for name, width in _first_met(output, made) if width == wide}
    kind = type(model).__name__
    if not found:
        raise UsageError(
            f"no nn.Linear makes the {wide} outputs of {kind}, so its head is not known: name the module "
            "that does with head=..., or give head='' for none"
        )
    if len(found) > 1:
        names = " and ".join(repr(n) for n in sorted(found))
        raise UsageError(
            f"{names} both make the output of {kind}: say which is its head with head=..., or name a "
            "module that holds them; head='' for none"
        )
    return next(iter(found))


def _check_head(model: nn.Module, name: str, example: Tensor | None) -> None:
    modules = dict(model.named_modules())
    if name not in modules:
        raise unknown("head (module of the network)", name, [m for m in modules if m])
    if not any(True for _ in modules[name].parameters()):
        raise UsageError(f"head {name!r} is a {type(modules[name]).__name__} without parameters; name a layer")
    if example is None:
        return
    output, made = _followed(model, example, [name])
    met = _first_met(output, made)
    if not met:
        raise UsageError(
            f"head {name!r} has no part in the output of {type(model).__name__}: name the module whose "
            "result it is, or leave head out"
        )
    if met[0][1] != output.shape[-1]:
        raise UsageError(
            f"head {name!r} gives {met[0][1]} numbers a sample, {type(model).__name__} gives "
            f"{output.shape[-1]}: the head is the module whose result is the network's"
        )


Made = Mapping[Any, tuple[str, int]]
"""By the node of autograd's graph: which module made it, and how many numbers a sample it has."""


def _followed(model: nn.Module, example: Tensor, names: list[str]) -> tuple[Tensor, Made]:
    """A forward pass of a copy: its output, and what the modules of these names gave."""
    network = copy.deepcopy(model).to(example.device).eval()
    modules, made = dict(network.named_modules()), dict[Any, tuple[str, int]]()

    def note(name: str, result: Any) -> None:
        if isinstance(result, Tensor) and result.grad_fn is not None and result.dim():
            made[result.grad_fn] = name, int(result.shape[-1])

    for name in names:
        modules[name].register_forward_hook(lambda _m, _i, result, name=name: note(name, result))
    for parameter in network.parameters():
        parameter.requires_grad_()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            output = network(example.contiguous().flatten().view(example.shape))  # channels first, as users write for
        except Exception as error:  # a layer may raise anything: BatchNorm2d a ValueError, own code what it likes
            shape = tuple(example.shape[1:])
            raise UsageError(f"{type(model).__name__} cannot take samples of shape {shape}: {error}") from error
    check_output(model, output, len(example))
    return output, made


def check_output(model: nn.Module, output: object, samples: int) -> None:
    """A network gives one row of numbers a sample, such as class scores, or one for each position of a sample."""
    if not isinstance(output, Tensor):
        raise UsageError(
            f"{type(model).__name__} returns a {type(output).__name__}: a network must return its "
            "outputs as one tensor, such as class scores [samples, classes]; wrap it in a module that does"
        )
    if output.dim() < 2 or len(output) != samples:
        raise UsageError(
            f"{type(model).__name__} returns shape {tuple(output.shape)} for {samples} samples: a network "
            "must return one row a sample, such as class scores [samples, classes]; a single number is [samples, 1]"
        )


def _first_met(output: Tensor, made: Made) -> list[tuple[str, int]]:
    """Of those modules, the ones met first on the ways back from the output."""
    met, seen, ahead = list[tuple[str, int]](), set[Any](), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in made:
            met.append(made[node])
        else:
            ahead += [before for before, _ in node.next_functions]
    return met


def _tied(model: nn.Module, head: str) -> tuple[str, ...]:
    """Parameters that learn in the head and outside of it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(id(parameter), []).append(name)
    return tuple(n[0] for n in names.values() if len({inside(name, head) for name in n}) > 1)
