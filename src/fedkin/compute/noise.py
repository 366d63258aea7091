"""Noise that can be repeated: what dropout and PyTorch's random functions do when a network calls them.

Their numbers are a function of the row's key and of how many calls drew noise before (`calls.Calls.draw`); functions
whose numbers cannot be drawn that way are listed as refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.attention import scaled_dot_product
from fedkin.compute.recurrent import recurrent

if TYPE_CHECKING:
    from fedkin.compute.calls import Calls


def _dropout(c: Calls, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _dropped(c, input, p if training else 0.0, input.shape, inplace)


def _dropout_of_channels(
    c: Calls, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _dropped(c, input, p if training else 0.0, _channels(input), inplace)


def _dropout1d(c: Calls, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if input.dim() == 2:  # one sample: channels and length
        return _dropped(c, input, p if training else 0.0, (len(input), 1), inplace)
    return _dropout_of_channels(c, input, p, training, inplace)


def _channels(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def _dropped(c: Calls, x: Tensor, p: float, shape: Sequence[int], inplace: bool) -> Tensor:
    kept = c.kept(x, p, shape)
    if kept is None:
        return x
    found = x * kept / (1 - p) if p < 1 else x * 0.0
    return x.copy_(found) if inplace else found


ALPHA = 1.7580993408473766  # SELU's value far below zero, negated


def _alpha_dropout(c: Calls, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    return _alpha_dropped(c, input, p if training else 0.0, input.shape, inplace)


def _feature_alpha(c: Calls, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    return _alpha_dropped(c, input, p if training else 0.0, _channels(input), inplace)


def _alpha_dropped(c: Calls, x: Tensor, p: float, shape: Sequence[int], inplace: bool) -> Tensor:
    """What goes takes SELU's lowest value; mean and variance stay as they were."""
    kept = c.kept(x, p, shape)
    if kept is None:
        return x
    scale = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    found = x * (kept * scale) + ((kept.to(x.dtype) - 1) * (ALPHA * scale) + ALPHA * scale * p)
    return x.copy_(found) if inplace else found


def _sized(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _rand(normal: bool) -> Callable[..., Tensor]:
    func = torch.randn if normal else torch.rand

    def drawn(c: Calls, *size: Any, **how: Any) -> Tensor:
        c.needs_training(func)
        size = _sized(size or (how.pop("size"),))
        place = torch.empty((), device=how.get("device"))
        return c.draw(place, size, normal).to(device=how.get("device"), dtype=how.get("dtype"))

    return drawn


def _rand_like(normal: bool) -> Callable[..., Tensor]:
    def drawn(c: Calls, x: Tensor, **how: Any) -> Tensor:
        c.needs_training(torch.randn_like if normal else torch.rand_like)
        return c.draw(x, x.shape, normal).to(how.get("dtype") or x.dtype)

    return drawn


def _bernoulli(c: Calls, x: Tensor, p: float | None = None, **_: Any) -> Tensor:
    c.needs_training(torch.bernoulli)
    return (c.draw(x, x.shape) < (x if p is None else p)).to(x.dtype)


def _bernoulli_(c: Calls, x: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    c.needs_training(torch.Tensor.bernoulli_)
    return _filled(c, x, (c.draw(x, x.shape) < p).to(x.dtype))


def _uniform_(c: Calls, x: Tensor, low: float = 0.0, high: float = 1.0, **how: Any) -> Tensor:
    c.needs_training(torch.Tensor.uniform_)
    low, high = how.get("from", low), how.get("to", high)
    return _filled(c, x, (low + (high - low) * c.draw(x, x.shape)).to(x.dtype))


def _normal_(c: Calls, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    c.needs_training(torch.Tensor.normal_)
    return _filled(c, x, (mean + std * c.draw(x, x.shape, normal=True)).to(x.dtype))


def _filled(c: Calls, x: Tensor, drawn: Tensor) -> Tensor:
    """In place where the tensor is the row's own; under `vmap` it may be one for all, and the result counts."""
    return x.copy_(drawn) if c.row is None else drawn


Noise = Callable[..., Any]
NOISE: dict[Any, Noise] = {
    F.dropout: _dropout,
    torch.dropout: lambda c, x, p, train: _dropout(c, x, p, train),
    torch.dropout_: lambda c, x, p, train: x.copy_(_dropout(c, x, p, train)),
    F.dropout1d: _dropout1d,
    F.dropout2d: _dropout_of_channels,
    F.dropout3d: _dropout_of_channels,
    torch.feature_dropout: lambda c, x, p, train: _dropout_of_channels(c, x, p, train),
    F.alpha_dropout: _alpha_dropout,
    torch.alpha_dropout: lambda c, x, p, train: _alpha_dropout(c, x, p, train),
    F.feature_alpha_dropout: _feature_alpha,
    torch.feature_alpha_dropout: lambda c, x, p, train: _feature_alpha(c, x, p, train),
    F.scaled_dot_product_attention: scaled_dot_product,
    torch.rand: _rand(normal=False),
    torch.randn: _rand(normal=True),
    torch.rand_like: _rand_like(normal=False),
    torch.randn_like: _rand_like(normal=True),
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.Tensor.uniform_: _uniform_,
    torch.Tensor.normal_: _normal_,
    **{
        getattr(torch._VF, kind): lambda c, *given, kind=kind: recurrent(c, kind, *given)
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
}
REFUSED: frozenset[Any] = frozenset(
    [
        *(torch.randint, torch.randint_like, torch.randperm, torch.multinomial, torch.poisson, torch.normal),
        *(torch.binomial, torch.rrelu, torch.rrelu_, torch.native_dropout),
        *(F.rrelu, F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool3d),
        *(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices),
        *(torch.Tensor.random_, torch.Tensor.exponential_, torch.Tensor.geometric_, torch.Tensor.cauchy_),
        *(torch.Tensor.log_normal_, torch.Tensor.multinomial),
    ]
)
