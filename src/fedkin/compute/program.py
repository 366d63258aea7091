"""A network as a program over rows: one forward pass for R models at once.

Activations keep the network's own shape with rows and batch merged, [R*B, ...], so everything without parameters
(ReLU, pooling, additions) runs as it stands; only layers with parameters have a rule that tells the rows apart. Frozen
parameters are constants of the program, one copy for all rows; a layer that is frozen as a whole runs once for all.
`trace` checks the program against the network itself; a network it cannot express is run by `Vmapped`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedkin.compute import kernels
from fedkin.compute.agreement import AT_REST, differs, mixes_samples
from fedkin.compute.calls import users_line
from fedkin.compute.forward import Context, Forward, Out, Unsupported
from fedkin.compute.layers import RULES, LaterBias
from fedkin.compute.layout import Layout, inside
from fedkin.compute.noise import NOISE, REFUSED
from fedkin.compute.probing import look_at
from fedkin.compute.vmapped import Vmapped, aliases


def trace(model: nn.Module, layout: Layout, example: Tensor) -> Forward:
    """The fastest form of this network: a checked `Program`, else `Vmapped`, whose `together` says whether rows can
    share a pass."""
    plain = Vmapped(model, layout)
    row = layout.row(model).unsqueeze(0)
    drawn = look_at(plain, layout, row, example)
    try:
        program = Program(model, layout)
        if program.draws != len(drawn.shapes):
            raise Unsupported("it draws noise elsewhere than in nn.Dropout")
        plain.no_program = differs(program, plain, layout, row, example)
        if not plain.no_program:
            return program
    except _NO_PROGRAM as error:
        plain.no_program = _reason(error)
    try:
        plain.why_not = differs(plain, plain, layout, row, example)
        if plain.why_not.endswith(AT_REST):
            plain.guards = True
            plain.why_not = differs(plain, plain, layout, row, example)
        plain.together = not plain.why_not
        if not plain.together and mixes_samples(plain, layout, row, example):
            plain.why_not = "it mixes the samples of a batch"
    except _NO_VMAP as error:
        plain.together = False
        plain.why_not = _reason(error)
    return plain


def _reason(error: Exception) -> str:
    """The user's line where there is one, and the first sentence of what was wrong with it."""
    said, line = f"{error}".partition(". ")[0].strip(), users_line(error.__traceback__)
    return f"{line} ({said})" if line else said


