"""All clients in this process: `ask` runs the client function for many rows at once.

The client half runs on its own instance of the method, built from the options alone, so it cannot see what the
server half remembers: what works here works when the two are on different machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedkin.cohort import Cohort, Site
from fedkin.compute import keys
from fedkin.errors import FedKinError
from fedkin.federation import Answer, Each, Masked, Reply

if TYPE_CHECKING:
    from fedkin.methods.base import Method


class LocalEngine:
    """`chunk` bounds how many clients are worked on at once; results do not depend on it."""

    def __init__(self, site: Site, method: Method, chunk: int | None = None) -> None:
        self.site, self._method, self._chunk = site, method, chunk
        self.losses = torch.full((len(site.names),), float("nan"))  # last training loss of each client

    def elsewhere(self, site: Site) -> LocalEngine:
        """The same clients with other data."""
        return LocalEngine(site, self._method, self._chunk)

    def scored(self, ids: keys.I64, parts: Mapping[str, Tensor]) -> tuple[keys.I64, keys.I64]:
        """Test samples that one model for all, given by its parts, gets right at each client, and how many it has."""
        step = self._chunk or len(ids)
        found = []
        for begin in range(0, len(ids), step):
            cohort = Cohort(self.site, ids[begin : begin + step], 0, "scored")
            found.append(cohort.evaluate(cohort.rows(**parts)))
        right, count = (torch.cat([getattr(f, n).sum(1) for f in found]).cpu().numpy() for n in ("correct", "count"))
        return right.astype(np.int64), count.astype(np.int64)

    def call(
        self, ids: keys.I64, function: str, message: Mapping[str, object], round: int
    ) -> Answer:
        step = self._chunk or len(ids)
        pieces: list[Reply] = []
        for begin in range(0, len(ids), step):
            mine = np.arange(begin, min(begin + step, len(ids)))
            pieces.append(self._call_chunk(ids, mine, function, message, round))
        return Answer(ids, _stack(pieces))

    def _call_chunk(
        self, ids: keys.I64, mine: keys.I64, function: str, message: Mapping[str, object], round: int
    ) -> Reply:
        cohort = Cohort(self.site, ids[mine], round, function)
        rows = torch.from_numpy(mine)
        given = {k: v.rows[rows] if isinstance(v, Each) else v for k, v in message.items()}
        reply: Reply | None = getattr(self._method, function)(cohort, **given)
        trained = ~torch.isnan(cohort.losses)
        self.losses[torch.from_numpy(cohort.ids)[trained]] = cohort.losses[trained]
        checked = {} if reply is None else reply
        for name, value in checked.items():
            tensor = value.values if isinstance(value, Masked) else value
            if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != len(cohort):
                shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise FedKinError(
                    f"{type(self._method).__name__}.{function} returned {name!r} with shape {shape}: "
                    f"the first axis must run over its {len(cohort)} clients"
                )
        return checked


def _stack(pieces: list[Reply]) -> dict[str, Tensor | Masked]:
    if len(pieces) == 1:
        return dict(pieces[0])
    stacked: dict[str, Tensor | Masked] = {}
    for name, first in pieces[0].items():
        parts = [p[name] for p in pieces]
        if isinstance(first, Masked):
            masked = [p for p in parts if isinstance(p, Masked)]
            stacked[name] = Masked(torch.cat([p.values for p in masked]), torch.cat([p.mask for p in masked]))
        else:
            stacked[name] = torch.cat([p for p in parts if isinstance(p, Tensor)])
    return stacked
