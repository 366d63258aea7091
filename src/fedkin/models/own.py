"""Networks that users bring: how they start at each seed. What was given is copied, never changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedkin.errors import UsageError
from fedkin.models.inputs import one_tensor
from fedkin.parts import Part

Given = nn.Module | Callable[[], nn.Module]
"""A network, or its class or a function that makes one."""


def first_network(
    given: Given,
    seed: int,
    init: Literal["seed", "given"],
    parts: Sequence[Part] = (),
    example: Tensor | None = None,
) -> tuple[nn.Module, str | None]:
    """The network a run starts with, on the CPU, and what a user should know about its first weights. `parts`: of its
    samples, where it has several inputs; `example`: some of them, by which lazy layers find their sizes.

    A class or function is called with PyTorch's generator set to `seed`. Of a network, a copy: with init="seed" the
    parameters that learn are drawn anew by each layer's own `reset_parameters`, where every layer has one."""
    if not isinstance(given, nn.Module):
        made = _made(given, seed, init)
        _refuse_odd(made)  # before anything is hung on it
        made = one_tensor(made, parts)
        return _copied(_sized(made, seed, example)), None
    network, kind = _sized(one_tensor(_copied(given), parts), seed, example), type(given).__name__
    if init == "given":
        return network, f"{kind} starts with the weights it came with, the same at every seed (init='given')"
    odd = draw_anew(network, seed)
    if odd is None:
        which = kind if all(p.requires_grad for p in network.parameters()) else f"{kind} that are not frozen"
        return network, (
            f"the weights of {which} were drawn anew from seed {seed}, as those of FedKin's networks are "
            "(init='given' keeps the ones that came with it)"
        )
    return network, (
        f"{kind} starts the same at every seed, so the spread over seeds leaves its first weights out: "
        f"{odd} has weights and no reset_parameters; give the class (model={kind}), or say "
        "init='given'"
    )


def draw_anew(network: nn.Module, seed: int) -> str | None:
    """Draw the parameters that learn anew, in place; frozen ones and their statistics keep their values. Nothing
    happens, and the odd module is named, where one with such parameters cannot do it. The global generator is left as
    it was."""
    resets: list[Callable[[], object]] = []
    containers: list[Callable[[], object]] = []  # what says how modules inside it begin, after these
    for name, module in network.named_modules():
        if not list(module.parameters(recurse=False)) and callable(reset := getattr(module, "reset_parameters", None)):
            containers.append(reset)
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if not callable(reset):
                return f"{name!r} ({type(module).__name__})" if name else "the network itself"
            resets.append(reset)
    kept = [*(p for p in network.parameters() if not p.requires_grad), *_kept_buffers(network)]
    frozen = [(t, t.detach().clone()) for t in kept]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for reset in [*resets, *reversed(containers)]:
            reset()
        for tensor, value in frozen:
            tensor.copy_(value)
    return None


def _kept_buffers(network: nn.Module) -> list[Tensor]:
    """What belongs to frozen parameters: those of the module itself or, where it has none, of what it stands in."""
    found: list[Tensor] = []
    for name, module in network.named_modules():
        own, path = list(module.parameters(recurse=False)), name
        while not own and path:
            path = path.rpartition(".")[0]
            own = list(network.get_submodule(path).parameters())
        learns = any(p.requires_grad for p in module.parameters(recurse=False))
        if not learns and not all(p.requires_grad for p in own):
            found += [b for b in module.buffers(recurse=False) if not is_lazy(b)]
    return found


def _made(make: Callable[[], nn.Module], seed: int, init: str) -> nn.Module:
    name = getattr(make, "__name__", repr(make))
    if not callable(make):
        raise UsageError(f"model={make!r}: give a network's name, an nn.Module, or its class or a function making one")
    if init == "given":
        raise UsageError(f"init='given' keeps the weights of a network; {name} makes one at every seed: leave init out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            network = make()
        except TypeError as error:
            raise UsageError(
                f"model={name} is called without arguments, which failed ({error}): give model=lambda: {name}(...)"
            ) from error
    if not isinstance(network, nn.Module):
        raise UsageError(f"model={name} made a {type(network).__name__}, not an nn.Module")
    return network


def _lazy(network: nn.Module) -> bool:
    return any(is_lazy(t) for t in (*network.parameters(), *network.buffers()))


def _sized(network: nn.Module, seed: int, example: Tensor | None) -> nn.Module:
    """Lazy layers take their sizes from a first pass, and their first weights from the seed."""
    if example is None or not _lazy(network):
        return network
    training = network.training
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            network.eval()(example.contiguous())
        except Exception as error:  # a layer may raise anything
            raise UsageError(
                f"{type(network).__name__} cannot take samples of shape {tuple(example.shape[1:])}: {error}"
            ) from error
    return network.train(training)


def _refuse_odd(network: nn.Module) -> None:
    """What a copy would not do, or could not be copied."""
    kind = type(network).__name__
    if any(isinstance(m, torch.jit.ScriptModule) for m in network.modules()):
        raise UsageError(
            f"{kind} is compiled by torch.jit, or holds a part that is, and such code cannot be given the weights of "
            "every client: give the nn.Module that it was made from"
        )
    for name, parameter in network.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UsageError(
                f"parameter {name!r} of {kind} has a hook on its gradient, which copies for the clients would not "
                "have: change the gradient in the forward pass (a torch.autograd.Function), or by a backward hook of "
                "its module (register_full_backward_hook)"
            )


def _copied(network: nn.Module) -> nn.Module:
    _refuse_odd(network)
    if any(is_lazy(b) for b in network.buffers()):
        raise UsageError(
            f"{type(network).__name__} has a lazy BatchNorm that has no size yet, and PyTorch cannot copy it: run it "
            "once on a few samples before, or give its class"
        )
    try:
        return copy.deepcopy(network).cpu()
    except Exception as error:  # a module may hold anything
        raise UsageError(
            f"{type(network).__name__} cannot be copied, and every client needs a copy ({error}); an old "
            "torch.nn.utils.weight_norm does this, one of torch.nn.utils.parametrizations does "
            "not"
        ) from error
