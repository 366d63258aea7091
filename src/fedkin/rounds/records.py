"""What a run writes down: its rounds, its clients, and what is known before the first round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedkin.config import Config
from fedkin.options import said
from fedkin.rounds import footprint
from fedkin.tasks import Classification, Metric

ACCURACY = Classification.metrics["accuracy"]


@dataclass(frozen=True)
class Accuracy:
    """The task's main metric over clients that have test samples: `macro` is their mean, `micro` that by samples,
    `worst_decile` the mean of the worst tenth of clients. `metric` says what the numbers are: unless another is named,
    accuracy in percent. Of others `unit` is empty, and `higher` says whether more is better."""

    micro: float
    macro: float
    worst_decile: float
    std: float
    metric: str = "accuracy"
    unit: str = "%"
    higher: bool = True

    @classmethod
    def of(cls, correct: np.ndarray[Any, Any], count: np.ndarray[Any, Any], metric: Metric = ACCURACY) -> Accuracy:
        what, has = (metric.name, metric.unit, metric.higher), count > 0
        if not has.any():
            nan = float("nan")
            return cls(nan, nan, nan, nan, *what)
        each = np.sort(metric.scale * correct[has] / count[has])
        worst = each if metric.higher else each[::-1]
        tenth = worst[: max(1, math.ceil(len(each) / 10))]
        micro = metric.scale * correct[has].sum() / count[has].sum()
        return cls(float(micro), float(each.mean()), float(tenth.mean()), float(each.std()), *what)

    def said(self, value: float) -> str:
        """One of these numbers as people read it."""
        return said(value, self.unit)


@dataclass(frozen=True)
class RoundRecord:
    """The state of a run after a round. `final` marks the one after the method's last fine-tuning.

    Times are since the start: `seconds` of the rounds themselves, of which `training` (what clients did when asked);
    `evaluating` and `writing` come on top; `wall` is what a stopwatch says, the preparing included.

    `round` counts from 1. `accuracy` is the main metric of the personal models on test samples, `metrics` the others,
    `test_loss` and `train_loss` the mean losses; `validation`, `validation_loss` and `validation_metrics` the same on
    validation samples, of as many clients as `validated` says. `bytes_down`, `bytes_up` and `client_steps` are since
    the start, and so is `removed`; `participants` and `failed` are of this round, `lr` is its learning rate. The
    accuracy is of `judged` clients, of `judgeable` that it should be of."""

    round: int
    accuracy: Accuracy
    test_loss: float
    train_loss: float
    bytes_down: int  # since the start
    bytes_up: int
    seconds: float  # training, and the server's work
    participants: int
    failed: int  # in this round
    removed: int  # since the start
    final: bool = False
    client_steps: int = 0  # training steps of all clients, since the start
    training: float = math.nan  # NaN: written before FedKin kept these apart
    evaluating: float = math.nan
    writing: float = math.nan  # up to the round before
    wall: float = math.nan
    judged: int = 0  # clients that the accuracy is of
    judgeable: int = 0  # and that it should be of: where clients are elsewhere, some may not have answered
    lr: float = math.nan  # the learning rate of this round, without clients' own factors; NaN: it was not written down
    metrics: Mapping[str, float] = field(default_factory=dict)  # the others, each the mean over clients that have it
    validation: Accuracy | None = None  # the main metric on validation samples, where some were asked for
    validation_loss: float = math.nan
    validation_metrics: Mapping[str, float] = field(default_factory=dict)
    validated: int = 0  # clients that the validation score is of: those of which it can be computed

    @property
    def choice(self) -> float:
        """What a choice between models goes by, more is better: the validation score, the mean over clients. NaN where
        there is none."""
        if self.validation is None:
            return math.nan
        return self.validation.macro if self.validation.higher else -self.validation.macro

    @property
    def covers_all(self) -> bool:
        """Whether the accuracy is of all clients that it should be of."""
        return self.judged >= self.judgeable

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RoundRecord:
        """From what `asdict` made of one."""
        aside = values.get("validation")
        validation = None if aside is None else Accuracy(**aside)
        return cls(**{**values, "accuracy": Accuracy(**values["accuracy"]), "validation": validation})


@dataclass(frozen=True)
class ClientRecord:
    client: int
    name: str
    accuracy: float
    loss: float
    train_samples: int
    test_samples: int
    correct: int  # 0 where the metric is none that counts right answers
    metrics: Mapping[str, float] = field(default_factory=dict)  # those beside the main one; NaN: cannot be computed
    validation: float = math.nan  # the main metric on validation samples; NaN: there are none, or nobody asked


@dataclass(frozen=True, eq=False)
class Prepared:
    """What is known before the first round; listeners (`on_event`) hear it once.

    `config` is all settings, `clients` and `classes` how many there are, `split_hash` says which split it is,
    `parameters` are those that learn; `device`, `precision` and `eval_point` are what was chosen. `done`: so many
    rounds were done before, by a run that is resumed. `remarks` are sentences to read first, `needed` is the memory and
    disk, as reckoned, `task`, `metric` and `extra` say what is learnt and measured, `columns` what was done with those
    of a table. `seen`: sentences on samples for tests and choices that the run which it begins with has trained on."""

    config: Config
    clients: int
    classes: int
    split_hash: str
    parameters: int
    device: str
    precision: str
    eval_point: str
    done: int = 0  # rounds that were done before, by a run that is resumed
    remarks: tuple[str, ...] = ()  # sentences a user should read before believing the numbers
    needed: footprint.Footprint | None = None  # memory and disk, as reckoned
    task: str = "classification"
    metric: Metric = ACCURACY  # the task's main one
    extra: tuple[Metric, ...] = ()  # those beside it
    columns: tuple[str, ...] = ()  # of a table: what each is and what was done with it, a sentence each
    seen: tuple[str, ...] = ()

    @property
    def counts_right(self) -> bool:
        """Whether the metric is the share of right answers, of which there is a number for each client."""
        return self.metric == ACCURACY and self.classes > 0


Event = Prepared | RoundRecord


Listener = Callable[[Event], None]
"""Hears what is known before the first round, then of every evaluated round. It may raise `StopTraining`."""


class StopTraining(Exception):
    """Raised by a listener (`on_event`), it ends the training of a run after the present round, as `patience` does.

    What the method does after the last round is done, the result is that of the models as they are, and
    `result.stopped` and a remark say when and why: `raise fk.StopTraining("no client is below 90 %")`."""


@dataclass(frozen=True)
class Halt:
    """That a listener ended the training."""

    round: int
    why: str


def comparable(history: Sequence[RoundRecord]) -> list[RoundRecord]:
    """The records whose accuracy is of everybody; if there is none, those that come closest. One that leaves the
    weakest out would look best."""
    most = max(1.0 if r.covers_all else r.judged / r.judgeable for r in history)
    return [r for r in history if (1.0 if r.covers_all else r.judged / r.judgeable) >= most]


def best_of(history: Sequence[RoundRecord]) -> RoundRecord:
    """The record that is best on validation samples (mean over clients), where there are any; else, chosen on test
    data, the one whose metric by samples is best. Of equal ones the first."""
    chosen = best_on_validation(history)
    if chosen is not None:
        return chosen
    sign = 1 if history[-1].accuracy.higher else -1
    return max(comparable(history), key=lambda r: (sign * r.accuracy.micro, -r.round))


def best_on_validation(history: Sequence[RoundRecord]) -> RoundRecord | None:
    """The first of the records with the best validation score; None where it could never be computed."""
    known = [r for r in history if not math.isnan(r.choice)]
    return max(known, key=lambda r: r.choice) if known else None
