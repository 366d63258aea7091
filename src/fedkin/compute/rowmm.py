"""R matrix products at once, with gradients laid out like the weights they belong to.

Autograd's own rule for x @ w.T returns the weight gradient transposed, and every update then walks strided memory.
And a convolution's weight gradient sums over batch * height * width with a tiny result: one product per row would
occupy a handful of a GPU's processors, so the sum is cut into pieces that run side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TILE = 64
_ENOUGH = 256  # products of one tile each that keep a large GPU busy


class _RowMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        gx = torch.bmm(g, w) if ctx.needs_input_grad[0] else None
        gw = _weight_gradient(g, x) if ctx.needs_input_grad[1] else None
        return gx, gw


def _weight_gradient(g: Tensor, x: Tensor) -> Tensor:
    rows, count, outputs = g.shape
    inputs = x.shape[2]
    tiles = rows * -(-outputs // _TILE) * -(-inputs // _TILE)
    pieces = 1
    while tiles * pieces < _ENOUGH and count % (pieces * 2) == 0 and count // (pieces * 2) >= 64:
        pieces *= 2
    if pieces == 1 or not g.is_cuda:
        return torch.bmm(g.transpose(1, 2), x)
    many = torch.bmm(
        g.reshape(rows * pieces, count // pieces, outputs).transpose(1, 2),
        x.reshape(rows * pieces, count // pieces, inputs),
    )
    return many.view(rows, pieces, outputs, inputs).sum(1)


def row_matmul(x: Tensor, w: Tensor) -> Tensor:
    """[R, N, I] times [R, O, I] transposed: [R, N, O]."""
    product: Tensor = _RowMatmul.apply(x, w)  # type: ignore[no-untyped-call]
    return product
