"""A pre-trained network as a trunk that never moves, with small parts beside it that learn.

`lora` puts a low-rank product beside linear layers (Hu et al., ICLR 2022), `adapters` a narrow bottleneck behind layers
(Houlsby et al., ICML 2019). Both give a copy in which all but these parts and the head is frozen, so that a client's
row, and every message, holds the small parts alone: the trunk exists once, whatever the number of clients. Both parts
begin as nothing at all, so that the network starts where the pre-trained one stands.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkin.errors import UsageError, unknown


def lora(
    model: nn.Module,
    rank: int = 8,
    targets: str | Sequence[str] | None = None,
    *,
    head: str | Sequence[str] | None = None,
    alpha: float | None = None,
    dropout: float = 0.0,
) -> nn.Module:
    """A copy of the network in which low-rank updates of linear layers learn instead of the layers themselves.

    `targets`: names or patterns ("*.query", "blocks.?.mlp*") of `nn.Linear` and `nn.MultiheadAttention` modules; None
    takes all that are not in the head. `head`: the modules that learn as they are, usually the new classifier ("" for
    none); None leaves those parameters to learn that do now, if some of them are frozen already. `alpha`: the update
    counts `alpha / rank` times (default: `rank`, so once); `dropout`: of the update's input.

    Example: `fk.run("fedper", model=fk.lora(network, rank=8, head="classifier"), init="given", ...)`."""
    if rank < 1 or int(rank) != rank:
        raise UsageError(f"rank={rank}: a low-rank update has a whole number of at least 1")
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout={dropout}: a share from 0 to below 1")
    scale = (rank if alpha is None else alpha) / rank
    if not math.isfinite(scale) or scale == 0:
        raise UsageError(f"alpha={alpha}: a number that is not zero")
    network, kept = _trunk_of(model, head)

    def changed(module: nn.Module) -> nn.Module:
        if isinstance(module, nn.MultiheadAttention):
            return LowRankAttention(module, rank, scale, dropout)
        assert isinstance(module, nn.Linear)
        return LowRank(module, rank, scale, dropout)

    def usual(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear | nn.MultiheadAttention)

    _replace(network, _chosen(network, targets, kept, usual, "nn.Linear or nn.MultiheadAttention"), changed)
    return network


def adapters(
    model: nn.Module,
    width: int = 16,
    targets: str | Sequence[str] | None = None,
    *,
    head: str | Sequence[str] | None = None,
) -> nn.Module:
    """A copy of the network with a bottleneck of `width` units behind chosen layers: y + up(relu(down(y))).

    `targets`: names or patterns of modules whose width is known (linear layers, convolutions, normalisations); None
    takes the second linear layer of every `nn.TransformerEncoderLayer`. `head` as for `lora`."""
    if width < 1 or int(width) != width:
        raise UsageError(f"width={width}: a bottleneck has a whole number of units, at least 1")
    network, kept = _trunk_of(model, head)
    inside = {id(m.linear2) for m in network.modules() if isinstance(m, nn.TransformerEncoderLayer)}

    def usual(module: nn.Module) -> bool:
        return id(module) in inside

    chosen = _chosen(network, targets, kept, usual, "nn.TransformerEncoderLayer", of_any_kind=True)
    _replace(network, chosen, lambda module: Bottleneck(module, _features_of(module), width))
    return network


def merged(model: nn.Module) -> nn.Module:
    """A copy in which low-rank updates are added to the layers they stand beside: the same answers, the first shape.

    For a model that is done with learning, for example `fk.merged(result.personal(0).network)`."""
    network = copy.deepcopy(model)

    def plain(module: nn.Module) -> nn.Module:
        assert isinstance(module, LowRank | LowRankAttention)
        return module.merged()

    found = [n for n, m in network.named_modules() if isinstance(m, LowRank | LowRankAttention)]
    outer = [n for n in found if not any(n.startswith(f"{other}.") for other in found)]
    if outer == [""]:
        return plain(network)
    _replace(network, outer, plain)
    return network


class LowRank(nn.Module):
    """A frozen linear layer with an update of low rank: base(x) + scale * up(down(x)); `up` begins at zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = base
        where = base.weight.device
        self.down = nn.Linear(base.in_features, rank, bias=False, device=where)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=where)
        self.drop: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.scale = scale
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """`down` at random, `up` zero: the layer is the frozen one to begin with."""
        self.down.reset_parameters()
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.up(self.down(self.drop(x)))
        found: Tensor = self.base(x) + self.scale * update
        return found

    def merged(self) -> nn.Linear:
        """One linear layer that answers the same."""
        found = copy.deepcopy(self.base)
        with torch.no_grad():
            found.weight += self.scale * self.up.weight @ self.down.weight
        return found


