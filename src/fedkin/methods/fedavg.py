"""FedAvg. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

Every client trains the received model on its own data; the server averages the results by training samples.
Down: the model. Up: the trained model.

FedAvg-FT trains in the same way, and is evaluated by each client's model after its local epochs (FedAvg-P in FedPKDA).
"""

from __future__ import annotations

from torch import Tensor

from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Reply
from fedkin.methods.base import METHODS, Method


@METHODS.register("fedavg")
class FedAvg(Method):
    about = "one model for all: the average of locally trained models"
    paper = "McMahan et al., AISTATS 2017"
    uses_head = False

    def round(self, fed: Federation, cohort: Clients) -> None:
        replies = fed.ask(cohort, self.train, model=self.model)
        self.model = replies.mean("model", otherwise=self.model)

    def train(self, client: Cohort, model: Tensor) -> Reply:
        return {"model": client.model(client.fit(client.rows(model=model)))}


@METHODS.register("fedavg-ft")
class FedAvgFT(FedAvg):
    about = "FedAvg, where each client uses its model after local training"
    paper = "McMahan et al., AISTATS 2017; FedAvg-P of FedPKDA, FedAvg-FT of FedCAP"
    private = "the locally trained model, which the client uses"
    eval_point = "after_local"
