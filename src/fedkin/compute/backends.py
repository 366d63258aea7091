"""The ways to train R rows: one after another on worker threads, or all as one batched program.

Which is faster depends on the network, the batch and the device, so `choose` measures. They compute the same thing:
the tests hold each of them against a plain PyTorch loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import kernels
from fedkin.compute import random as keys
from fedkin.compute.batches import Plan, Source
from fedkin.compute.layout import Layout
from fedkin.compute.losses import Term, cross_entropy, is_plain, total
from fedkin.compute.optim import Moments, Optimiser, Pull, update
from fedkin.compute.program import Context, Forward, Out
from fedkin.compute.tape import Tape

Precision = Literal["fp32", "tf32", "bf16"]
WORTH_SHARING = 4_000_000  # multiplications in a step below which more than one thread only costs
CLEARLY = 0.8  # a way must take at most this share of a likelier one's time to be preferred: timings are noisy
WAYS = ("each", "threads", "batched", "graph", "compiled")


@dataclass
class Work:
    """A cohort's training job: R rows, changed in place. Row r trains on client `client[r]` of the plan."""

    forward: Forward
    layout: Layout
    rows: Tensor  # [R, D]
    client: keys.I64  # [R]
    source: Source
    plan: Plan
    opt: Optimiser
    learn: tuple[str, ...]
    terms: Sequence[Term] = field(default_factory=lambda: [cross_entropy()])
    mask: Tensor | None = None  # bool [R, D]
    mu: Tensor | None = None  # [R]
    anchor: Tensor | None = None  # [R, D]
    moments: Moments | None = None
    noise: keys.U64 | None = None  # [R]
    precision: Precision = "fp32"
    tape: Tape | None = None
    measure: bool = False  # change nothing; instead of losses give squared norms of the gradients, evaluation mode

    def __post_init__(self) -> None:
        self.steps = self.plan.steps[self.client]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def take(self, rows: Sequence[int], steps: int) -> Work:
        """A small copy of this job, to measure with."""
        index = torch.as_tensor(list(rows), device=self.rows.device)
        moments = self.moments
        if moments is not None:
            moments = Moments([b[index].clone() for b in moments.buffers], moments.steps[index].clone())
        small = replace(
            self,
            rows=self.rows[index].clone(),
            client=self.client[list(rows)],
            plan=self.plan.first(steps),
            terms=[t.rows(index) for t in self.terms],
            mask=None if self.mask is None else self.mask[index],
            mu=None if self.mu is None else self.mu[index],
            anchor=None if self.anchor is None else self.anchor[index],
            noise=None if self.noise is None else self.noise[list(rows)],
            moments=moments,
        )
        return small


# ---------------------------------------------------------------- one row after another


def each(work: Work, workers: int = 1) -> Tensor:
    """Train row by row, `workers` rows at a time on threads of one core each. Returns the mean loss, [R]."""
    order = np.argsort(-work.steps, kind="stable").tolist()
    if workers <= 1:
        losses = {r: _train_row(work, r, work.tape) for r in order}
    else:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = pool.map(lambda r: _train_row(work, r, work.tape and Tape.of(work.forward)), order)
            losses = dict(zip(order, found, strict=True))
    return torch.tensor([losses[r] for r in range(len(order))])


def _train_row(work: Work, r: int, tape: Tape | None) -> float:
    """All steps of one row, in place; returns its mean loss. Without autograd there is nothing to track."""
    with torch.inference_mode(tape is not None and is_plain(work.terms)):
        return _steps_of_row(work, r, tape)


