"""FedBABU. Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

During training only the body learns; the head keeps its random first weights, which are the same for all clients. After
the last round each client fine-tunes its model. Down: the body. Up: the trained body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedkin.core.cohort import Cohort, Learn
from fedkin.core.federation import Clients, Federation, Reply
from fedkin.methods.base import METHODS, option
from fedkin.methods.finetune import TunedAtTheEnd


@dataclass(frozen=True)
class FedBABUOptions:
    finetune_epochs: int = option(10, "epochs of fine-tuning after the last round", low=0)
    finetune: Literal["full", "head"] = option("full", "the part that is fine-tuned")


@METHODS.register("fedbabu")
class FedBABU(TunedAtTheEnd):
    Options = FedBABUOptions
    about = "the body learns under a fixed head; each client fine-tunes at the end"
    paper = "Oh et al., ICLR 2022"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.tune_epochs = self.options.finetune_epochs
        self.tune_part: Learn = "head" if self.options.finetune == "head" else "model"

    def round(self, fed: Federation, cohort: Clients) -> None:
        replies = fed.ask(cohort, self.train, body=self.body)
        self.body = replies.mean("body", otherwise=self.body)

    def train(self, client: Cohort, body: Tensor) -> Reply:
        return {"body": client.body(client.fit(client.rows(body=body), learn="body"))}
