"""Layers with parameters, which have to tell the rows apart: each written once, for networks that are programs over
rows (`RULES`, by the kind of module) and for those that run under `vmap` (`functions`).

Activations are [R*B, ...], rows and batch merged; parameters are [R, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkin.compute import convolutions, draws, kernels, windows
from fedkin.compute.forward import Context, Unsupported
from fedkin.compute.patches import patches
from fedkin.compute.rowmm import row_matmul
from fedkin.errors import UsageError

# ---------------------------------------------------------------- what they compute


def conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    rows: int,
    c: Context,
) -> Tensor:
    x, w, b = x.to(c.dtype), w.to(c.dtype), None if b is None else b.to(c.dtype)
    how = (stride, padding, dilation)
    if rows == 1:
        return F.conv2d(x, w[0], None if b is None else b[0], *how, groups)
    out, batch, kernel = w.shape[1], x.shape[0] // rows, (w.shape[3], w.shape[4])
    if groups != 1 or any(d != 1 for d in dilation):
        return grouped(F.conv2d, x, w, b, rows, how, groups)
    height, width = _sizes(x, kernel, stride, padding)
    if convolutions.fits(x, w, batch * height * width):
        y = convolutions.convolve(x, w, stride, padding)
        return y if b is None else _add_bias(y, b, rows, c)
    columns, height, width = patches(x, kernel, stride, padding)
    columns = columns.reshape(rows, batch * height * width, -1)
    taps = w.permute(0, 1, 3, 4, 2).reshape(rows, out, -1)
    if columns.shape[2] > taps.shape[2]:
        taps = F.pad(taps, (0, columns.shape[2] - taps.shape[2]))
    y = row_matmul(columns, taps)
    if b is not None:
        y = y + b.unsqueeze(1)
    return y.view(rows * batch, height, width, out).permute(0, 3, 1, 2)


def grouped(
    convolve: Callable[..., Tensor],
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    rows: int,
    how: tuple[Any, ...],
    groups: int,
) -> Tensor:
    """Any of PyTorch's convolutions as one of `rows` times as many groups. `how`: what stands before the groups."""
    wide = x.reshape(rows, -1, *x.shape[1:]).transpose(0, 1)
    y = convolve(wide.flatten(1, 2), w.flatten(0, 1), None if b is None else b.flatten(), *how, groups * rows)
    batch, *sizes = wide.shape[0], *y.shape[2:]
    return y.reshape(batch, rows, -1, *sizes).transpose(0, 1).reshape(rows * batch, -1, *sizes)