class LowRankAttention(nn.Module):
    """A frozen `nn.MultiheadAttention` whose queries, keys, values and result have updates of low rank.

    It takes what the module it replaces takes; attention weights are not returned."""

    in_proj_bias = None  # PyTorch's encoder layers ask for it before they would take a short cut past this module

    def __init__(self, of: nn.MultiheadAttention, rank: int, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        if not of._qkv_same_embed_dim or of.bias_k is not None or of.add_zero_attn:
            raise UsageError(
                "low-rank updates of an nn.MultiheadAttention need one width for queries, keys and values, and neither "
                "add_bias_kv nor add_zero_attn: name other layers in targets"
            )
        self.embed_dim, self.num_heads, self.batch_first = of.embed_dim, of.num_heads, of.batch_first
        self.dropout = of.dropout
        parts = torch.chunk(of.in_proj_weight.detach(), 3)
        biases = [None] * 3 if of.in_proj_bias is None else list(torch.chunk(of.in_proj_bias.detach(), 3))
        self.query, self.key, self.value = (
            LowRank(_frozen_linear(w, b), rank, scale, dropout) for w, b in zip(parts, biases, strict=True)
        )
        out = _frozen_linear(of.out_proj.weight.detach(), None if of.out_proj.bias is None else of.out_proj.bias)
        self.out_proj = LowRank(out, rank, scale, dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if query.dim() == 2:  # one sample
            query, key, value = (t.unsqueeze(0 if self.batch_first else 1) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            found, _ = self(query, key, value, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal)
            return found.squeeze(0 if self.batch_first else 1), None
        if not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = (
            of(t).view(*t.shape[:2], self.num_heads, -1).transpose(1, 2)
            for of, t in ((self.query, query), (self.key, key), (self.value, value))
        )
        mask = _as_added(attn_mask, q.dtype)
        if mask is not None and mask.dim() == 3:
            mask = mask.view(-1, self.num_heads, *mask.shape[1:])
        if key_padding_mask is not None:
            padded = _as_added(key_padding_mask, q.dtype)
            assert padded is not None
            padded = padded[:, None, None, :]
            mask = padded if mask is None else mask + padded
        share = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(q, k, v, mask, share, is_causal=is_causal and mask is None)
        result: Tensor = self.out_proj(found.transpose(1, 2).flatten(2))
        return (result if self.batch_first else result.transpose(0, 1)), None

    def merged(self) -> nn.MultiheadAttention:
        """One attention module that answers the same."""
        parts = [self.query.merged(), self.key.merged(), self.value.merged()]
        biased = parts[0].bias is not None
        found = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, bias=biased, batch_first=self.batch_first
        )
        with torch.no_grad():
            found.in_proj_weight.copy_(torch.cat([p.weight for p in parts]))
            if found.in_proj_bias is not None:
                found.in_proj_bias.copy_(torch.cat([p.bias for p in parts]))
        out = self.out_proj.merged()
        found.out_proj.weight, found.out_proj.bias = out.weight, out.bias
        return found.train(self.training)


class Bottleneck(nn.Module):
    """A frozen module with a narrow part behind it: y + up(relu(down(y))); `up` begins at zero."""

    def __init__(self, base: nn.Module, features: int, width: int) -> None:
        super().__init__()
        self.base = base
        self.pixels = isinstance(base, _OVER_PIXELS)
        self.down = nn.Conv2d(features, width, 1) if self.pixels else nn.Linear(features, width)
        self.up = nn.Conv2d(width, features, 1) if self.pixels else nn.Linear(width, features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """`down` at random, `up` zero: the module is the frozen one to begin with."""
        self.down.reset_parameters()
        nn.init.zeros_(self.up.weight)
        if self.up.bias is not None:
            nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        y: Tensor = self.base(x, *args, **named)
        update: Tensor = self.up(F.relu(self.down(y)))
        return y + update


_OVER_PIXELS = (nn.Conv2d, nn.BatchNorm2d)


def _frozen_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device)
    with torch.no_grad():
        made.weight.copy_(weight)
        if bias is not None:
            made.bias.copy_(bias)
    return made.requires_grad_(False)


def _as_added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores: minus infinity where a boolean mask is true."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))


def _trunk_of(model: nn.Module, head: str | Sequence[str] | None) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy with everything frozen but the head, and the names of the modules of the head."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model={model!r}: give the network itself, an nn.Module")
    if any(isinstance(m, LowRank | LowRankAttention | Bottleneck) for m in model.modules()):
        raise UsageError(f"{type(model).__name__} has adapters already: begin with the network that it was made of")
    network = copy.deepcopy(model)
    if head is None:
        learning = [p.requires_grad for p in network.parameters()]
        if all(learning):
            raise UsageError(
                f"which part of {type(model).__name__} learns as it is, beside the adapters? Name it with head= (its "
                "new classifier, head='' for none), or freeze the trunk yourself (requires_grad_(False))"
            )
        return network, tuple(n for n, m in network.named_modules() if n and _all_learn(m))
    kept = tuple(n for n in ([head] if isinstance(head, str) else head) if n)
    modules = dict(network.named_modules())
    for name in kept:
        if name not in modules:
            raise unknown("head (module of the network)", name, [n for n in modules if n])
    network.requires_grad_(False)
    for name in kept:
        modules[name].requires_grad_(True)
    return network, kept


def _all_learn(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and all(p.requires_grad for p in parameters)


def _chosen(
    network: nn.Module,
    targets: str | Sequence[str] | None,
    kept: Sequence[str],
    usual: Callable[[nn.Module], bool],
    kind: str,
    of_any_kind: bool = False,
) -> list[str]:
    """The names of the modules to change: none within another of them, none in the head."""
    free = {n: m for n, m in network.named_modules() if n and not any(n == k or n.startswith(f"{k}.") for k in kept)}
    if targets is None:
        found = [n for n, m in free.items() if usual(m)]
        if not found:
            raise UsageError(f"{type(network).__name__} has no {kind} outside of its head: name modules in targets")
    else:
        found = []
        for pattern in [targets] if isinstance(targets, str) else targets:
            met = [n for n in free if fnmatchcase(n, pattern)]
            fit = [n for n in met if of_any_kind or usual(free[n])]
            if not met:
                raise unknown("target (module of the network)", pattern, [n for n, m in free.items() if usual(m)])
            if not fit:
                raise UsageError(
                    f"target {pattern!r} is a {type(free[met[0]]).__name__}: low-rank updates stand beside {kind}"
                )
            found += [n for n in fit if n not in found]
    return [n for n in found if not any(n.startswith(f"{other}.") for other in found)]


def _replace(network: nn.Module, names: Sequence[str], change: Callable[[nn.Module], nn.Module]) -> None:
    """Change these modules in place; one that stands in several places is changed once."""
    modules, made = dict(network.named_modules(remove_duplicate=False)), dict[int, nn.Module]()
    for name in names:
        old = modules[name]
        for place, module in modules.items():
            if module is old:
                parent, _, own = place.rpartition(".")
                made.setdefault(id(old), change(old))
                setattr(modules[parent], own, made[id(old)])
                if isinstance(holder := modules[parent], nn.TransformerEncoderLayer):
                    holder.activation_relu_or_gelu = 0  # in evaluation PyTorch would take a short cut past its parts


def _features_of(module: nn.Module) -> int:
    """The width of what a module gives."""
    for name in ("out_features", "out_channels", "num_features", "embed_dim"):
        if isinstance(found := getattr(module, name, None), int):
            return found
    if isinstance(module, nn.LayerNorm):
        return int(module.normalized_shape[-1])
    raise UsageError(
        f"the width of what a {type(module).__name__} gives is not known: name the linear layer, convolution or "
        "normalisation that it ends with"
    )
