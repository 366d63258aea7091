"""What FedBABU and C-PFL share: a body trained under one frozen head, and a personal model tuned at the very end."""

from __future__ import annotations

from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.core.cohort import Cohort, Learn
from fedkin.core.federation import Federation
from fedkin.core.store import Keep
from fedkin.methods.base import Method, Needs


class TunedAtTheEnd(Method):
    """The server holds `self.body`; the head stays the common first one until `tune`."""

    shares = "body"
    shared_part = "body"
    private = "the tuned model"
    keeps = {"tuned": Keep("row", lasts=False), "is_tuned": Keep((1,), "zeros", lasts=False)}
    frozen_head = True

    tune_epochs: int
    tune_part: Learn

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        layout.require("body")
        if self.tune_epochs and self.tune_part == "head":
            layout.require("head")
        self.body = layout.body(row).clone()

    def finish(self, fed: Federation) -> None:
        if self.tune_epochs:
            fed.ask(fed.alive, self.tune, body=self.body)

    def tune(self, client: Cohort, body: Tensor) -> None:
        client["tuned"] = client.fit(client.rows(body=body), learn=self.tune_part, epochs=self.tune_epochs)
        client["is_tuned"] = client["is_tuned"] + 1

    def settle(self, client: Cohort, body: Tensor) -> None:
        """Tunes as the others do at the end, for as many epochs as it is told."""
        if self.tune_epochs:
            client["tuned"] = client.fit(client.rows(body=body), learn=self.tune_part)
            client["is_tuned"] = client["is_tuned"] + 1

    def settle_epochs(self, usual: int) -> int:
        return self.tune_epochs or usual

    def needs(self, cohort: int, seen: int, everybody: int) -> Needs:
        return Needs(everybody, everybody) if self.tune_epochs else Needs(cohort, 0)

    def personal(self, client: Cohort, body: Tensor) -> Tensor:
        return client.rows(body=body).where(client["is_tuned"] == 0, client["tuned"])
