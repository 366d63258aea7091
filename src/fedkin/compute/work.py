"""A training job: which rows learn what, on which samples, by which optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkin.compute import keys
from fedkin.compute.batches import Plan, Source
from fedkin.compute.forward import Forward
from fedkin.compute.layout import Layout
from fedkin.compute.losses import Term, cross_entropy
from fedkin.compute.optim import Moments, Optimiser
from fedkin.compute.tape import Tape

Precision = Literal["fp32", "tf32", "bf16"]


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
    rates: Tensor | None = None  # [R], in place of the optimiser's learning rate
    moments: Moments | None = None
    clip: float | None = None  # the largest norm of a row's gradient
    noise: keys.U64 | None = None  # [R]
    precision: Precision = "fp32"
    tape: Tape | None = None
    measure: bool = False  # change nothing; instead of losses give squared norms of the gradients, evaluation mode

    def __post_init__(self) -> None:
        self.steps = self.plan.steps[self.client]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @cached_property
    def rule(self) -> Optimiser:
        """The optimiser as far as works that are alike have it in common: rates that rows bring are none of it."""
        return self.opt if self.rates is None else replace(self.opt, lr=1.0)

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
            rates=None if self.rates is None else self.rates[index],
            noise=None if self.noise is None else self.noise[list(rows)],
            moments=moments,
        )
        return small


def dropout_keys(work: Work, rows: Sequence[int], steps: int) -> Tensor | None:
    """Dropout keys, int64 [S, len(rows)]."""
    if work.noise is None:
        return None
    step = keys.mix(np.arange(steps, dtype=np.uint64))[:, None]
    return torch.from_numpy((keys.mix(work.noise[list(rows)][None] ^ step)).view(np.int64)).to(work.rows.device)


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
