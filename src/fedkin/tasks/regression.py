"""Numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.forward import Out
from fedkin.compute.losses import Value
from fedkin.options import option
from fedkin.tasks.scores import r2
from fedkin.tasks.task import TASKS, Metric, Task, named


def _squared(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return (out.logits - y).square().mean(-1)


def _absolute(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return (out.logits - y).abs().mean(-1)


def _huber(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return F.huber_loss(out.logits, y, reduction="none").mean(-1)


LOSSES: dict[str, Value] = {"mse": _squared, "mae": _absolute, "huber": _huber}


def _mse(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).double().square().mean()


def _rmse(outputs: Tensor, y: Tensor) -> Tensor:
    return _mse(outputs, y).sqrt()


def _mae(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).double().abs().mean()


@TASKS.register("regression")
@dataclass(frozen=True)
class Regression(Task):
    """A network gives the numbers themselves. Targets are taken as they are: scale them if they are far from 1."""

    name = "regression"
    about = "one number or several"
    targets = "numbers"
    main = "mse"
    extra = ("rmse", "mae", "r2")
    metrics = named(
        [
            Metric("mse", "mean squared error", _mse, higher=False, low=0.0),
            Metric("rmse", "root of a client's mean squared error", _rmse, higher=False, low=0.0),
            Metric("mae", "mean absolute error", _mae, higher=False, low=0.0),
            Metric("r2", "share of the variance that is explained", r2, needs="targets that differ", high=1.0),
        ]
    )
    loss: Literal["mse", "mae", "huber"] = option("mse", "squared error, absolute error, or Huber's (delta 1)")

    @property
    def value(self) -> Value:
        return LOSSES[self.loss]
