"""A network as a program over rows: one forward pass for R models at once.

Activations keep the network's own shape with rows and batch merged, [R*B, ...], so everything without parameters
(ReLU, pooling, additions) runs as it stands; only layers with parameters have a rule that tells the rows apart. Frozen
parameters are constants of the program, one copy for all rows; a layer that is frozen as a whole runs once for all.
`trace` checks the program against the network itself; a network it cannot express is run by `Opaque`.
"""

from __future__ import annotations

import copy
import hashlib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

from fedkin.compute import convolutions, kernels
from fedkin.compute.layout import Layout, check_output, inside
from fedkin.compute.patches import patches
from fedkin.compute.rowmm import row_matmul
from fedkin.errors import UsageError


@dataclass
class Out:
    """What a loss sees: features (the head's input) [R, B, F], logits [R, B, C], and which samples of a padded batch
    count [R, B] (none: all)."""

    features: Tensor
    logits: Tensor
    valid: Tensor | None = None


@dataclass(frozen=True)
class Context:
    """How to run: training or not; which samples of a padded batch count; dropout keys [R]; compute precision."""

    train: bool = False
    valid: Tensor | None = None  # bool [R, B]
    noise: Tensor | None = None  # int64 [R]
    dtype: torch.dtype = torch.float32
    compiled: bool = False
    salt: int = 0


class Forward(Protocol):
    """Anything that runs R rows of a network on [R*B, ...] inputs."""

    together: bool

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, rows: int, context: Context) -> Out: ...


def trace(model: nn.Module, layout: Layout, example: Tensor) -> Forward:
    """The fastest form of this network: a checked `Program`, else `Opaque`."""
    opaque = Opaque(model, layout)
    try:
        program = Program(model, layout)
        if _agree(program, opaque, layout, model, example):
            return program
    except (_Unsupported, fx.proxy.TraceError, TypeError, RuntimeError, NotImplementedError, AttributeError, KeyError):
        pass  # KeyError: a tensor that two layers share has one name in the row
    if not _repeats(opaque, layout, model, example) or opaque.stochastic:
        raise UsageError(
            f"{type(model).__name__} has noise in its forward pass that could not be repeated from a seed: use "
            "nn.Dropout (not F.dropout or Dropout2d) and no data-dependent Python control flow, or remove the noise"
        )
    opaque.together = opaque.together and _runs_together(opaque, layout, model, example)
    return opaque


