"""K clients and their private data on one device: what a method's client half works with.

In the simulator a cohort is many rows trained as one program; on a real node it is one row. The code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedkin.compute import keys
from fedkin.compute.backends import cores, matmul_precision, run_way
from fedkin.compute.batches import Source, crop_flip, in_order, plan
from fedkin.compute.choice import Chooser
from fedkin.compute.forward import Context, Forward
from fedkin.compute.layout import Layout
from fedkin.compute.losses import Term, cross_entropy, total
from fedkin.compute.optim import Moments, Optimiser
from fedkin.compute.program import Program
from fedkin.compute.tape import Tape
from fedkin.compute.work import Precision, Work, on_device
from fedkin.core.schedules import Factors
from fedkin.core.store import Keep, Store
from fedkin.errors import DataError, UsageError

DataPart = Literal["train", "validation", "test"]
Learn = Literal["model", "body", "head"]
EVALUATE = 512  # samples of a client that a forward pass takes at once
EVALUATE_TOGETHER = 8192  # samples of all clients that share a pass
T = TypeVar("T")


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

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
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
    hold: bool = False  # remember each client's last locally trained model
    poisoned: Callable[[int], NDArray[np.bool_]] | None = None  # who trains on the attacker's version in a round
    tape: Tape | None = field(init=False)

    def __post_init__(self) -> None:
        self.tape = Tape.of(self.forward) if self.source.device.type == "cpu" else None
        modules = self.forward.ops if isinstance(self.forward, Program) else []
        kinds = {type(op.layer).__name__ for op in modules}
        opaque_norm = getattr(self.forward, "has_batch_norm", False)
        self.has_batch_norm = bool({"BatchNorm1d", "BatchNorm2d"} & kinds) or opaque_norm
        self.has_dropout = "Dropout" in kinds
        if "buffers" not in self.store.keeps:
            self.store.keeps["buffers"] = Keep("buffers")
        self.store.keeps["held"] = Keep("row")
        self.store.keeps["trained"] = Keep((1,), "zeros")  # in which round last, counted from 1; 0: never


@dataclass
class Model:
    """One of several models that a client trains on the same batches."""

    start: Tensor  # [D] or [K, D]
    mu: float = 0.0  # strength of the proximal term mu/2 ||w - anchor||^2
    anchor: Tensor | None = None  # [D] or [K, D]


@dataclass(frozen=True)
class Scores:
    """How K models did on their clients' data."""

    correct: Tensor  # [K, C]: hits per true class
    count: Tensor  # [K, C]: samples per true class
    loss: Tensor  # [K]: mean cross-entropy

    @property
    def accuracy(self) -> Tensor:
        """Share of samples right, [K]; NaN for a client without samples."""
        return self.correct.sum(1) / self.count.sum(1)


