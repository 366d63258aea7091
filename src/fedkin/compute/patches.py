"""A convolution's input as a matrix of patches, and the way back.

Columns are ordered (height, width, channel), so both directions read and write whole channel runs of
channels-last images. Under a compiler the way back is a sum of shifted slices, which becomes one kernel that
gathers; op by op our own kernels do both on a GPU, PyTorch's `col2im` elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute import kernels


def patches(
    x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...] | str, compiled: bool
) -> tuple[Tensor, int, int]:
    """[N, C, H, W] to [N, H', W', kh * kw * C]; also returns H' and W'. There may be columns of zeros at the end."""
    ph, pw = int(padding[0]), int(padding[1])
    if kernel != (1, 1) and not compiled and kernels.usable(x):
        found = kernels.patches(x, (kernel[0], kernel[1]), (stride[0], stride[1]), (ph, pw))
        return found, found.shape[1], found.shape[2]
    if ph or pw:
        x = F.pad(x, (pw, pw, ph, ph))
    height = (x.shape[2] - kernel[0]) // stride[0] + 1
    width = (x.shape[3] - kernel[1]) // stride[1] + 1
    if kernel == (1, 1):
        return x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1), height, width
    columns: Tensor = _Patches.apply(x, kernel, stride, height, width, compiled)  # type: ignore[no-untyped-call]
    return columns, height, width


class _Patches(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], height: int, width: int, compiled: bool
    ) -> Tensor:
        ctx.shape, ctx.kernel, ctx.stride, ctx.compiled = x.shape, kernel, stride, compiled
        windows = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])  # [N, C, H', W', kh, kw]
        return windows.permute(0, 2, 3, 4, 5, 1).reshape(x.shape[0], height, width, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        n, c, h, w = ctx.shape
        (kh, kw), (sh, sw) = ctx.kernel, ctx.stride
        ho, wo = grad.shape[1], grad.shape[2]
        g = grad.view(n, ho, wo, kh, kw, c)
        if not ctx.compiled:
            flat = g.permute(0, 5, 3, 4, 1, 2).reshape(n, c * kh * kw, ho * wo)
            return F.fold(flat, (h, w), (kh, kw), stride=(sh, sw)), None, None, None, None, None
        total = None
        for i in range(kh):
            for j in range(kw):
                tap = g[:, :, :, i, j]  # [N, H', W', C]
                if sh > 1 or sw > 1:  # between the outputs of a strided convolution lie zeros
                    tap = F.pad(tap.view(n, ho, 1, wo, 1, c), (0, 0, 0, sw - 1, 0, 0, 0, sh - 1))
                    tap = tap.reshape(n, ho * sh, wo * sw, c)
                shifted = F.pad(tap, (0, 0, j, w - j - tap.shape[2], i, h - i - tap.shape[1]))
                total = shifted if total is None else total + shifted
        assert total is not None
        return total.permute(0, 3, 1, 2), None, None, None, None, None
