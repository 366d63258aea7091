"""Masks over the coordinates of a model: which are a client's own (true) and which it shares (false).

How a mask grows (CO-PFL, Algorithm 2 line 16; FedSelect), how models are averaged where masks let them, and what is
left of an average when one client is taken out of it. Everything is written for K clients at once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedkin.compute.layout import Layout

Scope = Literal["per_tensor_unmasked", "global"]
NEARLY_ALL = 1e-6  # with less weight than this left, there are no others to speak of


def learnable(layout: Layout, device: torch.device) -> Tensor:
    """Which columns of a row are learnt, bool [D]: all but the statistics of normalisation layers."""
    found = torch.zeros(layout.width, dtype=torch.bool, device=device)
    for slot in layout.slots:
        found[slot.start : slot.stop] = slot.kind != "buffer"
    return found


def grow(
    mask: Tensor, moved: Tensor, layout: Layout, rate: float, budget: float, scope: Scope, exact: bool = False
) -> Tensor:
    """Add the coordinates that moved most: mask bool [K, D], moved [K, D] (at least 0) to the larger mask.

    `per_tensor_unmasked`: of each weight tensor (biases stay shared) a share `rate` of what is still shared, at most
    floor(budget n) of its n coordinates in all. `global`: those of the `rate` d that moved most that are not in the
    mask yet, at most floor(budget d) in all.

    Changes are compared to three digits (bfloat16) unless `exact`, ties broken by position: after few steps of Adam all
    of them are about as large, and rounding, which differs between devices, must not decide."""
    moved = moved if exact else moved.bfloat16()
    grown = mask.clone()
    if scope == "global":
        open_ = learnable(layout, mask.device)
        size = int(open_.sum())
        top = torch.full((len(mask),), round(rate * size), device=mask.device)
        return _add(grown, moved.masked_fill(~open_, -1), top, int(budget * size))
    for slot in layout.slots:
        if slot.kind != "buffer" and "weight" in slot.name.rpartition(".")[2]:
            columns = slice(slot.start, slot.stop)
            here, size = grown[:, columns], slot.shape.numel()
            left = size - here.sum(1)
            top = left - ((1 - rate) * left.double()).round().long()
            grown[:, columns] = _add(here, moved[:, columns].masked_fill(here, -1), top, int(budget * size))
    return grown


def _add(mask: Tensor, moved: Tensor, top: Tensor, most: int) -> Tensor:
    """The mask and, of each row's `top` coordinates, those that are new, the first ones first, until `most` are in."""
    room = most - mask.sum(1)
    if not (room.minimum(top) > 0).any():  # sorting everything is what costs
        return mask
    order = moved.sort(dim=1, descending=True, stable=True).indices
    new = ~mask.gather(1, order) & (torch.arange(mask.shape[1], device=mask.device) < top[:, None])
    new &= new.cumsum(1) <= room[:, None]
    return mask | torch.zeros_like(mask).scatter(1, order, new)


def normalised(scores: Tensor) -> Tensor:
    """Weights that sum to 1, in proportion to scores of at least 0; equal ones if all scores are 0."""
    return scores / scores.sum() if scores.sum() > 0 else torch.full_like(scores, 1 / len(scores))


def shared_mean(rows: Tensor, shared: Tensor, alpha: Tensor, otherwise: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each coordinate over the clients that share it, by weight alpha, and their weight Z: [D] both.

    Where nobody shares a coordinate, Z is 0 and the mean `otherwise`."""
    z = alpha @ shared.to(alpha.dtype)
    sums = alpha @ rows.where(shared, rows.new_zeros(()))
    return torch.where(z > 0, sums / z.where(z > 0, torch.ones_like(z)), otherwise), z


def leave_one_out(mean: Tensor, z: Tensor, alpha: Tensor, own: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """What `shared_mean` would have been without client n, for each of K clients, and where that is known: [K, D].

    (Z mean - alpha_n own) / (Z - alpha_n) where n shares and others do too; `mean` elsewhere."""
    rest = z.to(mean.dtype) - alpha[:, None]
    known = shared & (rest > NEARLY_ALL)
    step = alpha[:, None] / rest.where(known, torch.ones_like(rest)) * (mean - own)
    return mean + step.where(known, step.new_zeros(())), known


def cosine(a: Tensor, b: Tensor, where: Tensor) -> Tensor:
    """Cosine of the angle between rows over some of their coordinates, [K]; 0 where one of them is zero."""
    zero = a.new_zeros(())
    a, b = a.where(where, zero), b.where(where, zero)
    lengths = a.norm(dim=1) * b.norm(dim=1)
    return torch.where(lengths > 0, (a * b).sum(1) / lengths.where(lengths > 0, torch.ones_like(lengths)), zero)
