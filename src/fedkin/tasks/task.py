"""What a task is: a loss, metrics of which one is the main one, and what the network's outputs mean.

    @TASKS.register("counts")
    @dataclass(frozen=True)
    class Counts(Task):
        about = "whole numbers, by Poisson regression"
        targets = "numbers"
        main = "deviance"
        metrics = {"deviance": Metric("deviance", "mean Poisson deviance", _deviance, higher=False)}

        @property
        def value(self): return _poisson            # (output, targets [R, B, d], given) to [R, B]

Targets are stored as `fedkin.data` reads them: `targets` says of which kind they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from fedkin.compute.losses import Term, Value
from fedkin.errors import FedKinError, UsageError, unknown
from fedkin.options import named_spec, validated
from fedkin.registry import Registry

TASKS: Registry[type[Task] | Task] = Registry("task")
"""All tasks by name; `@fk.TASKS.register("name")` adds a class, `fk.TASKS.register("name")(fk.task(...))` a task that
is made already."""


@dataclass(frozen=True)
class Metric:
    """A number that says how well a model does on one client's samples; `about` says in words what it is.

    `value` takes what the task keeps of the outputs and the targets, and gives NaN where the metric cannot be computed;
    `needs` says what is missing then. `unit` "%" marks a share that is shown in percent, `scale` is what the value is
    multiplied by for that, and `of` gives the number as it is shown; of a `share`, 1 is the best. `higher`: more is
    better. `name` is what a run calls it. `low` and `high` bound the values that there can be: what a site of a
    deployment says beyond them is not believed."""

    name: str
    about: str
    value: Callable[[Tensor, Tensor], float | Tensor]
    unit: str = ""
    higher: bool = True
    share: bool = False
    needs: str = "samples"
    low: float = -math.inf
    high: float = math.inf

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which the value is, whatever the model and the samples."""
        return (0.0, 1.0) if self.share or self.unit == "%" else (self.low, self.high)

    @property
    def scale(self) -> float:
        """From the value to the number that is shown."""
        return 100.0 if self.unit == "%" else 1.0

    def of(self, kept: Tensor, y: Tensor) -> float:
        """The value as it is shown; NaN where it cannot be computed."""
        return self.scale * self.number(kept, y) if len(y) else math.nan

    def number(self, kept: Tensor, y: Tensor) -> float:
        """The value as a number; UsageError where its function fails, or gives anything else."""
        try:
            found: Any = self.value(kept, y)
        except FedKinError:
            raise
        except Exception as error:  # somebody else's function can fail in any way
            raise UsageError(
                f"metric {self.name!r} fails for outputs of shape {tuple(kept.shape)} and targets of shape "
                f"{tuple(y.shape)} ({type(error).__name__}: {error}); where it cannot be computed it gives NaN"
            ) from error
        numbers = int(found.numel()) if isinstance(found, Tensor) else int(np.size(found))
        if numbers != 1 or isinstance(found, str | bytes):
            said = repr(found)[:40] if isinstance(found, str | bytes) else f"{numbers} numbers"
            raise UsageError(f"metric {self.name!r} gives {said}: it must give one number, as mean() does")
        try:
            return float(found)
        except (TypeError, ValueError):
            raise UsageError(f"metric {self.name!r} gives a {type(found).__name__}: it must give one number") from None


class Labelled(Protocol):
    """Clients as a loss may look at them: how many, and how many training samples of each class."""

    def __len__(self) -> int: ...

    def class_counts(self) -> Tensor: ...  # [K, C]


