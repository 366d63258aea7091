"""PyTorch's functions as a user's forward pass calls them, carried out for rows and with noise that can be repeated.

While a network runs, `Calls` sees every call of a PyTorch function. Under `vmap`, layers that have a faster form over
rows, or must know which samples count, are computed by that (`layers`, `recurrent`, `attention`); everything else is
left to `vmap`. Noise, in both forms and row by row, is a function of the row's key and of how many calls drew noise
before this one; numbers that cannot be drawn that way are refused with the line that asked for them.
"""

from __future__ import annotations

import linecache
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedkin.compute import draws, layers
from fedkin.compute.attention import multi_head, scaled_dot_product
from fedkin.compute.forward import Context, Unsupported
from fedkin.compute.outside import outside, shared
from fedkin.compute.recurrent import recurrent
from fedkin.errors import UsageError

_TORCH, _OURS = str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep


@dataclass
class Drawn:
    """What a network was seen to draw: the shape of each call's noise; and, found by comparing two numbers of samples,
    which axis of it are the samples."""

    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    axes: dict[int, int] = field(default_factory=dict)
    normed: bool = False  # statistics over samples


class Calls(TorchFunctionMode):
    """One forward pass: of `rows` rows under `vmap`, or, where `row` is None, of a single one as it is."""

    def __init__(self, network: str, context: Context, drawn: Drawn, row: Tensor | None = None, rows: int = 1) -> None:
        super().__init__()
        self.network, self.context, self.drawn, self.row, self.rows = network, context, drawn, row, rows
        self.noisy = 0  # calls so far

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NOISE:
            return NOISE[func](self, *args, **kwargs)
        if func in REFUSED:
            raise self._refusal(func)
        if func is F.batch_norm and (kwargs.get("training") or any(a is True for a in args[5:6])):
            self.drawn.normed = True
        if func in COMPOSED:
            with self:  # what it calls is seen as well
                return COMPOSED[func](*args, **kwargs)
        if self.row is not None and func in OVER_ROWS:
            return OVER_ROWS[func](self, *args, **kwargs)
        return func(*args, **kwargs)

    # ------------------------------------------------------------ rows

    def over_rows(self, function: Callable[..., Any], *given: Tensor | None) -> Any:
        return outside(self.row, function, *given)  # type: ignore[arg-type]

    def merged(
        self, layer: Callable[[Tensor, list[Tensor | None], int], Tensor], x: Tensor, *own: Tensor | None
    ) -> Any:
        """`layer(x [R*B, ...], own parameters [R, ...], rows)`; one set of parameters for all rows is as one row."""

        def over(x: Tensor, *own: Tensor | None) -> Tensor:
            alone = len(x) > 1 and all(shared(t) for t in own)
            mine = [t[:1] if alone and t is not None else t for t in own]
            y = layer(x.flatten(0, 1), mine, 1 if alone else len(x))
            return y.reshape(*x.shape[:2], *y.shape[1:])

        return self.over_rows(over, x, *own)

    # ------------------------------------------------------------ noise

    def draw(self, like: Tensor, shape: Sequence[int], normal: bool = False) -> Tensor:
        """[*shape] numbers in [0, 1), or from N(0, 1); each row's own under `vmap`. Padded samples change nothing for
        the others: numbers are counted sample by sample."""
        context, call, shape = self.context, self.noisy, tuple(int(n) for n in shape)
        self.noisy += 1
        self.drawn.shapes[call] = shape
        if context.noise is None:
            raise UsageError("a network with dropout needs keys for its noise; train it through a cohort")
        keys, count = context.noise + call, math.prod(shape)
        at = self.drawn.axes.get(call, 0) if shape else 0
        order = (shape[at], *shape[:at], *shape[at + 1 :]) if shape else ()

        def over(_: Tensor) -> Tensor:
            if normal:
                found = draws.normal(torch.zeros((), dtype=torch.int64, device=keys.device), draws.mix(keys), count)
            else:
                found = draws.uniform(keys, count)
            wide = found.view(len(keys), *order)
            return wide.movedim(1, at + 1) if shape else wide

        found: Tensor = over(like)[0] if self.row is None else self.over_rows(over, like)
        return found

    def kept(self, x: Tensor, p: float, shape: Sequence[int]) -> Tensor | None:
        """Which numbers dropout leaves; None: all."""
        if p > 0:
            return self.draw(x, shape) >= p
        self.noisy += 1
        return None

    def _refusal(self, func: Any) -> UsageError:
        return UsageError(
            f"{self.network} draws random numbers with {_name(func)} ({users_line(sys._getframe())}), and they "
            "could not be repeated from a seed: use dropout (F.dropout or a Dropout module), torch.rand, "
            "torch.randn or bernoulli, whose numbers are drawn from the run's seed, or draw them when "
            "the network is made"
        )

    def needs_training(self, func: Any) -> None:
        if not self.context.train:
            raise UsageError(
                f"{self.network} draws random numbers in evaluation mode with {_name(func)} "
                f"({users_line(sys._getframe())}), so its answers could not be repeated: draw only "
                "while self.training"
            )


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def users_line(start: Any) -> str:
    """Where the user's own code stands, of a frame or a traceback: the innermost line that is neither PyTorch's nor
    ours. Nothing where there is none."""
    frames: list[tuple[str, int]] = []
    while start is not None:
        if isinstance(start, TracebackType):
            frames.insert(0, (start.tb_frame.f_code.co_filename, start.tb_lineno))
            start = start.tb_next
        else:
            frames.append((start.f_code.co_filename, start.f_lineno))
            start = start.f_back
    for file, line in frames:
        if not file.startswith((_TORCH, _OURS, "<")):
            return f"{Path(file).name} line {line}: {linecache.getline(file, line).strip()}"
    return ""


