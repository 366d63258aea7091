"""FedPer. Arivazhagan et al., "Federated Learning with Personalization Layers", 2019 (arXiv 1912.00818).

The body is shared and averaged; each client keeps its own head. Both are trained jointly.
Down: the body. Up: the trained body.
"""

from __future__ import annotations

from torch import Tensor

from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Reply
from fedkin.core.store import Keep
from fedkin.methods.base import METHODS, Method


@METHODS.register("fedper")
class FedPer(Method):
    about = "a shared body under private heads"
    paper = "Arivazhagan et al., 2019"
    shares = "body"
    shared_part = "body"
    private = "the head"
    keeps = {"head": Keep("head")}

    def round(self, fed: Federation, cohort: Clients) -> None:
        replies = fed.ask(cohort, self.train, body=self.body)
        self.body = replies.mean("body", otherwise=self.body)

    def train(self, client: Cohort, body: Tensor) -> Reply:
        rows = client.fit(client.rows(body=body, head=client["head"]))
        client["head"] = client.head(rows)
        return {"body": client.body(rows)}

    def personal(self, client: Cohort, body: Tensor) -> Tensor:
        return client.rows(body=body, head=client["head"])

    def settle(self, client: Cohort, body: Tensor) -> None:
        """A head that learns on the body as it is."""
        if client.layout.size("head"):
            rows = client.fit(client.rows(body=body, head=client["head"]), learn="head")
            client["head"] = client.head(rows)