def _steps_of_row(work: Work, r: int, tape: Tape | None) -> float:
    layout, source = work.layout, work.source
    own = {name: _channels_last(t.clone()) for name, t in layout.tensors(work.rows[r]).items()}
    learn = [own[name] for name in work.learn]
    names = frozenset(work.learn)

    def shaped(rows: Tensor) -> list[Tensor]:
        parts = layout.tensors(rows[r])
        return [parts[name] for name in work.learn]

    memory = _fresh_memory(work, learn) if work.moments is None else [shaped(b) for b in work.moments.buffers]
    taken = 0.0 if work.moments is None else float(work.moments.steps[r])
    masks = None if work.mask is None else shaped(work.mask)
    pull = None
    if work.anchor is not None and work.mu is not None and float(work.mu[r]):
        pull = Pull([float(work.mu[r])] * len(learn), shaped(work.anchor))
    given = [{k: v[r : r + 1] for k, v in term.given.items()} for term in work.terms]
    table, sizes = work.plan.table[:, work.client[r]], work.plan.sizes[:, work.client[r]]
    index = torch.from_numpy(np.ascontiguousarray(table)).to(source.device)
    moves = None
    if work.plan.moves is not None:
        moves = torch.from_numpy(np.ascontiguousarray(work.plan.moves[:, work.client[r]])).to(source.device)
    noise = dropout_keys(work, [r], len(sizes))
    value = torch.zeros((), device=source.device)
    if tape is None:
        for t in learn:
            t.requires_grad_()
    for s in range(int(work.steps[r])):
        chosen = index[s, : int(sizes[s])]
        x = source.batch(chosen, None if moves is None else moves[s, : int(sizes[s])])
        y = source.labels(chosen)
        if tape is not None:
            with torch.no_grad():
                loss, found = tape.gradients(own, names, x, partial(_loss_gradient, work.terms, y, given))
            grads = [found[n] if n in found else torch.zeros_like(t) for n, t in zip(work.learn, learn, strict=True)]
        else:
            context = Context(train=True, noise=None if noise is None else noise[s], dtype=work.dtype)
            out = work.forward({k: v.unsqueeze(0) for k, v in own.items()}, x, 1, context)
            loss = total(work.terms, out, y.unsqueeze(0), given).mean()
            grads = list(torch.autograd.grad(loss, learn, materialize_grads=True))
        taken += 1
        value += loss.detach()
        with torch.no_grad():
            update(work.opt, learn, grads, memory, taken, pull, masks)
    with torch.no_grad():
        for slot, t in zip(layout.tensors(work.rows[r]).values(), own.values(), strict=True):
            slot.copy_(t)
        if work.moments is not None:
            work.moments.steps[r] = taken
    return float(value) / max(int(work.steps[r]), 1)