_NO_PROGRAM = (
    *(Unsupported, fx.proxy.TraceError, TypeError, RuntimeError, NotImplementedError, AttributeError, KeyError),
    *(ValueError, IndexError),
)
_NO_VMAP = (Unsupported, RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError, IndexError)


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
        twin = copy.deepcopy(model).train()  # whatever tracing leaves on it
        graph = fx.Tracer().trace(twin)
        modules = dict(twin.named_modules())
        for name, module in modules.items():
            if module._backward_hooks or module._backward_pre_hooks:
                raise Unsupported(f"{name or 'the network'} has a backward hook")
        self.fixed = fixed_parameters(model, layout)
        self.aliases = aliases(model)
        self._alone: set[str] = set()  # layers that are frozen as a whole
        self._fixed_at: dict[torch.device, dict[str, Tensor]] = {}
        self.ops: list[Op] = []
        self.features = ""
        self.input = ""
        self.logits = ""
        for node in graph.nodes:
            if node.op == "placeholder":
                if self.input:
                    raise Unsupported("it takes several inputs")
                self.input = node.name
            elif node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    raise Unsupported("it gives more than one tensor")
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
                raise Unsupported(f"it uses {node.target} outside of a layer")
        if layout.head_name and not self.features:
            raise Unsupported(f"its head {layout.head_name!r} is not called as a module")
        self.features = self.features or self.logits
        ordered = _pool_before_relu(self.ops, keep={self.features, self.logits})
        noisy = itertools.count()
        self.ops = [replace(op, salt=next(noisy)) if type(op.layer) is nn.Dropout else op for op in ordered]
        layers = {type(op.layer) for op in self.ops}
        self.has_dropout = nn.Dropout in layers
        self.draws = sum(isinstance(op.layer, nn.Dropout) and op.layer.p > 0 for op in self.ops)  # in a training pass
        self.has_batch_norm = bool({nn.BatchNorm1d, nn.BatchNorm2d} & layers)
        self._on_gpu = _pool_before_bias(self.ops, keep={self.features, self.logits})
        self.signature = "\n".join(
            [f"{op.name} {op.inputs} {op.options} {op.target} {op.layer or op.function}" for op in self.ops]
            + [self.features, self.logits, *(f"{n} {_digest(t)}" for n, t in self.fixed.items())]
        )  # programs that read the same compute the same

    def _add_layer(self, node: fx.Node, target: str, layer: nn.Module) -> None:
        has_state = any(True for _ in layer.parameters()) or any(True for _ in layer.buffers())
        if type(layer) not in RULES and (has_state or "Dropout" in type(layer).__name__ or isinstance(layer, nn.RReLU)):
            raise Unsupported(f"{target} ({type(layer).__name__}) has no rule over rows")
        if node.kwargs or len(node.args) != 1:
            raise Unsupported(f"{target} is called with several arguments")
        own = [self.aliases.get(f"{target}.{name}", f"{target}.{name}") for name, _ in layer.named_parameters()]
        if own and all(name in self.fixed for name in own) and not isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            self._alone.add(target)  # BatchNorm tells rows apart even so: each has statistics of its own
        self.ops.append(Op(node.name, node.args, layer=copy.deepcopy(layer), target=target, users=len(node.users)))

    def _add_function(self, node: fx.Node, function: Callable[..., Any]) -> None:
        if function in NOISE or (isinstance(function, _Method) and function.draws):
            raise Unsupported(
                f"it calls {getattr(function, '__name__', getattr(function, 'name', function))} as a function"
            )
        self.ops.append(Op(node.name, node.args, dict(node.kwargs), function=function, users=len(node.users)))

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, rows: int, context: Context) -> Out:
        seen: dict[str, Any] = {self.input: x}
        fixed = self._fixed_on(x.device) if self.fixed else {}
        if fixed:
            tensors = {**tensors, **{n: t.expand(rows, *t.shape[1:]) for n, t in fixed.items()}}
        ours = rows > 1 and kernels.usable(x)
        if self.aliases:
            tensors = {**tensors, **{n: tensors[one] for n, one in self.aliases.items() if one in tensors}}
        for op in self._on_gpu if ours else self.ops:
            inputs = [_replaced(v, seen) for v in op.inputs]
            if op.layer is None:
                assert op.function is not None
                seen[op.name] = op.function(*inputs, **{k: _replaced(v, seen) for k, v in op.options.items()})
            elif type(op.layer) in RULES:
                here = replace(context, salt=op.salt) if type(op.layer) is nn.Dropout else context
                rule, alone = RULES[type(op.layer)], op.target in self._alone
                seen[op.name] = rule(
                    op.layer, op.target, fixed if alone else tensors, inputs[0], 1 if alone else rows, here
                )
            else:
                seen[op.name] = op.layer(inputs[0])
        features, logits = seen[self.features].float(), seen[self.logits].float()
        return Out(features.reshape(rows, features.shape[0] // rows, -1), logits.reshape(rows, -1, *logits.shape[1:]))

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

    @property
    def draws(self) -> bool:
        found = getattr(Tensor, self.name, None)
        return found in NOISE or found in REFUSED

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        if self.name == "view":  # images lie channels-last here; the network may have been written for the other order
            x = x.contiguous()
        return getattr(x, self.name)(*args, **options)


@dataclass(frozen=True)
class _Result:
    """What the operation of this name gave."""

    name: str


def _replaced(value: Any, seen: Mapping[str, Any]) -> Any:
    if isinstance(value, fx.Node | _Result):
        return seen[value.name]
    if isinstance(value, tuple):
        return tuple(_replaced(v, seen) for v in value)
    if isinstance(value, list):
        return [_replaced(v, seen) for v in value]
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
