"""A first look at a network, before anything trains: what noise it draws, and whether it keeps what no row has.

A few passes of a few samples through copies of it. What cannot be trained as its author means it is refused here.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from fedkin.compute.agreement import beside, close
from fedkin.compute.calls import Drawn
from fedkin.compute.carried import Generators, kept, refuse_carried, refuse_change
from fedkin.compute.forward import Unsupported
from fedkin.compute.layout import Layout
from fedkin.compute.vmapped import Copy, Probed, Vmapped, aliases
from fedkin.errors import UsageError

LOOKS = 3  # another thread of the process may have drawn from a generator meanwhile, but not every time


class _Moved(UsageError):
    """Somebody drew from a generator of the process."""


def look_at(plain: Vmapped, layout: Layout, row: Tensor, example: Tensor) -> Drawn:
    """UsageError if rows cannot be trained as this network is; else its noise, which `plain` is told, too."""
    for _ in range(LOOKS - 1):
        with suppress(_Moved):
            return _look(plain, layout, row, example)
    return _look(plain, layout, row, example)


def _look(plain: Vmapped, layout: Layout, row: Tensor, example: Tensor) -> Drawn:
    row = beside(layout, row)[:1]  # a slow copy of a layer would not move while both are the same
    fewer, others, more = (example[torch.arange(at, at + n) % len(example)] for at, n in ((0, 3), (3, 3), (0, 4)))

    def seen(copy: Copy, x: Tensor, train: bool = True, key: int = 1) -> Probed:
        return plain.probe(copy, layout.tensors(row.clone()), x, train, key)

    used, unused = plain.fresh(), plain.fresh()
    try:
        with torch.no_grad(), Generators() as generators:
            first = seen(plain.fresh(), fewer, train=False)
            _refuse_noise(plain.name, generators, "evaluation")
            buffers = [s.name for s in layout.slots if s.kind == "buffer"]
            refuse_change(plain.name, buffers, layout.tensors(row[0]), first.after)
            own = {*first.after, *(n for n, one in aliases(used.module).items() if one in first.after)}
            start = kept(used.module, own)
            few, many = seen(used, fewer), seen(plain.fresh(), more)
            _refuse_noise(plain.name, generators, "training")
            later, fresh = seen(used, others, key=2), seen(unused, others, key=2)
            behind, alone = (kept(m.module, own) for m in (used, unused))
            refuse_carried(used.module, plain.name, behind, alone, start)
            again = seen(used, fewer, train=False)
    except (RuntimeError, Unsupported) as error:
        shape = tuple(example.shape[1:])
        raise UsageError(f"{plain.name} cannot take samples of shape {shape}: {error}") from error
    alike = close(later.logits, fresh.logits) and close(again.logits, first.logits)
    if not alike or not all(close(t, fresh.after[n]) for n, t in later.after.items()):
        raise UsageError(
            f"{plain.name} gives something else when it sees the same samples again: it remembers what no client's row "
            "holds (keep it in float buffers, register_buffer), or draws random numbers, and not with PyTorch (use "
            "dropout, torch.rand or torch.randn, whose numbers are drawn from the run's seed)"
        )
    for call, shape in few.drawn.shapes.items():
        other = many.drawn.shapes.get(call, shape)
        grown = [i for i, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
        plain.drawn.axes[call] = grown[0] if grown else 0
    plain.guards = few.replaced
    plain.has_dropout = bool(few.drawn.shapes)
    plain.has_batch_norm |= few.drawn.normed
    return few.drawn


def _refuse_noise(name: str, generators: Generators, mode: str) -> None:
    if moved := generators.moved():
        raise _Moved(
            f"{name} draws random numbers from {moved} in {mode}, and they could not be repeated from a seed: use "
            "dropout, torch.rand or torch.randn while self.training, whose numbers are drawn from the run's seed, or "
            "draw them when the network is made"
        )
