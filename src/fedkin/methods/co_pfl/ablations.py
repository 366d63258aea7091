"""What only CO-PFL's ablations need, or its Algorithm 1 to the letter: other optimisers, scores of one part alone,
passes that take turns, coordinates that are frozen for all."""

from __future__ import annotations

import torch
from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.compute.optim import SGD, Optimiser
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Federation
from fedkin.methods.base import METHODS
from fedkin.methods.co_pfl import method
from fedkin.methods.co_pfl.method import PaperCOPFL


@METHODS.register("co-pfl")
class COPFL(PaperCOPFL):
    __doc__ = method.__doc__  # as the paper has it, unless an option says otherwise

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        super().start(fed, layout, row)
        if self.options.aggregation == "or_freeze":
            self.z = self.z.bool()  # personal to nobody so far

    def _behind(self, z: Tensor, shared: Tensor) -> Tensor:
        return self.z & shared.all(0) if self.options.aggregation == "or_freeze" else super()._behind(z, shared)

    def _mamo(self, client: Cohort, start: Tensor, mask: Tensor) -> Tensor:
        epochs, rows = client.training.epochs, start
        if self.options.optimiser != "mamo":
            return self._pass(client, start, torch.ones_like(mask), "shared", epochs)
        if self.options.alternation == "jacobi":
            return super()._mamo(client, start, mask)
        any_grown = self.options.p > 0 and client.round > 0
        for _ in range(epochs):
            mine = self._pass(client, rows, mask, "personal", 1) if any_grown else rows
            rows = mine.where(mask, self._pass(client, mine, ~mask, "shared", 1))
        return rows

    def _optimiser(self, client: Cohort) -> Optimiser:
        adam = super()._optimiser(client)
        return SGD(lr=adam.lr, weight_decay=adam.weight_decay) if self.options.optimiser == "sgd" else adam

    def _contribution(self, client: Cohort, model: Tensor, z: Tensor, alpha: Tensor, delta: Tensor) -> Tensor:
        none = self.options.cowa == "none"
        return torch.ones_like(alpha) if none else super()._contribution(client, model, z, alpha, delta)

    def _turn(self, client: Cohort, others: Tensor, known: Tensor, delta: Tensor) -> Tensor:
        left_out = self.options.cowa == "pred"
        return delta.new_zeros(len(client)) if left_out else super()._turn(client, others, known, delta)

    def _loss(self, client: Cohort, others: Tensor) -> Tensor:
        left_out = self.options.cowa == "grad"
        return others.new_zeros(len(client)) if left_out else super()._loss(client, others)
