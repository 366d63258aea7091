"""A task of the user's own: a loss and metrics as ordinary functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedkin.compute.forward import Out
from fedkin.compute.losses import Value
from fedkin.errors import UsageError
from fedkin.tasks.task import Metric, Task

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class OwnTask(Task):
    """What `fk.task` makes."""

    loss: Loss = field(kw_only=True)
    given: Mapping[str, Metric] = field(kw_only=True)
    kind: str = field(kw_only=True)
    answer: Callable[[Tensor], Tensor] | None = field(default=None, kw_only=True)
    called: str = field(default="own", kw_only=True)

    name = "own"
    about = "a loss and metrics of one's own"

    def __post_init__(self) -> None:
        first = next(iter(self.given))
        own = {"targets": self.kind, "metrics": self.given, "main": first, "extra": tuple(self.given)[1:]}
        for attribute, value in {**own, "name": self.called, "_value": _over_samples(self.loss)}.items():
            object.__setattr__(self, attribute, value)

    @property
    def value(self) -> Value:
        found: Value = vars(self)["_value"]
        return found

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs if self.answer is None else self.answer(outputs)

    def check_outputs(self, shape: Sequence[int], wanted: int, network: str) -> None:
        """Only its loss knows what it takes."""


def task(
    loss: Loss,
    metrics: Mapping[str, Callable[[Tensor, Tensor], Any] | Metric],
    *,
    targets: str = "numbers",
    higher: bool = False,
    predict: Callable[[Tensor], Tensor] | None = None,
    name: str = "own",
) -> OwnTask:
    """A task of one's own, for `fk.run(task=...)`.

    `loss(output, target)` is called for one sample at a time, as a batch of one, and gives one number; FedKin takes it
    over all samples and clients at once (`torch.func.vmap`), so it has to be made of PyTorch's operations. Losses of
    `torch.nn.functional` are such functions. `metrics`: by name, functions of all outputs and targets of a client that
    give one number (NaN where there is none) or `fk.Metric`s; a result is told by the first, and `higher` says whether
    more is better for those that are plain functions. `targets`: of which kind the targets are ("numbers", "labels",
    "classes", "tokens", "survival"); `predict`: from outputs to predictions."""
    if not callable(loss):
        raise UsageError(f"loss={loss!r}: a function of (output, target)")
    if not isinstance(metrics, Mapping) or not metrics:
        raise UsageError("metrics: a dictionary from names to functions of (outputs, targets), with at least one")
    kinds = ("classes", "labels", "numbers", "tokens", "survival")
    if targets not in kinds:
        raise UsageError(f"targets={targets!r}: choose one of {', '.join(kinds)}")
    made: dict[str, Metric] = {}
    for key, one in metrics.items():
        if not isinstance(one, Metric) and not callable(one):
            raise UsageError(f"metric {key!r} is a {type(one).__name__}: give a function of (outputs, targets)")
        made[str(key)] = one if isinstance(one, Metric) else Metric(str(key), str(key), one, higher=higher)
    return OwnTask(loss=loss, given=made, kind=targets, answer=predict, called=name)


def _over_samples(loss: Loss) -> Value:
    def one(output: Tensor, target: Tensor) -> Tensor:
        found = loss(output.unsqueeze(0), target.unsqueeze(0))
        if not isinstance(found, Tensor) or found.numel() != 1:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise UsageError(f"the loss gives {shape} for one sample: it must give one number")
        return found.reshape(())

    def value(out: Out, y: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        try:
            result: Tensor = torch.func.vmap(torch.func.vmap(one))(out.logits, y)
        except UsageError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise UsageError(
                f"the loss cannot be taken of outputs of shape {tuple(out.logits.shape[2:])} and targets of shape "
                f"{tuple(y.shape[2:])} a sample: {str(error).partition('. ')[0]}"
            ) from error
        return result

    return value