# ---------------------------------------------------------------- noise


def _dropout(c: Calls, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return _dropped(c, input, p if training else 0.0, input.shape, inplace)


def _dropout_of_channels(
    c: Calls, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _dropped(c, input, p if training else 0.0, _channels(input), inplace)


def _dropout1d(c: Calls, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if input.dim() == 2:  # one sample: channels and length
        return _dropped(c, input, p if training else 0.0, (len(input), 1), inplace)
    return _dropout_of_channels(c, input, p, training, inplace)


def _channels(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def _dropped(c: Calls, x: Tensor, p: float, shape: Sequence[int], inplace: bool) -> Tensor:
    kept = c.kept(x, p, shape)
    if kept is None:
        return x
    found = x * kept / (1 - p) if p < 1 else x * 0.0
    return x.copy_(found) if inplace else found


ALPHA = 1.7580993408473766  # SELU's value far below zero, negated


def _alpha_dropout(c: Calls, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    return _alpha_dropped(c, input, p if training else 0.0, input.shape, inplace)


def _feature_alpha(c: Calls, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    return _alpha_dropped(c, input, p if training else 0.0, _channels(input), inplace)


def _alpha_dropped(c: Calls, x: Tensor, p: float, shape: Sequence[int], inplace: bool) -> Tensor:
    """What goes takes SELU's lowest value; mean and variance stay as they were."""
    kept = c.kept(x, p, shape)
    if kept is None:
        return x
    scale = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
    found = x * (kept * scale) + ((kept.to(x.dtype) - 1) * (ALPHA * scale) + ALPHA * scale * p)
    return x.copy_(found) if inplace else found


def _sized(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _rand(normal: bool) -> Callable[..., Tensor]:
    func = torch.randn if normal else torch.rand

    def drawn(c: Calls, *size: Any, **how: Any) -> Tensor:
        c.needs_training(func)
        size = _sized(size or (how.pop("size"),))
        place = torch.empty((), device=how.get("device"))
        return c.draw(place, size, normal).to(device=how.get("device"), dtype=how.get("dtype"))

    return drawn


def _rand_like(normal: bool) -> Callable[..., Tensor]:
    def drawn(c: Calls, x: Tensor, **how: Any) -> Tensor:
        c.needs_training(torch.randn_like if normal else torch.rand_like)
        return c.draw(x, x.shape, normal).to(how.get("dtype") or x.dtype)

    return drawn


def _bernoulli(c: Calls, x: Tensor, p: float | None = None, **_: Any) -> Tensor:
    c.needs_training(torch.bernoulli)
    return (c.draw(x, x.shape) < (x if p is None else p)).to(x.dtype)


def _bernoulli_(c: Calls, x: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
    c.needs_training(torch.Tensor.bernoulli_)
    return _filled(c, x, (c.draw(x, x.shape) < p).to(x.dtype))


def _uniform_(c: Calls, x: Tensor, low: float = 0.0, high: float = 1.0, **how: Any) -> Tensor:
    c.needs_training(torch.Tensor.uniform_)
    low, high = how.get("from", low), how.get("to", high)
    return _filled(c, x, (low + (high - low) * c.draw(x, x.shape)).to(x.dtype))


def _normal_(c: Calls, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    c.needs_training(torch.Tensor.normal_)
    return _filled(c, x, (mean + std * c.draw(x, x.shape, normal=True)).to(x.dtype))


def _filled(c: Calls, x: Tensor, drawn: Tensor) -> Tensor:
    """In place where the tensor is the row's own; under `vmap` it may be one for all, and the result counts."""
    return x.copy_(drawn) if c.row is None else drawn


Noise = Callable[..., Any]
NOISE: dict[Any, Noise] = {
    F.dropout: _dropout,
    torch.dropout: lambda c, x, p, train: _dropout(c, x, p, train),
    torch.dropout_: lambda c, x, p, train: x.copy_(_dropout(c, x, p, train)),
    F.dropout1d: _dropout1d,
    F.dropout2d: _dropout_of_channels,
    F.dropout3d: _dropout_of_channels,
    torch.feature_dropout: lambda c, x, p, train: _dropout_of_channels(c, x, p, train),
    F.alpha_dropout: _alpha_dropout,
    torch.alpha_dropout: lambda c, x, p, train: _alpha_dropout(c, x, p, train),
    F.feature_alpha_dropout: _feature_alpha,
    torch.feature_alpha_dropout: lambda c, x, p, train: _feature_alpha(c, x, p, train),
    F.scaled_dot_product_attention: scaled_dot_product,
    torch.rand: _rand(normal=False),
    torch.randn: _rand(normal=True),
    torch.rand_like: _rand_like(normal=False),
    torch.randn_like: _rand_like(normal=True),
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.Tensor.uniform_: _uniform_,
    torch.Tensor.normal_: _normal_,
    **{
        getattr(torch._VF, kind): lambda c, *given, kind=kind: recurrent(c, kind, *given)
        for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
}
REFUSED: frozenset[Any] = frozenset(
    [
        *(torch.randint, torch.randint_like, torch.randperm, torch.multinomial, torch.poisson, torch.normal),
        *(torch.binomial, torch.rrelu, torch.rrelu_, torch.native_dropout),
        *(F.rrelu, F.gumbel_softmax, F.fractional_max_pool2d, F.fractional_max_pool3d),
        *(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices),
        *(torch.Tensor.random_, torch.Tensor.exponential_, torch.Tensor.geometric_, torch.Tensor.cauchy_),
        *(torch.Tensor.log_normal_, torch.Tensor.multinomial),
    ]
)
COMPOSED: dict[Any, Callable[..., Any]] = {F.multi_head_attention_forward: multi_head}


# ---------------------------------------------------------------- layers over rows


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
