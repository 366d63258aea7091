"""All rows trained as one batched program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import kernels, keys
from fedkin.compute.forward import Context, Out
from fedkin.compute.losses import total
from fedkin.compute.optim import Pull, shortening, update
from fedkin.compute.work import Work, dropout_keys, on_device


class Stack:
    """The working tensors of R rows, sorted by steps so that those still training are always a prefix.

    Gradients are taken with respect to these per-layer tensors and never through slices of the wide rows. Made once
    for a kind of work; `load` fills it for each job (its addresses stay, which a captured graph relies on)."""

    def __init__(self, work: Work, rows: int) -> None:
        device, learn = work.rows.device, work.learn

        def like(tensors: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
            return {n: _place(rows, tensors[n].shape[1:], tensors[n].dtype, device) for n in names}

        parts = work.layout.tensors(work.rows)
        self.params = like(parts, list(parts))
        self.memory = [list(like(parts, learn).values()) for _ in range(work.opt.buffers)]
        self.taken = torch.zeros(rows, device=device)
        self.held = (
            [] if work.plan.share is None else list(like(parts, learn).values())
        )  # gradients until the weights move
        self.masks = None if work.mask is None else list(like(work.layout.tensors(work.mask), learn).values())
        self.anchors = None if work.anchor is None else list(like(parts, learn).values())
        self.mu = None if work.mu is None else torch.zeros(rows, device=device)
        self.rates = None if work.rates is None else torch.zeros(rows, device=device)
        self.given = [like(term.given, list(term.given)) for term in work.terms]

    def load(self, work: Work, order: Sequence[int]) -> None:
        """Fill with the rows of `work` in this order; places beyond them keep whatever they hold and rest."""
        index, count = _places(order, work.rows.device), len(order)

        def fill(places: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
            for place, t in zip(places, tensors, strict=True):
                place[:count].copy_(t if isinstance(index, slice) else t[index])

        def chosen(rows: Tensor) -> list[Tensor]:
            parts = work.layout.tensors(rows)
            return [parts[name] for name in work.learn]

        if self.held:
            torch._foreach_zero_(self.held)
        fill(self.params.values(), work.layout.tensors(work.rows).values())
        if work.moments is None:
            for tensors in self.memory:
                torch._foreach_zero_(tensors)
            self.taken.zero_()
        else:
            for tensors, buffer in zip(self.memory, work.moments.buffers, strict=True):
                fill(tensors, chosen(buffer))
            fill([self.taken], [work.moments.steps])
        if self.masks is not None and work.mask is not None:
            fill(self.masks, chosen(work.mask))
        if self.anchors is not None and work.anchor is not None:
            fill(self.anchors, chosen(work.anchor))
        if self.mu is not None and work.mu is not None:
            fill([self.mu], [work.mu])
        if self.rates is not None and work.rates is not None:
            fill([self.rates], [work.rates])
        for mine, term in zip(self.given, work.terms, strict=True):
            fill(mine.values(), term.given.values())

    def write_back(self, work: Work, order: Sequence[int]) -> None:
        index, count = _places(order, work.rows.device), len(order)
        where = {slot.name: slice(slot.start, slot.stop) for slot in work.layout.slots}
        for name, t in self.params.items():
            work.rows[index, where[name]] = t[:count].reshape(count, -1)
        if work.moments is not None:
            for buffer, tensors in zip(work.moments.buffers, self.memory, strict=True):
                for name, t in zip(work.learn, tensors, strict=True):
                    buffer[index, where[name]] = t[:count].reshape(count, -1)
            work.moments.steps[index] = self.taken[:count]


def _places(order: Sequence[int], device: torch.device) -> Tensor | slice:
    """The rows in this order; as they stand, if that is the order."""
    if list(order) == list(range(len(order))):
        return slice(None)
    return torch.as_tensor(list(order), device=device)


def _place(rows: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for one tensor of each row; convolution kernels with channels last, the order of the patches."""
    if len(shape) == 4:
        out, channels, height, width = shape
        return torch.empty(rows, out, height, width, channels, dtype=dtype, device=device).permute(0, 1, 4, 2, 3)
    return torch.empty(rows, *shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class Batch:
    """One step's samples for R rows: indices [R, B], how many count [R], augmentation [R, B], dropout keys [R]; and,
    where several batches go into an update, their shares in it [R] and whether it follows [R]."""

    chosen: Tensor
    size: Tensor
    moves: Tensor | None = None
    noise: Tensor | None = None
    share: Tensor | None = None
    ends: Tensor | None = None


Loss = Callable[[dict[str, Tensor], Tensor, Tensor, "Tensor | None", "Tensor | None", list[dict[str, Tensor]]], Tensor]


def loss_of(work: Work, rows: int) -> Loss:
    """The losses of `rows` rows as one function of tensors. Padded samples weigh nothing."""
    forward, source, terms, dtype, train = work.forward, work.source, list(work.terms), work.dtype, not work.measure

    def loss(
        params: dict[str, Tensor],
        chosen: Tensor,
        size: Tensor,
        moves: Tensor | None,
        noise: Tensor | None,
        given: list[dict[str, Tensor]],
    ) -> Tensor:
        batch = chosen.shape[1]
        flat = chosen.reshape(-1)
        y = source.labels(flat)
        y = y.view(rows, batch, *y.shape[1:])
        valid = torch.arange(batch, device=y.device) < size.unsqueeze(1)
        x = source.batch(flat, None if moves is None else moves.reshape(-1))
        out = forward(params, x, rows, Context(train, valid, noise, dtype))
        seen = Out(out.features, out.logits, valid)
        return total(terms, seen, y, given).where(valid, 0.0).sum(1) / size.clamp(min=1)

    return loss


def step_rows(work: Work, stack: Stack, active: int, loss: Loss, batch: Batch, gated: bool) -> Tensor:
    """One step of the first `active` rows; returns their losses [active]. `gated`: some of them may be resting.

    Where the work only measures, nothing moves and the squared norms of the gradients are returned instead."""
    leaves = {name: t[:active].detach().requires_grad_(name in work.learn) for name, t in stack.params.items()}
    given = [{k: v[:active] for k, v in mine.items()} for mine in stack.given]
    values = loss(leaves, batch.chosen, batch.size, batch.moves, batch.noise, given)
    learn = [leaves[name] for name in work.learn]
    weighed = values if batch.share is None else values * batch.share
    grads: Sequence[Tensor] = torch.autograd.grad(weighed.sum(), learn, materialize_grads=True)
    if work.measure:
        return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in grads]).sum(0)
    with torch.no_grad():
        moving = batch.size > 0
        if batch.ends is not None:
            moving, gated, held = batch.ends, True, [t[:active] for t in stack.held]
            torch._foreach_add_(held, list(grads))
            grads = held
        on = moving.float()
        stack.taken[:active] += on
        masks = None if stack.masks is None else [m[:active] for m in stack.masks]
        scale = None if work.clip is None else shortening(_norms(grads, masks), work.clip)
        own = [t.detach() for t in learn]
        if kernels.usable(learn[0]):
            _step_at_once(work, stack, active, own, grads, masks, on if gated else None, scale)
        else:
            _step_by_step(work, stack, active, own, grads, masks, on if gated else None, scale)
        if batch.ends is not None:
            for t in grads:
                t.masked_fill_(moving.view([-1] + [1] * (t.dim() - 1)), 0.0)
    return values.detach()