@dataclass(frozen=True)
class Task:
    """Base of all tasks. A subclass is a frozen dataclass of `fk.option` fields; `fk.task` makes one of two functions.

    `name` is the one it is registered under, `about` and `paper` are shown to users. `targets` is the kind of targets,
    `metrics` are all there are, by name, `main` is the one that a result is told by (`metric`), and `extra` those that
    are computed beside it unless somebody names others (`chosen`). `whole`: the loss is one of a batch and not of each
    sample.

    A subclass has `value`, the loss; it may also say what clients minimise (`term`, where that differs from the `plain`
    loss that is told of test samples), what of the outputs its metrics need (`keep`), what a prediction is (`predict`),
    and which outputs it takes (`check_outputs`)."""

    name: ClassVar[str] = ""  # as registered
    about: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    targets: ClassVar[str] = "classes"
    main: ClassVar[str] = ""
    extra: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[Mapping[str, Metric]] = {}
    whole: ClassVar[bool] = False

    @property
    def value(self) -> Value:
        """The loss of every sample: (output, targets [R, B, ...], given) to [R, B]. A function of a module, so that
        equal tasks have the same one."""
        raise NotImplementedError

    def term(self, clients: Labelled) -> Term:
        """What these clients minimise."""
        return Term(self.name, self.value)

    @property
    def plain(self) -> Term:
        """What test losses are told by: the loss without weights that are a client's own."""
        return Term(self.name, self.value)

    @property
    def metric(self) -> Metric:
        """The main one: what `score` and `best` of a result are."""
        return self.metrics[self.main]

    def chosen(self, names: Sequence[str] | None) -> tuple[Metric, ...]:
        """The metrics beside the main one: those of these names, or the usual ones."""
        if names is None:
            return tuple(self.metrics[name] for name in self.extra)
        for name in names:
            if name not in self.metrics:
                raise unknown(f"metric of the task {self.name}", name, self.metrics)
        return tuple(self.metrics[name] for name in dict.fromkeys(names) if name != self.main)

    def counted(self, y: Tensor) -> Tensor:
        """How much each sample counts in the mean of the `plain` loss over several batches, [n]."""
        return y.new_ones(len(y))

    def keep(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What of a batch's outputs [n, ...] its metrics need, [n, ...]."""
        return outputs

    def predict(self, outputs: Tensor) -> Tensor:
        """What outputs [n, ...] say, in the form of targets."""
        return outputs

    def check_outputs(self, shape: Sequence[int], wanted: int, network: str) -> None:
        """UsageError unless a network's output of this shape (samples first) fits. `wanted`: numbers a sample."""
        if len(shape) != 2:
            raise UsageError(
                f"{network} returns shape {tuple(shape)}: for {self.name} it must return {wanted} numbers a sample, "
                f"[samples, {wanted}]"
            )
        if shape[-1] != wanted:
            raise UsageError(f"{network} gives {shape[-1]} outputs, the task {self.name} needs {wanted}")


def make_task(spec: str) -> Task:
    """A task by name and options: "regression:loss=mae"."""
    name, options = named_spec(spec)
    found = TASKS[name]
    if not isinstance(found, Task):
        return validated(found, options, f"task {name!r}")
    if options:
        raise UsageError(f"task {spec!r}: {name!r} has no options")
    if found.name != name:
        raise UsageError(f"the task {name!r} calls itself {found.name!r}: make it with fk.task(..., name={name!r})")
    return found


USUAL: Mapping[str, str] = {
    "classes": "classification",
    "labels": "multi-label",
    "numbers": "regression",
    "tokens": "next-token",
    "survival": "survival",
}
"""What targets of each kind are for, unless somebody says otherwise."""


def task_for(targets: str) -> Task:
    """The usual task of targets of this kind."""
    return make_task(USUAL[targets])


def named(metrics: Sequence[Metric]) -> Mapping[str, Metric]:
    """Metrics by their names."""
    return {m.name: m for m in metrics}


def spread_over(weights: Any, of: int, what: str) -> list[float]:
    """Weights as people write them, 1+2.5+1, one for each of so many."""
    words = str(weights).split("+")
    try:
        found = [float(w) for w in words]
    except ValueError:
        found = []
    if len(found) != of or not all(math.isfinite(w) and w > 0 for w in found):
        raise UsageError(f"weights={weights!r}: accepts none, balanced, or {of} positive numbers ({what}), as in 1+2.5")
    return found
