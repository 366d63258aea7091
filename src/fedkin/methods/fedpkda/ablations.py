"""What only FedPKDA's ablation and the profile of the authors' code need: pulls left out, averages by samples, whole
models shared, an epoch of alignment before training, prototypes of everybody."""

from __future__ import annotations

from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.compute.losses import Term
from fedkin.compute.optim import SGD
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Replies, Reply
from fedkin.methods.base import METHODS
from fedkin.methods.fedpkda import method
from fedkin.methods.fedpkda.method import PaperFedPKDA


@METHODS.register("fedpkda")
class FedPKDA(PaperFedPKDA):
    __doc__ = method.__doc__  # as the paper has it, unless an option says otherwise

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        if self.options.share == "body":
            layout.require("body", "head")
        super().start(fed, layout, row)

    def collect(self, fed: Federation, clients: Clients) -> tuple[Tensor, Tensor]:
        if not self.options.proto_cache:
            self.senders, self.prototypes, self.present = [], self.prototypes[:0], self.present[:0]
        return super().collect(fed, fed.alive if self.options.senders == "all" else clients)

    def weights(self, fed: Federation, replies: Replies) -> Tensor | None:
        return None if self.options.aggregate == "samples" else super().weights(fed, replies)

    def pulls(self, progress: float) -> tuple[float, float]:
        own, others = super().pulls(progress)
        rows = {"full": (own, others), "base": (0.0, 0.0), "kda": (own, 0.0), "cp": (0.0, 1.0)}
        return rows[self.options.variant]

    def fitted(self, client: Cohort, rows: Tensor, terms: list[Term]) -> Tensor:
        if self.options.align == "before" and terms:
            rows = client.fit(rows, learn="body", epochs=1, opt=SGD(self.options.align_lr), loss=terms)
            terms = []
        return super().fitted(client, rows, terms)

    def importance(self, client: Cohort, rows: Tensor) -> Reply:
        return {} if self.options.aggregate == "samples" else super().importance(client, rows)

    def personal(self, client: Cohort, theta: Tensor) -> Tensor:
        return client.rows(model=theta) if self.options.share == "model" else super().personal(client, theta)
