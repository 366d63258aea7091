"""K clients and their private data on one device: what a method's client half works with.

In the simulator a cohort is many rows trained as one program; on a real node it is one row. The code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkin.compute import keys
from fedkin.compute.batches import Source, crop_flip, plan
from fedkin.compute.choice import Chooser
from fedkin.compute.forward import Forward
from fedkin.compute.layout import Layout
from fedkin.compute.losses import Term
from fedkin.compute.optim import Moments, Optimiser
from fedkin.compute.tape import Tape
from fedkin.compute.work import Precision, Work
from fedkin.core.evaluation import DataPart, Evaluation, Learn, Scores
from fedkin.core.schedules import Factors
from fedkin.core.store import Keep, Store
from fedkin.errors import UsageError
from fedkin.tasks import Classification, Metric, Task


@dataclass(frozen=True)
class Training:
    """How clients train unless a method says otherwise."""

    epochs: int
    batch: int
    opt: Optimiser
    precision: Precision = "fp32"
    augment: bool = False  # random crop and flip of training images
    fixed: bool = False  # mini-batches in the samples' own order, whole ones only
    factors: Factors | None = None  # what rates are multiplied by; None: they are the same for all, in every round
    clip: float | None = None  # the largest norm of a model's gradient
    accumulate: int = 1  # mini-batches that go into one step of the optimiser

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be at least 1")

    def rate(self, round: int) -> float:
        """The usual optimiser's learning rate in a round, counted from 0, without the clients' own factors."""
        return self.opt.lr * (1.0 if self.factors is None else self.factors.in_round(round))


@dataclass
class Site:
    """Where the data is: everything a cohort needs and the server does not have."""

    forward: Forward
    layout: Layout
    initial: Tensor  # [D], the common first model
    source: Source
    parts: Mapping[DataPart, Sequence[keys.I64]]
    names: Sequence[str]
    classes: int
    training: Training
    seed: int
    store: Store
    chooser: Chooser
    task: Task = field(default_factory=Classification)
    extra: tuple[Metric, ...] = ()  # metrics beside the task's main one
    hold: bool = False  # remember each client's last locally trained model
    validate: bool = False  # models are evaluated on the validation samples, too
    poisoned: Callable[[int], NDArray[np.bool_]] | None = None  # who trains on the attacker's version in a round
    tape: Tape | None = field(init=False)

    def __post_init__(self) -> None:
        self.tape = Tape.of(self.forward) if self.source.device.type == "cpu" else None
        self.has_batch_norm, self.has_dropout = self.forward.has_batch_norm, self.forward.has_dropout
        if "buffers" not in self.store.keeps:
            self.store.keeps["buffers"] = Keep("buffers")
        self.store.keeps["held"] = Keep("row")
        self.store.keeps["trained"] = Keep((1,), "zeros")  # in which round last, counted from 1; 0: never


@dataclass
class Model:
    """One of several models that a client trains on the same mini-batches, for `client.fit_together`.

    `start` is where its training begins, [D] or a row for each client, [K, D]. With `mu` above 0 the proximal term
    mu/2 ||w - anchor||^2 draws it towards `anchor` ([D] or [K, D])."""

    start: Tensor  # [D] or [K, D]
    mu: float = 0.0  # strength of the proximal term mu/2 ||w - anchor||^2
    anchor: Tensor | None = None  # [D] or [K, D]


class Cohort(Evaluation):
    """`client` in a method's client half: K clients and their data. On a real site K is 1.

    Rows, messages and results all have one entry per client, in order. `client["name"]` reads and writes what the
    method's `keeps` names, `len(client)` is K, `client.ids` are the clients' numbers, and `client.losses` is the mean
    training loss of the last `fit`."""

    def __init__(self, site: Site, ids: keys.I64, round: int, stream: str) -> None:
        super().__init__(site, ids, round, stream)
        self._fits = 0
        self.losses = torch.full((len(ids),), float("nan"))  # mean training loss of the last fit

    @property
    def seed(self) -> int:
        """The run's seed: with `ids` and `round`, what a client's own draws are keyed by."""
        return self._site.seed

    # ------------------------------------------------------------ what stays with the client

    def __getitem__(self, name: str) -> Tensor:
        return self._site.store.read(name, self.ids)

    def __setitem__(self, name: str, rows: Tensor) -> None:
        self._site.store.write(name, self.ids, rows)

    # ------------------------------------------------------------ rows

    def rows(self, **parts: Tensor) -> Tensor:
        """Whole rows from parts: `rows(body=..., head=...)` or `rows(model=...)`; each [width] or [K, width].

        What is not given comes from the common first model; statistics that never travel from the client's own."""
        full = self._site.initial.repeat(len(self), 1)
        if self.layout.buffers_policy == "local" and self.layout.size("buffers"):
            full[:, self.layout.columns("buffers")] = self["buffers"]
        for name, value in parts.items():
            columns = slice(None) if name == "row" else self.layout.columns(name)  # type: ignore[arg-type]
            full[:, columns] = value
        return full

    def body(self, rows: Tensor) -> Tensor:
        """The columns of all layers below the head (a view)."""
        return self.layout.body(rows)

    def head(self, rows: Tensor) -> Tensor:
        """The columns of the head (a view)."""
        return self.layout.head(rows)

    def model(self, rows: Tensor) -> Tensor:
        """The columns that travel when a whole model is sent."""
        return rows[..., self.layout.columns("model")]

    # ------------------------------------------------------------ training

    def fit(
        self,
        start: Tensor,
        *,
        learn: Learn = "model",
        epochs: int | None = None,
        steps: int | None = None,
        opt: Optimiser | None = None,
        mu: float = 0.0,
        anchor: Tensor | None = None,
        loss: Sequence[Term] | None = None,
        mask: Tensor | None = None,
        moments: Moments | None = None,
    ) -> Tensor:
        """Train one model per client from `start` ([D] or [K, D]) on its own data; returns [K, D].

        It takes `epochs`, or so many `steps` of one mini-batch each, however many samples a client has. `learn` and
        `mask` ([K, D], true where a number may change) choose what moves; `mu` and `anchor` pull towards
        a point; `loss` replaces the cross-entropy; `moments` is an optimiser memory to go on with, changed in place.
        The optimiser's rate, `opt`'s too, is multiplied by the schedule's factor of the round and by the client's."""
        models = [Model(start, mu, anchor)]
        return self.fit_together(
            models, learn=learn, epochs=epochs, steps=steps, opt=opt, loss=loss, mask=mask, moments=moments
        )[0]

    def _epochs_for(self, steps: int, fewest: int, epochs: int | None) -> int:
        """How many epochs have so many mini-batches, of a client with the fewest samples, too."""
        if epochs is not None:
            raise UsageError(f"epochs={epochs} and steps={steps}: give one of the two")
        if steps < 1:
            raise UsageError(f"steps={steps}: must be at least 1; to train nothing, do not call fit")
        if self._site.training.accumulate > 1:
            raise UsageError(
                f"steps={steps} are mini-batches, and accumulate={self._site.training.accumulate} goes by epochs"
            )
        return -(-steps // max(1, fewest // self._site.training.batch))

    def fit_together(
        self,
        models: Sequence[Model],
        *,
        learn: Learn = "model",
        epochs: int | None = None,
        steps: int | None = None,
        opt: Optimiser | None = None,
        loss: Sequence[Term] | None = None,
        mask: Tensor | None = None,
        moments: Moments | None = None,
    ) -> list[Tensor]:
        """Train several models per client on the same mini-batches: more rows of one program.

        The result has one tensor [K, D] for each of `models`; the other arguments are those of `fit`."""
        site, layout, clients = self._site, self.layout, len(self)
        training, self._fits = site.training, self._fits + 1
        stream = (site.seed, self.round, self._stream, self._fits)
        parts = self.indices("train")
        for i, part in zip(self.ids, parts, strict=True):
            if not len(part):
                raise self._no_samples(i, "train")
        if epochs is not None and epochs < 1:
            raise UsageError(f"epochs={epochs}: must be at least 1; to train nothing, do not call fit")
        if site.poisoned is not None:
            bad = site.poisoned(self.round)[self.ids]
            parts = [part + site.source.count * int(b) for part, b in zip(parts, bad, strict=True)]
        how = (training.batch, stream, site.has_batch_norm, training.fixed, training.accumulate)
        if steps is not None:
            epochs = self._epochs_for(steps, min(map(len, parts), default=1), epochs)
        table = plan(parts, self.ids, epochs or training.epochs, *how).first(steps)
        if training.augment:
            table = replace(table, moves=crop_flip(stream, self.ids, *table.table.shape[::2]))
        rows = torch.cat([self._wide(m.start) for m in models])
        pulled = any(m.mu and m.anchor is not None for m in models)
        mu = anchor = None
        if pulled:
            strengths = [m.mu if m.anchor is not None else 0.0 for m in models]
            mu = torch.tensor(strengths, device=self.device).repeat_interleave(clients)
            anchor = torch.cat([self._wide(m.start if m.anchor is None else m.anchor) for m in models])
        terms: Sequence[Term] = loss if loss is not None else [self.objective()]
        if len(models) > 1:
            terms = [t.repeated(len(models)) for t in terms]
            mask = mask.repeat(len(models), 1) if mask is not None and len(mask) == clients else mask
        noise = None
        if site.has_dropout:
            one = keys.key(*stream, "noise", self.ids)
            noise = np.concatenate([keys.mix(one + np.uint64(m)) for m in range(len(models))])
        opt, rates = opt or training.opt, None
        if training.factors is not None:
            own = (opt.lr * training.factors.at(self.ids, self.round)).astype(np.float32)
            rates = torch.from_numpy(np.tile(own, len(models))).to(self.device)
        work = Work(
            forward=site.forward,
            layout=layout,
            rows=rows,
            client=np.tile(np.arange(clients), len(models)),
            source=site.source,
            plan=table,
            opt=opt,
            learn=self._learned(learn),
            terms=terms,
            mask=mask,
            mu=mu,
            anchor=anchor,
            rates=rates,
            moments=moments,
            clip=training.clip,
            noise=noise,
            precision=training.precision,
            tape=site.tape if training.precision == "fp32" else None,
        )
        losses = site.chooser.train(work)
        self.losses = losses[-clients:].nan_to_num(nan=torch.inf, posinf=torch.inf)  # NaN is for not trained at all
        trained = [rows[m * clients : (m + 1) * clients] for m in range(len(models))]
        if layout.buffers_policy == "local" and layout.size("buffers"):
            self["buffers"] = trained[-1][:, layout.columns("buffers")]
        if site.hold:
            self["held"] = trained[-1]
            self["trained"] = torch.full((clients, 1), float(self.round + 1), device=self.device)
        return trained


__all__ = ["Cohort", "DataPart", "Learn", "Model", "Scores", "Site", "Training"]
