"""Convolutions of many rows on a GPU that never write their patches down: the products gather them as they go.

A batched product of patches moves each pixel of an image 25 times through memory for a 5x5 kernel, and that, not
arithmetic, is what a small network's step then waits for. Here a program holds a tile of the result and reads the
pixels it needs, which lie in the cache. Images and kernels lie channels-last; columns are ordered (height, width,
channel).
"""

# Triton has no types, and its kernels read their annotations themselves: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedkin.compute import kernels
from fedkin.compute.kernels import power
from fedkin.compute.windows import Shape, geometry, new_images, unpatched

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for a CPU
    triton = None

if triton is not None:

    @triton.jit
    def _forward(
        x,
        w,
        out,
        M,
        N,
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
        BN: tl.constexpr,
        BK: tl.constexpr,
        HOW: tl.constexpr,
    ):
        """out[row, m, o] = sum over k of patch[row, m, k] * w[row, o, k]; m: a position of an image of the row."""
        K: tl.constexpr = KH * KW * C
        row = tl.program_id(2).to(tl.int64)
        m = tl.program_id(0) * BM + tl.arange(0, BM)
        o = tl.program_id(1) * BN + tl.arange(0, BN)
        n, at = m // (HO * WO), m % (HO * WO)
        top, left = at // WO * SH - PH, at % WO * SW - PW
        corner = x + (((row * (M // (HO * WO)) + n) * H + top) * W + left) * C
        there = m < M
        kernel = w + row * N * K + o.to(tl.int64) * K
        total = tl.zeros((BM, BN), tl.float32)
        for begin in range(0, K, BK):
            k = begin + tl.arange(0, BK)
            tap, c = k // C, k % C
            i, j = tap // KW, tap % KW
            ok = there[:, None] & (k < K)[None, :]
            if PH + PW > 0:
                y, z = top[:, None] + i[None, :], left[:, None] + j[None, :]
                ok = ok & (y >= 0) & (y < H) & (z >= 0) & (z < W)
            a = tl.load(corner[:, None] + ((i * W + j) * C + c)[None, :], mask=ok, other=0.0)
            b = tl.load(kernel[None, :] + k[:, None], mask=(k < K)[:, None] & (o < N)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=HOW)
        place = (row * M + m)[:, None] * N + o[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=there[:, None] & (o < N)[None, :])

    @triton.jit
    def _kernel_gradient(
        x,
        g,
        out,
        M,
        N,
        PIECE,
        PIECES,
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
        BN: tl.constexpr,
        BK: tl.constexpr,
        HOW: tl.constexpr,
    ):
        """out[row, piece, o, k] = sum over the positions m of a piece of g[row, m, o] * patch[row, m, k]."""
        K: tl.constexpr = KH * KW * C
        row, piece = tl.program_id(2).to(tl.int64) // PIECES, tl.program_id(2) % PIECES
        k = tl.program_id(0) * BK + tl.arange(0, BK)
        o = tl.program_id(1) * BN + tl.arange(0, BN)
        tap, c = k // C, k % C
        i, j = tap // KW, tap % KW
        shift = (i * W + j) * C + c
        images = row * (M // (HO * WO))
        total = tl.zeros((BK, BN), tl.float32)
        for begin in range(0, PIECE, BM):
            m = piece * PIECE + begin + tl.arange(0, BM)
            there = (begin + tl.arange(0, BM) < PIECE) & (m < M)
            n, at = m // (HO * WO), m % (HO * WO)
            top, left = at // WO * SH - PH, at % WO * SW - PW
            ok = there[None, :] & (k < K)[:, None]
            if PH + PW > 0:
                y, z = top[None, :] + i[:, None], left[None, :] + j[:, None]
                ok = ok & (y >= 0) & (y < H) & (z >= 0) & (z < W)
            corner = x + (((images + n) * H + top) * W + left) * C
            a = tl.load(corner[None, :] + shift[:, None], mask=ok, other=0.0)
            b = tl.load(g + (row * M + m)[:, None] * N + o[None, :], mask=there[:, None] & (o < N)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=HOW)
        place = ((row * PIECES + piece) * N + o)[None, :] * K + k[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=(k < K)[:, None] & (o < N)[None, :])

    @triton.jit
    def _image_gradient(
        g,
        w,
        out,
        M,
        N,
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
        BN: tl.constexpr,
        BK: tl.constexpr,
        HOW: tl.constexpr,
    ):
        """out[row, p, c] = sum over taps and o of g[row, where the tap saw p, o] * w[row, tap, c, o]; stride 1."""
        row = tl.program_id(2).to(tl.int64)
        p = tl.program_id(0) * BM + tl.arange(0, BM)
        c = tl.program_id(1) * BN + tl.arange(0, BN)
        n, at = p // (H * W), p % (H * W)
        y, z = at // W + PH, at % W + PW
        there = p < M
        corner = g + ((row * (M // (H * W)) + n) * (HO * WO) + y * WO + z) * N
        kernel = w + (row * (KH * KW * C) + c) * N
        total = tl.zeros((BM, BN), tl.float32)
        parts = tl.cdiv(N, BK)
        for step in range(0, KH * KW * parts):
            tap = step // parts
            o = step % parts * BK + tl.arange(0, BK)
            i, j = tap // KW, tap % KW
            ok = there & (y >= i) & (y < HO + i) & (z >= j) & (z < WO + j)
            here = corner[:, None] + (o - (i * WO + j) * N)[None, :]
            a = tl.load(here, mask=ok[:, None] & (o < N)[None, :], other=0.0)
            here = kernel[None, :] + (o + tap * C * N)[:, None]
            b = tl.load(here, mask=(o < N)[:, None] & (c < C)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=HOW)
        place = (row * M + p)[:, None] * C + c[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=there[:, None] & (c < C)[None, :])


@dataclass(frozen=True)
class Tile:
    """What a program holds of the result, how much it reads at a time, and how it is run. With two warps the gradient
    of the kernels stays on instructions that take both operands as they lie; with four they would be turned first."""

    lines: int
    wide: int  # columns, at most
    deep: int
    warps: int
    stages: int


FORWARD, KERNELS, IMAGES = Tile(128, 64, 32, 4, 3), Tile(64, 64, 16, 2, 4), Tile(128, 64, 32, 4, 3)  # for an H200
ENOUGH = 1024  # programs of two warps that keep a large GPU busy
POSITIONS_PER_OUTPUT = 4  # below so many kernels weigh more than patches, and one product of the patches is better


def fits(x: Tensor, w: Tensor, positions: int) -> bool:
    """Is this the faster way for the kernels w [R, O, C, kh, kw], `positions` of each row's result? In fp32 it is not:
    tensor cores have no such numbers."""
    coarse = x.dtype == torch.bfloat16 or torch.get_float32_matmul_precision() == "high" or kernels.INTERPRETED
    worth = w.shape[3:] != (1, 1) and positions >= POSITIONS_PER_OUTPUT * w.shape[1]
    return coarse and worth and kernels.usable(x) and _has_tensor_cores(str(x.device))


@cache
def _has_tensor_cores(device: str) -> bool:
    """Of the kind that take tf32 and bf16: since Ampere."""
    return kernels.INTERPRETED or torch.cuda.get_device_capability(device) >= (8, 0)


def _launch(kernel: Any, tile: Tile, grid: tuple[int, ...], given: tuple[Any, ...], sizes: dict[str, int]) -> None:
    how = "ieee" if kernels.INTERPRETED else "tf32"
    kernel[grid](*given, **sizes, HOW=how, num_warps=tile.warps, num_stages=tile.stages)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stride: Shape, padding: Shape) -> Tensor:
        rows, outputs, _, *kernel = w.shape
        ctx.how = ((kernel[0], kernel[1]), stride, padding)
        ctx.shape, x = x.shape, _laid_out(x)
        taps = _laid_out(w.flatten(0, 1)).unflatten(0, w.shape[:2])
        ctx.save_for_backward(x, w)
        size = _geometry(x, *ctx.how)
        out = x.new_empty(x.shape[0], size["HO"], size["WO"], outputs)
        positions = out.numel() // outputs // rows
        wide = power(outputs, 16, FORWARD.wide)
        grid = (triton.cdiv(positions, FORWARD.lines), triton.cdiv(outputs, wide), rows)
        sizes = {**size, "BM": FORWARD.lines, "BN": wide, "BK": FORWARD.deep}
        _launch(_forward, FORWARD, grid, (x, taps, out, positions, outputs), sizes)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, w = ctx.saved_tensors
        g = grad.permute(0, 2, 3, 1).contiguous()
        of_x = _of_images(g, w, ctx.shape, *ctx.how) if ctx.needs_input_grad[0] else None
        of_w = _of_kernels(x, g, w.shape, *ctx.how) if ctx.needs_input_grad[1] else None
        return of_x, of_w, None, None


def _geometry(x: Tensor, kernel: Shape, stride: Shape, padding: Shape) -> dict[str, int]:
    return geometry(x.permute(0, 3, 1, 2).shape, kernel, stride, padding)


def _laid_out(images: Tensor) -> Tensor:
    """[N, C, H, W] as [N, H, W, C]; three channels and the like get zeros up to whole 16 bytes, because three numbers
    are read one by one and four at once."""
    n, channels, height, width = images.shape
    last = images.permute(0, 2, 3, 1)
    if channels % 4 == 0 or channels < 3:
        return last.contiguous()
    wide = images.new_zeros(n, height, width, -(-channels // 4) * 4)
    wide[..., :channels] = last
    return wide


def _of_kernels(x: Tensor, g: Tensor, shape: torch.Size, kernel: Shape, stride: Shape, padding: Shape) -> Tensor:
    """The gradient of the kernels, [R, O, C, kh, kw], channels last."""
    rows, outputs, channels = shape[:3]
    size = _geometry(x, kernel, stride, padding)
    positions, columns = g.numel() // outputs // rows, math.prod(kernel) * size["C"]
    wide = power(outputs, 16, KERNELS.wide)
    tall = power(columns, 16, KERNELS.lines * KERNELS.wide // wide)
    tiles = triton.cdiv(columns, tall) * triton.cdiv(outputs, wide)
    pieces = 1
    while rows * tiles * pieces < ENOUGH and positions > 256 * pieces:
        pieces *= 2
    piece = triton.cdiv(positions, pieces * KERNELS.deep) * KERNELS.deep
    out = g.new_empty(rows, pieces, outputs, *kernel, size["C"])
    grid = (triton.cdiv(columns, tall), triton.cdiv(outputs, wide), rows * pieces)
    sizes = {**size, "BM": KERNELS.deep, "BN": wide, "BK": tall}
    _launch(_kernel_gradient, KERNELS, grid, (x, g, out, positions, outputs, piece, pieces), sizes)
    return (out[:, 0] if pieces == 1 else out.sum(1))[..., :channels].permute(0, 1, 4, 2, 3)


def _of_images(g: Tensor, w: Tensor, shape: torch.Size, kernel: Shape, stride: Shape, padding: Shape) -> Tensor:
    """The gradient of the images."""
    rows, outputs = w.shape[:2]
    if stride != (1, 1):
        flat = torch.bmm(g.view(rows, -1, outputs), w.permute(0, 1, 3, 4, 2).flatten(2))
        return unpatched(flat.view(*g.shape[:3], -1), shape, kernel, stride, padding)
    size, out = geometry(shape, kernel, stride, padding), new_images(shape, g)
    pixels = out.numel() // size["C"] // rows
    wide, deep = power(size["C"], 16, IMAGES.wide), power(outputs, 16, IMAGES.deep)
    grid = (triton.cdiv(pixels, IMAGES.lines), triton.cdiv(size["C"], wide), rows)
    turned = w.permute(0, 3, 4, 2, 1).contiguous()  # tensor cores want what is summed over side by side
    sizes = {**size, "BM": IMAGES.lines, "BN": wide, "BK": deep}
    _launch(_image_gradient, IMAGES, grid, (g, turned, out, pixels, outputs), sizes)
    return out


def convolve(x: Tensor, w: Tensor, stride: Shape, padding: Shape) -> Tensor:
    """Images x [R * B, C, H, W] of R rows with each row's own kernels w [R, O, C, kh, kw]: [R * B, O, H', W']."""
    found: Tensor = _Convolution.apply(x, w, stride, padding)
    return found