def _repeats(opaque: Opaque, layout: Layout, model: nn.Module, example: Tensor) -> bool:
    """Does training mode say the same twice?"""
    row = layout.row(model).unsqueeze(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            first, second = (opaque(layout.tensors(row.clone()), example, 1, Context(train=True)) for _ in range(2))
        except RuntimeError as error:
            shape = tuple(example.shape[1:])
            raise UsageError(f"{type(model).__name__} cannot take samples of shape {shape}: {error}") from error
    return _close(first.logits, second.logits)


def _runs_together(opaque: Opaque, layout: Layout, model: nn.Module, example: Tensor) -> bool:
    """Can `vmap` run it? It refuses Python control flow that depends on data."""
    try:
        return _agree(opaque, opaque, layout, model, example)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False


def _agree(program: Forward, opaque: Forward, layout: Layout, model: nn.Module, example: Tensor) -> bool:
    """Two different rows, three samples each: the program must say what the network says."""
    one = layout.row(model)
    noise = torch.randn(2, layout.width, generator=torch.Generator().manual_seed(0))
    rows = one * (1 + 0.1 * noise)
    take = torch.arange(6) % len(example)
    x = example[take]
    with torch.no_grad():
        for train in (False, True):
            context = Context(train=train, noise=torch.zeros(2, dtype=torch.int64) if train else None)
            if train and getattr(opaque, "stochastic", False):
                continue
            mine_rows, ref_rows = rows.clone(), rows.clone()
            mine = program(layout.tensors(mine_rows), x, 2, context)
            for r in range(2):
                ref = opaque(layout.tensors(ref_rows[r : r + 1]), x[3 * r : 3 * r + 3], 1, context)
                for a, b in ((mine.logits[r], ref.logits[0]), (mine.features[r], ref.features[0])):
                    if a.shape != b.shape or not _close(a, b):
                        return False
            if not _close(mine_rows, ref_rows):  # running statistics
                return False
    return True


def _close(a: Tensor, b: Tensor) -> bool:
    """Close as a whole: BatchNorm over three samples magnifies the rounding of single entries."""
    return bool((a - b).norm() <= 1e-3 * b.norm() + 1e-6)


class _Unsupported(Exception):
    pass


# ---------------------------------------------------------------- layers with parameters: one rule each

Rule = Callable[[nn.Module, str, Mapping[str, Tensor], Tensor, int, Context], Tensor]


def _conv2d(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    assert isinstance(m, nn.Conv2d)
    w = t[f"{name}.weight"]
    b = None if m.bias is None else t[f"{name}.bias"]
    if isinstance(m.padding, str) or m.padding_mode != "zeros":
        raise _Unsupported
    if rows == 1:
        return F.conv2d(
            x.to(c.dtype),
            w[0].to(c.dtype),
            None if b is None else b[0].to(c.dtype),
            m.stride,
            m.padding,
            m.dilation,
            m.groups,
        )
    out, batch = m.out_channels, x.shape[0] // rows
    if m.groups != 1 or any(d != 1 for d in m.dilation):
        wide = x.reshape(rows, batch, *x.shape[1:]).transpose(0, 1).reshape(batch, -1, *x.shape[2:])
        flat_bias = None if b is None else b.reshape(-1).to(c.dtype)
        y = F.conv2d(
            wide.to(c.dtype),
            w.reshape(-1, *w.shape[2:]).to(c.dtype),
            flat_bias,
            m.stride,
            m.padding,
            m.dilation,
            m.groups * rows,
        )
        return y.view(batch, rows, out, *y.shape[2:]).transpose(0, 1).reshape(rows * batch, out, *y.shape[2:])
    x, w = x.to(c.dtype), w.to(c.dtype)
    if not c.compiled and convolutions.fits(x, w, batch * math.prod(_sizes(m, x))):
        y = convolutions.convolve(x, w, _pair(m.stride), _pair(m.padding))
        return y if b is None else _add_bias(y, b, rows, c)
    columns, height, width = patches(x, m.kernel_size, m.stride, m.padding, c.compiled)
    columns = columns.reshape(rows, batch * height * width, -1)
    taps = w.permute(0, 1, 3, 4, 2).reshape(rows, out, -1)
    if columns.shape[2] > taps.shape[2]:
        taps = F.pad(taps, (0, columns.shape[2] - taps.shape[2]))
    y = row_matmul(columns, taps)
    if b is not None:
        y = y + b.unsqueeze(1).to(c.dtype)
    return y.view(rows * batch, height, width, out).permute(0, 3, 1, 2)


class _Bias(nn.Module):
    """The bias of a convolution, added later."""


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
        raise _Unsupported
    scale, shift = t[f"{name}.weight"], t[f"{name}.bias"]
    mean, var = t[f"{name}.running_mean"], t[f"{name}.running_var"]
    batch, channels = x.shape[0] // rows, x.shape[1]
    x = x.float()
    if rows == 1 and c.valid is None and x.numel() > channels:
        return F.batch_norm(x, mean[0], var[0], scale[0], shift[0], c.train, m.momentum, m.eps)
    view = x.reshape(rows, batch, channels, -1)
    if c.train and rows > 1 and not c.compiled and kernels.usable(x):
        valid = torch.ones(rows, batch, device=x.device) if c.valid is None else c.valid.float()
        return kernels.batch_norm(x, scale, shift, mean, var, valid, m.momentum, m.eps)
    if c.train:
        counted = torch.ones(rows, batch, device=x.device) if c.valid is None else c.valid.float()
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
        raise _Unsupported
    w = t[f"{name}.weight"]
    words = w.shape[1]
    offset = torch.arange(rows, device=x.device).repeat_interleave(x.shape[0] // rows) * words
    return F.embedding(x + offset.view(-1, *[1] * (x.dim() - 1)), w.reshape(rows * words, -1))


def _max_pool(m: nn.Module, name: str, t: Mapping[str, Tensor], x: Tensor, rows: int, c: Context) -> Tensor:
    assert isinstance(m, nn.MaxPool2d)
    how = [_pair(v) for v in (m.kernel_size, m.stride, m.padding)]
    plain = _pair(m.dilation) == (1, 1) and not m.ceil_mode and not m.return_indices and math.prod(how[0]) < 128
    if plain and not c.compiled and rows > 1 and x.dim() == 4 and kernels.usable(x):
        return kernels.max_pool(x, *how)
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
    kept = keyed_uniform(c.noise + c.salt, x.numel() // rows) >= m.p
    return x * kept.view(x.shape) / (1 - m.p)


def keyed_uniform(keys: Tensor, count: int) -> Tensor:
    """[R, count] numbers in [0, 1), a function of each row's key alone (SplitMix64 on int64 tensors)."""
    # xor, not a product: a counter times a large number is cut to 32 bits by the compiler
    z = _mix(keys).unsqueeze(1) ^ torch.arange(1, count + 1, device=keys.device)
    return ((_mix(z) >> 40) & 0xFFFFFF).float() / float(1 << 24)


def _mix(z: Tensor) -> Tensor:
    z = z - 7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: _conv2d,
    _Bias: _bias,
    nn.Linear: _linear,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
    nn.Dropout: _dropout,
    nn.MaxPool2d: _max_pool,
}


# ---------------------------------------------------------------- the program


@dataclass(frozen=True)
class Op:
    """One node of the traced network: a layer, or a function of earlier results."""

    name: str
    inputs: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    layer: nn.Module | None = None
    target: str = ""
    function: Callable[..., Any] | None = None
    users: int = 1
    salt: int = 0  # tells the noise of one layer from that of another


class Program:
    """The traced network. `together` says that rows can share one pass."""

    together = True

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        graph = fx.Tracer().trace(model)
        modules = dict(model.named_modules())
        self.fixed = fixed_parameters(model, layout)
        self._alone: set[str] = set()  # layers that are frozen as a whole
        self._fixed_at: dict[torch.device, dict[str, Tensor]] = {}
        self.ops: list[Op] = []
        self.features = ""
        self.input = ""
        self.logits = ""
        for node in graph.nodes:
            if node.op == "placeholder":
                if self.input:
                    raise _Unsupported
                self.input = node.name
            elif node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    raise _Unsupported
                self.logits = node.args[0].name
            elif node.op == "call_module":
                target = str(node.target)
                if not self.features and inside(target, layout.head_name):
                    self.features = node.args[0].name
                self._add_layer(node, target, modules[target])
            elif node.op == "call_function":
                self._add_function(node, node.target)
            elif node.op == "call_method":
                self._add_function(node, _Method(str(node.target)))
            else:
                raise _Unsupported
        if layout.head_name and not self.features:
            raise _Unsupported
        self.features = self.features or self.logits
        ordered = _pool_before_relu(self.ops, keep={self.features, self.logits})
        self.ops = [replace(op, salt=i) for i, op in enumerate(ordered)]
        self._on_gpu = _pool_before_bias(self.ops, keep={self.features, self.logits})
        self.signature = "\n".join(
            [f"{op.name} {op.inputs} {op.options} {op.target} {op.layer or op.function}" for op in self.ops]
            + [self.features, self.logits, *(f"{n} {_digest(t)}" for n, t in self.fixed.items())]
        )  # programs that read the same compute the same

    def _add_layer(self, node: fx.Node, target: str, layer: nn.Module) -> None:
        if "Dropout" in type(layer).__name__ and type(layer) not in RULES:
            raise _Unsupported  # its noise has no key
        has_state = any(True for _ in layer.parameters()) or any(True for _ in layer.buffers())
        if has_state and type(layer) not in RULES:
            raise _Unsupported
        if node.kwargs or len(node.args) != 1:
            raise _Unsupported
        own = [f"{target}.{name}" for name, _ in layer.named_parameters()]
        if own and all(name in self.fixed for name in own) and not isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            self._alone.add(target)  # BatchNorm tells rows apart even so: each has statistics of its own
        self.ops.append(Op(node.name, node.args, layer=copy.deepcopy(layer), target=target, users=len(node.users)))

    def _add_function(self, node: fx.Node, function: Callable[..., Any]) -> None:
        self.ops.append(Op(node.name, node.args, dict(node.kwargs), function=function, users=len(node.users)))

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, rows: int, context: Context) -> Out:
        seen: dict[str, Any] = {self.input: x}
        fixed = self._fixed_on(x.device) if self.fixed else {}
        if fixed:
            tensors = {**tensors, **{n: t.expand(rows, *t.shape[1:]) for n, t in fixed.items()}}
        ours = rows > 1 and not context.compiled and kernels.usable(x)
        for op in self._on_gpu if ours else self.ops:
            inputs = [_look(v, seen) for v in op.inputs]
            if op.layer is None:
                assert op.function is not None
                seen[op.name] = op.function(*inputs, **{k: _look(v, seen) for k, v in op.options.items()})
            elif type(op.layer) in RULES:
                here = replace(context, salt=op.salt) if type(op.layer) is nn.Dropout else context
                rule, alone = RULES[type(op.layer)], op.target in self._alone
                seen[op.name] = rule(
                    op.layer, op.target, fixed if alone else tensors, inputs[0], 1 if alone else rows, here
                )
            else:
                seen[op.name] = op.layer(inputs[0])
        features, logits = seen[self.features].float(), seen[self.logits].float()
        return Out(features.reshape(rows, features.shape[0] // rows, -1), logits.view(rows, -1, logits.shape[-1]))

    def _fixed_on(self, device: torch.device) -> dict[str, Tensor]:
        """The frozen parameters there, each [1, ...]."""
        if device not in self._fixed_at:
            self._fixed_at[device] = {n: t.to(device).unsqueeze(0) for n, t in self.fixed.items()}
        return self._fixed_at[device]


def fixed_parameters(model: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The values of the frozen parameters, on the CPU, convolution kernels with channels last."""
    found = {n: p.detach().cpu() for n, p in model.named_parameters() if n in layout.frozen}
    return {
        n: t.clone(memory_format=torch.channels_last if t.dim() == 4 else torch.contiguous_format)
        for n, t in found.items()
    }


def frozen_digest(model: nn.Module, layout: Layout) -> str:
    """Of the frozen values, which never travel: two sides that build a network by its name must have the same."""
    return " ".join(f"{n} {_digest(t)}" for n, t in fixed_parameters(model, layout).items())


def _digest(t: Tensor) -> str:
    return hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class _Method:
    """`x.name(...)` as a function."""

    name: str

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        if self.name == "view":  # images lie channels-last here; the network may have been written for the other order
            x = x.contiguous()
        return getattr(x, self.name)(*args, **options)


@dataclass(frozen=True)
class _Result:
    """What the operation of this name gave."""

    name: str


def _look(value: Any, seen: Mapping[str, Any]) -> Any:
    if isinstance(value, fx.Node | _Result):
        return seen[value.name]
    if isinstance(value, tuple):
        return tuple(_look(v, seen) for v in value)
    if isinstance(value, list):
        return [_look(v, seen) for v in value]
    return value


def _pool_before_relu(ops: list[Op], keep: set[str]) -> list[Op]:
    """max(relu(x)) = relu(max(x)), and so are the gradients: pool first and rectify a quarter of the numbers."""
    ops = list(ops)
    for i in range(len(ops) - 1):
        first, second = ops[i], ops[i + 1]
        chained = first.users == 1 and len(second.inputs) == 1 and getattr(second.inputs[0], "name", "") == first.name
        seen = {first.name, second.name} & keep
        if isinstance(first.layer, nn.ReLU) and isinstance(second.layer, nn.MaxPool2d) and chained and not seen:
            ops[i] = replace(second, name=first.name, inputs=first.inputs)
            ops[i + 1] = replace(first, name=second.name, inputs=second.inputs)
    return ops


def _pool_before_bias(ops: list[Op], keep: set[str]) -> list[Op]:
    """max(x + b) = max(x) + b: add a convolution's bias to a quarter of the numbers."""
    changed: list[Op] = []
    for op in ops:
        before = changed[-1] if changed else None
        if (
            before is not None
            and isinstance(before.layer, nn.Conv2d)
            and before.layer.bias is not None
            and isinstance(op.layer, nn.MaxPool2d)
            and before.users == 1
            and before.name not in keep
            and getattr(op.inputs[0], "name", "") == before.name
        ):
            plain = copy.deepcopy(before.layer)
            plain.bias = None
            changed[-1] = replace(before, layer=plain)
            changed.append(replace(op, name=f"{op.name} raw"))
            changed.append(Op(op.name, (_Result(f"{op.name} raw"),), layer=_Bias(), target=before.target))
        else:
            changed.append(op)
    return changed


# ---------------------------------------------------------------- networks that cannot be traced


def _usual_order(t: Tensor) -> Tensor:
    """Channels first, as users write for; going flat settles the strides of axes of length 1 too."""
    return t.contiguous().flatten().view(t.shape)


class Opaque:
    """The network called as it is: one row directly, several under `vmap`. Frozen parameters are its own copy's."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._template = copy.deepcopy(model).cpu()
        self._layout = layout
        self._mine = threading.local()
        kinds = [type(m).__name__ for m in model.modules()]
        self.stochastic = any("Dropout" in k for k in kinds)
        self.has_batch_norm = any("BatchNorm" in k for k in kinds)
        self.together = not self.stochastic and not self.has_batch_norm

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, rows: int, context: Context) -> Out:
        x, tensors = _usual_order(x), {k: _usual_order(v) for k, v in tensors.items()}
        with torch.autocast(x.device.type, context.dtype, enabled=context.dtype != torch.float32):
            if rows == 1:
                features, logits = self._one({k: v[0] for k, v in tensors.items()}, x, context.train)
                features, logits = features.unsqueeze(0), logits.unsqueeze(0)
            else:
                batches = x.view(rows, -1, *x.shape[1:])
                features, logits = vmap(lambda t, b: self._one(t, b, context.train))(dict(tensors), batches)
        return Out(features.float(), logits.float())

    def _one(self, tensors: dict[str, Tensor], x: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        module, caught = self._own_copy(x.device)
        module.train(train)
        caught.clear()
        logits: Tensor = functional_call(module, tensors, (x,))
        check_output(module, logits, len(x))
        features = caught[0] if caught else logits
        return features.flatten(1), logits

    def _own_copy(self, device: torch.device) -> tuple[nn.Module, list[Tensor]]:
        """A copy for this thread: `functional_call` swaps a module's tensors while it runs."""
        key = str(device)
        copies: dict[str, tuple[nn.Module, list[Tensor]]] = getattr(self._mine, "copies", {})
        if key not in copies:
            module = copy.deepcopy(self._template).to(device)
            caught: list[Tensor] = []
            if self._layout.head_name:
                head = dict(module.named_modules())[self._layout.head_name]
                head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
            copies[key] = (module, caught)
            self._mine.copies = copies
        return copies[key]
