"""One class of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.forward import Out
from fedkin.compute.losses import Term, Value, cross_entropy
from fedkin.errors import UsageError
from fedkin.options import option
from fedkin.tasks.scores import auc, calibration_error, f1, mean_auc, mean_known
from fedkin.tasks.task import TASKS, Labelled, Metric, Task, named, spread_over

TWO = "samples of two classes"


def _accuracy(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) == y).double().mean()


def _top5(logits: Tensor, y: Tensor) -> float:
    if logits.shape[1] <= 5:
        return math.nan
    return float((logits.topk(5, 1).indices == y.unsqueeze(1)).any(1).double().mean())


def _recall(logits: Tensor, y: Tensor) -> float:
    there, right = F.one_hot(y, logits.shape[1]).double(), (logits.argmax(1) == y).double()
    return mean_known((there * right.unsqueeze(1)).sum(0) / there.sum(0))


def _macro_f1(logits: Tensor, y: Tensor) -> float:
    classes = logits.shape[1]
    return mean_known(f1(F.one_hot(logits.argmax(1), classes), F.one_hot(y, classes)))


def _auc(logits: Tensor, y: Tensor) -> float:
    if logits.shape[1] == 2:
        return auc(logits[:, 1] - logits[:, 0], y)
    return mean_auc(logits.double().softmax(1), F.one_hot(y, logits.shape[1]))


def _weighted(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    each = F.cross_entropy(out.logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    weight = given["weight"].gather(1, y)
    counts = torch.ones_like(weight) if out.valid is None else out.valid.to(weight)
    # the batch's mean is yet to come: it has to be one over weights, as PyTorch takes it
    return weight * each * counts.sum(1, keepdim=True) / (weight * counts).sum(1, keepdim=True).clamp(min=1e-12)


@TASKS.register("classification")
@dataclass(frozen=True)
class Classification(Task):
    """Cross-entropy of class scores; the class of the highest score is the prediction."""

    name = "classification"
    about = "one class of several"
    targets = "classes"
    main = "accuracy"
    metrics = named(
        [
            Metric("accuracy", "share of samples whose class is predicted", _accuracy, "%", share=True),
            Metric("top5", "share whose class is among the five likeliest", _top5, "%", needs="more than five classes"),
            Metric("balanced-accuracy", "mean over classes of the share predicted", _recall, "%", share=True),
            Metric("macro-f1", "mean over classes of F1", _macro_f1, "%", share=True),
            Metric("auc", "area under the ROC curve, one class against the others", _auc, share=True, needs=TWO),
            Metric("ece", "expected calibration error, 15 bins", calibration_error, "%", higher=False),
        ]
    )
    weights: str = option(
        "none",
        "weights of classes in the loss: none, balanced (each client by its own training samples, as many for each of "
        "its classes), or one number for each class, as in 1+2.5",
    )

    @property
    def value(self) -> Value:
        return cross_entropy().value

    @property
    def plain(self) -> Term:
        return cross_entropy()

    def term(self, clients: Labelled) -> Term:
        if self.weights == "none":
            return cross_entropy()
        counts = clients.class_counts()
        if self.weights == "balanced":
            has = counts > 0
            each = counts.sum(1, keepdim=True) / (has.sum(1, keepdim=True) * counts.clamp(min=1))
            weight = each * has
        else:
            one = spread_over(self.weights, counts.shape[1], "one for each class")
            weight = torch.tensor(one, device=counts.device).expand(len(clients), -1)
        return Term("weighted cross-entropy", _weighted, {"weight": weight.contiguous()})

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs.argmax(1)

    def check_outputs(self, shape: Sequence[int], wanted: int, network: str) -> None:
        if len(shape) != 2:
            raise UsageError(
                f"{network} returns shape {tuple(shape)}: a network must return one row of class scores a sample, "
                "[samples, classes]"
            )
        if shape[-1] < wanted:
            raise UsageError(f"the network gives {shape[-1]} outputs, the data have {wanted} classes")