class Cohort:
    """`client` in a method's client half. Rows, messages and results all have one entry per client, in order."""

    def __init__(self, site: Site, ids: keys.I64, round: int, stream: str) -> None:
        self.ids, self.round = ids, round
        self.layout, self.training, self.classes = site.layout, site.training, site.classes
        self._site, self._stream, self._fits = site, stream, 0
        site.source.turn(round)
        self.losses = torch.full((len(ids),), float("nan"))  # mean training loss of the last fit

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def device(self) -> torch.device:
        return self._site.source.device

    @property
    def seed(self) -> int:
        """The run's seed: with `ids` and `round`, what a client's own draws are keyed by."""
        return self._site.seed

    def indices(self, data: DataPart) -> list[keys.I64]:
        return [self._site.parts[data][i] for i in self.ids]

    def samples(self, data: DataPart = "train") -> Tensor:
        return torch.tensor([len(p) for p in self.indices(data)], dtype=torch.float32, device=self.device)

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
        return self.layout.body(rows)

    def head(self, rows: Tensor) -> Tensor:
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
        opt: Optimiser | None = None,
        mu: float = 0.0,
        anchor: Tensor | None = None,
        loss: Sequence[Term] | None = None,
        mask: Tensor | None = None,
        moments: Moments | None = None,
    ) -> Tensor:
        """Train one model per client from `start` ([D] or [K, D]) on its own data; returns [K, D].

        `learn` and `mask` ([K, D], true where a number may change) choose what moves; `mu` and `anchor` pull towards
        a point; `loss` replaces the cross-entropy; `moments` is an optimiser memory to go on with, changed in place.
        The optimiser's rate, `opt`'s too, is multiplied by the schedule's factor of the round and by the client's."""
        models = [Model(start, mu, anchor)]
        return self.fit_together(models, learn=learn, epochs=epochs, opt=opt, loss=loss, mask=mask, moments=moments)[0]

    def fit_together(
        self,
        models: Sequence[Model],
        *,
        learn: Learn = "model",
        epochs: int | None = None,
        opt: Optimiser | None = None,
        loss: Sequence[Term] | None = None,
        mask: Tensor | None = None,
        moments: Moments | None = None,
    ) -> list[Tensor]:
        """Train several models per client on the same mini-batches: more rows of one program."""
        site, layout, clients = self._site, self.layout, len(self)
        training, self._fits = site.training, self._fits + 1
        stream = (site.seed, self.round, self._stream, self._fits)
        parts = self.indices("train")
        for i, part in zip(self.ids, parts, strict=True):
            if not len(part):
                raise self._nothing(i, "train")
        if epochs is not None and epochs < 1:
            raise UsageError(f"epochs={epochs}: must be at least 1; to train nothing, do not call fit")
        if site.poisoned is not None:
            bad = site.poisoned(self.round)[self.ids]
            parts = [part + site.source.count * int(b) for part, b in zip(parts, bad, strict=True)]
        steps = plan(
            parts, self.ids, epochs or training.epochs, training.batch, stream, site.has_batch_norm, training.fixed
        )
        if training.augment:
            steps = replace(steps, moves=crop_flip(stream, self.ids, *steps.table.shape[::2]))
        rows = torch.cat([self._wide(m.start) for m in models])
        pulled = any(m.mu and m.anchor is not None for m in models)
        mu = anchor = None
        if pulled:
            strengths = [m.mu if m.anchor is not None else 0.0 for m in models]
            mu = torch.tensor(strengths, device=self.device).repeat_interleave(clients)
            anchor = torch.cat([self._wide(m.start if m.anchor is None else m.anchor) for m in models])
        terms: Sequence[Term] = loss if loss is not None else [cross_entropy()]
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
            plan=steps,
            opt=opt,
            learn=self._learned(learn),
            terms=terms,
            mask=mask,
            mu=mu,
            anchor=anchor,
            rates=rates,
            moments=moments,
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

    def _wide(self, rows: Tensor) -> Tensor:
        """[D] or [K, D] as [K, D], to be looked at: not a copy."""
        if rows.shape not in ((self.layout.width,), (len(self), self.layout.width)):
            raise UsageError(
                f"expected rows of shape [{self.layout.width}] or [{len(self)}, {self.layout.width}], got "
                f"{list(rows.shape)}; build whole rows with client.rows(body=..., head=...)"
            )
        return rows.detach().expand(len(self), -1)

    def _learned(self, learn: Learn) -> tuple[str, ...]:
        if learn not in ("model", "body", "head"):
            raise UsageError(f"learn={learn!r}: choose one of model, body, head")
        return self.layout.learnt(learn)

    # ------------------------------------------------------------ looking at models, without changing them

    def evaluate(self, rows: Tensor, data: DataPart = "test") -> Scores:
        """Accuracy and loss of one model per client on its own data."""
        wide = self._wide(rows)
        if self._together():
            return self._evaluate_together(wide, self.indices(data))

        def one(k: int) -> tuple[Tensor, Tensor, Tensor]:
            hits = torch.zeros(self.classes, device=self.device)
            count, loss = torch.zeros_like(hits), torch.zeros((), device=self.device)
            row = wide[k].clone()  # where it lies among the others must not show in the last digits
            for x, y in self._batches(k, data, EVALUATE, clean=True):
                logits = self._forward(row, x)[1]
                right = (logits.argmax(1) == y).float()
                hits.scatter_add_(0, y, right)
                count.scatter_add_(0, y, torch.ones_like(right))
                loss += F.cross_entropy(logits, y, reduction="sum")
            return hits, count, loss

        found = self._each(one)
        correct, count = torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found])
        loss = torch.stack([f[2] for f in found]) / count.sum(1).clamp(min=1)
        return Scores(correct, count, loss)

    def _together(self) -> bool:
        """On a GPU rows share a pass where the network allows it: one after another would leave it idle."""
        return self.device.type == "cuda" and self._site.forward.together and len(self) > 1

    def _evaluate_together(self, wide: Tensor, parts: Sequence[keys.I64]) -> Scores:
        """On these samples, with as many clients a pass as make EVALUATE_TOGETHER of them."""
        correct = torch.zeros(len(self), self.classes, device=self.device)
        count, loss = torch.zeros_like(correct), torch.zeros(len(self), device=self.device)
        order = np.argsort([-len(p) for p in parts], kind="stable").tolist()
        while order and len(parts[order[0]]):
            batch = min(EVALUATE, len(parts[order[0]]))
            chosen, order = order[: max(1, EVALUATE_TOGETHER // batch)], order[max(1, EVALUATE_TOGETHER // batch) :]
            at = torch.tensor(chosen, device=self.device)
            tensors, steps = self.layout.tensors(wide[at]), in_order([parts[k] for k in chosen], batch)
            table, sizes = on_device(steps.table, self.device), on_device(steps.sizes, self.device)
            for index, size in zip(table, sizes, strict=True):
                x, y = self._site.source.batch(index.flatten()), self._site.source.labels(index.flatten())
                with torch.no_grad(), matmul_precision(self.training.precision):
                    logits = self._site.forward(tensors, x, len(chosen), self._context()).logits
                y, valid = y.view(index.shape), (torch.arange(batch, device=self.device) < size.unsqueeze(1)).float()
                right = (logits.argmax(2) == y) * valid
                correct[at] = correct[at].scatter_add(1, y, right)
                count[at] = count[at].scatter_add(1, y, valid)
                each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
                loss[at] += (each * valid).sum(1)
        return Scores(correct, count, loss / count.sum(1).clamp(min=1))

    def features(self, rows: Tensor, data: DataPart = "train") -> list[Tensor]:
        """The head's inputs for each client's samples in order: K tensors [n_k, F]."""
        wide = self._wide(rows)

        def one(k: int) -> Tensor:
            return torch.cat([self._forward(wide[k], x)[0] for x, _ in self._batches(k, data, EVALUATE)])

        return self._each(one)

    def prototypes(
        self, rows: Tensor, data: DataPart = "train", clip: float | Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean feature of each class, [K, C, F] (zeros where a class is absent), and the counts [K, C].

        `clip` bounds features before the mean: a number each value, a function whole batches [B, F]."""
        wide = self._wide(rows)

        def one(k: int) -> tuple[Tensor, Tensor]:
            sums: Tensor | None = None
            count = torch.zeros(self.classes, device=self.device)
            for x, y in self._batches(k, data, EVALUATE):
                f = self._forward(wide[k], x)[0]
                if clip is not None:
                    f = clip(f) if callable(clip) else f.clamp(-clip, clip)
                if sums is None:
                    sums = torch.zeros(self.classes, f.shape[1], device=self.device)
                sums.index_add_(0, y, f)
                count.scatter_add_(0, y, torch.ones_like(y, dtype=torch.float32))
            if sums is None:
                raise self._nothing(int(self.ids[k]), data)
            return sums / count.clamp(min=1).unsqueeze(1), count

        found = self._each(one)
        return torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found])

    def gradient_norms(
        self, rows: Tensor, learn: Learn = "model", data: DataPart = "train", batch: int | None = None
    ) -> Tensor:
        """Sum over mini-batches of the squared norm of the mean-loss gradient, evaluation mode, [K]:
        the trace of an empirical Fisher matrix built from batch gradients. `batch`: their size, if not training's."""
        wide, names = self._wide(rows), self._learned(learn)
        size = batch or self.training.batch
        if self._together():
            work = Work(
                forward=self._site.forward,
                layout=self.layout,
                rows=wide.clone(),
                client=np.arange(len(self)),
                source=self._site.source,
                plan=in_order(self.indices(data), size),
                opt=self.training.opt,
                learn=names,
                precision=self.training.precision,
                measure=True,
            )
            return (run_way("graph", work) * torch.from_numpy(work.steps)).to(self.device)

        def one(k: int) -> Tensor:
            tensors = self.layout.tensors(wide[k].clone())
            leaves = [tensors[n].requires_grad_() for n in names]
            trace = torch.zeros((), device=self.device)
            for x, y in self._batches(k, data, size):
                with torch.enable_grad():
                    loss = F.cross_entropy(self._logits(tensors, x), y)
                    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
                trace += torch.stack([g.square().sum() for g in grads]).sum()
            return trace

        return torch.stack(self._each(one))

    def sample_gradients(self, rows: Tensor, learn: Learn = "model", data: DataPart = "train") -> list[Tensor]:
        """The gradient of every single sample's loss: K tensors [n_k, P], P in the order of the row."""
        wide, names = self._wide(rows), self._learned(learn)

        def one(k: int) -> Tensor:
            tensors = self.layout.tensors(wide[k])
            fixed = {n: t for n, t in tensors.items() if n not in names}

            def loss(moving: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
                return F.cross_entropy(self._logits({**fixed, **moving}, x.unsqueeze(0)), y.unsqueeze(0))

            gradient: Callable[..., dict[str, Tensor]] = torch.func.grad(loss)
            per_sample: Callable[..., dict[str, Tensor]] = torch.func.vmap(gradient, in_dims=(None, 0, 0))
            moving = {n: tensors[n] for n in names}
            if not self._site.forward.together:  # control flow that vmap refuses: one sample after another
                single = [gradient(moving, x[0], y[0]) for x, y in self._batches(k, data, 1)]
                return torch.stack([torch.cat([g[n].flatten() for n in names]) for g in single])
            found = [per_sample(moving, x, y) for x, y in self._batches(k, data, self.training.batch)]
            return torch.cat([torch.cat([g[n].flatten(1) for n in names], 1) for g in found])

        return [one(k) for k in range(len(self))]

    def loss(self, rows: Tensor, terms: Sequence[Term] | None = None, data: DataPart = "train") -> Tensor:
        """Mean loss of one model per client over its data, evaluation mode, [K]."""
        wide, chosen = self._wide(rows), terms if terms is not None else [cross_entropy()]
        if terms is None and self._together():
            return self._evaluate_together(wide, [self._own(k, data) for k in range(len(self))]).loss

        def one(k: int) -> Tensor:
            value, count = torch.zeros((), device=self.device), 0
            for x, y in self._batches(k, data, EVALUATE):
                tensors = self.layout.tensors(wide[k : k + 1])
                out = self._site.forward(tensors, x, 1, self._context())
                given = [{n: v[k : k + 1] for n, v in t.given.items()} for t in chosen]
                value += total(chosen, out, y.unsqueeze(0), given).sum()
                count += len(y)
            return value / max(count, 1)

        return torch.stack(self._each(one))

    def _nothing(self, i: int, data: DataPart) -> DataError:
        kind = "training" if data == "train" else data
        return DataError(f"client {self._site.names[i]!r} has no {kind} samples: give it some or leave it out")

    def _context(self) -> Context:
        return Context(dtype=torch.bfloat16 if self.training.precision == "bf16" else torch.float32)

    def _forward(self, row: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self._site.forward(self.layout.tensors(row.unsqueeze(0)), x, 1, self._context())
        return out.features[0], out.logits[0]

    def _logits(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        wide = {n: t.unsqueeze(0) for n, t in tensors.items()}
        return self._site.forward(wide, x, 1, self._context()).logits[0]

    def _batches(self, k: int, data: DataPart, size: int, clean: bool = False) -> list[tuple[Tensor, Tensor]]:
        """A client's data in order; `clean`: what models are judged on."""
        part = self._site.parts[data][self.ids[k]] if clean else self._own(k, data)
        index = torch.from_numpy(part).to(self.device)
        return [(self._site.source.batch(i), self._site.source.labels(i)) for i in torch.split(index, size) if len(i)]

    def _own(self, k: int, data: DataPart) -> keys.I64:
        """A client's samples; what attackers train on they also take prototypes, losses and gradients of."""
        part: keys.I64 = self._site.parts[data][self.ids[k]]
        poisoned = self._site.poisoned
        bad = data == "train" and poisoned is not None and bool(poisoned(self.round)[self.ids[k]])
        return part + np.int64(self._site.source.count * bad)

    def _each(self, one: Callable[[int], T]) -> list[T]:
        """Apply to every client, on as many threads as there are cores; gradients off unless turned on inside."""

        def quiet(k: int) -> T:
            with torch.no_grad():
                return one(k)

        if self.device.type != "cpu" or len(self) == 1 or cores() == 1:
            with matmul_precision(self.training.precision):
                return [quiet(k) for k in range(len(self))]
        shares = np.array_split(np.arange(len(self)), min(len(self), 8 * cores()))  # a task for each would cost more
        with ThreadPoolExecutor(cores(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = pool.map(lambda share: [quiet(k) for k in share.tolist()], shares)
            return [value for values in found for value in values]
