"""Layers with parameters, which have to tell the rows apart: one rule each.

Activations are [R*B, ...], rows and batch merged; parameters are [R, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkin.compute import convolutions, draws, kernels, windows
from fedkin.compute.forward import Context, Unsupported
from fedkin.compute.patches import patches
from fedkin.compute.rowmm import row_matmul
from fedkin.errors import UsageError

Rule = Callable[[nn.Module, str, Mapping[str, Tensor], Tensor, int, Context], Tensor]


def _conv2d(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    assert isinstance(m, nn.Conv2d)
    w = t[f"{name}.weight"]
    b = None if m.bias is None else t[f"{name}.bias"]
    if isinstance(m.padding, str) or m.padding_mode != "zeros":
        raise Unsupported
    x, w, b = x.to(c.dtype), w.to(c.dtype), None if b is None else b.to(c.dtype)
    how = (m.stride, m.padding, m.dilation)
    if rows == 1:
        return F.conv2d(x, w[0], None if b is None else b[0], *how, m.groups)
    out, batch = m.out_channels, x.shape[0] // rows
    if m.groups != 1 or any(d != 1 for d in m.dilation):
        wide = x.reshape(rows, batch, *x.shape[1:]).transpose(0, 1).reshape(batch, -1, *x.shape[2:])
        y = F.conv2d(wide, w.flatten(0, 1), None if b is None else b.flatten(), *how, m.groups * rows)
        return y.view(batch, rows, out, *y.shape[2:]).transpose(0, 1).reshape(rows * batch, out, *y.shape[2:])
    if convolutions.fits(x, w, batch * math.prod(_sizes(m, x))):
        y = convolutions.convolve(x, w, _pair(m.stride), _pair(m.padding))
        return y if b is None else _add_bias(y, b, rows, c)
    columns, height, width = patches(x, m.kernel_size, m.stride, m.padding)
    columns = columns.reshape(rows, batch * height * width, -1)
    taps = w.permute(0, 1, 3, 4, 2).reshape(rows, out, -1)
    if columns.shape[2] > taps.shape[2]:
        taps = F.pad(taps, (0, columns.shape[2] - taps.shape[2]))
    y = row_matmul(columns, taps)
    if b is not None:
        y = y + b.unsqueeze(1)
    return y.view(rows * batch, height, width, out).permute(0, 3, 1, 2)


class LaterBias(nn.Module):
    """The bias of a convolution, added after what follows it."""


def _bias(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    return _add_bias(x, t[f"{name}.bias"], rows, c)


def _add_bias(x: Tensor, bias: Tensor, rows: int, c: Context) -> Tensor:
    wide = bias.to(c.dtype)[:, None, :, None, None]
    return (x.view(rows, -1, *x.shape[1:]) + wide).view(x.shape)


def _sizes(m: nn.Conv2d, x: Tensor) -> list[int]:
    """Height and width of a convolution's result."""
    how = zip(x.shape[2:], m.kernel_size, _pair(m.stride), (int(p) for p in m.padding), strict=True)
    return [(size + 2 * p - k) // s + 1 for size, k, s, p in how]


def _linear(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    w = t[f"{name}.weight"].to(c.dtype)
    b = t.get(f"{name}.bias")
    if rows == 1:
        return F.linear(x.to(c.dtype), w[0], None if b is None else b[0].to(c.dtype))
    flat = x.reshape(rows, -1, x.shape[-1]).to(c.dtype)
    y = row_matmul(flat, w)
    if b is not None:
        y = y + b.unsqueeze(1).to(c.dtype)
    return y.view(*x.shape[:-1], -1)


def _batch_norm(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    assert isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)
    if m.momentum is None or not m.track_running_stats or not m.affine:
        raise Unsupported
    scale, shift = t[f"{name}.weight"], t[f"{name}.bias"]
    mean, var = t[f"{name}.running_mean"], t[f"{name}.running_var"]
    batch, channels = x.shape[0] // rows, x.shape[1]
    x = x.float()
    if rows == 1 and c.valid is None and x.numel() > channels:
        return F.batch_norm(x, mean[0], var[0], scale[0], shift[0], c.train, m.momentum, m.eps)
    view = x.reshape(rows, batch, channels, -1)
    if c.train:
        counted = torch.ones(rows, batch, device=x.device) if c.valid is None else c.valid.float()
        if rows > 1 and kernels.usable(x):
            return kernels.batch_norm(x, scale, shift, mean, var, counted, m.momentum, m.eps)
        weight = counted[:, :, None, None]
        count = weight.sum((1, 2, 3)).unsqueeze(1) * view.shape[3]  # [R, 1]
        count = count.clamp(min=1)
        now = (view * weight).sum((1, 3)) / count
        spread = ((view - now[:, None, :, None]).square() * weight).sum((1, 3)) / count
        with torch.no_grad():
            unbiased = spread * count / (count - 1).clamp(min=1)
            alive = (weight.sum((1, 2, 3)) > 0).unsqueeze(1)
            step = m.momentum * alive
            mean.add_((now.detach() - mean) * step)
            var.add_((unbiased.detach() - var) * step)
    else:
        now, spread = mean, var
    factor = scale * torch.rsqrt(spread + m.eps)
    # Centre first: the rearranged form x * f - mean * f loses all digits in channels that hardly vary.
    y = (view - now[:, None, :, None]) * factor[:, None, :, None] + shift[:, None, :, None]
    return y.reshape(x.shape)


def _layer_norm(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    assert isinstance(m, nn.LayerNorm)
    y = F.layer_norm(x.float(), m.normalized_shape, None, None, m.eps)
    return _affine(y, name, t, rows, len(m.normalized_shape))


def _group_norm(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    assert isinstance(m, nn.GroupNorm)
    y = F.group_norm(x.float(), m.num_groups, None, None, m.eps)
    flat = y.view(x.shape[0], x.shape[1], -1).transpose(1, 2)
    return _affine(flat.contiguous(), name, t, rows, 1).transpose(1, 2).reshape(x.shape)


def _affine(y: Tensor, name: str, t: Mapping[str, Tensor], rows: int, dims: int) -> Tensor:
    if f"{name}.weight" not in t:
        return y
    view = y.view(rows, -1, *y.shape[-dims:])
    out = view * t[f"{name}.weight"].unsqueeze(1)
    if f"{name}.bias" in t:
        out = out + t[f"{name}.bias"].unsqueeze(1)
    return out.view(y.shape)


def _embedding(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    assert isinstance(m, nn.Embedding)
    if m.padding_idx is not None or m.max_norm is not None:
        raise Unsupported
    w = t[f"{name}.weight"]
    words = w.shape[1]
    offset = torch.arange(rows, device=x.device).repeat_interleave(x.shape[0] // rows) * words
    return F.embedding(x + offset.view(-1, *[1] * (x.dim() - 1)), w.reshape(rows * words, -1))


def _max_pool(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    assert isinstance(m, nn.MaxPool2d)
    how = [_pair(v) for v in (m.kernel_size, m.stride, m.padding)]
    plain = _pair(m.dilation) == (1, 1) and not m.ceil_mode and not m.return_indices and math.prod(how[0]) < 128
    if plain and rows > 1 and x.dim() == 4 and kernels.usable(x):
        return windows.max_pool(x, *how)
    pooled: Tensor = m(x)
    return pooled


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _dropout(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    assert isinstance(m, nn.Dropout)
    if not c.train or m.p == 0:
        return x
    if c.noise is None:
        raise UsageError("a network with dropout needs keys for its noise; train it through a cohort")
    kept = draws.uniform(c.noise + c.salt, x.numel() // rows) >= m.p
    return x * kept.view(x.shape) / (1 - m.p)


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: _conv2d,
    LaterBias: _bias,
    nn.Linear: _linear,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
    nn.Dropout: _dropout,
    nn.MaxPool2d: _max_pool,
}
