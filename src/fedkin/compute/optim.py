"""The update of a step, for one row or many: weight decay, proximal pull, mask, then SGD or Adam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkin.errors import UsageError


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, for `client.fit(..., opt=fk.SGD(lr=0.1))`.

    `lr` is the learning rate, `momentum` (0 up to, but without, 1) the share of the last step that goes into the next,
    and `weight_decay` the strength of the pull of all weights towards zero."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum={self.momentum}: must be at least 0 and below 1")

    @property
    def buffers(self) -> int:
        """How many numbers this optimiser remembers per weight."""
        return 1 if self.momentum else 0


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, ICLR 2015), for `client.fit(..., opt=fk.Adam(lr=0.001))`.

    `lr` is the learning rate, `beta1` and `beta2` say how slowly the means of gradients and of their squares change,
    `eps` keeps the step finite, and `weight_decay` is added to the gradient as in `torch.optim.Adam`."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self.lr, self.weight_decay)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be at least 0 and below 1")

    @property
    def buffers(self) -> int:
        """How many numbers this optimiser remembers per weight."""
        return 2


Optimiser = SGD | Adam


def _check(lr: float, weight_decay: float) -> None:
    if not lr > 0:
        raise UsageError(f"lr={lr}: the learning rate must be above 0")
    if weight_decay < 0:
        raise UsageError(f"weight_decay={weight_decay}: must not be negative")


@dataclass
class Moments:
    """An optimiser's memory that outlives a fit: [K, D] per buffer and the steps taken so far, [K]."""

    buffers: list[Tensor]
    steps: Tensor

    @classmethod
    def zeros(cls, opt: Optimiser, rows: int, width: int, device: torch.device) -> Moments:
        buffers = [torch.zeros(rows, width, device=device) for _ in range(opt.buffers)]
        return cls(buffers, torch.zeros(rows, device=device))


@dataclass
class Pull:
    """The proximal term mu/2 * ||w - anchor||^2, in the shape of the parameters."""

    mu: Sequence[float | Tensor]
    anchor: Sequence[Tensor]


def shortening(norm: Tensor, most: float) -> Tensor:
    """What gradients of these norms are multiplied by, so that none is longer than `most`: as in
    `torch.nn.utils.clip_grad_norm_`."""
    return (most / (norm + 1e-6)).clamp(max=1.0)


def clipped(grads: Sequence[Tensor], masks: Sequence[Tensor] | None, most: float) -> list[Tensor]:
    """One row's gradient with a norm of at most `most`; what a mask holds does not count."""
    if masks is not None:
        grads = [g * m for g, m in zip(grads, masks, strict=True)]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads))))
    return list(torch._foreach_mul(list(grads), shortening(norm, most)))


def update(
    opt: Optimiser,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    memory: Sequence[Sequence[Tensor]],
    steps: float | Sequence[Tensor],
    pull: Pull | None = None,
    masks: Sequence[Tensor] | None = None,
    gate: Sequence[Tensor] | None = None,
    rate: float | Sequence[Tensor] | None = None,
) -> None:
    """One step in place. `steps` counts this one (Adam's bias correction); `gate` is 0 where a row rests and keeps
    its memory; `rate` takes the place of the optimiser's own, alone or in the shape of the parameters."""
    g: list[Tensor] = list(grads)
    before = [[t.clone() for t in buffer] for buffer in memory] if gate is not None else []
    if opt.weight_decay:
        g = list(torch._foreach_add(g, list(params), alpha=opt.weight_decay))
    if pull is not None and isinstance(pull.mu[0], float):
        g = list(torch._foreach_add(g, list(params), alpha=pull.mu[0]))
        torch._foreach_add_(g, list(pull.anchor), alpha=-pull.mu[0])
    elif pull is not None:
        g = [gi + mu * (p - a) for gi, mu, p, a in zip(g, pull.mu, params, pull.anchor, strict=True)]
    if masks is not None:
        g = [gi * m for gi, m in zip(g, masks, strict=True)]
    if isinstance(opt, SGD) and opt.momentum:
        torch._foreach_mul_(list(memory[0]), opt.momentum)
        torch._foreach_add_(list(memory[0]), g)
        g = list(memory[0])
    elif isinstance(opt, Adam):
        first, second = memory
        torch._foreach_lerp_(list(first), g, 1 - opt.beta1)
        torch._foreach_mul_(list(second), opt.beta2)
        torch._foreach_addcmul_(list(second), g, g, 1 - opt.beta2)
        times: Sequence[float | Tensor] = [steps] * len(g) if isinstance(steps, float) else steps
        g = [
            (m / (1 - opt.beta1**t)) / ((v / (1 - opt.beta2**t)).sqrt() + opt.eps)
            for m, v, t in zip(first, second, times, strict=True)
        ]
    if masks is not None and opt.buffers:  # the memory of an earlier fit may reach where this mask does not
        g = [gi * m for gi, m in zip(g, masks, strict=True)]
    if gate is not None:
        for buffer, kept in zip(memory, before, strict=True):
            for t, old, on in zip(buffer, kept, gate, strict=True):
                t.copy_(torch.where(on > 0, t, old))
        g = [gi * on for gi, on in zip(g, gate, strict=True)]
    if rate is None or isinstance(rate, float):
        torch._foreach_add_(list(params), g, alpha=-(opt.lr if rate is None else rate))
    else:
        torch._foreach_sub_(list(params), [gi * r for gi, r in zip(g, rate, strict=True)])
