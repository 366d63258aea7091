"""LG-FedAvg. Liang et al., "Think Locally, Act Globally", 2020 (arXiv 2001.01523).

The mirror image of FedPer: each client keeps its own body, and the head is shared and averaged. The authors start
from a model trained by FedAvg (`pretrain`); without it every body starts from the common first model.
Down: the head. Up: the trained head. During the rounds of FedAvg, whole models travel.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Reply
from fedkin.core.store import Keep
from fedkin.methods.base import METHODS, Method, option


@dataclass(frozen=True)
class LGFedAvgOptions:
    pretrain: int = option(0, "rounds of FedAvg that come first", low=0)


@METHODS.register("lg-fedavg")
class LGFedAvg(Method):
    Options = LGFedAvgOptions
    about = "private bodies under a shared head"
    paper = "Liang et al., 2020"
    shares = "head"
    shared_part = "head"
    private = "the body"
    keeps = {"body": Keep("body")}

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        super().start(fed, layout, row)
        self.model, self.split = row[layout.columns("model")].clone(), layout.size("body")

    def round(self, fed: Federation, cohort: Clients) -> None:
        if fed.round < self.options.pretrain:
            self.model = fed.ask(cohort, self.pretrain, model=self.model).mean("model", otherwise=self.model)
            if fed.round == self.options.pretrain - 1:
                self.head = self.model[self.split :].clone()
                fed.ask(fed.alive, self.install, body=self.model[: self.split])
        else:
            self.head = fed.ask(cohort, self.train, head=self.head).mean("head", otherwise=self.head)

    def pretrain(self, client: Cohort, model: Tensor) -> Reply:
        return {"model": client.model(client.fit(client.rows(model=model)))}

    def install(self, client: Cohort, body: Tensor) -> None:
        client["body"] = body.expand(len(client), -1)

    def train(self, client: Cohort, head: Tensor) -> Reply:
        rows = client.fit(client.rows(body=client["body"], head=head))
        client["body"] = client.body(rows)
        return {"head": client.head(rows)}

    def personal(self, client: Cohort, head: Tensor) -> Tensor:
        return client.rows(body=client["body"], head=head)

    def welcome(self, fed: Federation, newcomers: Clients) -> Clients:
        if self.options.pretrain:
            fed.ask(newcomers, self.install, body=self.model[: self.split])
        return super().welcome(fed, newcomers)

    def settle(self, client: Cohort, head: Tensor) -> None:
        """A body that learns below the head as it is."""
        client["body"] = client.body(client.fit(client.rows(body=client["body"], head=head), learn="body"))
