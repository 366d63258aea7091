"""Networks that are no program over rows: their own code, row by row or, under `torch.func.vmap`, for all rows at once.

Free parameters, functional code, attention, several inputs: nothing of it needs a rule. `Calls` sees the functions
that the code calls, computes layers over rows where that is faster or necessary, and keys the noise.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import checkpoint

from fedkin.compute.calls import Calls, Drawn, users_line
from fedkin.compute.forward import Context, Out
from fedkin.compute.layout import Layout, check_output
from fedkin.errors import UsageError


class Vmapped:
    """The network called as it is. Frozen parameters are its own copy's, one for all rows.

    `together` says that `vmap` can run it, `why_not` what stood in the way."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._template = copy.deepcopy(model).cpu()
        for module in self._template.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False  # the same gradient in another form, which rows have no use for
        self._layout = layout
        self._idle: dict[str, list[Copy]] = {}
        self._statistics = [s.name for s in layout.slots if s.kind == "buffer"]
        self.name = type(model).__name__
        self.drawn = Drawn()
        self.has_dropout = False
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
        self._attends = any(isinstance(m, ATTENTION) for m in model.modules())
        self.together, self.why_not = True, ""
        self.guards = False  # statistics are put on copies: they move while a row rests, or are replaced
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
                own = {k: usual_order(v[0]) for k, v in tensors.items()}
                if self.guards and context.train:
                    own.update({k: own[k].clone() for k in self._statistics})
                features, logits = self._run(network, own, x, context)
                features, logits = features.unsqueeze(0), logits.unsqueeze(0)
                if context.train:
                    for name in self._statistics:
                        place = tensors[name][0]
                        if own[name].data_ptr() != place.data_ptr():  # a copy, or replaced (`self.mean = ...`)
                            place.copy_(own[name])
            else:

                def one(row: Tensor, own: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, Tensor]:
                    return self._run(network, own, batch, context, row, rows)

                wide = {k: usual_order(v) if v.dim() == 5 else v for k, v in tensors.items()}
                if self.guards and context.train:
                    wide.update({k: wide[k].clone() for k in self._statistics})
                features, logits = vmap(one)(torch.arange(rows, device=x.device), wide, x.view(rows, -1, *x.shape[1:]))
                if context.train:
                    self._settle(tensors, wide, context.valid)
        return Out(features.float(), logits.float())

    def _settle(self, given: Mapping[str, Tensor], now: Mapping[str, Tensor], valid: Tensor | None) -> None:
        """Statistics go where they belong; those of rows at rest stay as they were."""
        for name in self._statistics:
            if now[name] is given[name]:
                continue
            found = now[name]
            if self.guards and valid is not None:
                rests = ~valid.any(1).view(-1, *[1] * (found.dim() - 1))
                found = torch.where(rests, given[name], found)
            given[name].copy_(found)

    def _run(
        self,
        network: Copy,
        own: dict[str, Tensor],
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
        if context.train:
            network.write_back(own, in_place=row is not None)
        features = network.caught[0] if network.caught else logits
        return features.flatten(1), logits

    def fresh(self) -> Copy:
        """A copy that has seen nothing."""
        return Copy(copy.deepcopy(self._template), self._layout)

    def probe(self, network: Copy, tensors: Mapping[str, Tensor], x: Tensor, train: bool, key: int = 1) -> Probed:
        """One pass of one row through this copy, watched: what noise it draws."""
        drawn = Drawn()
        context = Context(train, noise=torch.full((1,), key, dtype=torch.int64) if train else None)
        own = {k: usual_order(v[0]) for k, v in tensors.items()}
        network.bind(own)
        before = {k: v.data_ptr() for k, v in own.items()}
        network.module.train(train)
        network.caught.clear()
        with Calls(self.name, context, drawn), plain_calls_only(self.name):
            logits: Any = network.module(usual_order(x))
        check_output(self._template, logits, len(x))
        network.write_back(own)
        replaced = any(own[k].data_ptr() != before[k] for k in self._statistics)
        return Probed(drawn, logits.detach(), {k: t.detach() for k, t in own.items()}, replaced)

    @contextmanager
    def _borrowed(self, device: torch.device) -> Iterator[Copy]:
        """A copy that nobody else uses meanwhile: rows are trained on several threads."""
        idle = self._idle.setdefault(str(device), [])
        try:
            found = idle.pop()
        except IndexError:
            found = Copy(copy.deepcopy(self._template).to(device), self._layout)
        try:
            yield found
        finally:
            idle.append(found)


@dataclass(frozen=True)
class Probed:
    """What a pass drew and gave, and what its row's tensors were afterwards."""

    drawn: Drawn
    logits: Tensor
    after: Mapping[str, Tensor]
    replaced: bool  # is one of its statistics another tensor now?


ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class Copy:
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
        self._statistics: list[tuple[dict[str, Any], str, str]] = []
        for prefix, owner in module.named_modules():
            for held in (owner._parameters, owner._buffers):
                for leaf in held:
                    full = f"{prefix}.{leaf}" if prefix else leaf
                    if names.get(full, full) in learnt:
                        self._places.append((held, leaf, names.get(full, full)))
                        if held is owner._buffers:
                            self._statistics.append(self._places[-1])
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]

    def bind(self, own: Mapping[str, Tensor]) -> None:
        for held, leaf, name in self._places:
            held[leaf] = own[name]
        for layer in self._recurrent:
            layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]

    def write_back(self, own: dict[str, Tensor], in_place: bool = False) -> None:
        """Buffers that the network replaced (`self.mean = ...`) become the row's, as those written in place are."""
        for held, leaf, name in self._statistics:
            if held[leaf] is not own[name]:
                value = _fitting(own[name], held[leaf], name)
                if in_place:
                    own[name].copy_(value)
                else:
                    own[name] = value


def _fitting(place: Tensor, value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != place.shape:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(
            f"the network replaces its buffer {name!r} of shape {list(place.shape)} by {found}: a client's buffers "
            "keep their shapes; make it as large as it has to be, or keep it as an attribute that depends on no samples"
        )
    return value.detach()


@contextmanager
def plain_calls_only(network: str) -> Iterator[None]:
    """Refuses `torch.utils.checkpoint` while a network is looked at: it would run layers again in the backward pass,
    when other weights and other noise may be in place."""

    def refused(*_: Any, **__: Any) -> Any:
        raise UsageError(
            f"{network} uses torch.utils.checkpoint ({users_line(sys._getframe())}): it runs layers again in the "
            "backward pass, when another client's weights and noise may be in place; call them directly"
        )

    before = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = refused
    checkpoint.CheckpointFunction.apply = refused  # type: ignore[method-assign]
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = before
        del checkpoint.CheckpointFunction.apply  # the inherited one again


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
