"""Back-propagation by hand for chains of ordinary layers, for one row on a CPU.

At batch 10 a step of a small network is a few hundred microseconds of matrix work; building and walking an autograd
graph costs a large share of that again, and its gradients land in fresh memory every step. A chain of convolution,
pooling, ReLU, flatten and linear layers needs neither: each layer's backward pass is one or two kernels, and the
large weight gradients go to buffers that are kept. Other networks take the autograd way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedkin.compute.forward import Out
from fedkin.compute.program import Program

LossGradient = Callable[[Out], tuple[Tensor, Tensor, Tensor | None]]
"""From the output to (loss value, gradient at the logits, gradient at the features or None)."""

_aten: Any = torch.ops.aten
_KINDS = (nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Linear, nn.Identity)


class Tape:
    """A program that is a plain chain. `of` returns None for anything else."""

    def __init__(self, program: Program) -> None:
        self.ops = program.ops
        self.features_after = next(
            (i for i, op in enumerate(program.ops) if op.name == program.features), len(program.ops) - 1
        )
        self.split = program.features != program.logits
        self._fixed = program.fixed
        self._kept: dict[tuple[str, bool], Tensor] = {}

    @classmethod
    def of(cls, program: object) -> Tape | None:
        if not isinstance(program, Program):
            return None
        before = program.input
        for op in program.ops:
            source = op.inputs[0] if op.inputs else None
            if not isinstance(op.layer, _KINDS) or not isinstance(source, fx.Node) or source.name != before:
                return None
            if not _plain(op.layer):
                return None
            before = op.name
        names = [op.name for op in program.ops]
        shared = [op.target for op in program.ops if isinstance(op.layer, nn.Conv2d | nn.Linear)]
        if len(set(shared)) < len(shared) or program.aliases:  # used twice: gradients would have to be added
            return None
        return cls(program) if program.ops and program.logits == before and program.features in names else None

    def gradients(
        self, params: Mapping[str, Tensor], learn: frozenset[str], x: Tensor, loss: LossGradient
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its gradients by name, of those that have one. They stay valid until the next call."""
        params = {**params, **self._fixed} if self._fixed else params
        trail: list[tuple[Tensor, Any]] = []  # per layer: its input, and what its backward pass needs
        features = x
        for i, op in enumerate(self.ops):
            layer = op.layer
            extra: Any = None
            if isinstance(layer, nn.Conv2d):
                y = torch.conv2d(
                    x, params[f"{op.target}.weight"], params.get(f"{op.target}.bias"), layer.stride, layer.padding
                )
            elif isinstance(layer, nn.Linear):
                bias = params.get(f"{op.target}.bias")
                y = torch.nn.functional.linear(x, params[f"{op.target}.weight"], bias)
            elif isinstance(layer, nn.MaxPool2d):
                y, extra = _aten.max_pool2d_with_indices(x, *_pool(layer))
            elif isinstance(layer, nn.ReLU):
                # In place, unless somebody else still needs what is overwritten: the data, or the features.
                y = extra = torch.relu(x) if i in (0, self.features_after + 1) else torch.relu_(x)
            elif isinstance(layer, nn.Flatten):
                y = x.flatten(1)
            else:
                y = x
            trail.append((x, extra))
            x = y
            if i == self.features_after:
                features = x
        out = Out(features.unsqueeze(0), x.unsqueeze(0))
        value, g, at_features = loss(out)
        grads: dict[str, Tensor] = {}
        lowest = next((i for i, op in enumerate(self.ops) if _owned(op.target, learn)), len(self.ops))
        for i in range(len(self.ops) - 1, lowest - 1, -1):
            if i == self.features_after and self.split and at_features is not None:
                g = g + at_features.view(g.shape)
            g = self._back(i, g, params, learn, grads, trail[i], go_on=i > lowest)
        return value, grads

    def _back(
        self,
        i: int,
        g: Tensor,
        params: Mapping[str, Tensor],
        learn: frozenset[str],
        grads: dict[str, Tensor],
        saved: tuple[Tensor, Any],
        go_on: bool,
    ) -> Tensor:
        op = self.ops[i]
        layer, (x, extra) = op.layer, saved
        weight, bias = f"{op.target}.weight", f"{op.target}.bias"
        if isinstance(layer, nn.Linear):
            flat = g.flatten(0, -2)
            if weight in learn:
                grads[weight] = torch.mm(flat.t(), x.flatten(0, -2), out=self._buffer(weight, params[weight]))
            if bias in learn:
                grads[bias] = flat.sum(0)
            return torch.mm(flat, params[weight]).view(x.shape) if go_on else g
        if isinstance(layer, nn.Conv2d):
            wanted = [go_on, weight in learn, bias in learn]
            shape = ([layer.out_channels], layer.stride, layer.padding, (1, 1), False, (0, 0), 1)
            gx, gw, gb = _aten.convolution_backward(g, x, params[weight], *shape, wanted)
            if gw is not None:
                grads[weight] = gw
            if gb is not None:
                grads[bias] = gb
            return gx if go_on else g
        if isinstance(layer, nn.MaxPool2d):
            pooled: Tensor = _aten.max_pool2d_with_indices_backward(g, x, *_pool(layer), extra)
            return pooled
        if isinstance(layer, nn.ReLU):
            kept: Tensor = _aten.threshold_backward(g, extra, 0)
            return kept
        return g.reshape(x.shape) if isinstance(layer, nn.Flatten) else g

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        key = (name, torch.is_inference_mode_enabled())  # a tensor made in that mode cannot be written outside it
        if key not in self._kept:
            self._kept[key] = torch.empty_like(like)
        return self._kept[key]


def _plain(layer: nn.Module | None) -> bool:
    if isinstance(layer, nn.Conv2d):
        simple = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
        return simple and not isinstance(layer.padding, str)
    if isinstance(layer, nn.MaxPool2d):
        return layer.dilation in (1, (1, 1)) and not layer.ceil_mode
    return not isinstance(layer, nn.Flatten) or (layer.start_dim == 1 and layer.end_dim == -1)


def _pool(layer: nn.MaxPool2d) -> tuple[Any, ...]:
    def pair(value: Any) -> list[int]:
        return [value, value] if isinstance(value, int) else list(value)

    return pair(layer.kernel_size), pair(layer.stride), pair(layer.padding), [1, 1], False


def _owned(target: str, learn: frozenset[str]) -> bool:
    return bool(target) and (f"{target}.weight" in learn or f"{target}.bias" in learn)
