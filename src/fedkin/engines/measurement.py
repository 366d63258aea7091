"""What a site says of its personal model, whatever the method: one form, made at the site and judged by the server.

Of classes these are the test samples that are right and how many there are, of other tasks the main metric times the
samples and the samples it is of, none where it cannot be computed; and the mean loss. The other metrics of a run follow
in their order, with a truth value for each that says whether it could be computed. Nothing is told class by class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.core.federation import Measured
from fedkin.core.messages import Answer, Masked, Spec, gate
from fedkin.tasks import Classification, Metric, Task

LARGEST = 1e30  # of a loss or a metric
SLACK = 1e-5  # of rounding, beside a bound


def measurement(reply: Mapping[str, Tensor | Masked]) -> dict[str, Tensor | Masked]:
    """What leaves a site of what a method's report returns."""
    told: dict[str, Tensor | Masked] = {}
    for name in ("correct", "count"):
        value = reply.get(name)
        if isinstance(value, Tensor):
            told[name] = value.sum(1, keepdim=True) if value.dim() == 2 else value
    if "loss" in reply:
        told["loss"] = reply["loss"]
    extra = reply.get("extra")
    if isinstance(extra, Tensor) and extra.dim() == 2 and extra.shape[1]:
        known = ~extra.isnan()
        told |= {"extra": extra.where(known, torch.zeros_like(extra)), "known": known}
    return told


@dataclass(frozen=True)
class Judge:
    """What sites may say: of this task, with these metrics beside the main one, and so many test samples each."""

    task: Task = field(default_factory=Classification)
    extra: tuple[Metric, ...] = ()
    tests: Sequence[int] = ()

    @property
    def spec(self) -> Spec:
        """What one looks like."""
        found: Spec = {
            "correct": ((1,), torch.float32, False),
            "count": ((1,), torch.float32, False),
            "loss": ((), torch.float32, False),
        }
        if self.extra:
            many = (len(self.extra),)
            found |= {"extra": (many, torch.float32, False), "known": (many, torch.bool, False)}
        return found

    def believed(self, answer: Answer) -> tuple[Measured, dict[int, str]]:
        """Of each site what can be true; zeros and NaN for the others, and why (of those that have something to be
        evaluated by)."""
        kept, why = gate(answer, self.spec)
        why = {**answer.failed, **why}
        sites = len(self.tests)
        found = Measured(np.zeros(sites), np.zeros(sites), np.full(sites, np.nan), self._unknown(sites))
        values: dict[str, Any] = {n: v.cpu().numpy() for n, v in kept.replies.items() if isinstance(v, Tensor)}
        for k, client in enumerate(kept.ids.tolist()):
            if client in why:
                continue
            one = {name: value[k] for name, value in values.items()}
            odd = self._odd(self.tests[client], one)
            if odd is not None:
                why[client] = odd
                continue
            found.correct[client], found.total[client] = one["correct"].item(), one["count"].item()
            found.loss[client] = one["loss"].item()
            if self.extra:
                found.extra[client] = np.where(one["known"], one["extra"], np.nan)
        return found, {c: reason for c, reason in sorted(why.items()) if self.tests[c]}

    def _unknown(self, sites: int) -> np.ndarray[Any, Any]:
        return np.full((sites, len(self.extra)), np.nan)

    def _odd(self, tests: int, said: Mapping[str, Any]) -> str | None:
        """What cannot be true of what one site says; None: all of it can."""
        right, of, loss = (float(said[n].item()) for n in ("correct", "count", "loss"))
        if abs(loss) > LARGEST:
            return f"says that its test loss is {loss:g}"
        if isinstance(self.task, Classification):
            if of != tests or not 0 <= right <= of or right != round(right):
                return f"says {right:g} of {of:g} test samples right; it has {tests}"
        elif of not in (0, tests) or (not of and right):
            return f"says that its {self.task.main} is of {of:g} test samples; it has {tests}"
        elif of and not _possible(self.task.metric, right / of, 1.0):
            return f"says that its {self.task.main} is {right / of:g}, which cannot be"
        for metric, value, known in zip(self.extra, said.get("extra", ()), said.get("known", ()), strict=True):
            if not (_possible(metric, float(value), metric.scale) if known else value == 0):
                return f"says that its {metric.name} is {value:g}, which cannot be"
        return None


def _possible(metric: Metric, value: float, scale: float) -> bool:
    low, high = (bound * scale for bound in metric.bounds)
    return low - SLACK * max(1.0, scale) <= value <= high + SLACK * max(1.0, scale) and abs(value) <= LARGEST
