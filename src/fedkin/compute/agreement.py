"""Does one form of a network say what the network itself says? Asked once, when a run is prepared.

Results, gradients and running statistics are compared, tensor by tensor and in both modes, on rows a little beside the
first one: far enough that a branch which begins at zero is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkin.compute.forward import Context, Forward, Out
from fedkin.compute.layout import Layout

SAMPLES, COUNTED = 4, 3  # of each row in a batch; those that are no padding
RESTS = 2  # the row that has no samples left


@dataclass
class _Said:
    """What a form said of some rows in one pass."""

    out: Out
    gradients: dict[str, Tensor]
    tensors: dict[str, Tensor]  # weights and statistics afterwards


def differs(form: Forward, plain: Forward, layout: Layout, row: Tensor, example: Tensor) -> str:
    """What this form says otherwise than the network, in words; nothing where they agree. Three rows: two of them with
    three samples each and a fourth that does not count, one at rest (which only statistics could notice)."""
    for train in (False, True):
        found = _results(form, plain, layout, row, example, train, seed=0)
        if found.startswith(_GRADIENTS):  # a unit so near its kink that rounding decides: not twice
            found = _results(form, plain, layout, row, example, train, seed=1)
        if found:
            return found
    return ""


_GRADIENTS = "the gradient"
AT_REST = "changes where a row has no samples left"


def _results(
    form: Forward, plain: Forward, layout: Layout, row: Tensor, example: Tensor, train: bool, seed: int
) -> str:
    rests = train and any(s.kind == "buffer" for s in layout.slots)
    rows = beside(layout, row, seed)[: RESTS + rests]
    x = example[torch.arange(len(rows) * SAMPLES) % len(example)]
    counts = torch.tensor([COUNTED, COUNTED, 0][: len(rows)])
    valid = torch.arange(SAMPLES) < counts.unsqueeze(1)
    keys = torch.arange(1, 1 + len(rows)) if train else None
    mine = _said(form, layout, rows, x, Context(train, valid, keys), valid)
    mode = "in training" if train else "in evaluation"
    for r in range(RESTS):
        few = x[SAMPLES * r : SAMPLES * r + COUNTED]
        context = Context(train, noise=None if keys is None else keys[r : r + 1])
        ref = _said(plain, layout, rows[r : r + 1], few, context, None)
        pairs = (mine.out.logits, ref.out.logits), (mine.out.features, ref.out.features)
        for ours, theirs in pairs:
            if ours.shape[2:] != theirs.shape[2:] or not close(ours[r, :COUNTED], theirs[0]):
                return f"what it gives {mode} is not what it gives for one row"
        for name, after in ref.tensors.items():
            if not close(mine.tensors[name][r], after[0]):
                return f"{name!r} changes in another way {mode} than for one row"
        whole = 1e-4 * math.sqrt(sum(float(g.square().sum()) for g in ref.gradients.values()))
        for name, theirs in ref.gradients.items():
            if not close(mine.gradients[name][r], theirs[0], 2e-2, whole):
                return f"{_GRADIENTS} of {name!r} {mode} is not what it is for one row"
    before = layout.tensors(rows)
    moved = [n for n, t in mine.tensors.items() if rests and not close(t[RESTS], before[n][RESTS], 1e-5)]
    return f"{moved[0]!r} {AT_REST}" if moved else ""


def _said(form: Forward, layout: Layout, rows: Tensor, x: Tensor, context: Context, valid: Tensor | None) -> _Said:
    learnt = [s.name for s in layout.slots if s.kind != "buffer"]
    tensors = {n: t.detach().clone() for n, t in layout.tensors(rows).items()}
    leaves = [tensors[name].requires_grad_() for name in learnt]
    with torch.enable_grad():
        out = form(tensors, x, len(rows), context)
        loss = torch.zeros(())
        for given in (out.logits, out.features):
            weights = torch.randn(SAMPLES, *given.shape[2:], generator=torch.Generator().manual_seed(2))
            if valid is None:
                loss = loss + (given * weights[: given.shape[1]]).sum()
            else:
                loss = loss + sum((g[v] * weights[v]).sum() for g, v in zip(given, valid, strict=True))
        found = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
    gradients = {
        n: torch.zeros_like(t) if g is None else g.to_dense().detach()
        for n, t, g in zip(learnt, leaves, found, strict=True)
    }
    after = {n: t.detach() for n, t in tensors.items()}
    return _Said(Out(out.features.detach(), out.logits.detach()), gradients, after)


def beside(layout: Layout, row: Tensor, seed: int = 0) -> Tensor:
    """Three rows near this one, signs as they are. What is zero or tiny moves by as much as a layer's first weights."""
    generator = torch.Generator().manual_seed(seed)
    rows = row * (1 + 0.1 * torch.randn(RESTS + 1, layout.width, generator=generator))
    noise = torch.randn(rows.shape, generator=generator)
    for slot in layout.slots:
        at = slice(slot.start, slot.stop)
        now = row[:, at]
        if not now.numel() or (slot.kind == "buffer" and now.any()):
            continue
        inputs = max(1, slot.shape.numel() // (slot.shape[0] if len(slot.shape) > 1 else slot.shape.numel()))
        step = max(0.1 * float(now.square().mean().sqrt()), 0.05 / math.sqrt(inputs))
        moves = torch.where(now == 0, noise[:, at], noise[:, at].abs() * now.sign())
        if slot.kind == "buffer":
            moves = moves.abs()  # a variance stays none below zero
        rows[:, at] += torch.where(now.abs() < step, step * moves, 0.0)
    return rows


def mixes_samples(plain: Forward, layout: Layout, row: Tensor, example: Tensor) -> bool:
    """Does what it gives a sample depend on the others of its batch?"""
    rows = beside(layout, row)[:1]
    x = example[torch.arange(SAMPLES) % len(example)]
    with torch.no_grad():
        for train in (False, True):
            context = Context(train, noise=torch.ones(1, dtype=torch.int64) if train else None)
            few, all_of_them = (plain(layout.tensors(rows.clone()), x[:n], 1, context) for n in (COUNTED, SAMPLES))
            if not close(few.logits[0], all_of_them.logits[0, :COUNTED]):
                return True
    return False


def close(a: Tensor, b: Tensor, relative: float = 1e-3, absolute: float = 1e-6) -> bool:
    """Close as a whole: BatchNorm over three samples magnifies the rounding of single entries. What is not finite must
    be the same."""
    if a.shape != b.shape:
        return False
    odd = ~(a.isfinite() & b.isfinite())
    if odd.any():
        if not torch.equal(a[odd].nan_to_num(), b[odd].nan_to_num()) or bool((a[odd].isnan() != b[odd].isnan()).any()):
            return False
        a, b = a[~odd], b[~odd]
    return bool((a - b).norm() <= relative * b.norm() + absolute)