def _loss_gradient(
    terms: Sequence[Term], y: Tensor, given: Sequence[Mapping[str, Tensor]], out: Out
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Plain cross-entropy in closed form (softmax - one-hot); anything else by autograd on the output alone."""
    if is_plain(terms):
        logits = out.logits[0]
        log_p = logits.log_softmax(1)
        picked = y.unsqueeze(1)
        loss = -log_p.gather(1, picked).mean()
        g = log_p.exp_().scatter_add_(1, picked, log_p.new_full((1, 1), -1.0).expand(len(y), 1)).div_(len(y))
        return loss, g, None
    with torch.enable_grad():
        leaf = Out(out.features.detach().requires_grad_(), out.logits.detach().requires_grad_())
        loss = total(terms, leaf, y.unsqueeze(0), given).mean()
        found: Sequence[Tensor | None] = torch.autograd.grad(loss, (leaf.logits, leaf.features), allow_unused=True)
    at_logits, at_features = found
    zeros = torch.zeros_like(out.logits[0])
    return loss.detach(), zeros if at_logits is None else at_logits[0], None if at_features is None else at_features[0]


def _channels_last(t: Tensor) -> Tensor:
    """Convolution kernels in the order the fast CPU kernels want, also where the channel axis has length 1."""
    return t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if t.dim() == 4 else t


def _fresh_memory(work: Work, learn: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[torch.zeros_like(t) for t in learn] for _ in range(work.opt.buffers)]


def dropout_keys(work: Work, rows: Sequence[int], steps: int) -> Tensor | None:
    """Dropout keys, int64 [S, len(rows)]."""
    if work.noise is None:
        return None
    step = keys.mix(np.arange(steps, dtype=np.uint64))[:, None]
    return torch.from_numpy((keys.mix(work.noise[list(rows)][None] ^ step)).view(np.int64)).to(work.rows.device)


# ---------------------------------------------------------------- all rows at once


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
        self.masks = None if work.mask is None else list(like(work.layout.tensors(work.mask), learn).values())
        self.anchors = None if work.anchor is None else list(like(parts, learn).values())
        self.mu = None if work.mu is None else torch.zeros(rows, device=device)
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
        for mine, term in zip(self.given, work.terms, strict=True):
            fill(mine.values(), term.given.values())

    def write_back(self, work: Work, order: Sequence[int]) -> None:
        index, count = _places(order, work.rows.device), len(order)
        where = {slot.name: slice(slot.start, slot.stop) for slot in work.layout.slots}
        for name, t in self.params.items():
            work.rows[index, where[name]] = t[:count].flatten(1)
        if work.moments is not None:
            for buffer, tensors in zip(work.moments.buffers, self.memory, strict=True):
                for name, t in zip(work.learn, tensors, strict=True):
                    buffer[index, where[name]] = t[:count].flatten(1)
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
    """One step's samples for R rows: indices [R, B], how many count [R], augmentation [R, B], dropout keys [R]."""

    chosen: Tensor
    size: Tensor
    moves: Tensor | None = None
    noise: Tensor | None = None


Loss = Callable[[dict[str, Tensor], Tensor, Tensor, "Tensor | None", "Tensor | None", list[dict[str, Tensor]]], Tensor]


def loss_of(work: Work, rows: int, compiled: bool = False) -> Loss:
    """The losses of `rows` rows as one function of tensors, ready to be compiled. Padded samples weigh nothing."""
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
        y = source.labels(flat).view(rows, batch)
        valid = torch.arange(batch, device=y.device) < size.unsqueeze(1)
        x = source.batch(flat, None if moves is None else moves.reshape(-1))
        out = forward(params, x, rows, Context(train, valid, noise, dtype, compiled))
        seen = Out(out.features, out.logits, valid)
        return (total(terms, seen, y, given) * valid).sum(1) / size.clamp(min=1)

    return loss


def step_rows(work: Work, stack: Stack, active: int, loss: Loss, batch: Batch, gated: bool) -> Tensor:
    """One step of the first `active` rows; returns their losses [active]. `gated`: some of them may be resting.

    Where the work only measures, nothing moves and the squared norms of the gradients are returned instead."""
    leaves = {name: t[:active].detach().requires_grad_(name in work.learn) for name, t in stack.params.items()}
    given = [{k: v[:active] for k, v in mine.items()} for mine in stack.given]
    values = loss(leaves, batch.chosen, batch.size, batch.moves, batch.noise, given)
    learn = [leaves[name] for name in work.learn]
    grads = torch.autograd.grad(values.sum(), learn, materialize_grads=True)
    if work.measure:
        return torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0)
    with torch.no_grad():
        on = (batch.size > 0).float()
        stack.taken[:active] += on
        if kernels.usable(learn[0]):
            _step_at_once(work, stack, active, [t.detach() for t in learn], grads, on if gated else None)
            return values.detach()
        wide = [[-1] + [1] * (t.dim() - 1) for t in learn]
        pull = None
        if stack.anchors is not None and stack.mu is not None:
            mu = stack.mu[:active]
            pull = Pull([mu.view(w) for w in wide], [a[:active] for a in stack.anchors])
        masks = None if stack.masks is None else [m[:active] for m in stack.masks]
        gate = [on.view(w) for w in wide] if gated else None
        memory = [[t[:active] for t in tensors] for tensors in stack.memory]
        taken = stack.taken[:active].clamp(min=1)
        update(work.opt, [t.detach() for t in learn], grads, memory, [taken.view(w) for w in wide], pull, masks, gate)
    return values.detach()


