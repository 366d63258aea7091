"""What a client minimises, written once for any number of rows.

A loss is a sum of terms. A term sees the network's output for a batch and returns one number per sample, [R, B];
what it needs beyond that (a teacher's head, class prototypes) it carries in `given`, one entry per row, so that the
engine can sort, split and batch rows without knowing what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.program import Out


class Term(Protocol):
    """`value` must depend on nothing but its arguments: it is compiled once and reused with other `given` tensors."""

    name: ClassVar[str]
    given: dict[str, Tensor]

    @staticmethod
    def value(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor: ...


class CrossEntropy:
    """The usual loss of a classifier."""

    name: ClassVar[str] = "cross-entropy"

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}

    @staticmethod
    def value(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(out.logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


class Align:
    """Draw features towards the prototype of their class: weight * mean squared difference, own class only.

    prototypes [K, C, F] or [C, F]; present (bool, same leading shape) says which exist; weight a number or [K].
    """

    name: ClassVar[str] = "align"

    def __init__(self, prototypes: Tensor, present: Tensor, weight: float | Tensor, rows: int) -> None:
        if prototypes.dim() == 2:
            prototypes, present = prototypes.expand(rows, -1, -1), present.expand(rows, -1)
        strength = torch.as_tensor(weight, dtype=torch.float32, device=prototypes.device).expand(rows)
        self.given = {"prototypes": prototypes, "present": present, "weight": strength}

    @staticmethod
    def value(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        index = y.unsqueeze(-1).expand(-1, -1, out.features.shape[-1])
        goal = given["prototypes"].gather(1, index)
        known = given["present"].gather(1, y).float() * given["weight"].unsqueeze(1)
        return (out.features - goal).square().mean(-1) * known


class Guide:
    """Learn from a frozen teacher classifier on the student's own features: KL(teacher || student), teacher detached.

    weight [K, C, F] and bias [K, C] of the teacher's linear head.
    """

    name: ClassVar[str] = "guide"

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.given = {"weight": weight, "bias": bias}

    @staticmethod
    def value(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            logits = torch.baddbmm(given["bias"].unsqueeze(1), out.features, given["weight"].transpose(1, 2))
            teacher = logits.log_softmax(-1)
        student = out.logits.log_softmax(-1)
        return (teacher.exp() * (teacher - student)).sum(-1)


def total(terms: Sequence[type[Term] | Term], out: Out, y: Tensor, given: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The sum of the terms, [R, B]."""
    values = [term.value(out, y, mine) for term, mine in zip(terms, given, strict=True)]
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result
