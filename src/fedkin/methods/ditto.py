"""Ditto. Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

Besides the shared model w, which is trained as in FedAvg, each client keeps a personal model v. It is trained on the
same mini-batches and pulled towards the received w: v <- v - lr (grad L(v) + lam (v - w_received)).
Down: the model. Up: the trained model. v never leaves the client. A client uses v; with `output=shared` w is evaluated
instead, as in some comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedkin.core.cohort import Cohort, Model
from fedkin.core.federation import Reply
from fedkin.core.store import Keep
from fedkin.methods.base import METHODS, option
from fedkin.methods.fedavg import FedAvg


@dataclass(frozen=True)
class DittoOptions:
    lam: float = option(1.0, "pull of the personal model towards the received one", low=0, search="0.01..10:log")
    output: Literal["personal", "shared"] = option("personal", "which of the two models a client uses")


@METHODS.register("ditto")
class Ditto(FedAvg):
    Options = DittoOptions
    about = "a shared model, and personal models that are pulled towards it"
    paper = "Li et al., ICML 2021"
    private = "the personal model"
    outputs = ("output",)
    keeps = {"personal": Keep("row")}
    trained_at_once = 2

    def train(self, client: Cohort, model: Tensor) -> Reply:
        received = client.rows(model=model)
        v, w = client.fit_together([Model(client["personal"], self.options.lam, received), Model(received)])
        client["personal"] = v
        return {"model": client.model(w)}

    def deliver(self) -> dict[str, Any]:
        return {} if self.options.output == "personal" else {"model": self.model}

    def personal(self, client: Cohort, model: Tensor | None = None) -> Tensor:
        return client["personal"] if model is None else client.rows(model=model)

    def after_local(self, client: Cohort, model: Tensor | None = None) -> Tensor:
        return client["personal"] if model is None else super().after_local(client, model=model)
