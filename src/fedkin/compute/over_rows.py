"""PyTorch's layer functions under `vmap`, in a form that is faster over rows or knows which samples count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkin.compute import layers
from fedkin.compute.forward import Unsupported

if TYPE_CHECKING:
    from fedkin.compute.calls import Calls


def _linear(c: Calls, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.dim() == 0 or weight.dim() != 2:
        return F.linear(x, weight, bias)
    if x.dim() == 1:
        return _linear(c, x.unsqueeze(0), weight, bias).squeeze(0)
    found: Tensor = c.merged(lambda x, own, rows: layers.linear(x, own[0], own[1], rows, c.context), x, weight, bias)  # type: ignore[arg-type]
    return found


def _convolution(axes: int, transposed: bool = False) -> Callable[..., Tensor]:
    names = ("conv1d", "conv2d", "conv3d"), ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    func = getattr(F, names[transposed][axes - 1])

    def everywhere(value: Any) -> tuple[int, ...]:
        many = (value,) if isinstance(value, int) else tuple(value)
        return many * axes if len(many) == 1 else many

    def call(c: Calls, input: Tensor, weight: Tensor, bias: Tensor | None = None, *given: Any, **named: Any) -> Tensor:
        order: tuple[str, ...] = ("stride", "padding", "output_padding", "groups", "dilation")
        usual: dict[str, Any] = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
        if not transposed:
            order = ("stride", "padding", "dilation", "groups")
        how = {**usual, **dict(zip(order, given, strict=False)), **named}
        if input.dim() == axes + 1:  # one sample
            return call(c, input.unsqueeze(0), weight, bias, **{n: how[n] for n in order}).squeeze(0)
        stride, dilation = everywhere(how["stride"]), everywhere(how["dilation"])
        padding = layers.in_numbers(how["padding"], tuple(weight.shape[2:]), dilation)
        if padding is not None:
            padding = everywhere(padding)
        groups, dtype = int(how["groups"]), c.context.dtype

        def over(x: Tensor, own: list[Tensor | None], rows: int) -> Tensor:
            w, b = own
            assert w is not None
            if axes < 3 and not transposed and padding is not None and (rows == 1 or groups == 1):
                if axes == 2:
                    return layers.conv2d(x, w, b, stride, padding, dilation, groups, rows, c.context)  # type: ignore[arg-type]
                flat = ((1, *stride), (0, *padding), (1, *dilation))
                return layers.conv2d(x.unsqueeze(2), w.unsqueeze(3), b, *flat, groups, rows, c.context).squeeze(2)  # type: ignore[arg-type]
            x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
            if not transposed:
                return layers.grouped(
                    lambda x, w, b, g: func(x, w, b, stride, how["padding"], dilation, g), x, w, b, rows, (), groups
                )
            places = (stride, padding, everywhere(how["output_padding"]))
            return layers.grouped(lambda x, w, b, g: func(x, w, b, *places, g, dilation), x, w, b, rows, (), groups)

        found: Tensor = c.merged(over, input, weight, bias)
        return found

    return call


def _batch_norm(
    c: Calls,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    def over(x: Tensor, *own: Tensor | None) -> Tensor:
        rows, batch, channels = x.shape[:3]
        usual = (x.new_zeros, x.new_ones, x.new_ones, x.new_zeros)  # of statistics nobody keeps
        mean, var, scale, shift = (make(rows, channels) if t is None else t for t, make in zip(own, usual, strict=True))
        valid = c.context.valid
        if valid is not None and valid.shape[1] != batch:  # several pieces of each sample
            valid = valid.repeat_interleave(batch // valid.shape[1], 1)
        y = layers.batch_norm(x.flatten(0, 1), scale, shift, mean, var, training, momentum, eps, rows, valid)
        return y.reshape(rows, batch, *y.shape[1:])

    found: Tensor = c.over_rows(over, input, running_mean, running_var, weight, bias)
    return found


def _layer_norm(
    c: Calls,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    y = F.layer_norm(input.float(), shape, None, None, eps)
    return _affine(c, y, weight, bias, len(shape))


def _rms_norm(
    c: Calls, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    y = F.rms_norm(input.float(), tuple(normalized_shape), None, eps)
    return _affine(c, y, weight, None, len(normalized_shape))


def _affine(c: Calls, y: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int) -> Tensor:
    if (weight is None and bias is None) or y.dim() == dims:
        y = y if weight is None else y * weight
        return y if bias is None else y + bias
    found: Tensor = c.merged(lambda y, own, rows: layers.affine(y, own[0], own[1], rows, dims), y, weight, bias)
    return found


def _group_norm(
    c: Calls,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    found: Tensor = c.merged(
        lambda x, own, rows: layers.group_norm(x, num_groups, own[0], own[1], eps, rows), input, weight, bias
    )
    return found


def _instance_norm(
    c: Calls,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if running_mean is not None or not use_input_stats:
        raise Unsupported("instance norm with running statistics")
    return _group_norm(c, input, input.shape[1], weight, bias, eps)


def _embedding(
    c: Calls,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise Unsupported("an embedding with max_norm, scale_grad_by_freq or sparse")
    if input.dim() == 0:
        return _embedding(c, input.unsqueeze(0), weight, padding_idx).squeeze(0)
    found: Tensor = c.merged(
        lambda x, own, rows: layers.embedding(x, own[0], padding_idx, rows),  # type: ignore[arg-type]
        input,
        weight,
    )
    return found


def _embedding_bag(
    c: Calls,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    if input.dim() != 2 or padding_idx is not None:
        raise Unsupported("an embedding bag with offsets or padding")
    found = _embedding(c, input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    return found.amax(1) if mode == "max" else found.sum(1) if mode == "sum" else found.mean(1)


def _weight_norm(c: Calls, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = [i for i in range(v.dim()) if dim == -1 or i != dim % v.dim()]
    return v * (g / v.square().sum(others, keepdim=True).sqrt()) if others else v * (g / v.abs())


def _normalize(
    c: Calls, input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor:
    """Spectral norm writes its vectors so; those of a row that rests stay."""
    found = F.normalize(input, p, dim, eps)

    def written(new: Tensor, kept: Tensor) -> Tensor:
        valid = c.context.valid
        if valid is not None:
            new = torch.where(valid.any(1).view(-1, *[1] * (new.dim() - 1)), new, kept)
        return kept.copy_(new)

    return found if out is None else c.over_rows(written, found, out)


def _max_pool2d(
    c: Calls,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices or input.dim() != 4:
        pool: Any = F.max_pool2d
        return pool(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    kernel, step, around, apart = (layers.pair(v) for v in (kernel_size, stride or kernel_size, padding, dilation))
    return c.merged(lambda x, own, rows: layers.max_pool2d(x, kernel, step, around, apart, ceil_mode, c.rows), input)


def _view(c: Calls, x: Tensor, *shape: Any) -> Tensor:
    """Images lie channels-last here; the network may have been written for the other order."""
    return x.view(*shape) if isinstance(shape[0], torch.dtype) else x.reshape(*shape)


OVER_ROWS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
    F.conv_transpose1d: _convolution(1, transposed=True),
    F.conv_transpose2d: _convolution(2, transposed=True),
    F.conv_transpose3d: _convolution(3, transposed=True),
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.group_norm: _group_norm,
    F.instance_norm: _instance_norm,
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    torch._weight_norm: _weight_norm,
    F.normalize: _normalize,
    F.max_pool2d: _max_pool2d,
    torch.Tensor.view: _view,
}

KINDS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.instancenorm._InstanceNorm),
    *(nn.Embedding, nn.EmbeddingBag, nn.MaxPool2d, nn.RNNBase, nn.MultiheadAttention),
    *(nn.modules.dropout._DropoutNd,),
)
"""The modules that call these."""
