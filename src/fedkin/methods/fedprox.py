"""FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

FedAvg in which clients are held near the received model: each step follows grad + mu (w - w_received).
Down: the model. Up: the trained model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedkin.core.cohort import Cohort
from fedkin.core.federation import Reply
from fedkin.methods.base import METHODS, option
from fedkin.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedProxOptions:
    mu: float = option(0.01, "strength of the pull towards the received model", low=0, search="0.001..1:log")


@METHODS.register("fedprox")
class FedProx(FedAvg):
    Options = FedProxOptions
    about = "FedAvg with a pull towards the received model"
    paper = "Li et al., MLSys 2020"

    def train(self, client: Cohort, model: Tensor) -> Reply:
        received = client.rows(model=model)
        return {"model": client.model(client.fit(received, mu=self.options.mu, anchor=received))}
