"""Linear algebra on rows that rules and attacks share, in column blocks: no temporary is as large as the input.

Squared distances come from a Gram matrix. It is built in float64 around a centre near the rows, so that neither
cancellation nor one enormous row can spoil the distances between the others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

BLOCK = 16384  # columns that fit a processor's cache with a hundred rows
LAUNCHES = 8  # on a GPU it is the number of steps that counts: blocks are so many times wider there


def block(rows: Tensor) -> int:
    return BLOCK * (LAUNCHES if rows.is_cuda else 1)


def blocks(rows: Tensor) -> Iterator[slice]:
    """The columns in blocks."""
    size, width = block(rows), rows.shape[-1]
    return (slice(at, min(at + size, width)) for at in range(0, width, size))


def gram(rows: Tensor, centre: Tensor) -> Tensor:
    """<row_i - centre, row_j - centre>, [..., K, K] in float64, of rows [..., K, D] around [..., D]."""
    count = rows.shape[-2]
    product = torch.zeros(*rows.shape[:-2], count, count, dtype=torch.float64, device=rows.device)
    for columns in blocks(rows):
        part = (rows[..., columns] - centre[..., None, columns]).double()
        product += part @ part.mT
    return (product + product.mT) / 2  # exactly symmetric, so that equal distances are ties on every machine


def squared_distances(rows: Tensor, centre: Tensor) -> Tensor:
    """|row_i - row_j|^2, [..., K, K] in float64, with an exact zero for every row to itself."""
    product = gram(rows, centre)
    norms = product.diagonal(dim1=-2, dim2=-1)
    return (norms[..., :, None] + norms[..., None, :] - 2 * product).clamp_(min=0)


def lengths(rows: Tensor, centre: Tensor) -> Tensor:
    """|row_i - centre|, [K] in float64."""
    total = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for columns in blocks(rows):
        total += torch.linalg.vector_norm(rows[:, columns] - centre[columns], dim=1).double() ** 2
    return total.sqrt()


def dots(rows: Tensor, centre: Tensor, direction: Tensor) -> Tensor:
    """<row_i - centre, direction>, [K] in float64."""
    total = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for columns in blocks(rows):
        total += (rows[:, columns] - centre[columns]).double() @ direction[columns].double()
    return total


def step(rows: Tensor, centre: Tensor, factors: Tensor) -> Tensor:
    """centre + sum_i factor_i (row_i - centre)."""
    moved = torch.empty_like(centre)
    for columns in blocks(rows):
        moved[columns] = centre[columns] + factors.to(rows.dtype) @ (rows[:, columns] - centre[columns])
    return moved


def mean_of(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_i w_i row_i / sum_i w_i; without any weight, the plain mean of all."""
    total = weights.sum()
    share = weights / total if total > 0 else torch.full_like(weights, 1 / len(rows))
    return share.to(rows.dtype) @ rows


def ascending(values: Tensor) -> Tensor:
    """Sorted along the last axis; NumPy's sort is by far the faster one on a CPU."""
    if values.device.type != "cpu":
        return values.sort(-1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def sorted_columns(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Column blocks with their values in ascending order, [columns, K]."""
    return ((columns, ascending(rows[:, columns].T.contiguous())) for columns in blocks(rows))
