"""Networks from the wild train as in a plain PyTorch loop, whichever way they run, their noise included."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import Bench, distance, plain_loss, torch_optimiser, usual_order
from torch import Tensor
from wild import CLASSES, NETWORKS

from fedkin.compute import draws, keys
from fedkin.compute.optim import SGD
from fedkin.errors import UsageError

CLOSE = 1e-4
SIZES = (9, 5, 12)  # batch 4: a rest of one, of one, of none
WAYS = ("each", "threads", "batched")


@contextmanager
def keyed(key: int, samples: int) -> Iterator[None]:
    """PyTorch with noise that is a function of a key, by replacing what draws it, name by name."""
    calls = [0]

    def uniform(shape: tuple[int, ...]) -> Tensor:
        at = shape.index(samples) if samples in shape else 0
        order = (shape[at], *shape[:at], *shape[at + 1 :])
        drawn = draws.uniform(torch.tensor([key]) + calls[0], math.prod(shape)).view(order)
        calls[0] += 1
        return drawn.movedim(0, at)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropped(x, p, tuple(x.shape)) if training else x

    def dropout2d(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropped(x, p, (*x.shape[:2], 1, 1)) if training else x

    def dropped(x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
        return x * (uniform(shape) >= p) / (1 - p)

    def alpha(x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        if not training:
            return x
        kept = uniform(tuple(x.shape)) >= p
        lowest = -1.7580993408473766
        a = (1 - p + p * (1 - p) * lowest**2) ** -0.5
        return a * torch.where(kept, x, torch.full_like(x, lowest)) - a * p * lowest

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        if attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        return (dropout(weights, dropout_p) if dropout_p else weights) @ v

    def bernoulli_(x: Tensor, p: float) -> Tensor:
        return x.copy_(uniform(tuple(x.shape)) < p)

    one_layer = torch._VF.lstm

    def lstm(x: Tensor, hx: Any, weights: Any, biases: bool, layers: int, p: float, *how: bool) -> Any:
        training, both, first = how
        ends = []
        for i in range(layers):
            x = dropout(x, p, training) if i and p else x
            begin = tuple(h[i : i + 1] for h in hx) if layers > 1 else hx
            own = weights[4 * i : 4 * i + 4] if layers > 1 else weights
            x, *last = one_layer(x, begin, own, biases, 1, 0.0, training, both, first)
            ends.append(last)
        return x, *(torch.cat(end) for end in zip(*ends, strict=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._VF, "lstm", lstm)
        for name, function in (("dropout", dropout), ("dropout2d", dropout2d), ("alpha_dropout", alpha)):
            patch.setattr(F, name, function)
        patch.setattr(F, "scaled_dot_product_attention", attention)
        patch.setattr(Tensor, "bernoulli_", bernoulli_)
        yield


def plain_loop(bench: Bench, starts: Tensor) -> Tensor:
    """One client after another, with noise from the key of (seed, client, round, step)."""
    rows = []
    stream = (bench.seed, 0, "train", 1)
    own = keys.key(*stream, "noise", np.arange(len(bench.parts)))
    for k in range(len(bench.parts)):
        module = bench.module(starts[k]).train()
        optimiser = torch_optimiser(bench.opt, list(module.parameters()))
        for s, (x, y) in enumerate(bench.batches(k)):
            step = keys.mix(keys.mix(own) ^ keys.mix(np.array([s], np.uint64)))
            optimiser.zero_grad()
            with keyed(int(step[k].view(np.int64)), len(x)):
                logits = module(usual_order(x))
            plain_loss(logits, logits, y).backward()
            optimiser.step()
        rows.append(bench.layout.row(module))
    return torch.stack(rows)


def bench_of(name: str, way: str) -> Bench:
    wild = NETWORKS[name]
    torch.manual_seed(3)
    network, data = wild.network()
    y = np.random.default_rng(5).integers(0, CLASSES, sum(SIZES))
    return Bench(network, data(sum(SIZES)), y, SIZES, classes=CLASSES, opt=SGD(wild.lr), way=way, head=wild.head)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_from_the_wild_train_as_in_the_plain_loop(name: str) -> None:
    wild, expected = NETWORKS[name], None
    for way in WAYS:
        bench = bench_of(name, way)
        form = bench.site.forward
        assert type(form) is wild.form, form.no_program
        start = bench.starts(0.05)
        if way == "batched" and not wild.together:
            with pytest.raises(UsageError, match=r"choose each or threads") as caught:
                bench.cohort().fit(start)
            assert wild.reason in str(caught.value)
            continue
        assert form.together == wild.together, form.why_not
        expected = plain_loop(bench, start) if expected is None else expected
        assert distance(bench.cohort().fit(start), expected, start) < CLOSE, way
