"""Networks that are no program over rows: their own code, row by row or, under `torch.func.vmap`, for all rows at once.

Free parameters, functional code, attention, several inputs: nothing of it needs a rule. `Calls` sees the functions
that the code calls, computes layers over rows where that is faster or necessary, and keys the noise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedkin.compute.calls import Calls, Drawn
from fedkin.compute.forward import Context, Out
from fedkin.compute.layout import Layout, check_output


class Vmapped:
    """The network called as it is. Frozen parameters are its own copy's, one for all rows.

    `together` says that `vmap` can run it, `why_not` what stood in the way."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._template = copy.deepcopy(model).cpu()
        self._layout = layout
        self._idle: dict[str, list[_Copy]] = {}
        self.name = type(model).__name__
        self.drawn = Drawn()
        self.has_dropout = False
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
        self._attends = any(isinstance(m, ATTENTION) for m in model.modules())
        self.together, self.why_not = True, ""
        self.no_program = ""  # why it is no program over rows

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, rows: int, context: Context) -> Out:
        x = usual_order(x)
        alone = rows == 1 and context.valid is None
        if self.has_batch_norm and self.together and context.train and len(x) == 1:
            alone = False  # PyTorch's own BatchNorm takes no single sample
        with (
            torch.autocast(x.device.type, context.dtype, enabled=context.dtype != torch.float32),
            self._borrowed(x.device) as network,
        ):
            if alone:
                features, logits = self._run(network, {k: usual_order(v[0]) for k, v in tensors.items()}, x, context)
                features, logits = features.unsqueeze(0), logits.unsqueeze(0)
            else:

                def one(row: Tensor, own: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, Tensor]:
                    return self._run(network, own, batch, context, row, rows)

                wide = {k: usual_order(v) if v.dim() == 5 else v for k, v in tensors.items()}
                features, logits = vmap(one)(torch.arange(rows, device=x.device), wide, x.view(rows, -1, *x.shape[1:]))
        return Out(features.float(), logits.float())

    def _run(
        self,
        network: _Copy,
        own: Mapping[str, Tensor],
        x: Tensor,
        context: Context,
        row: Tensor | None = None,
        rows: int = 1,
    ) -> tuple[Tensor, Tensor]:
        network.bind(own)
        network.module.train(context.train)
        network.caught.clear()
        # A single row without noise is plain PyTorch. Watching also keeps PyTorch off its shortcuts for attention in
        # evaluation mode, which leave padding out and differ from what it does in training.
        if row is None and not (self._attends if not context.train else self.has_dropout):
            logits: Any = network.module(x)
        else:
            with Calls(self.name, context, self.drawn, row, rows):
                logits = network.module(x)
        check_output(self._template, logits, len(x))
        features = network.caught[0] if network.caught else logits
        return features.flatten(1), logits

    def probe(self, tensors: Mapping[str, Tensor], x: Tensor) -> Drawn:
        """One training pass of one row, watched: what noise it draws."""
        drawn = Drawn()
        context = Context(train=True, noise=torch.ones(1, dtype=torch.int64))
        with self._borrowed(x.device) as network:
            network.bind({k: usual_order(v[0]) for k, v in tensors.items()})
            network.module.train()
            network.caught.clear()
            with Calls(self.name, context, drawn):
                check_output(self._template, network.module(usual_order(x)), len(x))
        return drawn

    @contextmanager
    def _borrowed(self, device: torch.device) -> Iterator[_Copy]:
        """A copy that nobody else uses meanwhile: rows are trained on several threads."""
        idle = self._idle.setdefault(str(device), [])
        try:
            found = idle.pop()
        except IndexError:
            found = _Copy(copy.deepcopy(self._template).to(device), self._layout)
        try:
            yield found
        finally:
            idle.append(found)


ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class _Copy:
    """A copy of the network whose parameters are whatever tensors it is given."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module = module
        self.caught: list[Tensor] = []
        if layout.head_name:
            head = module.get_submodule(layout.head_name)
            head.register_forward_pre_hook(lambda _, inputs: self.caught.append(inputs[0]))
        names = aliases(module)
        learnt = {s.name for s in layout.slots}
        self._places: list[tuple[dict[str, Any], str, str]] = []
        for prefix, owner in module.named_modules():
            for held in (owner._parameters, owner._buffers):
                for leaf in held:
                    full = f"{prefix}.{leaf}" if prefix else leaf
                    if names.get(full, full) in learnt:
                        self._places.append((held, leaf, names.get(full, full)))
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]

    def bind(self, own: Mapping[str, Tensor]) -> None:
        for held, leaf, name in self._places:
            held[leaf] = own[name]
        for layer in self._recurrent:
            layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]


def aliases(model: nn.Module) -> dict[str, str]:
    """Of parameters and buffers that have more than one name: the one in the row, by the others."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in both:
        if first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


def usual_order(t: Tensor) -> Tensor:
    """Channels first, as users write for; going flat settles the strides of axes of length 1 too."""
    if t.dim() < 4:
        return t if t.is_contiguous() else t.contiguous()
    steps: list[int] = []
    size = 1
    for length in reversed(t.shape):
        steps.insert(0, size)
        size *= length
    return t if t.stride() == tuple(steps) else t.contiguous().flatten().view(t.shape)
