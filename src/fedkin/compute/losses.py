"""What a client minimises, written once for any number of rows.

A loss is a sum of terms. A term sees the network's output for a batch and returns one number per sample, [R, B];
what it needs beyond that (a teacher's head, class prototypes) it carries in `given`, one entry per row, so that the
engine can sort, split and batch rows without knowing what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.forward import Out

Value = Callable[[Out, Tensor, Mapping[str, Tensor]], Tensor]
"""(output, targets [R, B, ...], given) to [R, B]. Must depend on nothing else: graphs are captured once and reused."""


@dataclass(frozen=True, eq=False)
class Term:
    """One term of a loss, for `client.fit(rows, loss=[...])`.

    `name` tells it from others. `value` is a function of (output, targets [R, B, ...], given) that gives a number for
    each sample, [R, B]; `given` has what it needs beside that, one entry for each row. `rows` gives the same term for
    some of the rows, `repeated` for several models of each client."""

    name: str
    value: Value
    given: Mapping[str, Tensor] = field(default_factory=dict)  # each [R, ...]

    def rows(self, index: Tensor) -> Term:
        """The same term for some of its rows."""
        return replace(self, given={k: v[index] for k, v in self.given.items()})

    def repeated(self, times: int) -> Term:
        """The same term for each of a client's models in turn."""
        return replace(self, given={k: v.repeat(times, *[1] * (v.dim() - 1)) for k, v in self.given.items()})


def cross_entropy() -> Term:
    """The usual loss of a classifier: what `client.fit` minimises unless `loss=` says otherwise.

    `client.fit(rows, loss=[fk.cross_entropy(), fk.align(...)])` minimises a sum of terms."""
    return Term("cross-entropy", _cross_entropy)


def _cross_entropy(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


Pull = Literal["mean", "class_means", "printed"]


def align(
    prototypes: Tensor, present: Tensor, weight: float, rows: int, name: str = "align", pull: Pull = "mean"
) -> Term:
    """Draw features towards the prototype of their class: weight * mean squared difference, own class only.

    prototypes [K, C, F], or [C, F] for all `rows` clients alike; present (bool, [K, C] or [C]) says which exist.
    `pull`: "class_means" adds up the means over each class of the batch, where "mean" takes that over all its samples;
    "printed" is the squared distance to every prototype there is, whatever the sample's class (FedPKDA, eqs. 8, 9)."""
    if prototypes.dim() == 2:
        prototypes, present = prototypes.expand(rows, -1, -1), present.expand(rows, -1)
    strength = torch.full((rows,), weight, device=prototypes.device)
    return Term(name, PULLS[pull], {"prototypes": prototypes, "present": present, "weight": strength})


def _align(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    goal = given["prototypes"].gather(1, y.unsqueeze(-1).expand(-1, -1, out.features.shape[-1]))
    known = given["present"].gather(1, y).float() * given["weight"].unsqueeze(1)
    return (out.features - goal).square().mean(-1) * known


def _align_class_means(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    counts = torch.ones_like(y, dtype=torch.bool) if out.valid is None else out.valid
    alike = ((y.unsqueeze(2) == y.unsqueeze(1)) & counts.unsqueeze(1)).sum(2)  # samples of the class in the batch
    return _align(out, y, given) * counts.sum(1, keepdim=True) / alike.clamp(min=1)  # the batch's mean is yet to come


def _align_printed(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    has = given["present"].to(out.features.dtype).unsqueeze(2)
    count = has.sum(1)  # [R, 1]
    centre = (given["prototypes"] * has).sum(1, keepdim=True) / count.clamp(min=1).unsqueeze(2)
    spread = ((given["prototypes"] - centre) * has).square().sum((1, 2)).unsqueeze(1)
    far = count * (out.features - centre).square().sum(-1) + spread  # sum_k |f - p_k|^2
    return far * given["weight"].unsqueeze(1)


PULLS: dict[Pull, Value] = {"mean": _align, "class_means": _align_class_means, "printed": _align_printed}


def guide(weight: Tensor, bias: Tensor, through: bool = False) -> Term:
    """Learn from a frozen linear classifier (weight [K, C, F], bias [K, C]) on the student's own features:
    KL(teacher || student), the teacher's side detached unless gradients go `through` it."""
    return Term("guide", _guide_through if through else _guide, {"weight": weight, "bias": bias})


def _guide(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return _divergence(out.features.detach(), out, given)


def _guide_through(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return _divergence(out.features, out, given)


def _divergence(features: Tensor, out: Out, given: Mapping[str, Tensor]) -> Tensor:
    logits = torch.baddbmm(given["bias"].unsqueeze(1), features, given["weight"].transpose(1, 2))
    teacher = logits.log_softmax(-1)
    return (teacher.exp() * (teacher - out.logits.log_softmax(-1))).sum(-1)


def total(terms: Sequence[Term], out: Out, y: Tensor, given: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The sum of the terms, [R, B]."""
    result = terms[0].value(out, y, given[0])
    for term, mine in zip(terms[1:], given[1:], strict=True):
        result = result + term.value(out, y, mine)
    return result


def is_plain(terms: Sequence[Term]) -> bool:
    """Nothing but cross-entropy."""
    return len(terms) == 1 and terms[0].value is _cross_entropy
