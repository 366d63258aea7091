"""What a reply has to look like, known before anybody is asked: the server plays the client once, by itself.

A made-up client of a few samples of the right shape, with every class that so few can have, runs the very function
that the sites will run, on the very message they will get. What comes back is thrown away but for its names, shapes
and types. That holds for every client because replies are stacked, one row a client: what a row looks like may depend
on the method, its options, the network and the message, and on nothing that only a client knows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkin.compute.batches import Source
from fedkin.compute.choice import Chooser
from fedkin.core.cohort import Cohort, Site
from fedkin.core.messages import Each, Spec, for_some, opened, rows_for, spec_of
from fedkin.core.store import Store

if TYPE_CHECKING:
    from fedkin.methods.base import Method

SAMPLES = 4  # of each part of the made-up client's data
SLACK = 1 << 20  # bytes of a header, at most


class Rehearsal:
    """Specs of replies, by phase and kind of message. `method` is a client half of its own; `x` and `y` are samples
    that are nobody's, 3 `SAMPLES` at least."""

    def __init__(self, site: Site, method: Method, x: NDArray[Any], y: NDArray[Any]) -> None:
        self._method = method
        rows = np.split(np.arange(3 * SAMPLES), 3)
        self._site = replace(
            site,
            source=Source(x, y, torch.device("cpu")),
            names=["rehearsal"],
            parts={"train": [rows[0]], "validation": [rows[1]], "test": [rows[2]]},
            training=replace(site.training, epochs=1, batch=min(site.training.batch, SAMPLES)),
            store=Store(1, site.store.keeps, site.layout, site.initial),
            chooser=Chooser("each"),
        )
        self._known: dict[object, tuple[Spec | str, int]] = {}

    def __call__(self, function: str, message: Mapping[str, object], round: int, anew: bool = False) -> Spec | str:
        """The spec of one client's reply, or why it cannot be known. `anew`: as of this very round and message, where
        what is remembered is of another; the same phase may answer otherwise later on."""
        asked = (function, tuple((k, _shape_of(v)) for k, v in message.items()))
        found = self._known.get(asked)
        if found is None or (anew and found[1] != round):
            found = self._known[asked] = self._play(function, message, round), round
        return found[0]

    def try_objective(self) -> None:
        """UsageError where the task's loss cannot be had of these samples, as with weights of another number."""
        Cohort(self._site, np.zeros(1, np.int64), 0, "objective").objective()

    def _play(self, function: str, message: Mapping[str, object], round: int) -> Spec | str:
        given = opened(for_some(message, slice(1)))
        drawn = np.random.get_state(), torch.get_rng_state(), random.getstate()  # noqa: NPY002
        try:
            cohort = Cohort(self._site, np.zeros(1, np.int64), round, function)
            return spec_of(rows_for(getattr(self._method, function)(cohort, **given), 1))
        except Exception as error:  # a function of somebody's own that needs more than a made-up client has
            return f"{type(error).__name__}: {error}"[:300]
        finally:
            np.random.set_state(drawn[0])  # noqa: NPY002
            torch.set_rng_state(drawn[1])
            random.setstate(drawn[2])


def most_bytes(spec: Spec) -> int:
    """What a reply may become in memory: twice what the right one does, and a header."""
    whole = {name: math.prod(shape) for name, (shape, _, _) in spec.items()}
    sizes = [n * (2 * spec[k][1].itemsize + 1 if spec[k][2] else spec[k][1].itemsize) for k, n in whole.items()]
    return 2 * sum(sizes) + SLACK


def _shape_of(value: object) -> object:
    """What a reply's look may depend on: a message's shapes, not what is in it."""
    tensor = value.rows[0] if isinstance(value, Each) and len(value.rows) else value
    return (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(value).__name__
