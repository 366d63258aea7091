"""Several labels of a sample, each there or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.forward import Out
from fedkin.compute.losses import Term, Value
from fedkin.options import option
from fedkin.tasks.scores import f1, mean_auc, mean_known
from fedkin.tasks.task import TASKS, Labelled, Metric, Task, named, spread_over

SOME = "a label that some samples have and some have not"


def _binary(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(out.logits, y, reduction="none").mean(-1)


def _weighted(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    weight = 1 + (given["positive"].unsqueeze(1) - 1) * y
    return (weight * F.binary_cross_entropy_with_logits(out.logits, y, reduction="none")).mean(-1)


def _micro_f1(logits: Tensor, y: Tensor) -> float:
    found = float(f1((logits > 0).flatten()[:, None], y.flatten()[:, None]))
    return found if not math.isnan(found) else math.nan


def _macro_f1(logits: Tensor, y: Tensor) -> float:
    return mean_known(f1(logits > 0, y))


def _exact(logits: Tensor, y: Tensor) -> Tensor:
    return ((logits > 0) == y.bool()).all(1).double().mean()


def _each(logits: Tensor, y: Tensor) -> Tensor:
    return ((logits > 0) == y.bool()).double().mean()


@TASKS.register("multi-label")
@dataclass(frozen=True)
class MultiLabel(Task):
    """Binary cross-entropy of a score for each label, the mean over labels; scores above 0 are predicted."""

    name = "multi-label"
    about = "several labels of a sample, each there or not"
    targets = "labels"
    main = "f1"
    extra = ("macro-f1", "auc", "exact", "label-accuracy")
    metrics = named(
        [
            Metric(
                "f1", "F1 over all labels of all samples", _micro_f1, "%", share=True, needs="a label that is there"
            ),
            Metric("macro-f1", "mean over labels of F1", _macro_f1, "%", share=True, needs="a label that is there"),
            Metric("auc", "area under the ROC curve, mean over labels", mean_auc, share=True, needs=SOME),
            Metric("exact", "share of samples whose labels are all right", _exact, "%", share=True),
            Metric("label-accuracy", "share of labels that are right", _each, "%", share=True),
        ]
    )
    positive: str = option(
        "none",
        "weights of labels that are there: none, balanced (each client by its own training samples: those without over "
        "those with), or one number for each label, as in 1+2.5",
    )

    @property
    def value(self) -> Value:
        return _binary

    def term(self, clients: Labelled) -> Term:
        if self.positive == "none":
            return self.plain
        counts = clients.class_counts()  # how many samples have each label; the last column: how many there are
        there, samples = counts[:, :-1], counts[:, -1:]
        if self.positive == "balanced":
            weight = ((samples - there) / there.clamp(min=1)).where(
                (there > 0) & (there < samples), torch.ones_like(there)
            )
        else:
            one = spread_over(self.positive, there.shape[1], "one for each label")
            weight = torch.tensor(one, device=counts.device).expand(len(clients), -1)
        return Term("weighted multi-label", _weighted, {"positive": weight.contiguous()})

    def predict(self, outputs: Tensor) -> Tensor:
        return (outputs > 0).to(torch.int64)
