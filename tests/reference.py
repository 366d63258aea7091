"""The slow, obvious way: one client after another, an ordinary module, an ordinary optimiser, an ordinary loop.

Everything fast in FedKin is held against this. It shares nothing with the engine but the list of batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkin.compute.batches import Plan, Source, plan
from fedkin.compute.choice import Chooser
from fedkin.compute.layout import Layout
from fedkin.compute.optim import SGD, Adam, Optimiser
from fedkin.compute.program import trace
from fedkin.core.cohort import Cohort, Site, Training
from fedkin.core.store import Keep, Store
from fedkin.tasks import Classification, Task

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(features, logits, labels) of one batch to a number."""


def plain_loss(features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def torch_optimiser(opt: Optimiser, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(opt, SGD):
        return torch.optim.SGD(params, opt.lr, opt.momentum, weight_decay=opt.weight_decay)
    return torch.optim.Adam(params, opt.lr, (opt.beta1, opt.beta2), opt.eps, opt.weight_decay)


def parts_of(module: nn.Module, head: str) -> dict[str, list[str]]:
    """The names of the parameters in the body, the head and both."""
    names = [n for n, _ in module.named_parameters()]
    top = [n for n in names if head and n.startswith(head + ".")]
    return {"model": names, "head": top, "body": [n for n in names if n not in top]}


def train_client(
    module: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    opt: Optimiser,
    *,
    head: str = "head",
    learn: str = "model",
    loss: Loss = plain_loss,
    mu: float = 0.0,
    anchor: nn.Module | None = None,
    mask: Mapping[str, Tensor] | None = None,
    optimiser: torch.optim.Optimizer | None = None,
) -> float:
    """Train `module` in place; returns the mean loss of its steps (without the proximal term)."""
    module.train()
    named = dict(module.named_parameters())
    moving = [named[n] for n in parts_of(module, head)[learn]]
    if optimiser is None:
        optimiser = torch_optimiser(opt, moving)
    start = {n: p.detach().clone() for n, p in named.items()}
    seen: list[Tensor] = []
    hook = dict(module.named_modules())[head].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    losses = []
    for x, y in batches:
        seen.clear()
        logits = module(x)
        features = seen[0].flatten(1) if head else logits
        value = loss(features, logits, y)
        losses.append(value.item())
        if anchor is not None:
            goal = dict(anchor.named_parameters())
            value = value + mu / 2 * sum((p - goal[n].detach()).square().sum() for n, p in named.items())
        module.zero_grad()
        value.backward()
        for p in named.values():
            if not any(p is m for m in moving):
                p.grad = None
        optimiser.step()
        if mask is not None:
            with torch.no_grad():
                for n, p in named.items():
                    p.copy_(torch.where(mask[n], p, start[n]))
    hook.remove()
    return float(np.mean(losses))


# ---------------------------------------------------------------- a small bench to put cohorts on


class Bench:
    """A network, some data, clients of given sizes: what a cohort and the reference loop both work on."""

    def __init__(
        self,
        model: nn.Module,
        x: np.ndarray,
        y: np.ndarray,
        sizes: Sequence[int],
        *,
        classes: int,
        opt: Optimiser | None = None,
        epochs: int = 1,
        batch: int = 4,
        way: str = "each",
        tape: bool = True,
        head: str | None = "head",
        buffers: str = "average",
        seed: int = 0,
        keeps: Mapping[str, Keep] | None = None,
        test: Sequence[Sequence[int]] | None = None,
        chooser: Chooser | None = None,
        task: Task | None = None,
    ) -> None:
        self.model, self.opt, self.epochs, self.batch, self.seed = model, opt or SGD(0.05), epochs, batch, seed
        self.source = Source(x, y, torch.device("cpu"))
        example = self.source.batch(torch.arange(min(6, len(y))))
        self.layout = Layout.of(model, head, buffers, example=example)
        edges = np.cumsum([0, *sizes])
        self.parts = [np.arange(a, b) for a, b in pairwise(edges)]
        self.initial = self.layout.row(model)
        tests = [np.array(t, np.int64) for t in test] if test is not None else self.parts
        self.site = Site(
            forward=trace(model, self.layout, example),
            layout=self.layout,
            initial=self.initial,
            source=self.source,
            parts={"train": self.parts, "validation": [p[:0] for p in self.parts], "test": tests},
            names=[f"client-{i}" for i in range(len(sizes))],
            classes=classes,
            training=Training(epochs, batch, self.opt),
            seed=seed,
            store=Store(len(sizes), keeps or {}, self.layout, self.initial),
            chooser=chooser or Chooser(way),
            task=task or Classification(),
        )
        if not tape:
            self.site.tape = None

    def cohort(self, ids: Sequence[int] | None = None, round: int = 0, stream: str = "train") -> Cohort:
        chosen = range(len(self.parts)) if ids is None else ids
        return Cohort(self.site, np.array(list(chosen), np.int64), round, stream)

    def plan(self, round: int = 0, stream: str = "train", fit: int = 1, epochs: int | None = None) -> Plan:
        """The batches of a cohort's `fit`-th training in this round."""
        return plan(
            self.parts,
            np.arange(len(self.parts)),
            epochs or self.epochs,
            self.batch,
            (self.seed, round, stream, fit),
            self.site.has_batch_norm,
        )

    def batches(self, k: int, steps: Plan | None = None) -> list[tuple[Tensor, Tensor]]:
        steps = steps or self.plan()
        chosen = [torch.from_numpy(steps.table[s, k, : steps.sizes[s, k]]) for s in range(len(steps.sizes))]
        return [(usual_order(self.source.batch(i)), self.source.labels(i)) for i in chosen if len(i)]

    def module(self, row: Tensor) -> nn.Module:
        return self.layout.load(copy.deepcopy(self.model), row)

    def reference(
        self,
        starts: Tensor,
        *,
        anchors: Tensor | None = None,
        masks: Tensor | None = None,
        losses=None,
        steps=None,
        **how,
    ) -> Tensor:
        """The plain loop for every client in turn; rows [K, D]."""
        rows = []
        for k in range(len(self.parts)):
            module = self.module(starts[k])
            train_client(
                module,
                self.batches(k, steps),
                how.get("opt", self.opt),
                head=self.layout.head_name,
                anchor=None if anchors is None else self.module(anchors[k]),
                mask=None if masks is None else self.layout.tensors(masks[k]),
                loss=plain_loss if losses is None else losses[k],
                **{key: value for key, value in how.items() if key != "opt"},
            )
            rows.append(self.layout.row(module))
        return torch.stack(rows)

    def starts(self, spread: float = 0.1) -> Tensor:
        """A different first model for every client; statistics stay as they are, so that variances stay positive."""
        noise = torch.randn(len(self.parts), self.layout.width, generator=torch.Generator().manual_seed(3))
        noise[:, self.layout.columns("buffers")] = 0
        return self.initial * (1 + spread * noise)


def usual_order(t: Tensor) -> Tensor:
    """Channels first in memory, as a user's own loader would have it (the engine keeps them last)."""
    return t.clone(memory_format=torch.contiguous_format)


def distance(found: Tensor, expected: Tensor, start: Tensor) -> float:
    """The largest relative error over clients: |found - expected| / |expected - start|."""
    wrong = (found - expected).norm(dim=-1)
    moved = (expected - start).norm(dim=-1)
    assert bool((moved > 0).all()), "a client did not move: the comparison would prove nothing"
    return float((wrong / moved).max())


def digits(count: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes as pictures and random labels."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape)).astype(np.uint8), rng.integers(0, classes, count)


def numbers(count: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random floats and random labels."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, *shape)).astype(np.float32), rng.integers(0, classes, count)


def tokens(count: int, length: int, vocabulary: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocabulary, (count, length)), rng.integers(0, classes, count)


ADAM = Adam(0.002)
OPTIMISERS: dict[str, Optimiser] = {
    "sgd": SGD(0.05),
    "sgd-momentum-decay": SGD(0.05, 0.9, 0.01),
    "adam": ADAM,
    "adam-decay": Adam(0.002, weight_decay=0.01),
}
