"""A federation to test with, tiny and unpleasant: a client with one sample, a class that nobody has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedkin.config import make_config
from fedkin.core.federation import Tamper
from fedkin.data import Dataset, Split
from fedkin.methods import METHODS, Method
from fedkin.rounds import Job, prepare
from fedkin.rounds.trained import Trained
from fedkin.testing.worlds import CLASSES, here

MethodOrName = str | type[Method]


def federation(sizes: tuple[int, ...] = (9, 6, 1), tests: int = 3, seed: int = 0) -> tuple[Dataset, Split]:
    """Clients of these training sizes; the last class is nobody's."""
    rng = np.random.default_rng(seed)
    total = sum(sizes) + tests * len(sizes)
    classes, world = rng.integers(0, CLASSES - 1, total), here()
    x, y = world.samples(rng, classes)
    edges = np.cumsum([0, *[n + tests for n in sizes]])
    rows = [np.arange(a, b) for a, b in pairwise(edges)]
    nobody = tuple(r[:0] for r in rows)
    split = Split(
        tuple(r[tests:] for r in rows),
        nobody,
        tuple(r[:tests] for r in rows),
        tuple(f"client-{i}" for i in range(len(sizes))),
    )
    about: dict[str, Any] = {"vocabulary": world.vocabulary, "targets": world.targets}
    return Dataset("tiny", x, y, world.outputs[-1], **about), with_validation(split)


def with_validation(split: Split) -> Split:
    """A last training sample for validation wherever more than three are left."""
    spare = [r[-1:] if len(r) > 3 else r[:0] for r in split.train]
    train = tuple(r[: len(r) - len(v)] for r, v in zip(split.train, spare, strict=True))
    return replace(split, train=train, validation=tuple(spare))


def job_of(
    method: MethodOrName,
    options: Mapping[str, Any] | None = None,
    *,
    sizes: tuple[int, ...] = (9, 6, 1),
    tamper: Tamper | None = None,
    norm: bool = False,
    begin_with: Trained | None = None,
    **settings: Any,
) -> Job:
    """A run on the tiny federation, ready to go."""
    named = {"method": method} if isinstance(method, str) else {"method": method.__name__.lower()}
    defaults = {"rounds": 2, "epochs": 1, "batch": 4, "lr": 0.1, "device": "cpu", "way": "each", "init": "given"}
    values = {**defaults, **named, **settings, "options": dict(options or {})}
    config = make_config(values, given=())  # the same for every method, whether it has a use for all of it or not
    method_class = METHODS[method] if isinstance(method, str) else method
    given: dict[str, Any] = {
        "method": method_class,
        "model": here().network(norm),
        "data": federation(sizes),
        "begin_with": begin_with,
    }
    return prepare(config, tamper=tamper, **given)


def finished(job: Job) -> Job:
    for _ in range(job.config.rounds):
        job.advance()
    job.finish()
    return job


def personal_rows(job: Job) -> Tensor:
    return job.rows()


def sane(job: Job) -> None:
    """Nobody's model is broken, and every client can have its own."""
    rows = personal_rows(job)
    assert rows.shape == (len(job.fed.all), job.site.layout.width)
    assert torch.isfinite(rows).all(), "a personal model holds NaN or infinity"
    for value in tensors_in(job.method.state()):
        assert not value.is_floating_point() or torch.isfinite(value).all(), "the server holds NaN or infinity"
    result = job.result()
    for client in job.fed.all:
        module = result.personal(client)
        assert not module.training
        x, _ = here().few(np.arange(2))
        assert module(x if isinstance(x, Mapping) else torch.from_numpy(x)).shape == (2, *here().outputs)
    assert 0 <= result.accuracy.micro <= 100
    json.dumps(result.to_dict()["failed"])


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors_in(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors_in(v)]
    return []
