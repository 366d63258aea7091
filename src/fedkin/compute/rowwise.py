"""Rows trained one after another, or some at a time on worker threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedkin.compute.forward import Context, Out
from fedkin.compute.losses import Term, is_plain, total
from fedkin.compute.optim import Pull, clipped, update
from fedkin.compute.tape import Tape
from fedkin.compute.work import Work, dropout_keys


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
    rate = None if work.rates is None else float(work.rates[r])
    given = [{k: v[r : r + 1] for k, v in term.given.items()} for term in work.terms]
    table, sizes = work.plan.table[:, work.client[r]], work.plan.sizes[:, work.client[r]]
    index = torch.from_numpy(np.ascontiguousarray(table)).to(source.device)
    moves = None
    if work.plan.moves is not None:
        moves = torch.from_numpy(np.ascontiguousarray(work.plan.moves[:, work.client[r]])).to(source.device)
    noise = dropout_keys(work, [r], len(sizes))
    value = torch.zeros((), device=source.device)
    share, ends = work.plan.share, work.plan.ends
    held = None if share is None else [torch.zeros_like(t) for t in learn]
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
        value += loss.detach()
        if held is not None and share is not None and ends is not None:
            torch._foreach_add_(held, [g.detach() for g in grads], alpha=float(share[s, work.client[r]]))
            if not ends[s, work.client[r]]:
                continue
            grads = held
        taken += 1
        with torch.no_grad():
            if work.clip is not None:
                grads = clipped(grads, masks, work.clip)
            update(work.opt, learn, grads, memory, taken, pull, masks, rate=rate)
            if held is not None:
                torch._foreach_zero_(held)
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
