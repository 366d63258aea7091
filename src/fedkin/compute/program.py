"""A network as a program over rows: one forward pass for R models at once.

Activations keep the network's own shape with rows and batch merged, [R*B, ...], so everything without parameters
(ReLU, pooling, additions) runs as it stands; only layers with parameters have a rule that tells the rows apart. Frozen
parameters are constants of the program, one copy for all rows; a layer that is frozen as a whole runs once for all.
`trace` checks the program against the network itself; a network it cannot express is run by `Opaque`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedkin.compute import kernels
from fedkin.compute.forward import Context, Forward, Out, Unsupported
from fedkin.compute.layers import RULES, LaterBias
from fedkin.compute.layout import Layout, inside
from fedkin.compute.opaque import Opaque
from fedkin.errors import UsageError


def trace(model: nn.Module, layout: Layout, example: Tensor) -> Forward:
    """The fastest form of this network: a checked `Program`, else `Opaque`."""
    opaque = Opaque(model, layout)
    try:
        program = Program(model, layout)
        if _agree(program, opaque, layout, model, example):
            return program
    except (Unsupported, fx.proxy.TraceError, TypeError, RuntimeError, NotImplementedError, AttributeError, KeyError):
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
                    raise Unsupported
                self.input = node.name
            elif node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    raise Unsupported
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
                raise Unsupported
        if layout.head_name and not self.features:
            raise Unsupported
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
            raise Unsupported  # its noise has no key
        has_state = any(True for _ in layer.parameters()) or any(True for _ in layer.buffers())
        if has_state and type(layer) not in RULES:
            raise Unsupported
        if node.kwargs or len(node.args) != 1:
            raise Unsupported
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
        ours = rows > 1 and kernels.usable(x)
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
            changed.append(Op(op.name, (_Result(f"{op.name} raw"),), layer=LaterBias(), target=before.target))
        else:
            changed.append(op)
    return changed