def _sizes(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> list[int]:
    """Height and width of a convolution's result."""
    how = zip(x.shape[2:], kernel, stride, padding, strict=True)
    return [(size + 2 * p - k) // s + 1 for size, k, s, p in how]


def _add_bias(x: Tensor, bias: Tensor, rows: int, c: Context) -> Tensor:
    wide = bias.to(c.dtype)[:, None, :, None, None]
    return (x.view(rows, -1, *x.shape[1:]) + wide).view(x.shape)


def linear(x: Tensor, w: Tensor, b: Tensor | None, rows: int, c: Context) -> Tensor:
    w = w.to(c.dtype)
    if rows == 1:
        return F.linear(x.to(c.dtype), w[0], None if b is None else b[0].to(c.dtype))
    flat = x.reshape(rows, -1, x.shape[-1]).to(c.dtype)
    y = row_matmul(flat, w)
    if b is not None:
        y = y + b.unsqueeze(1).to(c.dtype)
    return y.view(*x.shape[:-1], -1)


def batch_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    var: Tensor,
    train: bool,
    momentum: float,
    eps: float,
    rows: int,
    valid: Tensor | None,
) -> Tensor:
    """Of the samples that count; `mean` and `var` follow them in place."""
    batch, channels = x.shape[0] // rows, x.shape[1]
    x = x.float()
    if rows == 1 and valid is None and x.numel() > channels:
        return F.batch_norm(x, mean[0], var[0], scale[0], shift[0], train, momentum, eps)
    view = x.reshape(rows, batch, channels, -1)
    if train:
        counted = torch.ones(rows, batch, device=x.device) if valid is None else valid.float()
        if rows > 1 and kernels.usable(x):
            return kernels.batch_norm(x, scale, shift, mean, var, counted, momentum, eps)
        weight = counted[:, :, None, None]
        count = weight.sum((1, 2, 3)).unsqueeze(1) * view.shape[3]  # [R, 1]
        count = count.clamp(min=1)
        now = (view * weight).sum((1, 3)) / count
        spread = ((view - now[:, None, :, None]).square() * weight).sum((1, 3)) / count
        with torch.no_grad():
            unbiased = spread * count / (count - 1).clamp(min=1)
            alive = (weight.sum((1, 2, 3)) > 0).unsqueeze(1)
            step = momentum * alive
            mean.add_((now.detach() - mean) * step)
            var.add_((unbiased.detach() - var) * step)
        if valid is not None:  # a row at rest would grow from layer to layer until nothing of it is finite
            spread = torch.where(alive, spread, 1.0)
    else:
        now, spread = mean, var
    factor = scale * torch.rsqrt(spread + eps)
    # Centre first: the rearranged form x * f - mean * f loses all digits in channels that hardly vary.
    y = (view - now[:, None, :, None]) * factor[:, None, :, None] + shift[:, None, :, None]
    return y.reshape(x.shape)


def group_norm(x: Tensor, groups: int, w: Tensor | None, b: Tensor | None, eps: float, rows: int) -> Tensor:
    y = F.group_norm(x.float(), groups, None, None, eps)
    flat = y.view(x.shape[0], x.shape[1], -1).transpose(1, 2)
    return affine(flat.contiguous(), w, b, rows, 1).transpose(1, 2).reshape(x.shape)


def affine(y: Tensor, w: Tensor | None, b: Tensor | None, rows: int, dims: int) -> Tensor:
    """y * w + b over its last `dims` axes."""
    if w is None and b is None:
        return y
    view = y.view(rows, -1, *y.shape[-dims:])
    if w is not None:
        view = view * w.unsqueeze(1)
    if b is not None:
        view = view + b.unsqueeze(1)
    return view.view(y.shape)


def embedding(x: Tensor, w: Tensor, padding: int | None, rows: int) -> Tensor:
    """`padding`: a word that is looked up and does not learn."""
    words = w.shape[1]
    offset = torch.arange(rows, device=x.device).repeat_interleave(x.shape[0] // rows) * words
    # An id without a word must not become a word of the next row: it is sent beyond all of them, which PyTorch refuses.
    own = torch.where((x >= 0) & (x < words), x + offset.view(-1, *[1] * (x.dim() - 1)), rows * words)
    try:
        found = F.embedding(own, w.reshape(rows * words, -1))
    except IndexError:
        raise UsageError(
            f"an id between {int(x.min())} and {int(x.max())} is looked up in an embedding with the rows "
            f"0..{words - 1}: give it more rows, or number the ids from 0"
        ) from None
    if padding is None:
        return found
    return torch.where((x == padding % words).unsqueeze(-1), found.detach(), found)


def max_pool2d(
    x: Tensor,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    ceil: bool,
    rows: int,
) -> Tensor:
    plain = dilation == (1, 1) and not ceil and math.prod(kernel) < 128
    if plain and rows > 1 and x.dim() == 4 and kernels.usable(x):
        return windows.max_pool(x, kernel, stride, padding)
    return F.max_pool2d(x, kernel, stride, padding, dilation, ceil)


def dropout(x: Tensor, p: float, c: Context) -> Tensor:
    if c.noise is None:
        raise UsageError("a network with dropout needs keys for its noise; train it through a cohort")
    kept = draws.uniform(c.noise + c.salt, x.numel() // len(c.noise)) >= p
    return x * kept.view(x.shape) / (1 - p) if p < 1 else x * 0.0


def pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def in_numbers(
    padding: str | int | tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...] | None:
    """A convolution's padding on both sides of each axis; None where the sides differ."""
    if padding == "valid":
        return (0,) * len(kernel)
    if isinstance(padding, str):
        whole = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return None if any(w % 2 for w in whole) else tuple(w // 2 for w in whole)
    return (padding,) * len(kernel) if isinstance(padding, int) else tuple(padding)


# ---------------------------------------------------------------- modules


Rule = Callable[[Any, str, Mapping[str, Tensor], Tensor, int, Context], Tensor]


def _conv2d(m: nn.Conv2d, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    padding = in_numbers(m.padding, m.kernel_size, m.dilation)
    if padding is None or m.padding_mode != "zeros":
        raise Unsupported(f"{name} pads in a way of its own")
    b = None if m.bias is None else t[f"{name}.bias"]
    how = (pair(m.stride), pair(padding), pair(m.dilation))
    return conv2d(x, t[f"{name}.weight"], b, *how, m.groups, rows, c)


class LaterBias(nn.Module):
    """The bias of a convolution, added after what follows it."""


def _bias(m: LaterBias, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    return _add_bias(x, t[f"{name}.bias"], rows, c)


def _linear(m: nn.Linear, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    return linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"), rows, c)


def _batch_norm(
    m: nn.BatchNorm1d | nn.BatchNorm2d, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context
) -> Tensor:
    if m.momentum is None or not m.track_running_stats or not m.affine:
        raise Unsupported(f"{name} has no running statistics or no weights")
    scale, shift, mean, var = (t[f"{name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var"))
    return batch_norm(x, scale, shift, mean, var, c.train, m.momentum, m.eps, rows, c.valid)


def _layer_norm(m: nn.LayerNorm, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    y = F.layer_norm(x.float(), m.normalized_shape, None, None, m.eps)
    return affine(y, t.get(f"{name}.weight"), t.get(f"{name}.bias"), rows, len(m.normalized_shape))


def _group_norm(m: nn.GroupNorm, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    return group_norm(x, m.num_groups, t.get(f"{name}.weight"), t.get(f"{name}.bias"), m.eps, rows)


def _embedding(m: nn.Embedding, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    if m.max_norm is not None:
        raise Unsupported(f"{name} changes its weights as it is used (max_norm)")
    return embedding(x, t[f"{name}.weight"], m.padding_idx, rows)


def _max_pool(m: nn.MaxPool2d, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    if m.return_indices:
        raise Unsupported(f"{name} gives places besides")
    kernel, stride, padding, dilation = (pair(v) for v in (m.kernel_size, m.stride, m.padding, m.dilation))
    return max_pool2d(x, kernel, stride, padding, dilation, m.ceil_mode, rows)


def _dropout(m: nn.Dropout, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    return dropout(x, m.p, c) if c.train and m.p > 0 else x


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
