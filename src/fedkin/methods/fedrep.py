"""FedRep. Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.

FedPer in two phases: each client first trains its private head on the received body, and then the body under that head.
Down: the body. Up: the trained body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedkin.core.cohort import Cohort
from fedkin.core.federation import Reply
from fedkin.methods.base import METHODS, option
from fedkin.methods.fedper import FedPer


@dataclass(frozen=True)
class FedRepOptions:
    head_epochs: int | None = option(
        None, "epochs on the head with the body frozen (default: as many as --epochs)", low=1
    )
    body_epochs: int = option(1, "epochs on the body with the head frozen", low=1)


@METHODS.register("fedrep")
class FedRep(FedPer):
    Options = FedRepOptions
    about = "FedPer, where head and body are trained in turn"
    paper = "Collins et al., ICML 2021"

    @classmethod
    def unused(cls, options: Any) -> dict[str, str]:
        both = "its options head_epochs and body_epochs say how long clients train"
        return {} if options.head_epochs is None else {"epochs": both}

    def train(self, client: Cohort, body: Tensor) -> Reply:
        rows = client.rows(body=body, head=client["head"])
        rows = client.fit(rows, learn="head", epochs=self.options.head_epochs)
        rows = client.fit(rows, learn="body", epochs=self.options.body_epochs)
        client["head"] = client.head(rows)
        return {"body": client.body(rows)}
