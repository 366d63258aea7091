"""What a method learns while its promises are checked: classes; what comes next; classes again, by low-rank updates of
a frozen network, or from samples of two parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkin.data.dataset import Array
from fedkin.data.targets import Ints, Targets
from fedkin.models import lora

FEATURES, CLASSES = 6, 4  # of the four classes only three occur
WORDS, LENGTH = 7, 5


@dataclass(frozen=True)
class World:
    """Samples and a network. A network's body has its normalisation, if it has one, at `body.1`."""

    network: Callable[[bool], nn.Module]
    samples: Callable[[np.random.Generator, Ints], tuple[Any, Array]]  # for so many classes, one each: x and y
    targets: Targets = "classes"
    vocabulary: int = 0

    @property
    def outputs(self) -> tuple[int, ...]:
        """What the network gives for a sample."""
        return (CLASSES,) if self.targets == "classes" else (LENGTH, WORDS)

    def few(self, classes: Ints) -> tuple[Any, Array]:
        """Samples that are nobody's."""
        return self.samples(np.random.default_rng(1), classes)


class Network(nn.Module):
    """The network of all checks: a body and a head."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU())
            self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


class Next(nn.Module):
    """Scores for what comes after each token."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.ModuleList([nn.Embedding(WORDS, 8), nn.BatchNorm1d(8) if norm else nn.Identity()])
            self.head = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        words, norm = self.body
        logits: Tensor = self.head(norm(words(ids).transpose(1, 2)).transpose(1, 2))
        return logits


class TwoInputs(Network):
    """The same features, of which the last two come by themselves, as whole numbers."""

    def forward(self, values: Tensor, kinds: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([values, kinds.to(values.dtype)], 1))


def _features(rng: np.random.Generator, y: Ints) -> tuple[Array, Array]:
    return (rng.standard_normal((len(y), FEATURES)) + y[:, None]).astype(np.float32), y


def _halves(rng: np.random.Generator, y: Ints) -> tuple[Mapping[str, Array], Array]:
    x, _ = _features(rng, y)
    return {"values": x[:, :-2], "kinds": np.round(x[:, -2:]).astype(np.int64)}, y


def _counting(rng: np.random.Generator, y: Ints) -> tuple[Array, Array]:
    """Numbers that go up by one; a client's classes say where they begin."""
    every = (y[:, None] + rng.integers(0, 2, (len(y), 1)) + np.arange(LENGTH + 1)) % WORDS
    return every[:, :-1].astype(np.int64), every[:, 1:].astype(np.int64)


def _low_rank(norm: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return lora(Network(norm), rank=2, head="head")


WORLDS: Mapping[str, World] = {
    "classification": World(Network, _features),
    "next-token": World(Next, _counting, "tokens", WORDS),
    "low-rank": World(_low_rank, _features),
    "two-inputs": World(TwoInputs, _halves),
}
_HERE: ContextVar[World] = ContextVar("world", default=WORLDS["classification"])


def here() -> World:
    """That in which checks take place now."""
    return _HERE.get()


@contextmanager
def inside(name: str) -> Iterator[World]:
    """Checks take place in the world of this name."""
    before = _HERE.set(WORLDS[name])
    try:
        yield here()
    finally:
        _HERE.reset(before)
