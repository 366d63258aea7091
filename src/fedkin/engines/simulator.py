"""All clients in this process: `ask` runs the client function for many rows at once.

The client half runs on its own instance of the method, built from the options alone, so it cannot see what the
server half remembers: what works here works when the two are on different machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedkin.compute import keys
from fedkin.compute.backends import cores
from fedkin.core.cohort import Cohort, Site
from fedkin.core.federation import VALIDATION, Measured, Messages
from fedkin.core.messages import Answer, Masked, for_some, opened, rows_for, tensor_of
from fedkin.errors import FedKinError

if TYPE_CHECKING:
    from fedkin.methods.base import Method

Replied = dict[str, Tensor | Masked]
AT_ONCE = {"cpu": 16 << 20, "cuda": 1 << 30}
"""Bytes of models that are evaluated together unless `chunk` says how many. Several tensors of that size are needed to
answer. Up to 32 MiB the usual allocators of a CPU give memory out again instead of asking the system for it, which
took half of the time; a GPU needs many rows to be busy."""


class Simulator:
    """`chunk` bounds how many clients are worked on at once; results do not depend on it."""

    def __init__(self, site: Site, method: Method, chunk: int | None = None) -> None:
        self.site, self.method, self._chunk = site, method, chunk
        self.losses = torch.full((len(site.names),), float("nan"))  # last training loss of each client

    @property
    def client_steps(self) -> int:
        return self.site.chooser.client_steps

    @client_steps.setter
    def client_steps(self, steps: int) -> None:
        self.site.chooser.client_steps = steps

    @property
    def at_once(self) -> int:
        """How many clients' models are evaluated together."""
        if self._chunk is not None:
            return self._chunk
        rows, threads = AT_ONCE[self.site.source.device.type] // (4 * max(self.site.layout.width, 1)), cores()
        return max(rows // threads, 2) * threads  # as much for each thread

    def measured(self, ids: keys.I64, report: str, messages: Messages, round: int) -> tuple[Measured, dict[int, str]]:
        """The models themselves are let go of as soon as they have been evaluated."""
        found: dict[str, Tensor] = {}
        for begin, some in pieces(ids, self.at_once):
            reply = self._answer(some, report, opened(messages(some)), round)
            for name, value in reply.items():
                if name != "rows" and isinstance(value, Tensor):
                    # room for all at once: what outlives a piece must not be carved out of the memory the next needs
                    if name not in found:
                        found[name] = value.new_empty(len(ids), *value.shape[1:])
                    found[name][begin : begin + len(some)] = value
        validation = _measured(found, VALIDATION) if f"{VALIDATION}count" in found else None
        return replace(_measured(found), validation=validation), {}

    def rows(self, ids: keys.I64, report: str, evaluated: str, messages: Messages, round: int) -> Tensor:
        rows = torch.empty(len(ids), self.site.layout.width)
        for begin, some in pieces(ids, self.at_once):
            cohort = Cohort(self.site, some, round, report)
            rows[begin : begin + len(some)] = getattr(self.method, evaluated)(cohort, **opened(messages(some)))
        return rows

    def call(self, ids: keys.I64, function: str, message: Mapping[str, object], round: int) -> Answer:
        replies: Replied = {}
        for begin, mine in pieces(np.arange(len(ids)), self._chunk or len(ids)):
            own = torch.from_numpy(mine)
            piece = self._answer(ids[mine], function, opened(for_some(message, own)), round)
            if len(mine) == len(ids):
                return Answer(ids, piece)
            for name, value in piece.items():
                if not begin:  # room for what all clients send: nothing is held twice
                    replies[name] = _room(value, len(ids))
                tensor_of(replies[name])[begin : begin + len(mine)] = tensor_of(value)
                if isinstance(value, Masked):
                    replies[name].mask[begin : begin + len(mine)] = value.mask  # type: ignore[union-attr]
        return Answer(ids, replies)

    def _answer(self, ids: keys.I64, function: str, given: Mapping[str, object], round: int) -> Replied:
        cohort = Cohort(self.site, ids, round, function)
        reply = getattr(self.method, function)(cohort, **given)
        trained = ~torch.isnan(cohort.losses)
        self.losses[torch.from_numpy(cohort.ids)[trained]] = cohort.losses[trained]
        try:
            return rows_for(reply, len(cohort))
        except FedKinError as error:
            raise FedKinError(f"{type(self.method).__name__}.{function} returned {error}") from None


def _measured(found: Mapping[str, Tensor], before: str = "") -> Measured:
    correct, count = (found[f"{before}{name}"].sum(1).cpu().numpy() for name in ("correct", "count"))
    loss, extra = (found[f"{before}{name}"].cpu().numpy() for name in ("loss", "extra"))
    return Measured(correct, count, loss, extra)


def pieces(ids: keys.I64, step: int) -> Iterator[tuple[int, keys.I64]]:
    """These, at most `step` at a time, and how many came before."""
    return ((begin, ids[begin : begin + step]) for begin in range(0, len(ids), step))


def _room(value: Tensor | Masked, clients: int) -> Tensor | Masked:
    if isinstance(value, Masked):
        return Masked(*(t.new_empty(clients, *t.shape[1:]) for t in (value.values, value.mask)))
    return value.new_empty(clients, *value.shape[1:])
