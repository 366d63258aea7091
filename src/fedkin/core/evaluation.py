"""What models do on their clients' own data: scores, features, prototypes, gradients. Nothing changes on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute import keys
from fedkin.compute.backends import cores, matmul_precision, run_way
from fedkin.compute.batches import in_order
from fedkin.compute.forward import Context, Out
from fedkin.compute.losses import Term, is_plain, total
from fedkin.compute.work import Work, on_device
from fedkin.errors import DataError, UsageError
from fedkin.tasks import Classification, Metric

if TYPE_CHECKING:
    from fedkin.core.cohort import Site

DataPart = Literal["train", "validation", "test"]
Learn = Literal["model", "body", "head"]
EVALUATE = 512  # samples of a client that a forward pass takes at once
EVALUATE_TOGETHER = 8192  # samples of all clients that share a pass
T = TypeVar("T")


@dataclass(frozen=True)
class Scores:
    """How K models did on their clients' data, by the task's main metric: for classes, samples right and samples of
    each true class [K, C]; for other tasks the metric times the samples, and the samples it is of (none where it cannot
    be computed), [K, 1]."""

    correct: Tensor
    count: Tensor
    loss: Tensor  # [K]: mean loss
    extra: Tensor  # [K, M]: the other metrics, as they are shown

    @property
    def accuracy(self) -> Tensor:
        """The main metric (of classes: the share of samples right), [K]; NaN for a client without samples."""
        return self.correct.sum(1) / self.count.sum(1)


class Evaluation:
    """K clients and their data. Rows and results have one entry per client, in order."""

    def __init__(self, site: Site, ids: keys.I64, round: int, stream: str) -> None:
        self.ids, self.round = ids, round
        self.layout, self.training, self.classes, self.task = site.layout, site.training, site.classes, site.task
        self._site, self._stream = site, stream
        site.source.turn(round)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def device(self) -> torch.device:
        """Where the samples lie and the rows are worked on."""
        return self._site.source.device

    def indices(self, data: DataPart) -> list[keys.I64]:
        """The numbers of each client's samples of this part ("train", "validation" or "test")."""
        return [self._site.parts[data][i] for i in self.ids]

    def samples(self, data: DataPart = "train") -> Tensor:
        """How many samples of this part each client has, [K]."""
        return torch.tensor([len(p) for p in self.indices(data)], dtype=torch.float32, device=self.device)

    def evaluate(self, rows: Tensor, data: DataPart = "test", extra: bool = False) -> Scores:
        """The task's main metric (of classes: accuracy) and the loss of one model per client on its own data; with
        `extra` also the other metrics that the run was asked for."""
        wide, others = self._wide(rows), self._site.extra if extra else ()
        if others or not isinstance(self.task, Classification):
            return self._evaluate_whole(wide, data, others)
        if self._together():
            return self._evaluate_together(wide, self.indices(data))

        def one(k: int) -> tuple[Tensor, Tensor, Tensor]:
            hits = torch.zeros(self.classes, device=self.device)
            count, loss = torch.zeros_like(hits), torch.zeros((), device=self.device)
            row = wide[k].clone()  # where it lies among the others must not show in the last digits
            for x, y in self._batches(k, data, EVALUATE, clean=True):
                logits = self._forward(row, x)[1]
                right = (self._known(logits).argmax(1) == y).float()
                hits.scatter_add_(0, y, right)
                count.scatter_add_(0, y, torch.ones_like(right))
                loss += F.cross_entropy(logits, y, reduction="sum")
            return hits, count, loss

        found = self._each(one)
        correct, count = torch.stack([f[0] for f in found]), torch.stack([f[1] for f in found])
        loss = torch.stack([f[2] for f in found]) / count.sum(1).clamp(min=1)
        return Scores(correct, count, loss, loss.new_zeros(len(self), 0))

    def _evaluate_whole(self, wide: Tensor, data: DataPart, extra: Sequence[Metric]) -> Scores:
        """Metrics that look at all samples of a client at once."""
        main, classes = self.task.metric, isinstance(self.task, Classification)

        def one_number(value: float) -> Tensor:
            return torch.tensor([value], device=self.device)

        def one(k: int, outputs: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, float, list[float]]:
            kept, targets, loss, seen, counted = list[Tensor](), list[Tensor](), 0.0, 0, 0.0
            for out, y in outputs:
                kept.append(self.task.keep(self._known(out), y))
                targets.append(y)
                weight = float(self.task.counted(y).sum())
                loss += float(self._plain_loss(out, y).double().sum()) * (weight / len(y))
                seen, counted = seen + len(y), counted + weight
            if not seen:
                nothing = torch.zeros(self.classes if classes else 1, device=self.device)
                return nothing, nothing, 0.0, [math.nan] * len(extra)
            whole, y = torch.cat(kept), torch.cat(targets)
            others = [m.of(whole, y) for m in extra]
            if classes:
                count = torch.bincount(y, minlength=self.classes).float()
                right = torch.bincount(y[whole.argmax(1) == y], minlength=self.classes).float()
                return right, count, loss / counted, others
            value = main.number(whole, y)
            if math.isnan(value) and not whole.isfinite().all():  # not a metric that lacks something: a broken model
                value = -math.inf if main.higher else math.inf
            known = not math.isnan(value)
            return one_number(value * seen if known else 0.0), one_number(seen * known), loss / counted, others

        if self._together():
            found = [one(k, iter(pieces)) for k, pieces in enumerate(self._outputs_together(wide, self.indices(data)))]
        else:
            found = self._each(lambda k: one(k, self._outputs(wide[k].clone(), k, data)))
        return Scores(
            torch.stack([f[0] for f in found]).float(),
            torch.stack([f[1] for f in found]).float(),
            torch.tensor([f[2] for f in found], device=self.device),
            torch.tensor([f[3] for f in found], device=self.device).view(len(self), len(extra)),
        )

    def _known(self, outputs: Tensor) -> Tensor:
        """Of a network with more outputs than there are classes, those that can be predicted."""
        return outputs[..., : self.classes] if isinstance(self.task, Classification) else outputs

    def _mean_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of one client's batch."""
        if is_plain([self.task.plain]):
            return F.cross_entropy(logits, y)
        return self._plain_loss(logits, y).mean()

    def _plain_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample of one client's batch, [n], whose mean is the batch's."""
        return self.task.plain.value(Out(logits.unsqueeze(0), logits.unsqueeze(0)), y.unsqueeze(0), {})[0]

    def _outputs(self, row: Tensor, k: int, data: DataPart) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's outputs and targets, batch by batch; all at once where the loss is one of the whole."""
        outputs = [(self._forward(row, x)[1], y) for x, y in self._batches(k, data, EVALUATE, clean=True)]
        if self.task.whole and outputs:
            outputs = [(torch.cat([o for o, _ in outputs]), torch.cat([y for _, y in outputs]))]
        return iter(outputs)

    def _outputs_together(self, wide: Tensor, parts: Sequence[keys.I64]) -> list[list[tuple[Tensor, Tensor]]]:
        """Every client's outputs and targets, in one piece each."""
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in parts]
        for chosen, logits, y, valid in self._passes(wide, parts):
            for place, k in enumerate(chosen):
                there = valid[place].bool()
                found[k].append((logits[place][there], y[place][there]))
        return [[(torch.cat([o for o, _ in mine]), torch.cat([y for _, y in mine]))] if mine else [] for mine in found]

    @property
    def validates(self) -> bool:
        """Whether the run wants to know how models do on validation samples, too."""
        return self._site.validate

    def _together(self) -> bool:
        """On a GPU rows share a pass where the network allows it: one after another would leave it idle."""
        return self.device.type == "cuda" and self._site.forward.together and len(self) > 1

    def _evaluate_together(self, wide: Tensor, parts: Sequence[keys.I64]) -> Scores:
        """On these samples, with as many clients a pass as make EVALUATE_TOGETHER of them."""
        correct = torch.zeros(len(self), self.classes, device=self.device)
        count, loss = torch.zeros_like(correct), torch.zeros(len(self), device=self.device)
        for chosen, logits, y, valid in self._passes(wide, parts):
            at = torch.tensor(chosen, device=self.device)
            right = (self._known(logits).argmax(2) == y) * valid
            correct[at] = correct[at].scatter_add(1, y, right)
            count[at] = count[at].scatter_add(1, y, valid)
            each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
            loss[at] += (each * valid).sum(1)
        return Scores(correct, count, loss / count.sum(1).clamp(min=1), loss.new_zeros(len(self), 0))

    def _passes(self, wide: Tensor, parts: Sequence[keys.I64]) -> Iterator[tuple[list[int], Tensor, Tensor, Tensor]]:
        """Batches of several clients: which they are, their outputs [k, B, ...], targets, and which samples count."""
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
                valid = (torch.arange(batch, device=self.device) < size.unsqueeze(1)).float()
                yield chosen, logits, y.view(*index.shape, *y.shape[1:]), valid

    def class_counts(self) -> Tensor:
        """How many training samples of each class, [K, C]; of several labels, how many have each, and how many samples
        there are in the last column, [K, L + 1]."""
        y = self._site.source.y
        parts = [y[torch.from_numpy(self._own(k, "train")).to(y.device)] for k in range(len(self))]
        if self.task.targets == "classes":
            return torch.stack([torch.bincount(part, minlength=self.classes) for part in parts]).float()
        return torch.stack([torch.cat([part.sum(0), part.new_tensor([len(part)])]) for part in parts]).float()

    def objective(self) -> Term:
        """The task's loss, as these clients minimise it: what `fit` takes unless `loss` says otherwise."""
        return self.task.term(self)

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
                raise self._no_samples(int(self.ids[k]), data)
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
                terms=[self.task.plain],
                measure=True,
            )
            return (run_way("graph", work) * torch.from_numpy(work.steps)).to(self.device)

        def one(k: int) -> Tensor:
            tensors = self.layout.tensors(wide[k].clone())
            leaves = [tensors[n].requires_grad_() for n in names]
            trace = torch.zeros((), device=self.device)
            for x, y in self._batches(k, data, size):
                with torch.enable_grad():
                    loss = self._mean_loss(self._logits(tensors, x), y)
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
                return self._mean_loss(self._logits({**fixed, **moving}, x.unsqueeze(0)), y.unsqueeze(0))

            gradient: Callable[..., dict[str, Tensor]] = torch.func.grad(loss)
            per_sample: Callable[..., dict[str, Tensor]] = torch.func.vmap(gradient, in_dims=(None, 0, 0))
            moving = {n: tensors[n] for n in names}
            if not self._site.forward.together:  # control flow that vmap refuses: one sample after another
                single = [gradient(moving, x[0], y[0]) for x, y in self._batches(k, data, 1)]
                return torch.stack([torch.cat([g[n].flatten() for n in names]) for g in single])
            found = [per_sample(moving, x, y) for x, y in self._batches(k, data, self.training.batch)]
            return torch.cat([torch.cat([g[n].reshape(len(g[n]), -1) for n in names], 1) for g in found])

        return [one(k) for k in range(len(self))]

    def loss(self, rows: Tensor, terms: Sequence[Term] | None = None, data: DataPart = "train") -> Tensor:
        """Mean loss of one model per client over its data, evaluation mode, [K]."""
        wide, chosen = self._wide(rows), terms if terms is not None else [self.task.plain]
        if terms is None and isinstance(self.task, Classification) and self._together():
            return self._evaluate_together(wide, [self._own(k, data) for k in range(len(self))]).loss

        def one(k: int) -> Tensor:
            value, count = torch.zeros((), device=self.device), 0.0
            for x, y in self._batches(k, data, EVALUATE):
                tensors = self.layout.tensors(wide[k : k + 1])
                out = self._site.forward(tensors, x, 1, self._context())
                given = [{n: v[k : k + 1] for n, v in t.given.items()} for t in chosen]
                weight = float(self.task.counted(y).sum()) if terms is None else len(y)
                value += total(chosen, out, y.unsqueeze(0), given).sum() * (weight / len(y))
                count += weight
            return value / max(count, 1)

        return torch.stack(self._each(one))

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

    def _no_samples(self, i: int, data: DataPart) -> DataError:
        part = "training" if data == "train" else data
        return DataError(f"client {self._site.names[i]!r} has no {part} samples: give it some or leave it out")

    def _context(self) -> Context:
        return Context(dtype=torch.bfloat16 if self.training.precision == "bf16" else torch.float32)

    def _forward(self, row: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self._site.forward(self.layout.tensors(row.unsqueeze(0)), x, 1, self._context())
        return out.features[0], out.logits[0]

    def _logits(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        wide = {n: t.unsqueeze(0) for n, t in tensors.items()}
        return self._site.forward(wide, x, 1, self._context()).logits[0]

    def _batches(self, k: int, data: DataPart, size: int, clean: bool = False) -> list[tuple[Tensor, Tensor]]:
        """A client's data in order; `clean`: what models are evaluated on."""
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
