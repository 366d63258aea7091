"""Networks that cannot be traced, called as they are."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedkin.compute.forward import Context, Out
from fedkin.compute.layout import Layout, check_output


def _usual_order(t: Tensor) -> Tensor:
    """Channels first, as users write for; going flat settles the strides of axes of length 1 too."""
    return t.contiguous().flatten().view(t.shape)


class Opaque:
    """The network called as it is: one row directly, several under `vmap`. Frozen parameters are its own copy's."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._template = copy.deepcopy(model).cpu()
        self._layout = layout
        self._mine = threading.local()
        kinds = [type(m).__name__ for m in model.modules()]
        self.stochastic = any("Dropout" in k for k in kinds)
        self.has_batch_norm = any("BatchNorm" in k for k in kinds)
        self.together = not self.stochastic and not self.has_batch_norm

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, rows: int, context: Context) -> Out:
        x, tensors = _usual_order(x), {k: _usual_order(v) for k, v in tensors.items()}
        with torch.autocast(x.device.type, context.dtype, enabled=context.dtype != torch.float32):
            if rows == 1:
                features, logits = self._one({k: v[0] for k, v in tensors.items()}, x, context.train)
                features, logits = features.unsqueeze(0), logits.unsqueeze(0)
            else:
                batches = x.view(rows, -1, *x.shape[1:])
                features, logits = vmap(lambda t, b: self._one(t, b, context.train))(dict(tensors), batches)
        return Out(features.float(), logits.float())

    def _one(self, tensors: dict[str, Tensor], x: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        module, caught = self._own_copy(x.device)
        module.train(train)
        caught.clear()
        logits: Tensor = functional_call(module, tensors, (x,))
        check_output(module, logits, len(x))
        features = caught[0] if caught else logits
        return features.flatten(1), logits

    def _own_copy(self, device: torch.device) -> tuple[nn.Module, list[Tensor]]:
        """A copy for this thread: `functional_call` swaps a module's tensors while it runs."""
        key = str(device)
        copies: dict[str, tuple[nn.Module, list[Tensor]]] = getattr(self._mine, "copies", {})
        if key not in copies:
            module = copy.deepcopy(self._template).to(device)
            caught: list[Tensor] = []
            if self._layout.head_name:
                head = dict(module.named_modules())[self._layout.head_name]
                head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
            copies[key] = (module, caught)
            self._mine.copies = copies
        return copies[key]