def _step_at_once(
    work: Work, stack: Stack, active: int, learn: Sequence[Tensor], grads: Sequence[Tensor], on: Tensor | None
) -> None:
    """The update of a step by our own kernel."""

    def now(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
        return None if tensors is None else [t[:active] for t in tensors]

    memory = [[t[:active] for t in tensors] for tensors in stack.memory]
    mu = None if stack.mu is None else stack.mu[:active]
    taken = stack.taken[:active].clamp(min=1)
    kernels.step(work.opt, learn, grads, memory, taken, mu, now(stack.anchors), now(stack.masks), on)


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
    counts = (work.plan.sizes[:, clients] > 0).sum(1)
    sums = torch.zeros(len(order), device=device)
    functions: dict[int, Loss] = {}
    for s, active in enumerate(counts.tolist()):
        if active not in functions:
            functions[active] = loss_of(work, active)
        now = Batch(
            table[s, :active],
            sizes[s, :active],
            None if moves is None else moves[s, :active],
            None if noise is None else noise[s, :active],
        )
        sums[:active] += step_rows(work, stack, active, functions[active], now, gated=False)
    stack.write_back(work, order.tolist())
    return mean_losses(work, order, sums)


def on_device(array: keys.I64, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def mean_losses(work: Work, order: keys.I64, sums: Tensor) -> Tensor:
    """Sums over steps in working order to means in the caller's order, on the CPU."""
    result = torch.zeros(len(order))
    result[torch.from_numpy(order)] = sums[: len(order)].cpu() / torch.from_numpy(np.maximum(work.steps[order], 1))
    return result


# ---------------------------------------------------------------- choosing


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """TF32 only where it was asked for."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def run_way(way: str, work: Work) -> Tensor:
    """Train `work` in the named way. Returns the mean loss of each row, [R]."""
    with matmul_precision(work.precision):
        return _run_way(way, work)


def _run_way(way: str, work: Work) -> Tensor:
    if way == "threads":
        return each(work, workers=min(cores(), len(work.rows)))
    if way in ("each", "batched"):
        rows = 1 if way == "each" else len(work.rows)
        small = rows * work.plan.table.shape[2] * work.layout.weights < WORTH_SHARING
        with intra_op_threads(1 if small else torch.get_num_threads()):
            return each(work) if way == "each" else batched(work)
    from fedkin.compute import graphs

    return graphs.train(work, compiled=way == "compiled")


def candidates(work: Work) -> list[str]:
    """The ways that can run this work here, likely best first."""
    rows, together = len(work.rows), work.forward.together
    if work.rows.device.type == "cuda":
        return ["graph"] if together else ["each"]
    several = ["threads"] if cores() > 1 and rows > 1 else []
    return [*several, "each", *(["batched"] if together and rows > 1 else [])]


def choose(work: Work, budget: float = 0.8) -> str:
    """The fastest way for work like this, by timing a few steps of a few rows; about a second at most."""
    names = candidates(work)
    if len(names) == 1 or not work.steps.size or work.steps.max() == 0:
        return names[0]
    order = np.argsort(-work.steps, kind="stable").tolist()
    best, fastest, begin = names[0], float("inf"), time.perf_counter()
    for name in names:
        # Row by row, setting up a row must be spread over its steps; together, what counts is the number of rows.
        rows = order[: 16 if name == "batched" else 2 * cores()]
        if time.perf_counter() - begin > budget:
            break
        run_way(name, work.take(rows, 1))  # the first time is always slow
        steps, enough = 1, False
        while time.perf_counter() - begin < budget:
            small = work.take(rows, steps)
            seconds = _seconds(name, small)
            per_step = seconds / max(int(small.steps.sum()), 1)
            if per_step < fastest * (1.0 if name == best else CLEARLY):
                best, fastest = name, per_step
            if enough:
                break
            enough = seconds > 0.05 or steps >= work.steps.max()  # once more at this size: the better one counts
            steps *= 1 if enough else 3
    return best


def _seconds(way: str, work: Work) -> float:
    begin = time.perf_counter()
    run_way(way, work)
    return time.perf_counter() - begin
