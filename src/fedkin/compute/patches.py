"""A convolution's input as a matrix of patches, and the way back.

Columns are ordered (height, width, channel), so both directions read and write whole channel runs of channels-last
images. Our own kernels do both on a GPU, PyTorch's `unfold` and `fold` elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute import kernels, windows


def patches(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...] | str
) -> tuple[Tensor, int, int]:
    """[N, C, H, W] to [N, H', W', kh * kw * C]; also returns H' and W'. There may be columns of zeros at the end."""
    ph, pw = int(padding[0]), int(padding[1])
    if kernel != (1, 1) and kernels.usable(x):
        found = windows.patches(x, (kernel[0], kernel[1]), (stride[0], stride[1]), (ph, pw))
        return found, found.shape[1], found.shape[2]
    if ph or pw:
        x = F.pad(x, (pw, pw, ph, ph))
    height = (x.shape[2] - kernel[0]) // stride[0] + 1
    width = (x.shape[3] - kernel[1]) // stride[1] + 1
    if kernel == (1, 1):
        return x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1), height, width
    columns: Tensor = _Patches.apply(x, kernel, stride, height, width)  # type: ignore[no-untyped-call]
    return columns, height, width


class _Patches(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], height: int, width: int
    ) -> Tensor:
        ctx.shape, ctx.kernel, ctx.stride = x.shape, kernel, stride
        cut = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])  # [N, C, H', W', kh, kw]
        return cut.permute(0, 2, 3, 4, 5, 1).reshape(x.shape[0], height, width, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        n, c, h, w = ctx.shape
        ho, wo = grad.shape[1], grad.shape[2]
        taps = grad.view(n, ho, wo, *ctx.kernel, c).permute(0, 5, 3, 4, 1, 2).reshape(n, -1, ho * wo)
        return F.fold(taps, (h, w), ctx.kernel, stride=ctx.stride), None, None, None, None
