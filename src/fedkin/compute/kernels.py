"""Our own GPU kernels, for what PyTorch's do at a fraction of the memory's speed: BatchNorm of many rows, and the whole
update of a step in one pass. Those for images stand in `windows` and `convolutions`.

Written in Triton, which comes with PyTorch's CUDA builds; where it is missing or does not work `usable` says no and
everything runs on PyTorch's own operations. Images lie channels-last, so neighbouring threads read neighbouring
channels.
"""

# Triton has no types, and its kernels read their annotations themselves: no `from __future__ import annotations`.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import os
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedkin.compute.optim import SGD, Adam, Optimiser

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for a CPU
    triton = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, slowly: for tests


def usable(t: Tensor) -> bool:
    """Can the kernels run on this tensor?"""
    possible = triton is not None and (t.is_cuda or INTERPRETED) and t.dtype in (torch.float32, torch.bfloat16)
    return possible and works(str(t.device))


@cache
def works(device: str) -> bool:
    """Does a kernel run there? Triton needs a GPU that it knows, and a C compiler."""
    row = torch.ones(1, 4, device=device)
    try:
        step(SGD(0.5), [row], [torch.ones_like(row)], [], torch.ones(1, device=device))
        return bool((row == 0.5).all())
    except Exception as error:
        why = f"{error}".strip().splitlines() or [type(error).__name__]
        instead = "PyTorch's own operations take their place, at about half the speed"
        warnings.warn(f"our GPU kernels do not run here ({why[0]}): {instead}", stacklevel=2)
        return False