def _norms(grads: Sequence[Tensor], masks: Sequence[Tensor] | None) -> Tensor:
    """The norm of each row's gradient, [R]; what a mask holds does not count."""
    if masks is not None:
        grads = [g * m for g, m in zip(grads, masks, strict=True)]
    each = [torch.linalg.vector_norm(kernels.in_memory_order(g), dim=1) for g in grads]
    found: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return found


def _step_by_step(
    work: Work,
    stack: Stack,
    active: int,
    learn: Sequence[Tensor],
    grads: Sequence[Tensor],
    masks: Sequence[Tensor] | None,
    on: Tensor | None,
    scale: Tensor | None,
) -> None:
    """The update of a step by PyTorch's operations."""
    wide = [[-1] + [1] * (t.dim() - 1) for t in learn]
    if scale is not None:
        grads = [g * scale.view(w) for g, w in zip(grads, wide, strict=True)]
    pull = None
    if stack.anchors is not None and stack.mu is not None:
        mu = stack.mu[:active]
        pull = Pull([mu.view(w) for w in wide], [a[:active] for a in stack.anchors])
    gate = None if on is None else [on.view(w) for w in wide]
    memory = [[t[:active] for t in tensors] for tensors in stack.memory]
    taken = stack.taken[:active].clamp(min=1)
    rate = None if stack.rates is None else [stack.rates[:active].view(w) for w in wide]
    update(work.opt, learn, grads, memory, [taken.view(w) for w in wide], pull, masks, gate, rate)


def _step_at_once(
    work: Work,
    stack: Stack,
    active: int,
    learn: Sequence[Tensor],
    grads: Sequence[Tensor],
    masks: Sequence[Tensor] | None,
    on: Tensor | None,
    scale: Tensor | None,
) -> None:
    """The update of a step by our own kernel."""
    anchors = None if stack.anchors is None else [t[:active] for t in stack.anchors]
    memory = [[t[:active] for t in tensors] for tensors in stack.memory]
    mu, rates = (None if t is None else t[:active] for t in (stack.mu, stack.rates))
    taken = stack.taken[:active].clamp(min=1)
    kernels.step(work.opt, learn, grads, memory, taken, mu, anchors, masks, on, rates, scale)


def batched(work: Work) -> Tensor:
    """All rows in one program, op by op. At each step exactly the rows that still have data take part."""
    order = np.argsort(-work.steps, kind="stable")
    stack = Stack(work, len(order))
    stack.load(work, order.tolist())
    device = work.rows.device
    clients = work.client[order]
    table, sizes = on_device(work.plan.table[:, clients], device), on_device(work.plan.sizes[:, clients], device)
    moves = None if work.plan.moves is None else on_device(work.plan.moves[:, clients], device)
    noise = dropout_keys(work, order.tolist(), len(sizes))
    share, ends = (None if t is None else on_device(t[:, clients], device) for t in (work.plan.share, work.plan.ends))
    counts = (work.plan.sizes[:, clients] > 0).sum(1)
    sums = torch.zeros(len(order), device=device)
    functions: dict[int, Loss] = {}
    for s, active in enumerate(counts.tolist()):
        if active not in functions:
            functions[active] = loss_of(work, active)
        now = Batch(*(None if t is None else t[s, :active] for t in (table, sizes, moves, noise, share, ends)))  # type: ignore[arg-type]
        sums[:active] += step_rows(work, stack, active, functions[active], now, gated=False)
    stack.write_back(work, order.tolist())
    return mean_losses(work, order, sums)


def mean_losses(work: Work, order: keys.I64, sums: Tensor) -> Tensor:
    """Sums over steps in working order to means in the caller's order, on the CPU."""
    result = torch.zeros(len(order))
    result[torch.from_numpy(order)] = sums[: len(order)].cpu() / torch.from_numpy(np.maximum(work.steps[order], 1))
    return result
