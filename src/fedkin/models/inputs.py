"""What goes into a network and comes out of it, where that is not one tensor each.

A network of several inputs takes, and one that gives a tuple, a mapping or an object with `logits` gives, one tensor
once these hooks are on: everything else in FedKin knows of one tensor in and one out. Parameters keep their names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedkin.errors import UsageError
from fedkin.parts import Part


class _Unpack:
    """Before the network runs: the columns of a sample become its inputs, by name where the network knows the names."""

    def __init__(self, network: nn.Module, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        names = [p.name for p in parts]
        takes = inspect.signature(network.forward).parameters
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
        self.by_name = anything or all(name in takes for name in names)
        strange = [name for name in names if name not in takes]
        if not self.by_name and len(strange) < len(names):
            raise UsageError(
                f"of the parts of the samples, {', '.join(n for n in names if n in takes)} is an argument of "
                f"{type(network).__name__}.forward({', '.join(takes)}) by its name, and {', '.join(strange)} is "
                "not: give all parts the names of its arguments, or none, to be taken in their order"
            )
        places = [p for p in takes.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if not self.by_name and len(places) < len(parts):
            raise UsageError(
                f"the samples have the parts {', '.join(names)}, and {type(network).__name__}.forward takes "
                f"{', '.join(takes) or 'nothing'}: give the parts the names of its arguments"
            )

    def __call__(
        self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        width = sum(p.width for p in self.parts)
        if kwargs or len(args) != 1 or args[0].dim() != 2 or args[0].shape[1] != width:
            return None  # called as its author meant it
        found, at = {}, 0
        for part in self.parts:
            column = args[0][:, at : at + part.width].reshape(-1, *part.shape)
            found[part.name] = column.to(getattr(torch, part.dtype))
            at += part.width
        return ((), found) if self.by_name else (tuple(found.values()), {})


class _Logits:
    """After it ran: its class scores."""

    def __call__(self, network: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
        return logits_of(network, output)


def one_tensor(network: nn.Module, parts: Sequence[Part] = ()) -> nn.Module:
    """The network itself, taking samples of these parts as one tensor and giving its class scores as one."""
    if parts:
        network.register_forward_pre_hook(_Unpack(network, parts), with_kwargs=True)
    network.register_forward_hook(_Logits())
    return network


def logits_of(network: nn.Module, output: Any) -> Tensor:
    """Of a tuple or list its first tensor; of a mapping or an object its `logits`."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(getattr(output, "logits", None), Tensor):
        found = output.logits
    else:
        found = next((t for t in output if isinstance(t, Tensor)), None) if isinstance(output, list | tuple) else None
    if isinstance(found, Tensor):
        return found
    kind = type(output).__name__
    with_keys = f" with {', '.join(map(repr, output))}" if isinstance(output, Mapping) else ""
    raise UsageError(
        f"{type(network).__name__} returns a {kind}{with_keys}: a network must return its class scores as a "
        "tensor, first in a tuple, or as 'logits' of a mapping or an object; wrap it in a module that does"
    )