if triton is not None:

    @triton.jit
    def _norm(
        x,
        y,
        valid,
        scale,
        shift,
        mean,
        var,
        means,
        factors,
        counts,
        momentum,
        eps,
        mean_row,
        var_row,
        P,
        C: tl.constexpr,
        HW: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        """BatchNorm of some channels of one row over its P = batch * height * width positions: three passes."""
        row = tl.program_id(0)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        start = row.to(tl.int64) * P * C
        samples = row * (P // HW)
        total, number = tl.zeros((BC,), tl.float32), tl.zeros((BP,), tl.float32)
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)
            weight = tl.load(valid + samples + p // HW, mask=p < P, other=0.0)
            ok = (p < P)[:, None] & (c < C)[None, :]
            value = tl.load(x + start + p[:, None] * C + c[None, :], mask=ok, other=0.0)
            total += tl.sum(value * weight[:, None], axis=0)
            number += weight
        count = tl.sum(number, axis=0)
        some = tl.maximum(count, 1.0)
        now = total / some
        spread = tl.zeros((BC,), tl.float32)
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)
            weight = tl.load(valid + samples + p // HW, mask=p < P, other=0.0)
            ok = (p < P)[:, None] & (c < C)[None, :]
            value = tl.load(x + start + p[:, None] * C + c[None, :], mask=ok, other=0.0)
            away = value - now[None, :]
            spread += tl.sum(away * away * weight[:, None], axis=0)
        spread = spread / some
        here = row * C + c
        moving = tl.where(count > 0, momentum, 0.0)
        mean += row.to(tl.int64) * mean_row
        running = tl.load(mean + c, mask=c < C, other=0.0)
        tl.store(mean + c, running + (now - running) * moving, mask=c < C)
        var += row.to(tl.int64) * var_row
        running = tl.load(var + c, mask=c < C, other=0.0)
        unbiased = spread * some / tl.maximum(some - 1.0, 1.0)
        tl.store(var + c, running + (unbiased - running) * moving, mask=c < C)
        factor = 1.0 / tl.sqrt(spread + eps)
        tl.store(means + here, now, mask=c < C)
        tl.store(factors + here, factor, mask=c < C)
        tl.store(counts + here, some, mask=c < C)
        wide = factor * tl.load(scale + here, mask=c < C, other=0.0)
        low = tl.load(shift + here, mask=c < C, other=0.0)
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)
            ok = (p < P)[:, None] & (c < C)[None, :]
            value = tl.load(x + start + p[:, None] * C + c[None, :], mask=ok, other=0.0)
            value = (value - now[None, :]) * wide[None, :] + low[None, :]
            tl.store(y + start + p[:, None] * C + c[None, :], value, mask=ok)

    @triton.jit
    def _norm_back(
        x,
        g,
        out,
        valid,
        scale,
        means,
        factors,
        counts,
        g_scale,
        g_shift,
        P,
        C: tl.constexpr,
        HW: tl.constexpr,
        BP: tl.constexpr,
        BC: tl.constexpr,
    ):
        """Two passes: the sums that all positions share, then each position's gradient."""
        row = tl.program_id(0)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        here = row * C + c
        start = row.to(tl.int64) * P * C
        samples = row * (P // HW)
        now = tl.load(means + here, mask=c < C, other=0.0)
        factor = tl.load(factors + here, mask=c < C, other=0.0)
        total, turned = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)
            ok = (p < P)[:, None] & (c < C)[None, :]
            value = tl.load(x + start + p[:, None] * C + c[None, :], mask=ok, other=0.0)
            grad = tl.load(g + start + p[:, None] * C + c[None, :], mask=ok, other=0.0)
            total += tl.sum(grad, axis=0)
            turned += tl.sum(grad * (value - now[None, :]) * factor[None, :], axis=0)
        tl.store(g_shift + here, total, mask=c < C)
        tl.store(g_scale + here, turned, mask=c < C)
        share = 1.0 / tl.load(counts + here, mask=c < C, other=1.0)
        wide = factor * tl.load(scale + here, mask=c < C, other=0.0)
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)
            ok = (p < P)[:, None] & (c < C)[None, :]
            weight = tl.load(valid + samples + p // HW, mask=p < P, other=0.0)
            value = tl.load(x + start + p[:, None] * C + c[None, :], mask=ok, other=0.0)
            grad = tl.load(g + start + p[:, None] * C + c[None, :], mask=ok, other=0.0)
            normal = (value - now[None, :]) * factor[None, :]
            common = (total[None, :] + normal * turned[None, :]) * (weight[:, None] * share[None, :])
            tl.store(out + start + p[:, None] * C + c[None, :], (grad - common) * wide[None, :], mask=ok)

    @triton.jit
    def _step(
        p,
        g,
        first,
        second,
        mask,
        anchor,
        mu,
        bias1,
        bias2,
        on,
        rates,
        scale,
        width,
        lr,
        decay,
        beta1,
        beta2,
        eps,
        MOMENTUM: tl.constexpr,
        ADAM: tl.constexpr,
        DECAY: tl.constexpr,
        MASK: tl.constexpr,
        PULL: tl.constexpr,
        GATE: tl.constexpr,
        RATES: tl.constexpr,
        SCALE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """`optim.update` for a piece of one tensor of one row; a row that rests keeps its memory too."""
        row = tl.program_id(0)
        piece = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = piece < width
        if GATE:
            there = piece < tl.where(tl.load(on + row) > 0, width, 0)
        at = row.to(tl.int64) * width + piece
        w = tl.load(p + at, mask=there, other=0.0)
        d = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
        if SCALE:
            d = d * tl.load(scale + row)
        if DECAY:
            d += decay * w
        if PULL:
            d += tl.load(mu + row) * (w - tl.load(anchor + at, mask=there, other=0.0))
        moves = tl.full((BLOCK,), 1.0, tl.float32)
        if MASK:
            moves = tl.load(mask + at, mask=there, other=0).to(tl.float32)
            d = d * moves
        if MOMENTUM:
            d = beta1 * tl.load(first + at, mask=there, other=0.0) + d
            tl.store(first + at, d, mask=there)
        if ADAM:
            m = tl.load(first + at, mask=there, other=0.0)
            v = tl.load(second + at, mask=there, other=0.0)
            m = m + (1 - beta1) * (d - m)
            v = beta2 * v + (1 - beta2) * d * d
            tl.store(first + at, m, mask=there)
            tl.store(second + at, v, mask=there)
            d = (m / tl.load(bias1 + row)) / (tl.sqrt(v / tl.load(bias2 + row)) + eps)
        if MASK and (MOMENTUM or ADAM):
            d = d * moves
        if RATES:
            lr = tl.load(rates + row)
        tl.store(p + at, w - lr * d, mask=there)


def power(number: int, least: int, most: int) -> int:
    """The power of two that holds `number`, within bounds."""
    return max(least, min(most, 1 << (number - 1).bit_length()))


def _channels_last(x: Tensor) -> Tensor:
    """[N, C, ...] as a contiguous [N, positions, C]."""
    return x.unsqueeze(1).contiguous() if x.dim() == 2 else x.flatten(2).transpose(1, 2).contiguous()


def _as_before(flat: Tensor, shape: torch.Size) -> Tensor:
    return flat.squeeze(1) if len(shape) == 2 else flat.transpose(1, 2).unflatten(2, shape[2:])


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        mean: Tensor,
        var: Tensor,
        valid: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        flat = _channels_last(x)
        rows, channels = scale.shape
        kept = [torch.empty_like(scale, memory_format=torch.contiguous_format) for _ in range(3)]
        positions, each = flat.shape[0] // rows * flat.shape[1], flat.shape[1]
        ctx.size = {"P": positions, "C": channels, "HW": each, "BP": 256, "BC": power(channels, 1, 16)}
        grid = (rows, triton.cdiv(channels, ctx.size["BC"]))
        out, scale, valid = torch.empty_like(flat), scale.contiguous(), valid.contiguous()
        how = (momentum, eps, mean.stride(0), var.stride(0))
        _norm[grid](flat, out, valid, scale, shift.contiguous(), mean, var, *kept, *how, **ctx.size, num_warps=8)
        ctx.save_for_backward(flat, valid, scale, *kept)
        ctx.mark_non_differentiable(valid)
        return _as_before(out, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, valid, scale, means, factors, counts = ctx.saved_tensors
        g, out = _channels_last(grad), torch.empty_like(flat)
        g_scale, g_shift = torch.empty_like(scale), torch.empty_like(scale)
        grid = (len(scale), triton.cdiv(scale.shape[1], ctx.size["BC"]))
        _norm_back[grid](flat, g, out, valid, scale, means, factors, counts, g_scale, g_shift, **ctx.size, num_warps=8)
        return _as_before(out, grad.shape), g_scale, g_shift, None, None, None, None, None


def batch_norm(
    x: Tensor, scale: Tensor, shift: Tensor, mean: Tensor, var: Tensor, valid: Tensor, momentum: float, eps: float
) -> Tensor:
    """BatchNorm in training mode for R rows: x [R * B, C, ...], the others [R, C], `valid` [R, B] says which samples
    count. Changes the running `mean` and `var` in place."""
    found: Tensor = _BatchNorm.apply(x, scale, shift, mean, var, valid, momentum, eps)
    return found


def in_memory_order(t: Tensor) -> Tensor:
    """[R, ...] as [R, n], in the order in which `ways.Stack` lays tensors down: convolutions channels-last."""
    return (t.permute(0, 1, 3, 4, 2) if t.dim() == 5 else t).reshape(len(t), -1)


def step(
    opt: Optimiser,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    memory: Sequence[Sequence[Tensor]],
    taken: Tensor,
    mu: Tensor | None = None,
    anchors: Sequence[Tensor] | None = None,
    masks: Sequence[Tensor] | None = None,
    on: Tensor | None = None,
    rates: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """`optim.update` for tensors of R rows, in place, one pass over each: `taken`, `mu`, `on`, `rates` and `scale`,
    which gradients are multiplied by before anything else, are [R]."""
    adam = isinstance(opt, Adam)
    beta1, beta2, eps = (opt.beta1, opt.beta2, opt.eps) if isinstance(opt, Adam) else (opt.momentum, 0.0, 0.0)
    bias1 = bias2 = taken
    if adam:
        bias1, bias2 = ((1 - beta ** taken.double()).float() for beta in (beta1, beta2))
    numbers = [float(n) for n in (opt.lr, opt.weight_decay, beta1, beta2, eps)]
    how = {"MOMENTUM": not adam and beta1 > 0, "ADAM": adam, "DECAY": opt.weight_decay > 0, "MASK": masks is not None}
    how |= {"PULL": anchors is not None and mu is not None, "GATE": on is not None, "RATES": rates is not None}
    how["SCALE"] = scale is not None
    for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
        p, g = in_memory_order(param), in_memory_order(grad).contiguous()
        assert p.data_ptr() == param.data_ptr()

        def of(tensors: Sequence[Tensor] | None, number: int = number, p: Tensor = p) -> Tensor:
            return p if tensors is None else in_memory_order(tensors[number])

        first, second = of(memory[0] if memory else None), of(memory[1] if len(memory) > 1 else None)
        by_row = [p if t is None else t for t in (mu, bias1, bias2, on, rates, scale)]
        grid = (len(p), triton.cdiv(p.shape[1], 1024))
        tensors = (p, g, first, second, of(masks), of(anchors), *by_row)
        _step[grid](*tensors, p.shape[1], *numbers, **how, BLOCK=1024)
