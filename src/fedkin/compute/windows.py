"""What slides over images, for many rows on a GPU: patches and the way back, and max-pooling (see `kernels`)."""

# Triton has no types, and its kernels read their annotations themselves: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

import torch
from torch import Tensor

from fedkin.compute.kernels import power

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for a CPU
    triton = None

TILE = 4096  # numbers that a program handles at once

if triton is not None:

    @triton.jit
    def _im2col(
        x,
        out,
        total,
        sn,
        sc,
        sy,
        sx,
        H: tl.constexpr,
        W: tl.constexpr,
        C: tl.constexpr,
        HO: tl.constexpr,
        WO: tl.constexpr,
        KH: tl.constexpr,
        KW: tl.constexpr,
        SH: tl.constexpr,
        SW: tl.constexpr,
        PH: tl.constexpr,
        PW: tl.constexpr,
        K: tl.constexpr,
        BM: tl.constexpr,
        BK: tl.constexpr,
    ):
        """One output position per line of a tile, one (tap, channel) per column."""
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        k = tl.program_id(1) * BK + tl.arange(0, BK)
        n, at = m // (HO * WO), m % (HO * WO)
        tap, c = k // C, k % C
        y = (at // WO * SH - PH)[:, None] + (tap // KW)[None, :]
        z = (at % WO * SW - PW)[:, None] + (tap % KW)[None, :]
        there = (m < total)[:, None] & (k < K)[None, :]
        inside = there & (k < KH * KW * C)[None, :] & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        start = n.to(tl.int64)[:, None] * sn + c[None, :] * sc
        value = tl.load(x + start + y * sy + z * sx, mask=inside, other=0.0)
        tl.store(out + m.to(tl.int64)[:, None] * K + k[None, :], value, mask=there)

    @triton.jit
    def _col2im(
        g,
        out,
        total,
        H: tl.constexpr,
        W: tl.constexpr,
        C: tl.constexpr,
        HO: tl.constexpr,
        WO: tl.constexpr,
        KH: tl.constexpr,
        KW: tl.constexpr,
        SH: tl.constexpr,
        SW: tl.constexpr,
        PH: tl.constexpr,
        PW: tl.constexpr,
        K: tl.constexpr,
        BM: tl.constexpr,
        BC: tl.constexpr,
        EVEN: tl.constexpr,
    ):
        """One pixel per line, one channel per column: gather what every tap that covered the pixel says of it."""
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        n, at = m // (H * W), m % (H * W)
        there = (m < total)[:, None]
        if not EVEN:
            there = there & (c < C)[None, :]
        total_here = tl.zeros((BM, BC), tl.float32)
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                y, z = at // W + PH - i, at % W + PW - j
                ok = (y >= 0) & (z >= 0) & (y % SH == 0) & (z % SW == 0) & (y // SH < HO) & (z // SW < WO)
                start = (n.to(tl.int64) * HO + y // SH) * WO + z // SW
                here = g + start[:, None] * K + (i * KW + j) * C + c[None, :]
                total_here += tl.load(here, mask=there & ok[:, None], other=0.0).to(tl.float32)
        tl.store(out + m.to(tl.int64)[:, None] * C + c[None, :], total_here, mask=there)

    @triton.jit
    def _pool(
        x,
        out,
        taps,
        total,
        sn,
        sc,
        sy,
        sx,
        H: tl.constexpr,
        W: tl.constexpr,
        C: tl.constexpr,
        HO: tl.constexpr,
        WO: tl.constexpr,
        KH: tl.constexpr,
        KW: tl.constexpr,
        SH: tl.constexpr,
        SW: tl.constexpr,
        PH: tl.constexpr,
        PW: tl.constexpr,
        BM: tl.constexpr,
        BC: tl.constexpr,
        EVEN: tl.constexpr,
    ):
        """The largest of each window, the first of equals, and which tap it was; NaN is larger than everything."""
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        n, at = m // (HO * WO), m % (HO * WO)
        there = (m < total)[:, None]
        if not EVEN:
            there = there & (c < C)[None, :]
        best = tl.full((BM, BC), -float("inf"), tl.float32)
        which = tl.zeros((BM, BC), tl.int8)
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                y, z = at // WO * SH - PH + i, at % WO * SW - PW + j
                ok = there & ((y >= 0) & (y < H) & (z >= 0) & (z < W))[:, None]
                here = x + (n.to(tl.int64) * sn + y * sy + z * sx)[:, None] + c[None, :] * sc
                value = tl.load(here, mask=ok, other=-float("inf")).to(tl.float32)
                better = (value > best) | (value != value)
                best, which = tl.where(better, value, best), tl.where(better, i * KW + j, which).to(tl.int8)
        place = m.to(tl.int64)[:, None] * C + c[None, :]
        tl.store(out + place, best, mask=there)
        tl.store(taps + place, which, mask=there)

    @triton.jit
    def _pool_back(
        g,
        taps,
        out,
        total,
        sn,
        sc,
        sy,
        sx,
        H: tl.constexpr,
        W: tl.constexpr,
        C: tl.constexpr,
        HO: tl.constexpr,
        WO: tl.constexpr,
        KH: tl.constexpr,
        KW: tl.constexpr,
        SH: tl.constexpr,
        SW: tl.constexpr,
        PH: tl.constexpr,
        PW: tl.constexpr,
        BM: tl.constexpr,
        BC: tl.constexpr,
        EVEN: tl.constexpr,
    ):
        """One pixel per line: the gradients of those windows whose largest it was."""
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        n, at = m // (H * W), m % (H * W)
        there = (m < total)[:, None]
        if not EVEN:
            there = there & (c < C)[None, :]
        total_here = tl.zeros((BM, BC), tl.float32)
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                y, z = at // W + PH - i, at % W + PW - j
                hit = (y >= 0) & (z >= 0) & (y % SH == 0) & (z % SW == 0) & (y // SH < HO) & (z // SW < WO)
                ok = there & hit[:, None]
                window = (n.to(tl.int64) * HO + y // SH) * WO + z // SW
                tap = tl.load(taps + window[:, None] * C + c[None, :], mask=ok, other=-1)
                here = g + (n.to(tl.int64) * sn + y // SH * sy + z // SW * sx)[:, None] + c[None, :] * sc
                ok = ok & (tap == i * KW + j)
                total_here += tl.load(here, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + m.to(tl.int64)[:, None] * C + c[None, :], total_here, mask=there)


Shape = tuple[int, int]


def geometry(shape: torch.Size, kernel: Shape, stride: Shape, padding: Shape) -> dict[str, int]:
    """The sizes that kernels ask for: of images [N, C, H, W], of what the windows give, and of the windows."""
    _, channels, height, width = shape
    out = [(size + 2 * p - k) // s + 1 for size, k, s, p in zip((height, width), kernel, stride, padding, strict=True)]
    names = ("H", "W", "C", "HO", "WO", "KH", "KW", "SH", "SW", "PH", "PW")
    return dict(zip(names, (height, width, channels, *out, *kernel, *stride, *padding), strict=True))


def new_images(shape: torch.Size, like: Tensor) -> Tensor:
    """Room for [N, C, H, W], channels last."""
    n, c, h, w = shape
    return like.new_empty(n, h, w, c).permute(0, 3, 1, 2)


def _tiles(lines: int, columns: int, numbers: int = TILE) -> tuple[Shape, Shape]:
    """The grid of programs, and how many lines and columns each of them takes."""
    wide = power(columns, 1, 128)
    tall = max(1, numbers // wide)
    return (triton.cdiv(lines, tall), triton.cdiv(columns, wide)), (tall, wide)


class _Patches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Shape, stride: Shape, padding: Shape) -> Tensor:
        ctx.shape, ctx.how = x.shape, (kernel, stride, padding)
        size = geometry(x.shape, *ctx.how)
        columns = -(-size["KH"] * size["KW"] * size["C"] // 4) * 4  # tensor cores want rows of whole 16 bytes
        out = x.new_empty(x.shape[0], size["HO"], size["WO"], columns)
        lines = x.shape[0] * size["HO"] * size["WO"]
        grid, (tall, wide) = _tiles(lines, columns)
        _im2col[grid](x, out, lines, *x.stride(), **size, K=columns, BM=tall, BK=wide)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return unpatched(grad.contiguous(), ctx.shape, *ctx.how), None, None, None


def unpatched(grad: Tensor, shape: torch.Size, kernel: Shape, stride: Shape, padding: Shape) -> Tensor:
    """The way back of `patches`: each pixel gets the sum of what its patches say, [N, C, H, W]."""
    size, out = geometry(shape, kernel, stride, padding), new_images(shape, grad)
    lines = shape[0] * size["H"] * size["W"]
    grid, (tall, wide) = _tiles(lines, size["C"])
    _col2im[grid](grad, out, lines, **size, K=grad.shape[-1], BM=tall, BC=wide, EVEN=size["C"] % wide == 0)
    return out


def patches(x: Tensor, kernel: Shape, stride: Shape, padding: Shape) -> Tensor:
    """[N, C, H, W] to [N, H', W', K], K being kh * kw * C filled up with zeros to a multiple of four."""
    found: Tensor = _Patches.apply(x, kernel, stride, padding)
    return found


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Shape, stride: Shape, padding: Shape) -> Tensor:
        ctx.shape, ctx.how = x.shape, (kernel, stride, padding)
        size = geometry(x.shape, *ctx.how)
        out = new_images(torch.Size((*x.shape[:2], size["HO"], size["WO"])), x)
        taps = torch.empty_like(out, dtype=torch.int8)
        lines = x.shape[0] * size["HO"] * size["WO"]
        grid, (tall, wide) = _tiles(lines, size["C"], TILE // 2)
        _pool[grid](x, out, taps, lines, *x.stride(), **size, BM=tall, BC=wide, EVEN=size["C"] % wide == 0)
        ctx.save_for_backward(taps)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (taps,) = ctx.saved_tensors
        size, out = geometry(ctx.shape, *ctx.how), new_images(ctx.shape, grad)
        lines = ctx.shape[0] * size["H"] * size["W"]
        grid, (tall, wide) = _tiles(lines, size["C"], TILE // 2)
        _pool_back[grid](grad, taps, out, lines, *grad.stride(), **size, BM=tall, BC=wide, EVEN=size["C"] % wide == 0)
        return out, None, None, None


def max_pool(x: Tensor, kernel: Shape, stride: Shape, padding: Shape) -> Tensor:
    """`F.max_pool2d` without dilation; at most 127 taps."""
    found: Tensor = _MaxPool.apply(x, kernel, stride, padding)
    return found
